"""What the two groups of a program for short cached steps make ready: tails, new rows, T and P.

    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)    T = (I + A)^-1
    P = scale tril((q_i . k_j) Gamma_ij)

[Gated Delta Networks, arXiv 2412.06464.] The gates are those of `decays`, T and P those of
`prepare`, in the same products, roundings and order of adding, hence the same bits. P is formed in
the window alone, transposed: rows j, columns i. All stays in shared memory: a tuple of tiles (keys
and queries and values in halves of their columns, T, P, zeros, sums, two first rows that are not
finite, barriers).
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
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headstart.ops.gated_delta_rule.hopper.gluon import (
    copy_in,
    gather_in,
    reinterpret,
    thread_barrier,
)
from headstart.ops.gated_delta_rule.hopper.inverse import TAME, bounded_inverse, columns_of
from headstart.ops.gated_delta_rule.hopper.scores import inverse_norms, least_and_most
from headstart.ops.gated_delta_rule.hopper.short_tiles import (
    add_gates,
    ask_gates,
    read_gates,
    ring_of,
)

STATE, KEYS, MET, TRIANGLE, CHUNK_DONE = (gl.constexpr(i) for i in range(5))
"""Barriers: the state is there; keys and gates are; rows have met the state, and P is there; T is;
both groups are done with a chunk."""


@gluon.jit
def ask_state(states, quarters, bar, slot, head):
    """Begin to copy a state into shared memory."""
    mbarrier.expect(bar, 4 * 64 * 64 * 4)
    for quarter in gl.static_range(4):
        corner = [slot.to(gl.int32), head * 128 + quarter % 2 * 64, quarter // 2 * 64]
        copy_in(states, corner, bar, quarters[quarter])


@gluon.jit
def window_of(tile, at, ROWS: gl.constexpr):
    """ROWS rows of a tile [64, 64], from row 8 `at` on."""
    if ROWS == 64:
        return tile
    EIGHT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], tile.dtype)
    WINDOW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], tile.dtype)
    eights = reinterpret(tile, tile.dtype, [8, 8, 64], EIGHT)
    return reinterpret(eights.index(at), tile.dtype, [ROWS, 64], WINDOW)


@gluon.jit
def part_of(vector, at, ROWS: gl.constexpr):
    """ROWS entries of 64 floats in shared memory, from entry 8 `at` on."""
    if ROWS == 64:
        return vector
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    eights = reinterpret(vector, vector.dtype, [8, 8], PLAIN)
    return reinterpret(eights.index(at), vector.dtype, [ROWS], PLAIN)


@gluon.jit
def gather_tail(halves, tail, slot_step, head_step, head, tail_rows, place, low):
    """Begin to copy the rows of a tail [.., 128] that lie in a chunk; 0 for all others."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row, start, end, held, stands, slot = place
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    old = held & (low + rows >= stands) & (low + rows < start)
    lines = tail + slot * slot_step + head * head_step + ring_of(low, rows, tail_rows) * 128
    for half in gl.static_range(2):
        found = lines[:, None] + (half * 64 + columns)[None, :]
        gather_in(halves.index(half), found, mask=old[:, None])
    async_copy.commit_group()


@gluon.jit
def new_rows(place, low, at, ROWS: gl.constexpr, layout: gl.constexpr):
    """Rows of the window, as rows of the chunk, and which of them the call brings."""
    row, start, end, held, stands, slot = place
    rows = at * 8 + gl.arange(0, ROWS, layout=layout)
    return rows, (low + rows >= start) & (low + rows < end)


