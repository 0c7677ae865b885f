"""Parking the state of earlier blocks of keys in scratch while the next block is reduced.

A program has BM * (BDV + 2) numbers there: acc, then m, then l. acc lies in the order in which the
threads of an NVIDIA warp hold a product's sums: those that a thread holds of eight columns lie side
by side, and so do threads. A sum then goes from its register to memory and back as it is; any other
order would take a detour through shared memory, which tiles of keys fill. Wide states are joined a
few columns at a time, so that registers hold one of them and a part of the other.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.triton.softmax import join

COLUMNS = tl.constexpr(32)
"""Columns that are joined at a time."""


@triton.jit
def place_of(parked, BM: tl.constexpr, BDV: tl.constexpr):
    """Where this program parks."""
    return parked + tl.program_id(0).to(tl.int64) * (BM * (BDV + 2))


@triton.jit
def park(place, acc, m, l):  # noqa: E741
    """Store a state: acc [BM, BDV], m and l [BM]."""
    _store(place, acc)
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
    return _join_behind(place, acc, m, l, (tl.load(o_m), tl.load(o_m + acc.shape[0])))


@triton.jit
def _join_behind(place, acc, m, l, before):  # noqa: E741
    """The parked acc with `before` = (m, l) and, behind it, the next block's state as one."""
    if acc.shape[1] > COLUMNS:
        left, right = _halves(acc)
        left, _, _ = _join_behind(place, left, m, l, before)
        right, m, l = _join_behind(place + left.shape[0] * left.shape[1], right, m, l, before)  # noqa: E741
        both = _beside(left, right)
    else:
        both, m, l = join(_load(place, acc), before[0], before[1], acc, m, l)  # noqa: E741
    return both, m, l


@triton.jit
def _sums_of(place, acc):
    """Where m is [BM], with l behind it."""
    return place + acc.shape[0] * acc.shape[1] + tl.arange(0, acc.shape[0])


@triton.jit
def _store(place, acc):
    """Park acc."""
    held = _as_held(acc)
    tl.store(place + _offsets(held), held)


@triton.jit
def _load(place, acc):
    """What is parked where acc would be."""
    rows: tl.constexpr = acc.shape[0]
    held = tl.zeros((acc.shape[1] // 8, rows * 8), tl.float32)
    found = tl.load(place + _offsets(held))
    found = tl.reshape(found, (acc.shape[1] // 8, rows // 16, 8, 4, 2, 2))
    return tl.reshape(tl.permute(found, (1, 4, 2, 0, 3, 5)), acc.shape)


@triton.jit
def _as_held(acc):
    """[BM, BDV] as [BDV / 8, BM * 8]: warp, row and columns of a thread, rows 8 apart, column."""
    rows: tl.constexpr = acc.shape[0]
    parts = tl.reshape(acc, (rows // 16, 2, 8, acc.shape[1] // 8, 4, 2))
    return tl.reshape(tl.permute(parts, (3, 0, 2, 4, 1, 5)), (acc.shape[1] // 8, rows * 8))


@triton.jit
def _offsets(held):
    return tl.arange(0, held.shape[0])[:, None] * held.shape[1] + tl.arange(0, held.shape[1])


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
