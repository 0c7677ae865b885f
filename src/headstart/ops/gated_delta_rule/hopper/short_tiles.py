"""What a program for short sequences makes of a chunk: its rows, T, P and what scales them.

    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)    T = (I + A)^-1
    P = scale tril((q_i . k_j) Gamma_ij)

[Gated Delta Networks, arXiv 2412.06464.] The gates are those of `decays`, T and P those of
`prepare`, in the same products, roundings and order of adding, hence the same bits. All stays in
shared memory: a tuple of tiles (q, k, both halves of v, T, P, zeros, sums, scales, what scales rows
of q).
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false
# ruff: noqa: RUF059 (an outer test of a constant is decided when the kernel is compiled;
# functions unpack what they share, and use a part)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headstart.ops.gated_delta_rule.hopper.gluon import gather_in, reinterpret, thread_barrier
from headstart.ops.gated_delta_rule.hopper.inverse import bounded_inverse, columns_of
from headstart.ops.gated_delta_rule.hopper.scores import (
    inverse_norms,
    normalise,
    products_of,
    scores_of,
)
from headstart.ops.gated_delta_rule.passes.decays import not_finite, units, words
from headstart.ops.gated_delta_rule.passes.gates import log_decay, strength

SCALES = gl.constexpr(4)
"""Vectors of 64 of a chunk: Gamma_i0, beta, Gamma_Ci, and whether a row takes part; before T is
known both words of the running sum, beta and -Gamma_i0."""


@gluon.jit
def added(a, b):
    """How a running sum is formed."""
    return a + b


@gluon.jit
def store_vectors(x, to):
    """Store the columns of x [64, SCALES] as vectors."""
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    reinterpret(to, gl.float32, [SCALES, 64], TABLE).permute((1, 0)).store(x)


@gluon.jit
def ring_of(low, rows, tail_rows):
    """Where a tail keeps the rows of a chunk: their positions modulo tail_rows, at least 64."""
    ring = low % tail_rows + rows
    return gl.where(ring >= tail_rows, ring - tail_rows, ring)


@gluon.jit
def gather(
    to, x, token, head_step, head, place, low,
    first_column: gl.constexpr, COLUMNS: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """Begin to copy COLUMNS columns of a chunk's rows; 0 where the call brings none."""
    row, start, end = place
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    columns = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LINES))
    at = low + rows
    taken = (at >= start) & (at < end)
    lines = x + (row + low - start).to(gl.int64) * token + head * head_step + rows * token
    gather_in(to, lines[:, None] + columns[None, :], mask=taken[:, None])


@gluon.jit
def spoiled_rows(halves, zeros):
    """v 0: not 0 in rows that are not finite. v comes in two halves."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    spoiled = warpgroup_mma(
        halves.index(0), zeros.permute((1, 0)), gl.zeros((64, 8), gl.float32, NARROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    spoiled = warpgroup_mma(halves.index(1), zeros.permute((1, 0)), spoiled, is_async=True)
    spoiled = warpgroup_mma_wait(0, deps=[spoiled])
    return gl.convert_layout(gl.sum(spoiled, 1), gl.SliceLayout(1, ROW))


@gluon.jit
def ask_gates(
    gates, place, low, head,
    GATE: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """What `read_gates` reads of the call's rows, loaded before anyone waits for it."""
    ALL: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    g, beta, a_log, dt_bias, lower_bound, g_token, g_head, beta_token, beta_head = gates
    row, start, end = place
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ALL))
    new = (low + rows >= start) & (low + rows < end)
    first_row = (row + low - start).to(gl.int64)
    decay = gl.zeros([64], gl.float32, gl.SliceLayout(1, ALL))
    b = gl.where(new, 1.0, 0.0)
    rate = 0.0
    bias = 0.0
    if HAS_G:
        found = g + first_row * g_token + head * g_head + rows * g_token
        decay = gl.load(found, mask=new, other=0.0)
        if GATE == "raw" or GATE == "bounded":
            rate = gl.load(a_log + head)
            if HAS_BIAS:
                bias = gl.load(dt_bias + head)
    if HAS_BETA:
        found = beta + first_row * beta_token + head * beta_head + rows * beta_token
        b = gl.load(found, mask=new, other=0.0)
    return decay, b, rate, bias


