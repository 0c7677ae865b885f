"""The CPU's fused attention kernel over whole runs of keys: no window, no softcap, no mask.

Rows go in spans of queries; each visits the prefix in spans of keys (all of them visible), then the
new keys up to its own span, which is causal. The pieces are joined by their LSEs. The kernel takes
token-major strides and grouped heads as they are, so float32 keys are not copied.
"""

from __future__ import annotations

import torch

from headstart.ops.extend_attention.keys import load, view
from headstart.ops.extend_attention.merging import add_sinks, merge_into
from headstart.ops.extend_attention.scratch import Layout
from headstart.ops.extend_attention.spec import ExtendCall

SPAN = 4096
"""Queries and keys of one kernel call: bounds the scratch, long enough for the kernel's speed."""

Buffers = dict[str, torch.Tensor]


def plain(call: ExtendCall, n: int) -> bool:
    """Whether nothing but position decides what sequence n's rows see, and positions are runs.

    The kernel hides keys before it scales, so a scale of 0 or below would turn -inf into NaN.
    """
    positions = call.plan.key_positions is not None and call.plan.prefix[n] > 0
    plain_scores = call.softcap is None and call.scale > 0
    return plain_scores and call.custom_mask is None and not positions


def window_binds(call: ExtendCall, n: int) -> bool:
    """Whether the window hides any key of sequence n's part from any of its rows."""
    plan, keys = call.plan, call.keys(n)
    if call.window is None or not keys or not plan.lengths[n]:
        return False
    first_new = keys.start >= plan.prefix[n]
    lowest = plan.query_start[n] if first_new else plan.key_start[n]
    return plan.query_start[n] + plan.lengths[n] - 1 - lowest >= call.window


def suits(call: ExtendCall, n: int) -> bool:
    """Whether this route computes sequence n."""
    plan = call.plan
    if not plain(call, n) or window_binds(call, n):
        return False
    behind = plan.key_start[n] + plan.prefix[n] - 1 <= plan.query_start[n]
    return not call.causal or call.part == "extend" or not plan.prefix[n] or behind


def layout(call: ExtendCall, n: int) -> Layout:
    """Scratch for sequence n."""
    width = max(call.D, call.DV)
    span = min(SPAN, call.plan.lengths[n])
    found = copies(call, n, min(SPAN, max(call.plan.prefix[n], call.plan.lengths[n])))
    if copies_queries(call):
        found["flash.q"] = ((span, call.HQ, width), torch.float32)
    return found


def copies(call: ExtendCall, n: int, rows: int) -> Layout:
    """Buffers for keys and values that cannot be read where they are."""
    keys = call.keys(n)
    border = min(max(call.plan.cached(n), keys.start), keys.stop)
    pieces = [(keys.start, border), (border, keys.stop)]
    if all(begin == end or _viewable(call, n, begin, end) for begin, end in pieces):
        return {}
    width = max(call.D, call.DV)
    return {
        "flash.k": ((rows, call.HK, width), torch.float32),
        "flash.v": ((rows, call.HK, width), torch.float32),
    }


def _viewable(call: ExtendCall, n: int, begin: int, end: int) -> bool:
    return call.D == call.DV and view(call, n, begin, end, torch.float32) is not None


def copies_queries(call: ExtendCall) -> bool:
    """Whether queries must be converted or padded for the kernel."""
    return call.q.dtype != torch.float32 or call.D < call.DV


def queries(call: ExtendCall, begin: int, end: int, buffers: Buffers) -> torch.Tensor:
    """Packed rows [begin, end) as float32 [rows, HQ, max(D, DV)]."""
    if not copies_queries(call):
        return call.q[begin:end]
    q = buffers["flash.q"][: end - begin]
    q[..., : call.D].copy_(call.q[begin:end])
    q[..., call.D :] = 0
    return q


def keys_values(
    call: ExtendCall, n: int, begin: int, end: int, buffers: Buffers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [begin, end) of sequence n as float32 [rows, HK, max(D, DV)]."""
    if call.D == call.DV and (found := view(call, n, begin, end, torch.float32)) is not None:
        return found
    k, v = buffers["flash.k"][: end - begin], buffers["flash.v"][: end - begin]
    load(call, n, begin, end, k[..., : call.D], v[..., : call.DV])
    k[..., call.D :] = 0
    v[..., call.DV :] = 0
    return k, v


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel call: q [..., rows, HQ, E], k, v [..., keys, HK, E]; o [..., rows, HQ, E], LSE."""
    batched = q.dim() == 4
    q, k, v = (x.transpose(-3, -2) if batched else x.transpose(0, 1)[None] for x in (q, k, v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    o, lse = o.transpose(1, 2), lse.transpose(1, 2)
    return (o, lse) if batched else (o[0], lse[0])


def finish(
    call: ExtendCall, o: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor
) -> None:
    """Add the sinks to o [rows, HQ, DV] and LSE [rows, HQ], and store them."""
    if call.sinks is None:
        out.copy_(o)
    else:
        lse, share = add_sinks(lse, call.sinks)
        torch.mul(o, share.unsqueeze(-1), out=out)
    out_lse.copy_(lse)


def run(
    call: ExtendCall, n: int, buffers: Buffers, out: torch.Tensor, out_lse: torch.Tensor
) -> None:
    """Compute sequence n into out [length, HQ, DV] and out_lse [length, HQ]."""
    length, first = call.plan.lengths[n], call.plan.offsets[n]
    for begin in range(0, length, SPAN):
        end = min(begin + SPAN, length)
        q = queries(call, first + begin, first + end, buffers)
        o = lse = None
        for lower, upper, causal in _key_spans(call, n, begin, end):
            k, v = keys_values(call, n, lower, upper, buffers)
            o_part, lse_part = attend(q, k, v, call.scale, causal)
            o_part = o_part[..., : call.DV]
            if o is None or lse is None:
                o, lse = o_part, lse_part
            else:
                merge_into(o, lse, o_part, lse_part)
        if o is not None and lse is not None:
            finish(call, o, lse, out[begin:end], out_lse[begin:end])


def _key_spans(call: ExtendCall, n: int, begin: int, end: int) -> list[tuple[int, int, bool]]:
    """Runs of keys (first, end, causal) that rows [begin, end) of sequence n visit."""
    keys, prefix = call.keys(n), call.plan.prefix[n]
    spans = [(lower, min(lower + SPAN, prefix), False) for lower in range(keys.start, prefix, SPAN)]
    if call.part == "prefix":
        return spans
    for lower in range(prefix, keys.stop, SPAN):
        if call.causal and lower >= prefix + end:
            break
        causal = call.causal and lower == prefix + begin
        spans.append((lower, min(lower + SPAN, keys.stop), causal))
    return spans