@gluon.jit
def rows_of_call(
    x, token, head_step, head, place, low, at, half: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Half of the columns of the window's rows of q, k or v; 0 where the call brings none."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows, new = new_rows(place, low, at, ROWS, gl.SliceLayout(1, LINES))
    columns = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    lines = x + (place[0] + low - place[1]).to(gl.int64) * token + head * head_step + rows * token
    return gl.load(lines[:, None] + columns[None, :], mask=new[:, None], other=0.0)


@gluon.jit
def norms_of_call(x, token, head_step, head, place, low, at, ROWS: gl.constexpr):
    """1 / |x| of the window's rows of q or k."""
    WIDE_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows, new = new_rows(place, low, at, ROWS, gl.SliceLayout(1, WIDE_LINES))
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE_LINES))
    lines = x + (place[0] + low - place[1]).to(gl.int64) * token + head * head_step + rows * token
    x = gl.load(lines[:, None] + columns[None, :], mask=new[:, None], other=0.0)
    return inverse_norms(x)


@gluon.jit
def merge(tile, new, x, ROWS: gl.constexpr):
    """Rows x of the call take their places among those of a tail."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile.store(gl.where(new[:, None], x, tile.load(LINES)))


@gluon.jit
def keep(tail, slot_step, head_step, head, write, tail_rows, low, rows, new, x, half: gl.constexpr):
    """Half of the columns of new rows go to the tail of slot `write`."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    lines = tail + write * slot_step + head * head_step + ring_of(low, rows, tail_rows) * 128
    gl.store(lines[:, None] + columns[None, :], x, mask=new[:, None])


@gluon.jit
def ask_old_gates(tail, place, low, head):
    """Log decays and betas of the rows of a tail that lie in a chunk; 0 for all others."""
    ALL: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    decays, betas, decay_slot, decay_head, beta_slot, beta_head, tail_rows = tail
    row, start, end, held, stands, slot = place
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, ALL))
    old = held & (low + rows >= stands) & (low + rows < start)
    ring = ring_of(low, rows, tail_rows)
    decay = decays + slot * decay_slot + head * decay_head + ring
    b = betas + slot * beta_slot + head * beta_head + ring
    return gl.load(decay, mask=old, other=0.0), gl.load(b, mask=old, other=0.0), old


@gluon.jit
def keep_gates(tail, place, low, head, write, sums):
    """Log decays and betas of new rows go to the tail of slot `write`."""
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    decays, betas, decay_slot, decay_head, beta_slot, beta_head, tail_rows = tail
    row, start, end, held, stands, slot = place
    at = gl.arange(0, 64, layout=ROWS)
    ring = ring_of(low, at, tail_rows)
    new = (low + at >= start) & (low + at < end)
    to = decays + write * decay_slot + head * decay_head + ring
    gl.store(to, sums.index(3).load(ROWS), mask=new)
    to = betas + write * beta_slot + head * beta_head + ring
    gl.store(to, sums.index(2).load(ROWS), mask=new)


@gluon.jit
def keep_word(to, value):
    """One int to shared memory."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    to.store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def word_of(kept):
    """One int from shared memory."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(kept.load(ONE), 0)


