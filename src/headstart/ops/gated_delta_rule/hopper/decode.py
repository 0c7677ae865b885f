"""Short steps of cached sequences on NVIDIA Hopper in one launch: decode, drafts, ends of prompts.

    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)    T = (I + A)^-1
    P = scale tril((q_i . k_j) Gamma_ij)             v_new = T beta (v - Gamma_i0 k S)
    o = scale Gamma_i0 q S + P v_new                 S <- Gamma_C0 S + k^T (Gamma_Ci v_new)

[Gated Delta Networks, arXiv 2412.06464.] What `decays`, `prepare` and `scan` compute in turn: the
same products, roundings and order of adding, hence the same bits. One program per value head and
sequence, whose state is asked for before all else. Two groups of four warps share a chunk: one
reads keys and gates and makes T, which takes longest; the other reads values and queries, makes P,
and has all rows meet the state. Then each has half of V. Rows of the call lie in a window of ROWS
rows of their chunk, and P, q and outputs are formed there alone. A state stays in shared memory;
chunks that a step completes, or that drafts had left open, advance it there.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false
# ruff: noqa: SIM102, RUF059 (an outer test of a constant is decided when the kernel is compiled;
# functions unpack what they share, and use a part)

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headstart.ops.gated_delta_rule.hopper.decode_tiles import (
    CHUNK_DONE,
    GATES,
    KEYS,
    MET,
    STATE,
    TRIANGLE,
    ask_scores,
    ask_state,
    first_flag,
    keep_word,
    make_scores,
    make_triangle,
    new_rows,
    word_of,
)
from headstart.ops.gated_delta_rule.hopper.gluon import reinterpret, thread_barrier
from headstart.ops.gated_delta_rule.hopper.short_tiles import SCALES

SLOTS = ["read_slots", "write_slots", "snapshot_slots"]


@gluon.jit
def half_state(state, half: gl.constexpr, part: gl.constexpr):
    """64 rows of K and 64 columns of V of the state in shared memory, transposed."""
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float32)
    whole = reinterpret(state, gl.float32, [128, 128], SQUARE)
    return whole.slice(part * 64, 64, 0).slice(half * 64, 64, 1).permute((1, 0))


@gluon.jit
def in_order(x):
    """Rows 2 i + j of each 16 of x [64, ..] as rows i + 8 j: a thread's two lie side by side."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 16])
    split = x.reshape([4, 8, 2, x.shape[1]]).permute((0, 2, 1, 3))
    return gl.convert_layout(split.reshape([64, x.shape[1]]), ROW, assert_trivial=True)


@gluon.jit
def as_before(x):
    """What `in_order` made its result of."""
    split = x.reshape([4, 2, 8, x.shape[1]]).permute((0, 2, 1, 3))
    PAIRS: gl.constexpr = pairs_of(x.shape[1])
    return gl.convert_layout(split.reshape([64, x.shape[1]]), PAIRS, assert_trivial=True)


@gluon.constexpr_function
def pairs_of(columns):
    """Where threads find what `in_order` gives the layout of a product's result."""
    wider = [[0, 8 << n] for n in range(3) if 8 << n < columns]
    return gl.DistributedLinearLayout(
        [[0, 1], [1, 0], *wider],
        [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, columns],
    )


@gluon.jit
def keep_part(
    S, snaps, index, head, half: gl.constexpr, part: gl.constexpr, stands,
    snap_k: gl.constexpr, snap_v: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
):  # fmt: skip
    """A quarter of snapshot `index` of the call: S, a state after `stands` tokens."""
    (
        snapshots, snapshot_slots, snapshot_position, snapshot_end, snap_n, snap_h, snap_position,
    ) = snaps  # fmt: skip
    target = index.to(gl.int64)
    if HAS_SNAPSHOT_SLOTS:
        target = gl.load(snapshot_slots + index).to(gl.int64)
    if target >= 0:
        store_part(S, snapshots + target * snap_n + head * snap_h, half, part, snap_k, snap_v)
        if SNAPSHOTS_CACHED:
            if half + part == 0:
                gl.store(snapshot_position + target * snap_position + head, stands)
                gl.store(snapshot_end + target * snap_position + head, stands)


