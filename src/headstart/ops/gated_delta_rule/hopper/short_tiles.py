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
from headstart.ops.gated_delta_rule.hopper.prepare import (
    bounded_inverse,
    columns_of,
    inverse_norms,
    normalise,
    products_of,
    scores_of,
)
from headstart.ops.gated_delta_rule.passes.decays import not_finite, units, words
from headstart.ops.gated_delta_rule.passes.gates import log_decay, strength

SCALES = gl.constexpr(4)
"""Vectors of 64 of a chunk: Gamma_i0, beta, Gamma_Ci, and whether a row takes part; before T is
known both words of the running sum, beta and the log decay."""


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
    to, x, token, head_step, head, tail, slot_step, tail_head_step, tail_rows, place, low,
    first_column: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, LINES: gl.constexpr,
    CACHED: gl.constexpr,
):  # fmt: skip
    """Begin to copy COLUMNS columns of a chunk's rows, of the call or of a tail; 0 for none.

    WIDTH: columns of a row of the tail.
    """
    row, start, end, held, stands, slot = place
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    columns = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LINES))
    at = low + rows
    taken = (at >= start) & (at < end)
    lines = x + (row + low - start).to(gl.int64) * token + head * head_step + rows * token
    if CACHED:
        old = held & (at >= stands) & (at < start)
        kept = tail + slot * slot_step + head * tail_head_step
        lines = gl.where(old, kept + ring_of(low, rows, tail_rows) * WIDTH, lines)
        taken = taken | old
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
def read_gates(
    gates, place, low, head, scales,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """Log decays, their running sum and betas of a chunk, also to `scales`.

    Returns both words of the sum [64, 4], beta [64], and the first row that gates spoil. Each warp
    has all rows.
    """
    ALL: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    (
        g, beta, a_log, dt_bias, tail_decay, tail_beta, lower_bound,
        g_token, g_head, beta_token, beta_head,
        tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    ) = gates  # fmt: skip
    row, start, end, held, stands, slot = place
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ALL))
    at = low + rows
    new = (at >= start) & (at < end)
    first_row = (row + low - start).to(gl.int64)
    decay = gl.zeros([64], gl.float32, gl.SliceLayout(1, ALL))
    if HAS_G:
        decay = g + first_row * g_token + head * g_head + rows * g_token
        decay = gl.load(decay, mask=new, other=0.0).to(gl.float32)
        rate = 0.0
        bias = 0.0
        if GATE == "raw" or GATE == "bounded":
            rate = gl.exp(gl.load(a_log + head).to(gl.float32))
            if HAS_BIAS:
                bias = gl.load(dt_bias + head).to(gl.float32)
        decay = gl.where(new, log_decay(decay, rate, bias, lower_bound, GATE), 0.0)
    b = gl.where(new, 1.0, 0.0)
    if HAS_BETA:
        b = beta + first_row * beta_token + head * beta_head + rows * beta_token
        b = gl.load(b, mask=new, other=0.0).to(gl.float32)
        b = gl.where(new, strength(b, BETA), 0.0)
    if CACHED:
        old = held & (at >= stands) & (at < start)
        ring = ring_of(low, rows, tail_rows)
        kept = tail_decay + slot * tail_decay_slot + head * tail_decay_head
        decay = gl.where(old, gl.load(kept + ring, mask=old, other=0.0), decay)
        kept = tail_beta + slot * tail_beta_slot + head * tail_beta_head
        b = gl.where(old, gl.load(kept + ring, mask=old, other=0.0), b)
    wide = units(decay)[:, None] + gl.zeros([64, SCALES], gl.int64, ALL)
    high, rest = words(gl.associative_scan(wide, 0, added))
    first = gl.min(gl.where(not_finite(decay, b), rows, 64), 0)
    which = gl.arange(0, SCALES, layout=gl.SliceLayout(0, ALL))[None, :]
    found = gl.where(which == 2, b[:, None], decay[:, None])
    found = gl.where(which == 0, high, gl.where(which == 1, rest, found))
    store_vectors(found, scales)
    return high, rest, b, first


