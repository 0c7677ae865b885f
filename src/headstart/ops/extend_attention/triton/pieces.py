"""Joining the pieces of rows that were cut: from left to right, then the sink."""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.tile_table import JOIN_COLUMNS
from headstart.ops.extend_attention.triton.rows import store_rows
from headstart.ops.extend_attention.triton.softmax import NOTHING, finish, join

_JOIN = tl.constexpr(JOIN_COLUMNS)


@triton.jit(do_not_specialize=["heads"])
def join_kernel(
    o, lse, sinks, part_acc, part_m, part_l, joins,
    o_token, o_head, o_channel, lse_token, lse_head, heads,
    DV: tl.constexpr, BDV: tl.constexpr, BH: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One program for each packed row that was cut and each BH of all `heads` of queries."""
    i = tl.program_id(0)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < heads
    row = tl.load(joins + i * _JOIN)
    if row < 0:
        return
    entry = tl.load(joins + i * _JOIN + 1).to(tl.int64)
    pieces = tl.load(joins + i * _JOIN + 2)
    step = tl.load(joins + i * _JOIN + 3)
    o_d = tl.arange(0, BDV)
    m_acc = m_h[:, None] & (o_d < DV)[None, :]
    acc = tl.zeros((BH, BDV), tl.float32)
    m = tl.full((BH,), NOTHING, tl.float32)
    l = tl.zeros((BH,), tl.float32)  # noqa: E741
    # Several are on their way at a time: rows of many pieces would wait for one after the other.
    for piece in tl.range(pieces, num_stages=8):
        at = (entry + piece * step) * heads + o_h
        b_acc = tl.load(part_acc + (at * DV)[:, None] + o_d[None, :], mask=m_acc, other=0.0)
        b_m = tl.load(part_m + at, mask=m_h, other=NOTHING)
        b_l = tl.load(part_l + at, mask=m_h, other=0.0)
        acc, m, l = join(acc, m, l, b_acc, b_m, b_l)  # noqa: E741
    sink = tl.full(m.shape, NOTHING, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + o_h, mask=m_h, other=NOTHING).to(tl.float32)
    share, b_lse = finish(m, l, sink)
    at = row.to(tl.int64) * o_token + o_h.to(tl.int64) * o_head
    store_rows(o, at, acc * share[:, None], m_h, o_channel, DV, BDV)
    if HAS_LSE:
        tl.store(lse + row.to(tl.int64) * lse_token + o_h.to(tl.int64) * lse_head, b_lse, mask=m_h)
