"""The `torch` implementation: softmax extend attention in PyTorch operations, tuned for the CPU.

Each sequence takes the first route that suits it: the CPU's fused kernel over whole runs of keys
(`flash`), the same over a band of keys for windows (`band`), or an online softmax over tiles for
everything else and every other device (`tiled`). `reproducible` has a route of its own
(`fixed_tiles`), on the CPU only.
"""

from __future__ import annotations

from types import ModuleType

import torch

from headstart.ops.extend_attention import band, fixed_tiles, flash, promise, tiled
from headstart.ops.extend_attention.merge_spec import MergeCall
from headstart.ops.extend_attention.merging import add_sinks, merge_into
from headstart.ops.extend_attention.scratch import Layout, largest, layout_bytes, take
from headstart.ops.extend_attention.spec import ExtendCall
from headstart.ops.extend_attention.write_spec import WriteCall
from headstart.ops.extend_attention.writing import bytewise, stored
from headstart.runtime.dispatch import Implementation
from headstart.runtime.workspace import default_workspace


def declines(call: ExtendCall) -> str | None:
    """Why the decomposed path cannot run a call, or None."""
    if call.q.dtype == torch.float64:
        return "it computes in float32; float64 is for the reference."
    if not call.reproducible:
        return None
    if call.device.type not in ("cpu", "meta"):
        return f"it does not promise bits on {call.device}."
    return promise.declines(call)


def route(call: ExtendCall, n: int) -> ModuleType:
    """The module that computes sequence n."""
    if call.reproducible:
        return fixed_tiles
    if call.device.type in ("cpu", "meta"):
        for candidate in (flash, band):
            if candidate.suits(call, n):
                return candidate
    return tiled


def layout(call: ExtendCall) -> Layout:
    """Scratch of the call."""
    working = [n for n in range(call.plan.N) if call.plan.lengths[n] and len(call.keys(n))]
    return largest(route(call, n).layout(call, n) for n in working)


def run(call: ExtendCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the call."""
    o, lse = call.outputs()
    buffers = take(call.workspace or default_workspace(call.device), layout(call))
    for n, length in enumerate(call.plan.lengths):
        rows = slice(call.plan.offsets[n], call.plan.offsets[n] + length)
        if not length:
            continue
        if len(call.keys(n)):
            route(call, n).run(call, n, buffers, o[rows], lse[rows])
        else:
            o[rows], lse[rows] = 0, -torch.inf  # a partial over no keys
    return call.result(o, lse)


def merge(call: MergeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the parts from left to right, then add the sinks."""
    (o_first, lse_first), *rest = call.parts
    if o_first.dtype == torch.float64:
        o, lse = o_first.clone(), lse_first.clone()
    else:
        o, lse = o_first.to(torch.float32, copy=True), lse_first.clone()
    for o_part, lse_part in rest:
        merge_into(o, lse, o_part.to(o.dtype), lse_part)
    if call.sinks is not None:
        lse, share = add_sinks(lse, call.sinks)
        o.mul_(share.unsqueeze(-1))
    return call.deliver(o, lse)


def write(call: WriteCall) -> None:
    """Store all rows at once."""
    cache, slots, k, v = call.cache, call.slots.long(), call.k, call.v
    if cache.device.type != "cpu" or bool((slots < 0).any()):
        kept = (slots >= 0).nonzero().squeeze(1)
        slots, k, v = slots[kept], k[kept], v[kept]
    at = (slots,) if cache.k.dim() == 3 else (slots // cache.page_size, slots % cache.page_size)
    for rows, store, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        bytewise(store).index_put_(at, bytewise(stored(rows, store.dtype, scale)))


IMPLEMENTATION = Implementation(
    "torch",
    declines=declines,
    run=run,
    workspace_bytes=lambda call: layout_bytes(layout(call)),
)
MERGE = Implementation("torch", declines=lambda call: None, run=merge)
WRITE = Implementation("torch", declines=lambda call: None, run=write)
