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

from headstart.runtime.launcher import padded, precision

JOIN_WARPS = 4
COLUMNS = 16
"""Columns of V that a program holds: few, since a device has more processors than there are heads
where sequences are cut into segments."""


def joining(K: int, V: int, backend: str) -> dict[str, Any]:
    """How the kernel is built."""
    return {
        "K": K, "V": V, "BK": padded(K), "BV": COLUMNS, "BC": min(32, padded(K)),
        "PRECISION": precision(torch.float32, backend),
    }  # fmt: skip


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
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (block of BV columns of V, value head)."""
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    head = tl.program_id(1)
    rows = tl.arange(0, BK)
    cc = tl.arange(0, BC)
    there = (rows < K)[:, None] & (columns < V)[None, :]
    for i in range(maps):
        before = carry + ((first + i) * HV + head).to(tl.int64) * (K * V)
        after = before + HV * (K * V)
        factor = carry + ((factors + i) * HV + head).to(tl.int64) * (K * V)
        square = rows[:, None] * V + columns[None, :]
        S = tl.load(after + square, mask=there, other=0.0)
        for c in tl.static_range(0, BK, BC):
            L = tl.load(
                factor + rows[:, None] * V + (c + cc)[None, :],
                mask=(rows < K)[:, None] & (c + cc < K)[None, :],
                other=0.0,
            )
            part = tl.load(
                before + (c + cc)[:, None] * V + columns[None, :],
                mask=(c + cc < K)[:, None] & (columns < V)[None, :],
                other=0.0,
            )
            S = tl.dot(L, part, S, input_precision=PRECISION)
        tl.store(after + square, S, mask=there)
        # The next step reads what other threads have stored.
        tl.debug_barrier()
