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
from headstart.runtime.steady import layout, plain
from headstart.runtime.workspace import Workspace


def signature(
    q: Any, k: Any, v: Any, plan: Any, cache: Any, scale: Any, window: Any, sinks: Any,
    softcap: Any, custom_mask: Any, causal: Any, part: Any, return_lse: Any, reproducible: Any,
    workspace: Any, out: Any,
) -> Signature | None:  # fmt: skip
    """The signature of a call of `extend_attention`."""
    if (
        type(q) is not Tensor
        or q.device.type not in launcher.PREPARED
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
    scales = None
    if cache is not None:
        if type(cache) is not KVCache:
            return None
        scales = _cache_facts(cache, tensors)
    if not plain(tensors):
        return None
    facts = (
        k is None, v is None, sinks is None, custom_mask is None, o is None, lse is None,
        cache is None, scales, scale, window, softcap, causal, part, return_lse,
        reproducible, None if workspace is None else workspace.device,
        *[(x.shape, x.stride(), x.dtype, x.device) for x in tensors],
    )  # fmt: skip
    return facts, tensors


def write_signature(k: Any, v: Any, cache: Any, slots: Any) -> Signature | None:
    """The signature of a call of `write_kv`, with slots on the device."""
    if (
        type(k) is not Tensor
        or k.device.type not in launcher.PREPARED
        or type(cache) is not KVCache
        or type(slots) is not Tensor
        or slots.device != k.device
        or checking()
    ):
        return None
    tensors = [k, v, slots]
    scales = _cache_facts(cache, tensors)
    if not plain(tensors):
        return None
    return (scales, *map(layout, tensors)), tensors


def _cache_facts(cache: KVCache, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Scales of a cache, as numbers or as tensors, which are appended after its own."""
    tensors += (cache.k, cache.v)
    scales = []
    for scale in (cache.k_scale, cache.v_scale):
        if type(scale) is Tensor:
            tensors.append(scale)
            scales.append("tensor")
        else:
            scales.append(scale)
    return tuple(scales)
