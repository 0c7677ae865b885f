"""Parking the state of earlier blocks of keys in scratch while the next block is reduced.

A program has BM * (BDV + 2) numbers there: acc, then m, then l. Wide states are stored and joined a
few columns at a time, so that registers hold one of them and a part of the other.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.triton.softmax import join

COLUMNS = tl.constexpr(64)
"""Columns that are stored or joined at a time."""


@triton.jit
def place_of(parked, BM: tl.constexpr, BDV: tl.constexpr):
    """Where this program parks."""
    return parked + tl.program_id(0).to(tl.int64) * (BM * (BDV + 2))


@triton.jit
def park(place, acc, m, l):  # noqa: E741
    """Store a state: acc [BM, BDV], m and l [BM]."""
    _store(place, acc, acc.shape[1])
    o_m = _sums_of(place, acc)
    # Threads that hold the same rows have all read what was parked.
    tl.debug_barrier()
    tl.store(o_m, m)
    tl.store(o_m + acc.shape[0], l)


@triton.jit
def join_parked(place, acc, m, l):  # noqa: E741
    """The parked state and, behind it, that of the next block of keys as one."""
    # Another thread of this program may have stored what one loads.
    tl.debug_barrier()
    o_m = _sums_of(place, acc)
    return _join(place, tl.load(o_m), tl.load(o_m + acc.shape[0]), acc, m, l, acc.shape[1])


@triton.jit
def _sums_of(place, acc):
    """Where m is [BM], with l behind it."""
    return place + acc.shape[0] * acc.shape[1] + tl.arange(0, acc.shape[0])


@triton.jit
def _store(place, acc, BDV: tl.constexpr):
    if acc.shape[1] > COLUMNS:
        left, right = _halves(acc)
        _store(place, left, BDV)
        _store(place + left.shape[1], right, BDV)
    else:
        tl.store(place + _offsets(acc, BDV), acc)


@triton.jit
def _join(place, m, l, acc, m_next, l_next, BDV: tl.constexpr):  # noqa: E741
    if acc.shape[1] > COLUMNS:
        left, right = _halves(acc)
        left, m_both, l_both = _join(place, m, l, left, m_next, l_next, BDV)
        right, m_both, l_both = _join(place + left.shape[1], m, l, right, m_next, l_next, BDV)
        both = _beside(left, right)
    else:
        earlier = tl.load(place + _offsets(acc, BDV))
        both, m_both, l_both = join(earlier, m, l, acc, m_next, l_next)
    return both, m_both, l_both


@triton.jit
def _offsets(acc, BDV: tl.constexpr):
    """Offsets of some columns of a state [BM, BDV]."""
    return tl.arange(0, acc.shape[0])[:, None] * BDV + tl.arange(0, acc.shape[1])[None, :]


@triton.jit
def _halves(x):
    """Left and right columns of [R, C], each [R, C / 2]."""
    parts = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit
def _beside(left, right):
    """[R, C] of left and right columns [R, C / 2]."""
    parts = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(parts, (left.shape[0], 2 * left.shape[1]))