@gluon.jit
def read_gates(
    asked, lower_bound, place, low,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Log decays and betas of the call's rows in a chunk, of what was asked for; 0 elsewhere."""
    ALL: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    decay, b, rate, bias = asked
    row, start, end = place
    at = low + gl.arange(0, 64, layout=gl.SliceLayout(1, ALL))
    new = (at >= start) & (at < end)
    if HAS_G:
        if GATE == "raw" or GATE == "bounded":
            rate = gl.exp(rate.to(gl.float32))
            if HAS_BIAS:
                bias = bias.to(gl.float32)
        decay = log_decay(decay.to(gl.float32), rate, bias, lower_bound, GATE)
        decay = gl.where(new, decay, 0.0)
    if HAS_BETA:
        b = gl.where(new, strength(b.to(gl.float32), BETA), 0.0)
    return decay, b


@gluon.jit
def add_gates(decay, b, sums):
    """The running sum of a chunk's log decays; it, betas and -Gamma_i0 also to `sums`.

    Returns both words of the sum [64, 4], and the first row that gates spoil. Each warp has all
    rows.
    """
    ALL: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    wide = units(decay)[:, None] + gl.zeros([64, SCALES], gl.int64, ALL)
    high, rest = words(gl.associative_scan(wide, 0, added))
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ALL))
    first = gl.min(gl.where(not_finite(decay, b), rows, 64), 0)
    which = gl.arange(0, SCALES, layout=gl.SliceLayout(0, ALL))[None, :]
    found = gl.where(which == 2, b[:, None], gl.exp2(high + rest) * -1.0)
    found = gl.where(which == 0, high, gl.where(which == 1, rest, found))
    store_vectors(found, sums)
    return high, rest, first


@gluon.jit
def make_tiles(
    rows, gates, place, low, head, key_head, tiles, scale,
    K: gl.constexpr, V: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """Rows of q, k and v of a chunk, T, P and its scales, all to shared memory."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ALL: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    q, k, v, q_token, q_head, k_token, k_head, v_token, v_head = rows
    q_tile, k_tile, halves, T_tile, P_tile, zeros, sums, scales, q_reads = tiles
    row, start, end = place
    dtype: gl.constexpr = k.dtype.element_ty
    asked = ask_gates(gates, place, low, head, GATE, HAS_G, HAS_BETA, HAS_BIAS)
    gather(k_tile, k, k_token, k_head, key_head, place, low, 0, K, WIDE_LINES)
    gather(q_tile, q, q_token, q_head, key_head, place, low, 0, K, WIDE_LINES)
    for half in gl.static_range(2):
        gather(halves.index(half), v, v_token, v_head, head, place, low, half * 64, 64, LINES)
    async_copy.commit_group()
    decay, b = read_gates(asked, gates[4], place, low, GATE, BETA, HAS_G, HAS_BETA, HAS_BIAS)
    high, rest, first_spoiled = add_gates(decay, b, sums)
    async_copy.wait_group(0)
    # What scales rows of q, which are read as they are.
    reads = gl.full([64], scale, gl.float32, gl.SliceLayout(1, WIDE_LINES))
    if NORMALISE:
        normalise(k_tile, low, start, WIDE_LINES)
        reads = inverse_norms(q_tile.load(WIDE_LINES)) * scale
    q_reads.store(reads)
    fence_async_shared()
    thread_barrier()

    spoiled = spoiled_rows(halves, zeros)
    products, p = products_of(q_tile, k_tile)
    reads = q_reads.load(gl.SliceLayout(1, ROW))[:, None]
    high_i = sums.index(0).load(gl.SliceLayout(1, ROW))
    rest_i = sums.index(1).load(gl.SliceLayout(1, ROW))
    beta = sums.index(2).load(gl.SliceLayout(1, ROW))
    high_j = sums.index(0).load(gl.SliceLayout(0, ROW))
    rest_j = sums.index(1).load(gl.SliceLayout(0, ROW))
    scores, A, wild, clean_row = scores_of(
        products, p, spoiled, beta, first_spoiled, high_i, rest_i, high_j, rest_j, reads
    )
    P_tile.store(scores.to(dtype))
    # Blocks of A and of its diagonal's inverse lie where T will.
    blocks = reinterpret(T_tile, gl.float16, [4, 64, 16], BLOCKS)
    inverse, grown = bounded_inverse(columns_of(A), blocks, blocks.index(3), wild, dtype)
    clean_row = gl.minimum(clean_row, grown)

    # As `decays` and, from the first row that is not finite on, `prepare` say.
    all_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ALL))
    which = gl.arange(0, SCALES, layout=gl.SliceLayout(0, ALL))[None, :]
    inside = gl.where((all_rows < clean_row)[:, None], gl.exp2(high + rest), float("nan"))
    last_high = gl.sum(gl.where((all_rows == 63)[:, None], high, 0.0), 0)
    last_rest = gl.sum(gl.where((all_rows == 63)[:, None], rest, 0.0), 0)
    outside = gl.exp2((last_high[None, :] - high) + (last_rest[None, :] - rest))
    upper = gl.minimum(clean_row, end - low)
    takes_part = gl.where((all_rows >= start - low) & (all_rows < upper), 1.0, 0.0)
    found = gl.where(which == 2, outside, takes_part[:, None])
    found = gl.where(which == 0, inside, gl.where(which == 1, b[:, None], found))
    store_vectors(found, scales)
    # All have read what lies where T will.
    thread_barrier()
    T_tile.store(inverse.to(dtype))
    fence_async_shared()
    thread_barrier()