@gluon.jit
def make_tiles(
    rows, gates, place, low, head, key_head, tiles, scale,
    K: gl.constexpr, V: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """Rows of q, k and v of a chunk, T, P and its scales, all to shared memory."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ALL: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    (
        q, k, v, tail_k, tail_v, q_token, q_head, k_token, k_head, v_token, v_head,
        tail_k_slot, tail_k_head, tail_v_slot, tail_v_head, tail_rows,
    ) = rows  # fmt: skip
    q_tile, k_tile, halves, T_tile, P_tile, zeros, sums, scales, q_reads = tiles
    row, start, end, held, stands, slot = place
    dtype: gl.constexpr = k.dtype.element_ty
    gather(
        k_tile, k, k_token, k_head, key_head, tail_k, tail_k_slot, tail_k_head, tail_rows, place,
        low, 0, K, K, WIDE_LINES, CACHED,
    )  # fmt: skip
    gather(q_tile, q, q_token, q_head, key_head, q, 0, 0, 1, place, low, 0, K, K, WIDE_LINES, False)
    for half in gl.static_range(2):
        gather(
            halves.index(half), v, v_token, v_head, head, tail_v, tail_v_slot, tail_v_head,
            tail_rows, place, low, half * 64, 64, V, LINES, CACHED,
        )  # fmt: skip
    async_copy.commit_group()
    high, rest, b, first_spoiled = read_gates(
        gates, place, low, head, sums, GATE, BETA, HAS_G, HAS_BETA, HAS_BIAS, CACHED
    )
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
    begins = start
    if CACHED:
        begins = gl.where(held, stands, start)
    upper = gl.minimum(clean_row, end - low)
    takes_part = gl.where((all_rows >= begins - low) & (all_rows < upper), 1.0, 0.0)
    found = gl.where(which == 2, outside, takes_part[:, None])
    found = gl.where(which == 0, inside, gl.where(which == 1, b[:, None], found))
    store_vectors(found, scales)
    # All have read what lies where T will.
    thread_barrier()
    T_tile.store(inverse.to(dtype))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def keep_rows(
    rows, gates, place, low, head, key_head, tiles, write,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """A chunk's rows of the call are rows of the tail of slot `write`."""
    WIDE_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    (
        q, k, v, tail_k, tail_v, q_token, q_head, k_token, k_head, v_token, v_head,
        tail_k_slot, tail_k_head, tail_v_slot, tail_v_head, tail_rows,
    ) = rows  # fmt: skip
    (
        g, beta, a_log, dt_bias, tail_decay, tail_beta, lower_bound,
        g_token, g_head, beta_token, beta_head,
        tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    ) = gates  # fmt: skip
    q_tile, k_tile, halves, T_tile, P_tile, zeros, sums, scales, q_reads = tiles
    row, start, end, held, stands, slot = place
    if head % (HV // H) == 0:
        at = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_LINES))
        ring = ring_of(low, at, tail_rows)
        columns = gl.arange(0, K, layout=gl.SliceLayout(0, WIDE_LINES))[None, :]
        new = ((low + at >= start) & (low + at < end))[:, None]
        kept = tail_k + write * tail_k_slot + key_head * tail_k_head
        gl.store(kept + ring[:, None] * K + columns, k_tile.load(WIDE_LINES), mask=new)
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    ring = ring_of(low, at, tail_rows)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))[None, :]
    new = ((low + at >= start) & (low + at < end))[:, None]
    kept = tail_v + write * tail_v_slot + head * tail_v_head
    for half in gl.static_range(2):
        columns_of_half = kept + ring[:, None] * V + half * 64 + columns
        gl.store(columns_of_half, halves.index(half).load(LINES), mask=new)
    at = gl.arange(0, 64, layout=ROWS)
    ring = ring_of(low, at, tail_rows)
    new = (low + at >= start) & (low + at < end)
    kept = tail_decay + write * tail_decay_slot + head * tail_decay_head
    gl.store(kept + ring, sums.index(3).load(ROWS), mask=new)
    kept = tail_beta + write * tail_beta_slot + head * tail_beta_head
    gl.store(kept + ring, sums.index(2).load(ROWS), mask=new)
