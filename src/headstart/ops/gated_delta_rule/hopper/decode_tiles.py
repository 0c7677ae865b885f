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
# ruff: noqa: SIM102, RUF059 (an outer test of a constant is decided when the kernel is compiled;
# functions unpack what they share, and use a part)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headstart.ops.gated_delta_rule.hopper.gluon import (
    copy_in,
    reinterpret,
    thread_barrier,
)
from headstart.ops.gated_delta_rule.hopper.inverse import TAME, bounded_inverse, columns_of
from headstart.ops.gated_delta_rule.hopper.short_tiles import (
    add_gates,
    ask_gates,
    read_gates,
    ring_of,
)

STATE, KEYS, GATES, MET, TRIANGLE, CHUNK_DONE = (gl.constexpr(i) for i in range(6))
"""Barriers: the state is there; keys are; gates are; rows have met the state, and P is there; T is;
both groups are done with a chunk."""


@gluon.jit
def ask_state(states, state, bar, slot, head):
    """Begin to copy a state into shared memory."""
    mbarrier.expect(bar, 128 * 128 * 4)
    copy_in(states, [slot.to(gl.int32), head * 128, 0], bar, state)


@gluon.jit
def halves_of(tile):
    """Both halves [2, rows, 64] of a tile at once."""
    BOTH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2, tile.shape[1], 64], tile.dtype)
    return reinterpret(tile, tile.dtype, [2, tile.shape[1], 64], BOTH)


@gluon.jit
def entries_of(vector, at, ROWS: gl.constexpr):
    """ROWS entries of 64 floats in shared memory, from entry 8 `at` on, along columns of OUT."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if ROWS == 64:
        found = vector.load(gl.SliceLayout(0, OUT))
    else:
        eights = reinterpret(vector, vector.dtype, [8, 8], PLAIN)
        first = eights.index(at).load(gl.SliceLayout(0, NARROW))
        second = eights.index(at + 1).load(gl.SliceLayout(0, NARROW))
        both = gl.join(first, second).permute((1, 0)).reshape([ROWS])
        found = gl.convert_layout(both, gl.SliceLayout(0, OUT))
    return found


@gluon.jit
def new_rows(place, low, at, ROWS: gl.constexpr, layout: gl.constexpr):
    """Rows of the window, as rows of the chunk, and which of them the call brings."""
    row, start, end, held, stands, slot = place
    rows = at * 8 + gl.arange(0, ROWS, layout=layout)
    return rows, (low + rows >= start) & (low + rows < end)


@gluon.jit
def rows_of_call(x, token, head_step, head, place, low, at, ROWS: gl.constexpr):
    """The window's rows [2, ROWS, 64] of q, in halves of columns; 0 where the call brings none."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0])
    rows, new = new_rows(place, low, at, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LINES)))
    lines = x + (place[0] + low - place[1]).to(gl.int64) * token + head * head_step + rows * token
    return gl.load(lines[None, :, None] + columns_of_both(), mask=new[None, :, None], other=0.0)


@gluon.jit
def columns_of_both():
    """Numbers of columns [2, 1, 64]."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0])
    halves = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, LINES)))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, LINES)))
    return halves[:, None, None] * 64 + columns[None, None, :]


@gluon.jit
def norms_of(x):
    """rsqrt(|x|^2 + 1e-6) of rows [2, rows, 64], with the bits of `inverse_norms` of the whole."""
    rows: gl.constexpr = x.shape[1]
    x = x.to(gl.float32)
    eights = gl.sum(gl.sum((x * x).reshape([2, rows, 8, 8]), 3), 0)
    return gl.rsqrt(gl.sum(eights, 1) + 1e-6)


@gluon.jit
def piece(
    x, token, head_step, head, tail, slot_step, tail_head, tail_rows, place, low,
    number: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """A quarter of a chunk's rows [2, 16, 64] of k or v: the tail's, then the call's, else 0.

    Also where new ones go in a tail, and which they are.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [1, 4, 1], [2, 1, 0])
    row, start, end, held, stands, slot = place
    rows = number * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LINES)))
    at = low + rows
    old = held & (at >= stands) & (at < start)
    new = (at >= start) & (at < end)
    ring = ring_of(low, rows, tail_rows) * 128
    kept = tail + slot * slot_step + head * tail_head + ring
    given = x + (row + low - start).to(gl.int64) * token + head * head_step + rows * token
    lines = gl.where(old, kept, given)
    found = gl.load(
        lines[None, :, None] + columns_of_both(), mask=(old | new)[None, :, None], other=0.0
    )
    if NORMALISE:
        if (start < low + number * 16 + 16) & (end > low + number * 16):
            # In float32, which gives back what it is given: pairs are rounded at once.
            norms = gl.convert_layout(norms_of(found), gl.SliceLayout(0, gl.SliceLayout(2, LINES)))
            norms = norms[None, :, None]
            scaled = (found.to(gl.float32) * norms).to(found.dtype)
            found = gl.where(new[None, :, None], scaled, found)
    return found, ring, new