@gluon.jit
def make_triangle(
    rows, gates, tail, place, low, at, head, key_head, tiles, keeps,
    ROWS: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """A chunk's keys, gates and T, to shared memory; new rows also to the tail if it `keeps` them.

    Returns the first row that is not finite, as far as this shows.
    """
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    q, k, v, tail_k, tail_v, q_token, q_head, k_token, k_head, v_token, v_head = rows[:11]
    k_slot_step, k_head_step, tail_rows, write = rows[11], rows[12], rows[15], rows[16]
    keys, queries, values, T_tile, P_tile, zeros, sums, clean, bars = tiles
    dtype: gl.constexpr = keys.dtype
    asked = ask_gates(gates, place[:3], low, head, GATE, HAS_G, HAS_BETA, HAS_BIAS)
    old_decay, old_b, old = ask_old_gates(tail, place, low, head)
    gather_tail(keys, tail_k, k_slot_step, k_head_step, key_head, tail_rows, place, low)
    k0 = rows_of_call(k, k_token, k_head, key_head, place, low, at, 0, ROWS)
    k1 = rows_of_call(k, k_token, k_head, key_head, place, low, at, 1, ROWS)
    if NORMALISE:
        norms = norms_of_call(k, k_token, k_head, key_head, place, low, at, ROWS)
    decay, b = read_gates(asked, gates[4], place[:3], low, GATE, BETA, HAS_G, HAS_BETA, HAS_BIAS)
    decay = gl.where(old, old_decay, decay)
    high, rest, first_spoiled = add_gates(decay, gl.where(old, old_b, b), sums)
    if NORMALISE:
        # In float32, which gives back what it is given: pairs are rounded at once.
        norms = gl.convert_layout(norms, gl.SliceLayout(1, LINES))[:, None]
        k0 = (k0.to(gl.float32) * norms).to(dtype)
        k1 = (k1.to(gl.float32) * norms).to(dtype)
    keep_word(clean.index(0), first_spoiled)
    thread_barrier()
    high_i = sums.index(0).load(gl.SliceLayout(1, ROW))
    rest_i = sums.index(1).load(gl.SliceLayout(1, ROW))
    high_j = sums.index(0).load(gl.SliceLayout(0, ROW))
    rest_j = sums.index(1).load(gl.SliceLayout(0, ROW))
    G = gl.exp2((high_i[:, None] - high_j[None, :]) + (rest_i[:, None] - rest_j[None, :]))
    window, new = new_rows(place, low, at, ROWS, gl.SliceLayout(1, LINES))
    async_copy.wait_group(0)
    thread_barrier()
    merge(window_of(keys.index(0), at, ROWS), new, k0, ROWS)
    merge(window_of(keys.index(1), at, ROWS), new, k1, ROWS)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars[KEYS], count=1)
    beta = sums.index(2).load(gl.SliceLayout(1, ROW))
    products = warpgroup_mma(
        keys.index(0), keys.index(0).permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    products = warpgroup_mma(keys.index(1), keys.index(1).permute((1, 0)), products, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROW))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, ROW))
    norms = gl.sum(gl.where(i[:, None] == j[None, :], products, 0.0), 1)
    clean_row, wild = gl.reduce(
        (gl.where(norms * 0.0 != 0.0, i, 64), gl.where(norms * beta > TAME, 1, 0)),
        0, least_and_most,
    )  # fmt: skip
    clean_row = gl.minimum(clean_row, first_spoiled)
    strength = gl.where(i < clean_row, beta, 0.0)[:, None]
    kept = (i[:, None] > j[None, :]) & (i < clean_row)[:, None]
    A = gl.where(kept, products * G * strength, 0.0)
    # Blocks of A and of its diagonal's inverse lie where T will.
    blocks = reinterpret(T_tile, gl.float16, [4, 64, 16], BLOCKS)
    inverse, grown = bounded_inverse(columns_of(A), blocks, blocks.index(3), wild, dtype)
    clean_row = gl.minimum(clean_row, grown)
    keep_word(clean.index(0), clean_row)
    # All have read what lies where T will.
    thread_barrier()
    T_tile.store(inverse.to(dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars[TRIANGLE], count=1)
    if keeps:
        if head % (HV // H) == 0:
            keep(tail_k, k_slot_step, k_head_step, key_head, write, tail_rows, low, window, new,
                 k0, 0)  # fmt: skip
            keep(tail_k, k_slot_step, k_head_step, key_head, write, tail_rows, low, window, new,
                 k1, 1)  # fmt: skip
        keep_gates(tail, place, low, head, write, sums)
    return clean_row


@gluon.jit
def make_scores(
    states, quarters, rows, place, low, at, head, key_head, tiles, keeps, asks, phase, scale,
    ROWS: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """Values, queries and P of a chunk, to shared memory; new values also to the tail.

    Returns what scales the window's rows of q, and the first row that is not finite, as far as
    gates, keys and values show.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q, k, v, tail_k, tail_v, q_token, q_head, k_token, k_head, v_token, v_head = rows[:11]
    v_slot_step, v_head_step, tail_rows, write = rows[13], rows[14], rows[15], rows[16]
    keys, queries, values, T_tile, P_tile, zeros, sums, clean, bars = tiles
    dtype: gl.constexpr = keys.dtype
    gather_tail(values, tail_v, v_slot_step, v_head_step, head, tail_rows, place, low)
    v0 = rows_of_call(v, v_token, v_head, head, place, low, at, 0, ROWS)
    v1 = rows_of_call(v, v_token, v_head, head, place, low, at, 1, ROWS)
    q0 = rows_of_call(q, q_token, q_head, key_head, place, low, at, 0, ROWS)
    q1 = rows_of_call(q, q_token, q_head, key_head, place, low, at, 1, ROWS)
    reads = gl.full([ROWS], scale, gl.float32, gl.SliceLayout(0, OUT))
    if NORMALISE:
        norms = norms_of_call(q, q_token, q_head, key_head, place, low, at, ROWS)
        reads = gl.convert_layout(norms * scale, gl.SliceLayout(0, OUT))
    # Behind the rows, which are waited for first.
    if asks:
        ask_state(states, quarters, bars[STATE], place[5], head)
    queries.index(0).store(q0)
    queries.index(1).store(q1)
    # Whether a row is finite is what its product with zeros says.
    zeros.store(gl.zeros([8, 64], dtype, LINES))
    window, new = new_rows(place, low, at, ROWS, gl.SliceLayout(1, LINES))
    async_copy.wait_group(0)
    thread_barrier()
    merge(window_of(values.index(0), at, ROWS), new, v0, ROWS)
    merge(window_of(values.index(1), at, ROWS), new, v1, ROWS)
    fence_async_shared()
    thread_barrier()
    if keeps:
        keep(tail_v, v_slot_step, v_head_step, head, write, tail_rows, low, window, new, v0, 0)
        keep(tail_v, v_slot_step, v_head_step, head, write, tail_rows, low, window, new, v1, 1)
    mbarrier.wait(bars[KEYS], phase)
    # P transposed: rows j, columns i.
    p = warpgroup_mma(
        keys.index(0), queries.index(0).permute((1, 0)), gl.zeros((64, ROWS), gl.float32, OUT),
        use_acc=False, is_async=True,
    )  # fmt: skip
    p = warpgroup_mma(keys.index(1), queries.index(1).permute((1, 0)), p, is_async=True)
    spoiled = warpgroup_mma(
        values.index(0), zeros.permute((1, 0)), gl.zeros((64, 8), gl.float32, NARROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    spoiled = warpgroup_mma(values.index(1), zeros.permute((1, 0)), spoiled, is_async=True)
    spoiled = warpgroup_mma(keys.index(0), zeros.permute((1, 0)), spoiled, is_async=True)
    spoiled = warpgroup_mma(keys.index(1), zeros.permute((1, 0)), spoiled, is_async=True)
    p, spoiled = warpgroup_mma_wait(0, deps=[p, spoiled])
    j = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    i = at * 8 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    high_j = sums.index(0).load(gl.SliceLayout(1, OUT))
    rest_j = sums.index(1).load(gl.SliceLayout(1, OUT))
    high_i = part_of(sums.index(0), at, ROWS).load(gl.SliceLayout(0, OUT))
    rest_i = part_of(sums.index(1), at, ROWS).load(gl.SliceLayout(0, OUT))
    G = gl.exp2((high_i[None, :] - high_j[:, None]) + (rest_i[None, :] - rest_j[:, None]))
    scores = gl.where(i[None, :] >= j[:, None], p * (G * reads[None, :]), 0.0)
    P_tile.permute((1, 0)).store(scores.to(dtype))
    all_rows = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW))
    clean_row = gl.min(gl.where(gl.sum(spoiled, 1) != 0.0, all_rows, 64), 0)
    # What gates spoil was said with the keys; T says more.
    clean_row = gl.minimum(clean_row, word_of(clean.index(0)))
    keep_word(clean.index(1), clean_row)
    return reads * gl.exp2(high_i + rest_i), clean_row
