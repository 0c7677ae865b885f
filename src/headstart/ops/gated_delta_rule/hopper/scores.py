"""Products of the rows of a chunk, and what P and A make of them, on NVIDIA Hopper.

Whoever prepares a chunk forms both here, in the same products, roundings and order of adding.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from headstart.ops.gated_delta_rule.hopper.inverse import TAME


@gluon.jit
def inverse_norms(x):
    """rsqrt(sum(x^2) + 1e-6) of the rows of x."""
    x = x.to(gl.float32)
    return gl.rsqrt(gl.sum(x * x, 1) + 1e-6)


@gluon.jit
def normalise(k_tile, low, start, LINES: gl.constexpr):
    """Normalise rows of the call in shared memory; those of a tail are. Returns by what."""
    new = low + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES)) >= start
    x = k_tile.load(LINES)
    # In float32, which gives back what it is given: pairs are rounded at once.
    by = gl.where(new, inverse_norms(x), 1.0)
    k_tile.store((x.to(gl.float32) * by[:, None]).to(x.dtype))
    return by


@gluon.jit
def least_and_most(a, b, c, d):
    """How a minimum and a maximum are reduced at once."""
    return gl.minimum(a, c), gl.maximum(b, d)


@gluon.jit
def products_of(q_tile, k_tile):
    """K K^T and Q K^T."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    products = warpgroup_mma(
        k_tile, k_tile.permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    p = warpgroup_mma(
        q_tile, k_tile.permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    products, p = warpgroup_mma_wait(0, deps=[products, p])
    return products, p


@gluon.jit
def scores_of(
    products, p, spoiled, strength, first_spoiled, high_i, rest_i, high_j, rest_j, reads
):  # fmt: skip
    """P, A, whether T may grow, and the first row that is not finite, `first_spoiled` at most.

    spoiled: not 0 in rows that are not finite otherwise than by their keys; reads: the scale of
    rows of q.
    """
    ROW: gl.constexpr = products.type.layout
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROW))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, ROW))
    norms = gl.sum(gl.where(i[:, None] == j[None, :], products, 0.0), 1)
    clean_row, wild = gl.reduce(
        (
            gl.where(norms * 0.0 + spoiled != 0.0, i, 64),
            gl.where(norms * strength > TAME, 1, 0),
        ),
        0,
        least_and_most,
    )
    clean_row = gl.minimum(clean_row, first_spoiled)
    kept_i = (i < clean_row)[:, None]
    kept_j = (j < clean_row)[None, :]
    b = gl.where(i < clean_row, strength, 0.0)[:, None]
    G = gl.exp2((high_i[:, None] - high_j[None, :]) + (rest_i[:, None] - rest_j[None, :]))
    later = i[:, None] - j[None, :]
    scores = gl.where((later >= 0) & kept_j, p * (G * reads), 0.0)
    A = gl.where((later > 0) & kept_i, products * G * b, 0.0)
    return scores, A, wild, clean_row