@gluon.jit
def whole(pieces):
    """Pieces [2, 16, 64] one below the other [2, 64, 64]."""
    upper = gl.join(pieces[0][0], pieces[1][0])
    lower = gl.join(pieces[2][0], pieces[3][0])
    return gl.join(upper, lower).permute((0, 4, 3, 1, 2)).reshape([2, 64, 64])


@gluon.jit
def pieces_of(
    x, token, head_step, head, tail, slot_step, tail_head, tail_rows, place, low,
    NORMALISE: gl.constexpr,
):  # fmt: skip
    """All four pieces of a chunk's rows."""
    p0 = piece(x, token, head_step, head, tail, slot_step, tail_head, tail_rows, place, low, 0,
               NORMALISE)  # fmt: skip
    p1 = piece(x, token, head_step, head, tail, slot_step, tail_head, tail_rows, place, low, 1,
               NORMALISE)  # fmt: skip
    p2 = piece(x, token, head_step, head, tail, slot_step, tail_head, tail_rows, place, low, 2,
               NORMALISE)  # fmt: skip
    p3 = piece(x, token, head_step, head, tail, slot_step, tail_head, tail_rows, place, low, 3,
               NORMALISE)  # fmt: skip
    return p0, p1, p2, p3


@gluon.jit
def keep(tail, slot_step, head_step, head, write, pieces):
    """New rows go to the tail of slot `write`."""
    lines = tail + write * slot_step + head * head_step
    for number in gl.static_range(4):
        x, ring, new = pieces[number]
        gl.store(lines + ring[None, :, None] + columns_of_both(), x, mask=new[None, :, None])


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
def keep_gates(tail, place, low, head, write, decay, b):
    """Log decays and betas of new rows go to the tail of slot `write`."""
    ALL: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    decays, betas, decay_slot, decay_head, beta_slot, beta_head, tail_rows = tail
    row, start, end, held, stands, slot = place
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, ALL))
    ring = ring_of(low, at, tail_rows)
    new = (low + at >= start) & (low + at < end)
    gl.store(decays + write * decay_slot + head * decay_head + ring, decay, mask=new)
    gl.store(betas + write * beta_slot + head * beta_head + ring, b, mask=new)


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
def either(a, b):
    """How flags are reduced."""
    return a | b


@gluon.jit
def first_flag(flags):
    """The first of 64 flags in shared memory that is odd, 64 if none is. Each warp has all."""
    EACH: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))
    rows = gl.arange(0, 64, layout=EACH)
    return gl.min(gl.where((flags.load(EACH).to(gl.int32) & 1) != 0, rows, 64), 0)


