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
from headstart.runtime import launcher
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import NAMED, NUMBERS, Signature
from headstart.runtime.steady import layouts, plain
from headstart.runtime.workspace import Workspace

CACHES = (KVCache, type(None))


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
        or checking()
    ):
        return None
    o, lse = out if type(out) in (tuple, list) and len(out) == 2 else (out, None)
    tensors = [x for x in (q, k, v, sinks, custom_mask, o, lse) if x is not None]
    of_rows, of_cache = layouts(tensors), None
    if of_rows is None or type(cache) not in CACHES:
        return None
    if cache is not None:
        of_cache = cache.facts
        if not plain(cache.tensors):
            return None
        tensors += cache.tensors
    facts = (
        k is None, v is None, sinks is None, custom_mask is None, o is None, lse is None,
        of_cache, scale, window, softcap, causal, part, return_lse,
        reproducible, None if workspace is None else workspace.device, *of_rows,
    )  # fmt: skip
    return facts, tensors


def write_signature(k: Any, v: Any, cache: Any, slots: Any) -> Signature | None:
    """The signature of a call of `write_kv`, with slots on the device."""
    if (
        type(k) is not Tensor
        or not launcher.prepares(k)
        or type(cache) is not KVCache
        or type(slots) is not Tensor
        or slots.device != k.device
        or checking()
    ):
        return None
    tensors = [k, v, slots]
    of_rows = layouts(tensors)
    if of_rows is None or not plain(cache.tensors):
        return None
    return (cache.facts, *of_rows), [*tensors, *cache.tensors]