@gluon.jit
def store_part(
    S, state, half: gl.constexpr, part: gl.constexpr, state_k: gl.constexpr, state_v: gl.constexpr
):  # fmt: skip
    """Store S as a quarter of a state in memory, rounded to its dtype."""
    PAIRS: gl.constexpr = pairs_of(64)
    ck = part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, PAIRS))
    cv = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, PAIRS))
    to = state + ck[None, :] * state_k + cv[:, None] * state_v
    gl.store(to, as_before(S).to(state.dtype.element_ty))


@gluon.jit
def open_state(
    states, snaps, place, there, opens, opening, head, bars,
    snap_k: gl.constexpr, snap_v: gl.constexpr, HAS_SNAPSHOTS: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
):  # fmt: skip
    """The state that the first chunk meets, which may be a snapshot; 0 where there is none."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row, start, end, held, stands, slot = place
    if held:
        mbarrier.wait(bars[STATE], 0)
    if not there:
        for quarter in gl.static_range(4):
            half_state(states, quarter // 2, quarter % 2).store(gl.zeros((64, 64), gl.float32, ROW))
    if HAS_SNAPSHOTS:
        if opens:
            for quarter in gl.static_range(4):
                S = in_order(half_state(states, quarter // 2, quarter % 2).load(pairs_of(64)))
                keep_part(
                    S, snaps, opening, head, quarter // 2, quarter % 2, stands, snap_k, snap_v,
                    HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
                )  # fmt: skip


@gluon.jit
def taking_part(x, mask):
    """Pairs of x where the mask's bits are set, else 0."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=x.dtype, is_pure=True, pack=2
    )


@gluon.jit
def ask_products(states, tiles, half: gl.constexpr, ROWS: gl.constexpr):
    """Begin k S and q S in one half of V, transposed."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    BY_ROW: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    BY_OUT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    keys, queries, values, T_tile, P_tile, zeros, sums, clean, flags, bars, masks = tiles
    dtype: gl.constexpr = keys.dtype
    left0 = gl.convert_layout(
        in_order(half_state(states, half, 0).load(pairs_of(64))).to(dtype), BY_ROW
    )
    left1 = gl.convert_layout(
        in_order(half_state(states, half, 1).load(pairs_of(64))).to(dtype), BY_ROW
    )
    x = warpgroup_mma(
        left0, keys.index(0).permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    x = warpgroup_mma(left1, keys.index(1).permute((1, 0)), x, is_async=True)
    y = warpgroup_mma(
        gl.convert_layout(left0, BY_OUT), queries.index(0).permute((1, 0)),
        gl.zeros((64, ROWS), gl.float32, OUT), use_acc=False, is_async=True,
    )  # fmt: skip
    y = warpgroup_mma(
        gl.convert_layout(left1, BY_OUT), queries.index(1).permute((1, 0)), y, is_async=True
    )
    return x, y, left0, left1


@gluon.jit
def remainder(x, tiles, masks, half: gl.constexpr):
    """beta (v - Gamma_i0 x) in one half of V, transposed, of x = k S."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, ROW)
    values, sums = tiles[2], tiles[6]
    vt = in_order(values.index(half).permute((1, 0)).load(pairs_of(64)))
    inside = sums.index(3).load(COLUMN)
    beta = sums.index(2).load(COLUMN)
    r = gl.fma(x, inside[None, :], vt.to(gl.float32)) * beta[None, :]
    return taking_part(r.to(vt.dtype), masks.load(COLUMN)[None, :])


