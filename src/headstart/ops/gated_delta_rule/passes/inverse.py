"""(I + A)^-1 of a strictly lower triangular A [64, 64], by block substitution.

    [[P, 0], [M, Q]]^-1 = [[P^-1, 0], [-Q^-1 M P^-1, Q^-1]]

T starts as I and takes in the blocks M between neighbours of 1, 2, 4, ... 32 rows in turn:
T <- T - T M T. No power of A is ever formed, so equal keys with beta 1 cost no digits. Up to 16
rows the four diagonal blocks are a batch of [16, 16] products, beyond that full [64, 64] ones.
Products take their operands in float16 beside 16-bit inputs: |T_ij| is at most
beta_i |k_i| |k_j| wherever the rule itself does not grow, and float16 has the digits of TF32.
It can grow where beta |k|^2 is beyond 2 (a `wild` chunk: keys far from normalised, as in a draft
gone wrong). There a row beyond a bound is not finite to us, and operands are bounded, since rows
before it must not meet it as 0 times infinity; their bits do not change.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

TAME = tl.constexpr(4.0)
"""Up to this beta |k|^2, nothing is looked for."""


@triton.jit
def bounded(x, dtype: tl.constexpr):
    """x where an operand in dtype can hold it and its sums; else, and for NaN, the bound."""
    most: tl.constexpr = 1e18 if dtype == tl.float32 else 6e4
    return tl.where(tl.abs(x) < most, x, most)


@triton.jit
def substituted(T, M, wild, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """T - T M T with operands in dtype."""
    if wild:
        T = bounded(T, dtype)
        M = bounded(M, dtype)
    left = T.to(dtype)
    inner = tl.dot(left, M.to(dtype), input_precision=PRECISION)
    return T - tl.dot(inner.to(dtype), left, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(A, wild, stored: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 [64, 64] in the dtype `stored`, and its first row beyond a bound, 64 if none.

    From that row on it is 0. Entries on and above A's diagonal must be 0.
    wild: whether such a row is possible. PRECISION: of the operands of products.
    """
    dtype: tl.constexpr = tl.float32 if stored == tl.float32 else tl.float16
    b = tl.arange(0, 4)
    r = tl.arange(0, 16)
    same = (b[:, None] == b[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(A, (4, 16, 4, 16)), 0.0), 2)  # [4, 16, 16]
    # Rows i and j lie in neighbouring blocks of 2^n rows iff the top bit of i ^ j is bit n.
    apart = r[None, :, None] ^ r[None, None, :]
    T = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, blocks, 0.0)
    for level in tl.static_range(1, 4):
        M = tl.where((apart >> level) == 1, blocks, 0.0)
        T = substituted(T, M, wild, dtype, PRECISION)
    T = tl.reshape(tl.where(same, T[:, :, None, :], 0.0), (64, 64))
    rows = tl.arange(0, 64)
    apart = rows[:, None] ^ rows[None, :]
    for level in tl.static_range(4, 6):
        M = tl.where((apart >> level) == 1, A, 0.0)
        T = substituted(T, M, wild, dtype, PRECISION)
    grown = tl.full((), 64, tl.int32)
    if wild:
        # What T multiplies must fit the dtype that it is stored in.
        most: tl.constexpr = 512.0 if stored == tl.float16 else 6e4
        beyond = tl.max(tl.where(tl.abs(T) < most, 0, 1), 1, keep_dims=True)
        grown = tl.min(tl.where(beyond > 0, rows[:, None], 64))
        T = tl.where(rows[:, None] < grown, T, 0.0)
    return T.to(stored), grown
