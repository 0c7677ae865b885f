"""(I + A)^-1 of a strictly lower triangular A [64, 64], by block substitution.

    [[P, 0], [M, Q]]^-1 = [[P^-1, 0], [-Q^-1 M P^-1, Q^-1]]

T starts as I and takes in the blocks M between neighbours of 1, 2, 4, ... 32 rows in turn:
T <- T - T M T. No power of A is ever formed, so equal keys with beta 1 cost no digits. Up to 16
rows the four diagonal blocks are a batch of [16, 16] products, beyond that full [64, 64] ones.
Products take their operands in float16 beside 16-bit inputs: |T_ij| is at most
beta_i |k_i| |k_j| wherever the rule itself does not grow, and float16 has the digits of TF32.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def substituted(T, M, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """T - T M T with operands in dtype."""
    left = T.to(dtype)
    inner = tl.dot(left, M.to(dtype), input_precision=PRECISION)
    return T - tl.dot(inner.to(dtype), left, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(A, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1, [64, 64] float32; entries on and above A's diagonal must be 0.

    dtype, PRECISION: of the operands of its products.
    """
    b = tl.arange(0, 4)
    r = tl.arange(0, 16)
    same = (b[:, None] == b[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(A, (4, 16, 4, 16)), 0.0), 2)  # [4, 16, 16]
    # Rows i and j lie in neighbouring blocks of 2^n rows iff the top bit of i ^ j is bit n.
    apart = r[None, :, None] ^ r[None, None, :]
    T = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, blocks, 0.0)
    for level in tl.static_range(1, 4):
        M = tl.where((apart >> level) == 1, blocks, 0.0)
        T = substituted(T, M, dtype, PRECISION)
    T = tl.reshape(tl.where(same, T[:, :, None, :], 0.0), (64, 64))
    rows = tl.arange(0, 64)
    apart = rows[:, None] ^ rows[None, :]
    for level in tl.static_range(4, 6):
        M = tl.where((apart >> level) == 1, A, 0.0)
        T = substituted(T, M, dtype, PRECISION)
    return T