@gluon.jit
def finish(
    r, y, states, outs, snaps, tiles, place, low, at, after, fold, write, more, head, clean_row,
    half: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr, HAS_SNAPSHOTS: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
):  # fmt: skip
    """Outputs of a chunk in one half of V, and the state after it where anyone wants it.

    clean_row: the first row that is not finite: from there on outputs are NaN, as is the state.
    """
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    BY_ROW: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    BY_OUT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ROW)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o, o_token, o_head, new_state, new_n, new_h = outs
    keys, queries, values, T_tile, P_tile, zeros, sums, clean, flags, bars, masks = tiles
    row, start, end, held, stands, slot = place
    dtype: gl.constexpr = keys.dtype
    if clean_row < 64:
        finite = gl.arange(0, 64, layout=COLUMN) < clean_row
        r = gl.where(finite[None, :], r, 0.0)
    right = gl.convert_layout(r, BY_ROW)
    v_new = warpgroup_mma(
        right, T_tile.permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    v_new, right = warpgroup_mma_wait(0, deps=[v_new, right])
    rounded = gl.convert_layout(gl.convert_layout(v_new.to(dtype), BY_ROW), BY_OUT)
    out = warpgroup_mma(rounded, P_tile.permute((1, 0)), y, is_async=True)
    out, rounded = warpgroup_mma_wait(0, deps=[out, rounded])
    i = at * 8 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    out = gl.where((i < clean_row)[None, :], out, float("nan"))
    # o^T takes the place of v.
    o_tile = values.index(half)
    if ROWS < 64:
        o_tile = o_tile.slice(0, ROWS)
    o_tile.permute((1, 0)).store(as_before(out).to(dtype))
    folds = (low + 64 == fold) & (write >= 0)
    wanted = more | folds
    if HAS_SNAPSHOTS:
        wanted = wanted | (after >= 0)
    if wanted:
        if held:
            mbarrier.wait(bars[STATE], 0)
        rows = gl.arange(0, 64, layout=COLUMN)
        high = sums.index(0).load(COLUMN)
        rest = sums.index(1).load(COLUMN)
        last_high = gl.sum(gl.where(rows == 63, high, 0.0), 0)
        last_rest = gl.sum(gl.where(rows == 63, rest, 0.0), 0)
        outside = gl.exp2((last_high - high) + (last_rest - rest))
        whole = gl.where(clean_row < 64, float("nan"), gl.exp2(last_high + last_rest))
        update = gl.convert_layout((v_new * outside[None, :]).to(dtype), BY_ROW)
        for part in gl.static_range(2):
            S = in_order(half_state(states, half, part).load(pairs_of(64)))
            S = warpgroup_mma(update, keys.index(part), S * whole, is_async=True)
            S, update = warpgroup_mma_wait(0, deps=[S, update])
            if HAS_SNAPSHOTS:
                if after >= 0:
                    keep_part(
                        S, snaps, after, head, half, part, low + 64, snap_k, snap_v,
                        HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
                    )  # fmt: skip
            if folds:
                store_part(S, new_state + write * new_n + head * new_h, half, part, V, 1)
            if more:
                half_state(states, half, part).store(as_before(S))
    thread_barrier()
    window, new = new_rows(place, low, at, ROWS, gl.SliceLayout(1, LINES))
    columns = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    to = o + (row + low - start).to(gl.int64) * o_token + head * o_head + window * o_token
    gl.store(to[:, None] + columns[None, :], o_tile.load(LINES), mask=new[:, None])


@gluon.jit
def group(
    given, first_half: gl.constexpr,
    ROWS: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, V: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr, HAS_SNAPSHOTS: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
):  # fmt: skip
    """What one of the two groups of four warps does, chunk after chunk."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACROSS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    (
        states, state, tiles, rows, gates, tail, outs, snaps, items, place, there, opens,
        opening, fold, first, last, first_low, head, scale,
    ) = given  # fmt: skip
    row, start, end, held, stands, slot = place
    keys, queries, values, T_tile, P_tile, zeros, sums, clean, flags, bars, masks = tiles
    key_head = head // (HV // H)
    write = rows[16]
    # Once q has met the state, what the other group continues from takes its place.
    begun = reinterpret(queries, gl.float32, [64, ROWS], ACROSS)
    masks = tiles[10]
    EACH: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1]))
    if not first_half:
        if first >= last:
            if held:
                ask_state(states, state, bars[STATE], slot, head)
            open_state(
                state, snaps, place, there, opens, opening, head, bars, snap_k, snap_v,
                HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
            )  # fmt: skip
    # What does not change in the loop is formed anew: it would fill the registers.
    for item in tl.range(first, last, disable_licm=True):
        phase = (item - first) & 1
        low = first_low + (item - first) * 64
        at = gl.minimum(gl.maximum(start - low, 0) // 8, 8 - ROWS // 8)
        keeps = (write >= 0) & (low >= fold)
        after = -1
        if HAS_SNAPSHOTS:
            after = gl.load(items + item * 3 + 2)
        more = item + 1 < last
        if first_half:
            clean_row = make_triangle(
                rows, gates, tail, place, low, head, key_head, tiles, keeps, H, HV,
                GATE, BETA, HAS_G, HAS_BETA, HAS_BIAS, NORMALISE,
            )  # fmt: skip
            mbarrier.wait(bars[MET], phase)
            clean_row = gl.minimum(clean_row, word_of(clean.index(1)))
            finish(
                values.index(0).permute((1, 0)).load(ROW), begun.load(OUT), state, outs,
                snaps,
                tiles, place, low, at, after, fold, write, more, head, clean_row, 0, ROWS, V,
                snap_k, snap_v, HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
            )  # fmt: skip
        else:
            # Of rows that take part all bits are set, to be read in pairs.
            inner = gl.arange(0, 64, layout=EACH)
            begins = gl.where(held, stands, start) - low
            masks.store(gl.where((inner >= begins) & (inner < end - low), -1, 0).to(gl.int16))
            p, spoiled, reads = ask_scores(
                states, state, rows, place, low, at, head, key_head, tiles, keeps,
                held & (item == first), phase, scale, ROWS, NORMALISE,
            )  # fmt: skip
            if item == first:
                open_state(
                    state, snaps, place, there, opens, opening, head, bars, snap_k, snap_v,
                    HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
                )  # fmt: skip
            x, y, left0, left1 = ask_products(state, tiles, 0, ROWS)
            x, y, p, spoiled, left0, left1 = warpgroup_mma_wait(
                0, deps=[x, y, p, spoiled, left0, left1]
            )
            mbarrier.wait(bars[GATES], phase)
            reads = make_scores(p, spoiled, reads, at, tiles, ROWS)
            r0 = remainder(x, tiles, masks, 0)
            x, another, left0, left1 = ask_products(state, tiles, 1, ROWS)
            x, another, left0, left1 = warpgroup_mma_wait(0, deps=[x, another, left0, left1])
            r = remainder(x, tiles, masks, 1)
            thread_barrier()
            values.index(0).permute((1, 0)).store(r0)
            begun.store(y * reads[None, :])
            clean_row = first_flag(flags.index(1))
            keep_word(clean.index(1), clean_row)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(bars[MET], count=1)
            mbarrier.wait(bars[TRIANGLE], phase)
            clean_row = gl.minimum(clean_row, word_of(clean.index(0)))
            finish(
                r, another * reads[None, :], state, outs, snaps,
                tiles, place, low, at, after, fold, write, more, head, clean_row, 1, ROWS, V,
                snap_k, snap_v, HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
            )  # fmt: skip
        if more:
            # Before the next chunk's rows take the place of these.
            thread_barrier()
            mbarrier.arrive(bars[CHUNK_DONE], count=1)
            mbarrier.wait(bars[CHUNK_DONE], phase)


@gluon.jit(do_not_specialize_on_alignment=SLOTS)
def decode_kernel(
    states, q, k, v, o, g, beta, a_log, dt_bias, sequences, items,
    new_state, read_slots, write_slots,
    snapshots, snapshot_slots, snapshot_position, snapshot_end,
    position, tail_end, tail_k, tail_v, tail_decay, tail_beta, scale, lower_bound,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    g_token, g_head, beta_token, beta_head, new_n, new_h,
    snap_n, snap_h, snap_position, position_slot, tail_k_slot, tail_k_head,
    tail_v_slot, tail_v_head, tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head,
    tail_rows,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr, HAS_SNAPSHOTS: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
    ROWS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program per (value head, sequence). states: descriptor of the cache's states.

    ROWS: of a chunk's window, 16 for steps of at most 9 tokens, else 64. REGISTERS: of a thread.
    """
    head = gl.program_id(0) % HV
    n = gl.program_id(0) // HV
    slot = gl.load(read_slots + n).to(gl.int64)
    write = gl.load(write_slots + n).to(gl.int64)
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    first_chunk = gl.load(sequences + n * 8 + 3)
    begin = gl.load(sequences + n * 8 + 4)
    count = gl.load(sequences + n * 8 + 5)
    fold = gl.load(sequences + n * 8 + 6)
    opening = gl.load(sequences + n * 8 + 7)
    if count < 0:
        return
    dtype: gl.constexpr = k.dtype.element_ty
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    WINDOW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], dtype)
    EIGHT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    held = (slot >= 0) & (start > 0)
    stands = start // 64 * 64
    if held & (count > 0):
        stands = gl.load(position + slot * position_slot + head)
    # Memory of their own for each, so that nobody waits between one and the next.
    state = gl.allocate_shared_memory(gl.float32, [1, 128, 128], states.layout)
    bars = (
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(bars[STATE], count=1)
    mbarrier.init(bars[KEYS], count=1)
    mbarrier.init(bars[GATES], count=1)
    mbarrier.init(bars[MET], count=1)
    mbarrier.init(bars[TRIANGLE], count=1)
    mbarrier.init(bars[CHUNK_DONE], count=2)
    fence_async_shared()
    thread_barrier()
    slot = gl.maximum(slot, 0)
    first = begin + gl.where(count > 0, (stands - first_chunk * 64) // 64, 0)
    # Nobody else reads these, and this head's were read.
    if write >= 0:
        gl.store(position + write * position_slot + head, fold)
        gl.store(tail_end + write * position_slot + head, end)
    tiles = (
        gl.allocate_shared_memory(dtype, [2, 64, 64], SQUARE),
        gl.allocate_shared_memory(dtype, [2, ROWS, 64], WINDOW),
        gl.allocate_shared_memory(dtype, [2, 64, 64], SQUARE),
        gl.allocate_shared_memory(dtype, [64, 64], SQUARE),
        gl.allocate_shared_memory(dtype, [ROWS, 64], WINDOW),
        gl.allocate_shared_memory(dtype, [8, 64], EIGHT),
        gl.allocate_shared_memory(gl.float32, [SCALES, 64], PLAIN),
        gl.allocate_shared_memory(gl.int32, [2, 1], PLAIN),
        gl.allocate_shared_memory(gl.int8, [2, 64], PLAIN),
        bars,
        gl.allocate_shared_memory(gl.int16, [64], PLAIN),
    )
    rows = (
        q, k, v, tail_k, tail_v, q_token, q_head, k_token, k_head, v_token, v_head,
        tail_k_slot, tail_k_head, tail_v_slot, tail_v_head, tail_rows, write,
    )  # fmt: skip
    gates = g, beta, a_log, dt_bias, lower_bound, g_token, g_head, beta_token, beta_head
    tail = (
        tail_decay, tail_beta,
        tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    )  # fmt: skip
    outs = o, o_token, o_head, new_state, new_n, new_h
    snaps = (
        snapshots, snapshot_slots, snapshot_position, snapshot_end, snap_n, snap_h, snap_position,
    )  # fmt: skip
    given = (
        states, state, tiles, rows, gates, tail, outs, snaps, items,
        (row, start, end, held, stands, slot), held & (stands > 0),
        # Where a slot's state is not that of the opening, the first chunk leads there.
        (opening >= 0) & (stands == start // 64 * 64), opening, fold, first, begin + count,
        (first_chunk + first - begin) * 64, head, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (group, (
                given, True, ROWS, H, HV, V, snap_k, snap_v, GATE, BETA, HAS_G, HAS_BETA,
                HAS_BIAS, NORMALISE, HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
            )),
            (group, (
                given, False, ROWS, H, HV, V, snap_k, snap_v, GATE, BETA, HAS_G, HAS_BETA,
                HAS_BIAS, NORMALISE, HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
            )),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
