"""Joining attention results over disjoint sets of keys, in one launch for any number of parts.

With a_i = exp(lse_i - max lse):   o = sum a_i o_i / sum a_i,   lse = max + log(sum a_i),
the sink being one more part without a value. A program reads all of its rows before it writes them,
so results may lie where a part did.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headstart.ops.extend_attention.merge_spec import MergeCall
from headstart.ops.extend_attention.triton.softmax import NOTHING, finite
from headstart.runtime.launcher import current, start

ELEMENTS = 2048
"""Elements of o that a program holds of a part."""


@triton.jit(do_not_specialize=["total"])
def merge_kernel(
    parts_o, parts_lse, o_strides, lse_strides, sinks, o, lse,
    total, heads, o_token, o_head, o_channel, lse_token, lse_head,
    DV: tl.constexpr, BDV: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BR rows (token, head) of all parts; parts_o, parts_lse and their strides are tuples."""
    i_row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    m_row = i_row < total
    o_t, o_h = i_row // heads, i_row % heads
    o_d = tl.arange(0, BDV)
    m_o = m_row[:, None] & (o_d < DV)[None, :]
    top = tl.full((BR,), NOTHING, tl.float32)
    if sinks is not None:
        b_sink = tl.load(sinks + o_h, mask=m_row, other=NOTHING).to(tl.float32)
        top = b_sink
    for i in tl.static_range(PARTS):
        strides = lse_strides[i]
        p_lse = parts_lse[i] + o_t * strides[0] + o_h * strides[1]
        top = tl.maximum(top, tl.load(p_lse, mask=m_row, other=NOTHING))
    safe = finite(top)
    total_share = tl.zeros((BR,), tl.float32)
    if sinks is not None:
        total_share = tl.exp(b_sink - safe)
    acc = tl.zeros((BR, BDV), tl.float32)
    for i in tl.static_range(PARTS):
        strides = lse_strides[i]
        p_lse = parts_lse[i] + o_t * strides[0] + o_h * strides[1]
        share = tl.exp(tl.load(p_lse, mask=m_row, other=NOTHING) - safe)
        strides = o_strides[i]
        at = o_t * strides[0] + o_h * strides[1]
        p_o = parts_o[i] + at[:, None] + (o_d * strides[2])[None, :]
        b_o = tl.load(p_o, mask=m_o, other=0.0).to(tl.float32)
        acc = tl.fma(b_o, share[:, None], acc)
        total_share += share
    seen = total_share != 0.0
    total_safe = tl.where(seen, total_share, 1.0)
    b_lse = tl.where(seen, top + tl.log(total_safe), NOTHING)
    at = o_t * o_token + o_h * o_head
    p_o = o + at[:, None] + (o_d * o_channel)[None, :]
    tl.store(p_o, (acc / total_safe[:, None]).to(o.dtype.element_ty), mask=m_o)
    tl.store(lse + o_t * lse_token + o_h * lse_head, b_lse, mask=m_row)


def merge(call: MergeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the parts of a call."""
    first, first_lse = call.parts[0]
    if call.out is None:
        o, lse = torch.empty_like(first), torch.empty_like(first_lse)
    else:
        o, lse = call.out
    T, HQ, DV = first.shape
    columns = triton.next_power_of_2(DV)
    rows = max(1, ELEMENTS // columns)
    if T:
        given = (
            tuple(part for part, _ in call.parts),
            tuple(part for _, part in call.parts),
            tuple(part.stride() for part, _ in call.parts),
            tuple(part.stride() for _, part in call.parts),
            None if call.sinks is None else call.sinks.contiguous(),
            o, lse, T * HQ, HQ, *o.stride(), *lse.stride(), DV, columns, rows, len(call.parts),
        )  # fmt: skip
        arguments = dict(zip(merge_kernel.arg_names, given, strict=True))
        with current(call.device):
            start(merge_kernel, (triton.cdiv(T * HQ, rows),), arguments, num_warps=4)
    return o, lse