@gluon.jit
def make_triangle(
    rows, gates, tail, place, low, head, key_head, tiles, keeps,
    H: gl.constexpr, HV: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """A chunk's keys, gates and T, to shared memory; new rows also to the tail if it `keeps` them.

    Returns the first row that is not finite, as far as this shows.
    """
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    EACH: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))
    q, k, v, tail_k, tail_v, q_token, q_head, k_token, k_head, v_token, v_head = rows[:11]
    k_slot_step, k_head_step, tail_rows, write = rows[11], rows[12], rows[15], rows[16]
    keys, queries, values, T_tile, P_tile, zeros, sums, clean, flags, bars, masks = tiles
    dtype: gl.constexpr = keys.dtype
    asked = ask_gates(gates, place[:3], low, head, GATE, HAS_G, HAS_BETA, HAS_BIAS)
    old_decay, old_b, old = ask_old_gates(tail, place, low, head)
    pieces = pieces_of(
        k, k_token, k_head, key_head, tail_k, k_slot_step, k_head_step, tail_rows, place, low,
        NORMALISE,
    )  # fmt: skip
    halves_of(keys).store(whole(pieces))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars[KEYS], count=1)
    products = warpgroup_mma(
        keys.index(0), keys.index(0).permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    products = warpgroup_mma(keys.index(1), keys.index(1).permute((1, 0)), products, is_async=True)
    if keeps & (head % (HV // H) == 0):
        keep(tail_k, k_slot_step, k_head_step, key_head, write, pieces)
    decay, b = read_gates(asked, gates[4], place[:3], low, GATE, BETA, HAS_G, HAS_BETA, HAS_BIAS)
    decay = gl.where(old, old_decay, decay)
    b = gl.where(old, old_b, b)
    high, rest, first_spoiled = add_gates(decay, b, sums)
    if keeps:
        keep_gates(tail, place, low, head, write, decay, b)
    thread_barrier()
    mbarrier.arrive(bars[GATES], count=1)
    high_i = sums.index(0).load(gl.SliceLayout(1, ROW))
    rest_i = sums.index(1).load(gl.SliceLayout(1, ROW))
    high_j = sums.index(0).load(gl.SliceLayout(0, ROW))
    rest_j = sums.index(1).load(gl.SliceLayout(0, ROW))
    G = gl.exp2((high_i[:, None] - high_j[None, :]) + (rest_i[:, None] - rest_j[None, :]))
    beta = sums.index(2).load(gl.SliceLayout(1, ROW))
    products = warpgroup_mma_wait(0, deps=[products])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROW))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, ROW))
    norms = gl.sum(gl.where(i[:, None] == j[None, :], products, 0.0), 1)
    wrong = gl.where(norms * 0.0 != 0.0, 1, 0) | gl.where(norms * beta > TAME, 2, 0)
    flags.index(0).store(wrong.to(gl.int8))
    A = gl.where(i[:, None] > j[None, :], products * G * beta[:, None], 0.0)
    thread_barrier()
    said = gl.reduce(flags.index(0).load(EACH).to(gl.int32), 0, either)
    clean_row = first_spoiled
    if (said & 1) | (first_spoiled < 64):
        clean_row = gl.minimum(clean_row, first_flag(flags.index(0)))
        A = gl.where((i < clean_row)[:, None], A, 0.0)
    # Blocks of A and of its diagonal's inverse lie where T will.
    blocks = reinterpret(T_tile, gl.float16, [4, 64, 16], BLOCKS)
    inverse, grown = bounded_inverse(columns_of(A), blocks, blocks.index(3), said // 2, dtype)
    clean_row = gl.minimum(clean_row, grown)
    keep_word(clean.index(0), clean_row)
    # All have read what lies where T will.
    thread_barrier()
    T_tile.store(inverse.to(dtype))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(bars[TRIANGLE], count=1)
    return clean_row


@gluon.jit
def ask_scores(
    states, state, rows, place, low, at, head, key_head, tiles, keeps, asks, phase, scale,
    ROWS: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """Values and queries of a chunk, to shared memory; new values also to the tail.

    Returns k q^T and what is not 0 in rows of values that are not finite, both yet to be waited
    for, and what scales the window's rows of q.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q, k, v, tail_k, tail_v, q_token, q_head, k_token, k_head, v_token, v_head = rows[:11]
    v_slot_step, v_head_step, tail_rows, write = rows[13], rows[14], rows[15], rows[16]
    keys, queries, values, T_tile, P_tile, zeros, sums, clean, flags, bars, masks = tiles
    dtype: gl.constexpr = keys.dtype
    pieces = pieces_of(
        v, v_token, v_head, head, tail_v, v_slot_step, v_head_step, tail_rows, place, low, False
    )
    given = rows_of_call(q, q_token, q_head, key_head, place, low, at, ROWS)
    # Behind the rows, which are waited for first.
    if asks:
        ask_state(states, state, bars[STATE], place[5], head)
    reads = gl.full([ROWS], scale, gl.float32, gl.SliceLayout(0, OUT))
    if NORMALISE:
        reads = gl.convert_layout(norms_of(given) * scale, gl.SliceLayout(0, OUT))
    # Whether a row is finite is what its product with zeros says.
    zeros.store(gl.zeros([8, 64], dtype, ZEROS))
    halves_of(queries).store(given)
    halves_of(values).store(whole(pieces))
    fence_async_shared()
    thread_barrier()
    if keeps:
        keep(tail_v, v_slot_step, v_head_step, head, write, pieces)
    spoiled = warpgroup_mma(
        values.index(0), zeros.permute((1, 0)), gl.zeros((64, 8), gl.float32, NARROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    spoiled = warpgroup_mma(values.index(1), zeros.permute((1, 0)), spoiled, is_async=True)
    mbarrier.wait(bars[KEYS], phase)
    # P transposed: rows j, columns i.
    p = warpgroup_mma(
        keys.index(0), queries.index(0).permute((1, 0)), gl.zeros((64, ROWS), gl.float32, OUT),
        use_acc=False, is_async=True,
    )  # fmt: skip
    p = warpgroup_mma(keys.index(1), queries.index(1).permute((1, 0)), p, is_async=True)
    return p, spoiled, reads


@gluon.jit
def make_scores(p, spoiled, reads, at, tiles, ROWS: gl.constexpr):
    """P of a chunk, to shared memory, of k q^T. Which values are not finite goes to `flags`.

    Returns what scales q S.
    """
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    keys, queries, values, T_tile, P_tile, zeros, sums, clean, flags, bars, masks = tiles
    j = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    i = at * 8 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    high_j = sums.index(0).load(gl.SliceLayout(1, OUT))
    rest_j = sums.index(1).load(gl.SliceLayout(1, OUT))
    high_i = entries_of(sums.index(0), at, ROWS)
    rest_i = entries_of(sums.index(1), at, ROWS)
    G = gl.exp2((high_i[None, :] - high_j[:, None]) + (rest_i[None, :] - rest_j[:, None]))
    scores = gl.where(i[None, :] >= j[:, None], p * (G * reads[None, :]), 0.0)
    P_tile.permute((1, 0)).store(scores.to(keys.dtype))
    flags.index(1).store(gl.where(gl.sum(spoiled, 1) != 0.0, 1, 0).to(gl.int8))
    return reads * gl.exp2(high_i + rest_i)
