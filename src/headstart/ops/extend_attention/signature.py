"""Signatures of calls of extend attention: host facts, and tensors in a fixed order.

None stands for a call that goes the long way each time (see `runtime/steady.py`). What is prepared
is kept by the plan: a forward's layers share it, and its tables stay where they are as long as it
describes that forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.plan import ExtendPlan
from headstart.runtime import checks, launcher
from headstart.runtime.dispatch import NAMED, NUMBERS, Signature
from headstart.runtime.workspace import Workspace


def signature(
    q: Any, k: Any, v: Any, plan: Any, cache: Any, scale: Any, window: Any, sinks: Any,
    softcap: Any, custom_mask: Any, causal: Any, part: Any, return_lse: Any, reproducible: Any,
    workspace: Any, out: Any,
) -> Signature | None:  # fmt: skip
    """The signature of a call of `extend_attention`."""
    if (
        type(q) is not Tensor
        or not launcher.prepares(q)
        or type(plan) is not ExtendPlan
        or type(scale) not in NUMBERS
        or type(softcap) not in NUMBERS
        or (window is not None and type(window) is not int)
        or type(part) not in NAMED
        or type(causal) is not bool
        or type(return_lse) is not bool
        or type(reproducible) is not bool
        or (workspace is not None and type(workspace) is not Workspace)
        or checks.asked
    ):
        return None
    o, lse = out if type(out) in (tuple, list) and len(out) == 2 else (out, None)
    rows, of_cache = [q], None
    if k is not None:
        rows.append(k)
    if v is not None:
        rows.append(v)
    if sinks is not None:
        rows.append(sinks)
    if custom_mask is not None:
        rows.append(custom_mask)
    if o is not None:
        rows.append(o)
    if lse is not None:
        rows.append(lse)
    if cache is not None:
        if type(cache) is not KVCache:
            return None
        of_cache = cache.facts
        rows += cache.tensors
    facts = (
        k is None, v is None, sinks is None, custom_mask is None, o is None, lse is None,
        of_cache, scale, window, softcap, causal, part, return_lse,
        reproducible, None if workspace is None else workspace.device,
    )  # fmt: skip
    return facts, rows, []


def write_signature(k: Any, v: Any, cache: Any, slots: Any) -> Signature | None:
    """The signature of a call of `write_kv`, with slots on the device."""
    if (
        type(k) is not Tensor
        or not launcher.prepares(k)
        or type(cache) is not KVCache
        or type(slots) is not Tensor
        or slots.get_device() != k.get_device()
        or checks.asked
    ):
        return None
    return cache.facts, [k, v, slots, *cache.tensors], []
