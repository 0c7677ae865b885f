"""Where segments begin: S <- L S + b from one to the next, in float32.

Rows of `carry` from `first` on hold the state after segment 0, then b of each segment that has a
map, and in the end the states after them; L of those segments lie from row `factors` on.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.runtime.launcher import padded, precision
from headstart.runtime.static import Target

JOIN_WARPS = 4
COLUMNS = 16
"""Columns of V that a program holds: few, since a device has more processors than there are heads
where sequences are cut into segments."""


def joining(K: int, V: int, dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """How the kernel is built; dtype: of q, k and v.

    TF32 keeps three bits more of L and S than the bfloat16 that every chunk rounds both to.
    """
    exact = precision(torch.float32, target.backend)
    narrow = target.backend == "cuda" and dtype != torch.float32
    return {
        "K": K, "V": V, "BK": padded(K), "BV": COLUMNS, "PARTS": 4 if K > 64 else 1,
        "STAGES": 2 if target.backend == "cuda" else 1,
        "PRECISION": "tf32" if narrow else exact,
    }  # fmt: skip


@triton.jit
def quarter(x, i: tl.constexpr):
    """Rows i R / 4 to (i + 1) R / 4 of x [R, columns]."""
    halves = tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0))
    upper, lower = tl.split(halves)
    half = upper if i < 2 else lower
    quarters = tl.permute(tl.reshape(half, (2, half.shape[0] // 2, half.shape[1])), (1, 2, 0))
    first, second = tl.split(quarters)
    return first if i % 2 == 0 else second


@triton.jit(do_not_specialize=["first", "factors", "maps"])
def join_kernel(
    carry,
    first,
    factors,
    maps,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per (block of BV columns of V, value head).

    L comes in PARTS of its columns, 1 or 4: while one is multiplied the next is on its way.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    head = tl.program_id(1)
    rows = tl.arange(0, BK)
    inner = tl.arange(0, BK // PARTS)
    there = (rows < K)[:, None] & (columns < V)[None, :]
    step = HV * (K * V)
    own = carry + (first * HV + head).to(tl.int64) * (K * V)
    factor = carry + (factors * HV + head).to(tl.int64) * (K * V)
    square = rows[:, None] * V + columns[None, :]
    S = tl.load(own + square, mask=there, other=0.0)
    for _ in tl.range(0, maps, num_stages=STAGES):
        own += step
        after = tl.load(own + square, mask=there, other=0.0)
        for part in tl.static_range(PARTS):
            c = part * (BK // PARTS) + inner
            there_L = (rows < K)[:, None] & (c < K)[None, :]
            L = tl.load(factor + rows[:, None] * V + c[None, :], mask=there_L, other=0.0)
            before = S if PARTS == 1 else quarter(S, part)
            after = tl.dot(L, before, after, input_precision=PRECISION)
        tl.store(own + square, after, mask=there)
        S = after
        factor += step
