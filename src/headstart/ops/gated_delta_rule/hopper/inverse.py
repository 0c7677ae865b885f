"""(I + A)^-1 of a strictly lower triangular A [64, 64] without full products, on NVIDIA Hopper.

With 16 rows a warp and A, T in blocks of 16 x 16,

    D_x = (I + A_xx)^-1    T_ww = D_w    T_wx = -(sum over x < y <= w of T_wy A_yx) D_x

so a warp computes its own rows of T from right to left and waits for no other; D_w by block
substitution T <- T - T M T as in `passes/inverse.py`, a warp for itself.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

TAME = gl.constexpr(4.0)
"""Up to this beta |k|^2 no row of T can grow beyond a bound."""
MOST = gl.constexpr(6e4)
"""What an operand in float16 may hold."""


@gluon.jit
def operand(x, layout: gl.constexpr, WILD: gl.constexpr):
    """x in float16 for a product; in a wild chunk what float16 cannot hold, and NaN, is a bound."""
    if WILD:
        x = gl.where(gl.abs(x) < MOST, x, MOST)
    return gl.convert_layout(x.to(gl.float16), layout)


@gluon.jit
def quarters(x):
    """The four blocks of 16 columns of x [64, 64]."""
    x = x.reshape([64, 2, 2, 16]).permute((0, 3, 2, 1))
    left, right = gl.split(x)
    a, b = gl.split(left)
    c, d = gl.split(right)
    return a, b, c, d


@gluon.jit
def beside(x, y):
    """[x, y] of two tensors with as many columns."""
    return gl.join(x, y).permute((0, 2, 1)).reshape([64, 2 * x.shape[1]])


@gluon.jit
def diagonal_inverse(A, WILD: gl.constexpr):
    """(I + A_w)^-1 of four strictly lower triangular A_w [16, 16], one below the other [64, 16]."""
    BLOCK: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BLOCK, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, BLOCK, 2)
    outer: gl.constexpr = A.type.layout
    a = gl.convert_layout(A.reshape([4, 16, 16]), BLOCK)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCK)))[None, None, :]
    # Rows i and j lie in neighbouring blocks of 2^n rows iff the top bit of i ^ j is bit n.
    T = gl.where((i ^ j) == 0, 1.0, 0.0) - gl.where((i ^ j) == 1, a, 0.0)
    m = operand(a, RIGHT, WILD)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
    nothing = gl.zeros([4, 16, 16], gl.float32, BLOCK)
    for level in gl.static_range(1, 4):
        M = gl.where(((i ^ j) >> level) == 1, m, 0.0)
        inner = mma_v2(operand(T, LEFT, WILD), M, nothing)
        T = mma_v2(operand(-inner, LEFT, WILD), operand(T, RIGHT, WILD), T)
    return gl.convert_layout(T.reshape([64, 16]), outer)


@gluon.jit
def columns_of(A):
    """Three columns of blocks [64, 16] of A [64, 64], and those on its diagonal."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    a0, a1, a2, a3 = quarters(A)
    a0 = gl.convert_layout(a0, ROW)
    a1 = gl.convert_layout(a1, ROW)
    a2 = gl.convert_layout(a2, ROW)
    a3 = gl.convert_layout(a3, ROW)
    own = (gl.arange(0, 64, layout=gl.SliceLayout(1, ROW)) // 16)[:, None]
    on = gl.where(own == 0, a0, gl.where(own == 1, a1, gl.where(own == 2, a2, a3)))
    return a0, a1, a2, on


@gluon.jit
def unit_lower_inverse(columns, a_blocks, d_block, WILD: gl.constexpr):
    """(I + A)^-1 of A in columns; a_blocks, d_block: shared memory for blocks of A and D."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ROW, 2)
    a0, a1, a2, on = columns
    own = (gl.arange(0, 64, layout=gl.SliceLayout(1, ROW)) // 16)[:, None]
    D = diagonal_inverse(on, WILD)
    a_blocks.index(0).store(operand(-a0, ROW, WILD))
    a_blocks.index(1).store(operand(-a1, ROW, WILD))
    a_blocks.index(2).store(operand(-a2, ROW, WILD))
    d_block.store(operand(D, ROW, WILD))
    nothing = gl.zeros([64, 16], gl.float32, ROW)
    T3 = gl.where(own == 3, D, 0.0)
    left = operand(T3, LEFT, WILD)
    r0 = mma_v2(left, a_blocks.index(0).slice(48, 16).load(RIGHT), nothing)
    r1 = mma_v2(left, a_blocks.index(1).slice(48, 16).load(RIGHT), nothing)
    r2 = mma_v2(left, a_blocks.index(2).slice(48, 16).load(RIGHT), nothing)
    T2 = mma_v2(
        operand(r2, LEFT, WILD), d_block.slice(32, 16).load(RIGHT), gl.where(own == 2, D, 0.0)
    )
    left = operand(T2, LEFT, WILD)
    r1 = mma_v2(left, a_blocks.index(1).slice(32, 16).load(RIGHT), r1)
    r0 = mma_v2(left, a_blocks.index(0).slice(32, 16).load(RIGHT), r0)
    T1 = mma_v2(
        operand(r1, LEFT, WILD), d_block.slice(16, 16).load(RIGHT), gl.where(own == 1, D, 0.0)
    )
    left = operand(T1, LEFT, WILD)
    r0 = mma_v2(left, a_blocks.index(0).slice(16, 16).load(RIGHT), r0)
    T0 = mma_v2(
        operand(r0, LEFT, WILD), d_block.slice(0, 16).load(RIGHT), gl.where(own == 0, D, 0.0)
    )
    return beside(beside(T0, T1), beside(T2, T3))


@gluon.jit
def bounded_inverse(columns, a_blocks, d_block, wild, dtype: gl.constexpr):
    """T = (I + A)^-1 of A in columns, and its first row that `dtype` cannot hold: 0 from there."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    grown = 64
    if wild > 0:
        inverse = unit_lower_inverse(columns, a_blocks, d_block, True)
        inverse = gl.convert_layout(inverse, ROW)
        # What T multiplies must fit the dtype that it is stored in.
        most: gl.constexpr = 512.0 if dtype == gl.float16 else 6e4
        beyond = gl.max(gl.where(gl.abs(inverse) < most, 0, 1), 1)
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROW))
        grown = gl.min(gl.where(beyond > 0, i, 64), 0)
        inverse = gl.where((i < grown)[:, None], inverse, 0.0)
    else:
        inverse = unit_lower_inverse(columns, a_blocks, d_block, False)
        inverse = gl.convert_layout(inverse, ROW)
    return inverse, grown
