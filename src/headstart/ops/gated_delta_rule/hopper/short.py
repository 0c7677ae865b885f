"""Short sequences on NVIDIA Hopper in one launch: from the rows of a call and a tail to outputs.

    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)    T = (I + A)^-1
    P = scale tril((q_i . k_j) Gamma_ij)             v_new = T beta (v - Gamma_i0 k S)
    o = scale Gamma_i0 q S + P v_new                 S <- Gamma_C0 S + k^T (Gamma_Ci v_new)

[Gated Delta Networks, arXiv 2412.06464.] What `decays`, `prepare` and `scan` compute in turn for
long sequences: the same products, roundings and order of adding, hence the same bits. Steps on a
cache have a kernel of their own, `decode`. One program per value head and sequence; nothing but
states, rows and outputs passes through memory. T and P of a chunk serve both halves of V, which
take turns; S of a half, transposed [64, K], is in registers. A sequence of several chunks makes T
and P anew for each half.
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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headstart.ops.gated_delta_rule.hopper.gluon import gather_in, thread_barrier
from headstart.ops.gated_delta_rule.hopper.short_tiles import SCALES, make_tiles

SLOTS = ["read_slots", "write_slots", "present", "snapshot_slots"]


@gluon.jit
def prefetch_state(state, sk: gl.constexpr, sv: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Ask for the lines of a state [K, V], contiguous along one of both, long before its use."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line: gl.constexpr = 128 * 8 // state.dtype.element_ty.primitive_bitwidth
    first = gl.arange(0, K * V // line, layout=LANES) * line
    at = first // V * sk if sv == 1 else first // K * sv
    at += first % V if sv == 1 else first % K
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [state + at],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def state_of(
    old_state, block, old_n, old_h, slot, head, there,
    K: gl.constexpr, old_k: gl.constexpr, old_v: gl.constexpr,
):  # fmt: skip
    """64 columns of a state, transposed [64, K]."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    ck = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    cv = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STATE))
    found = old_state + slot * old_n + head * old_h
    found = found + ck[None, :] * old_k + cv[:, None] * old_v
    return gl.load(found, mask=there, other=0.0).to(gl.float32)


@gluon.jit
def stage_state(staged, old, head, block, K: gl.constexpr, sk: gl.constexpr, sv: gl.constexpr):
    """Begin to copy 64 columns of a state into shared memory, in the order that they lie in."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    old_state, old_n, old_h, slot, there = old
    found = old_state + slot * old_n + head * old_h
    i = gl.arange(0, staged.shape[0], layout=gl.SliceLayout(1, LINES))[:, None]
    j = gl.arange(0, staged.shape[1], layout=gl.SliceLayout(0, LINES))[None, :]
    found = found + block * 64 * sv + i * (sk if sv == 1 else sv) + j
    gather_in(staged, found, mask=(i >= 0) & there)
    async_copy.commit_group()


@gluon.jit
def keep_lines(S, staged, state, block, sk: gl.constexpr, sv: gl.constexpr):
    """As `keep_state`, by way of shared memory: whole lines are written."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    i = gl.arange(0, staged.shape[0], layout=gl.SliceLayout(1, LINES))[:, None]
    j = gl.arange(0, staged.shape[1], layout=gl.SliceLayout(0, LINES))[None, :]
    by_v = staged.permute((1, 0)) if sv == 1 else staged
    by_v.store(S)
    thread_barrier()
    to = state + block * 64 * sv + i * (sk if sv == 1 else sv) + j
    gl.store(to, staged.load(LINES))


@gluon.jit
def keep_state(S, state, block, K: gl.constexpr, sk: gl.constexpr, sv: gl.constexpr):
    """Store S as 64 columns of a state, rounded to its dtype."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    ck = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    cv = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STATE))
    gl.store(state + ck[None, :] * sk + cv[:, None] * sv, S.to(state.dtype.element_ty))


@gluon.jit
def keep_snapshot(
    S, snaps, index, head, block, stands,
    K: gl.constexpr, snap_k: gl.constexpr, snap_v: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
):  # fmt: skip
    """Snapshot `index` of the call: S, a state after `stands` tokens."""
    (
        snapshots, snapshot_slots, snapshot_position, snapshot_end, snap_n, snap_h, snap_position,
    ) = snaps  # fmt: skip
    target = index.to(gl.int64)
    if HAS_SNAPSHOT_SLOTS:
        target = gl.load(snapshot_slots + index).to(gl.int64)
    if target >= 0:
        keep_state(S, snapshots + target * snap_n + head * snap_h, block, K, snap_k, snap_v)
        if SNAPSHOTS_CACHED:
            if block == 0:
                gl.store(snapshot_position + target * snap_position + head, stands)
                gl.store(snapshot_end + target * snap_position + head, stands)


@gluon.jit
def opened(
    old, snaps, staged, opens, opening, start, head, block, more,
    K: gl.constexpr, old_k: gl.constexpr, old_v: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr, HAS_STATE: gl.constexpr, AHEAD: gl.constexpr,
    HAS_SNAPSHOTS: gl.constexpr, HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
):  # fmt: skip
    """The state that the first chunk meets, which may be a snapshot.

    AHEAD: it was asked for, and the next half of V is where there are `more`.
    """
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    old_state, old_n, old_h, slot, there = old
    S = gl.zeros((64, K), gl.float32, STATE)
    if AHEAD:
        async_copy.wait_group(0)
        thread_barrier()
        by_v = staged.permute((1, 0)) if old_v == 1 else staged
        S = by_v.load(STATE)
        if more:
            thread_barrier()
            stage_state(staged, old, head, block + 1, K, old_k, old_v)
    elif HAS_STATE:
        S = state_of(old_state, block, old_n, old_h, slot, head, there, K, old_k, old_v)
    if HAS_SNAPSHOTS:
        if opens:
            keep_snapshot(
                S, snaps, opening, head, block, start, K, snap_k, snap_v,
                HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
            )  # fmt: skip
    return S


@gluon.jit
def advance(
    S, outs, snaps, staged, tiles, place, low, after, write, more, head, block, scale,
    K: gl.constexpr, V: gl.constexpr, new_k: gl.constexpr, new_v: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr, HAS_NEW: gl.constexpr,
    HAS_SNAPSHOTS: gl.constexpr, HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
    LINES_KEPT: gl.constexpr,
):  # fmt: skip
    """Outputs of a chunk in one half of V, and the state after it where anyone wants it."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    BY_ROW: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    BY_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ROW)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o, o_token, o_head, new_state, new_n, new_h = outs
    q_tile, k_tile, halves, T_tile, P_tile, zeros, sums, scales, q_reads = tiles
    row, start, end = place
    dtype: gl.constexpr = k_tile.dtype
    v_tile = halves.index(block)
    rows = gl.arange(0, 64, layout=COLUMN)
    left = gl.convert_layout(S.to(dtype), BY_ROW)
    x = warpgroup_mma(
        left, k_tile.permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    y = warpgroup_mma(
        left, q_tile.permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    inside = scales.index(0).load(COLUMN)
    beta = scales.index(1).load(COLUMN)
    outside = scales.index(2).load(COLUMN)
    takes_part = scales.index(3).load(COLUMN)
    whole = gl.sum(gl.where(rows == 63, inside, 0.0), 0)
    vt = v_tile.permute((1, 0)).load(ROW)
    x, left = warpgroup_mma_wait(1, deps=[x, left])
    r = gl.fma(x, -inside[None, :], vt.to(gl.float32)) * beta[None, :]
    r = gl.where((takes_part != 0.0)[None, :], r, 0.0)
    right = gl.convert_layout(r.to(dtype), BY_ROW)
    v_new = warpgroup_mma(
        right, T_tile.permute((1, 0)), gl.zeros((64, 64), gl.float32, ROW),
        use_acc=False, is_async=True,
    )  # fmt: skip
    y, left = warpgroup_mma_wait(1, deps=[y, left])
    y = y * (inside * q_reads.load(COLUMN))[None, :]
    v_new, right = warpgroup_mma_wait(0, deps=[v_new, right])
    rounded = gl.convert_layout(v_new.to(dtype), BY_ROW)
    out = warpgroup_mma(rounded, P_tile.permute((1, 0)), y, is_async=True)
    out, rounded = warpgroup_mma_wait(0, deps=[out, rounded])
    # o^T takes v's place.
    v_tile.permute((1, 0)).store(out.to(dtype))
    wanted = more
    if HAS_SNAPSHOTS:
        wanted = wanted | (after >= 0)
    if HAS_NEW:
        wanted = True
    if wanted:
        update = gl.convert_layout((v_new * outside[None, :]).to(dtype), BY_STATE)
        S = warpgroup_mma(update, k_tile, S * whole, is_async=True)
        S, update = warpgroup_mma_wait(0, deps=[S, update])
        if HAS_SNAPSHOTS:
            if after >= 0:
                keep_snapshot(
                    S, snaps, after, head, block, low + 64, K, snap_k, snap_v,
                    HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
                )  # fmt: skip
        if HAS_NEW:
            if (not more) & (write >= 0):
                to = new_state + write * new_n + head * new_h
                if LINES_KEPT:
                    keep_lines(S, staged, to, block, new_k, new_v)
                else:
                    keep_state(S, to, block, K, new_k, new_v)
    thread_barrier()
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    to = o + (row + low - start).to(gl.int64) * o_token + head * o_head + block * 64
    gl.store(
        to + at[:, None] * o_token + columns[None, :],
        v_tile.load(LINES),
        mask=((low + at >= start) & (low + at < end))[:, None],
    )
    return S


@gluon.jit(do_not_specialize_on_alignment=SLOTS)
def short_kernel(
    q, k, v, o, g, beta, a_log, dt_bias, sequences, items,
    old_state, read_slots, present, new_state, write_slots,
    snapshots, snapshot_slots, snapshot_position, snapshot_end, scale, lower_bound,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    g_token, g_head, beta_token, beta_head, old_n, old_h, new_n, new_h,
    snap_n, snap_h, snap_position,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    old_k: gl.constexpr, old_v: gl.constexpr, new_k: gl.constexpr, new_v: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr,
    HAS_STATE: gl.constexpr, HAS_READ: gl.constexpr, HAS_PRESENT: gl.constexpr,
    HAS_NEW: gl.constexpr, HAS_WRITE: gl.constexpr, HAS_SNAPSHOTS: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
    HALVES: gl.constexpr, SEVERAL: gl.constexpr,
):  # fmt: skip
    """One program per (HALVES halves of V, value head, sequence).

    SEVERAL: whether a sequence may have more chunks than one.
    """
    program = gl.program_id(0)
    first_block = program % (2 // HALVES)
    head = program // (2 // HALVES) % HV
    n = program // (2 // HALVES * HV)
    key_head = head // (HV // H)
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    first_chunk = gl.load(sequences + n * 8 + 3)
    begin = gl.load(sequences + n * 8 + 4)
    count = gl.load(sequences + n * 8 + 5)
    opening = gl.load(sequences + n * 8 + 7)
    if count < 0:
        return
    # Where the state before the first chunk stands, and whether there is one.
    slot = n.to(gl.int64)
    write = n.to(gl.int64)
    if HAS_WRITE:
        write = gl.load(write_slots + n).to(gl.int64)
    if HAS_READ:
        slot = gl.load(read_slots + n).to(gl.int64)
    there = slot >= 0
    slot = gl.maximum(slot, 0)
    if HAS_PRESENT:
        there = there & (gl.load(present + n) != 0)
    last = begin + count
    if HAS_STATE:
        if (old_v == 1) | (old_k == 1):
            if there:
                prefetch_state(old_state + slot * old_n + head * old_h, old_k, old_v, K, V)

    old = old_state, old_n, old_h, slot, there
    # States go through shared memory in pieces of 16 bytes, conflicts apart as they lie in rows.
    AHEAD: gl.constexpr = (
        HAS_STATE and not SEVERAL
        and old_state.dtype.element_ty == gl.float32 and (old_v == 1 or old_k == 1)
    )  # fmt: skip
    LINES_KEPT: gl.constexpr = (
        HAS_NEW and not HAS_STATE
        and new_state.dtype.element_ty == gl.float32 and (new_v == 1 or new_k == 1)
    )  # fmt: skip
    staged = 0
    if AHEAD or LINES_KEPT:
        BY_V: gl.constexpr = old_v == 1 if AHEAD else new_v == 1
        FOUR: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        staged = gl.allocate_shared_memory(gl.float32, [K if BY_V else 64, 64 if BY_V else K], FOUR)
    if AHEAD:
        stage_state(staged, old, head, first_block, K, old_k, old_v)
    dtype: gl.constexpr = k.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    zeros = gl.allocate_shared_memory(dtype, [8, 64], FLAT)
    zeros.store(gl.zeros([8, 64], dtype, LINES))
    tiles = (
        gl.allocate_shared_memory(dtype, [64, K], WIDE),
        gl.allocate_shared_memory(dtype, [64, K], WIDE),
        gl.allocate_shared_memory(dtype, [2, 64, 64], SQUARE),
        gl.allocate_shared_memory(dtype, [64, 64], SQUARE),
        gl.allocate_shared_memory(dtype, [64, 64], SQUARE),
        zeros,
        gl.allocate_shared_memory(gl.float32, [SCALES, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [SCALES, 64], PLAIN),
        gl.allocate_shared_memory(gl.float32, [64], PLAIN),
    )
    place = row, start, end
    rows = q, k, v, q_token, q_head, k_token, k_head, v_token, v_head
    gates = g, beta, a_log, dt_bias, lower_bound, g_token, g_head, beta_token, beta_head
    outs = o, o_token, o_head, new_state, new_n, new_h
    snaps = (
        snapshots, snapshot_slots, snapshot_position, snapshot_end, snap_n, snap_h, snap_position,
    )  # fmt: skip
    opens = (opening >= 0) & (start % 64 == 0)
    low = first_chunk * 64
    if not SEVERAL:
        if begin < last:
            make_tiles(
                rows, gates, place, low, head, key_head, tiles, scale,
                K, V, GATE, BETA, HAS_G, HAS_BETA, HAS_BIAS, NORMALISE,
            )  # fmt: skip
        for half in gl.static_range(HALVES):
            block = first_block + half
            S = opened(
                old, snaps, staged, opens, opening, start, head, block, half + 1 < HALVES,
                K, old_k, old_v, snap_k, snap_v, HAS_STATE, AHEAD,
                HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
            )  # fmt: skip
            if begin < last:
                after = -1
                if HAS_SNAPSHOTS:
                    after = gl.load(items + begin * 3 + 2)
                S = advance(
                    S, outs, snaps, staged, tiles, place, low, after, write, False,
                    head, block, scale, K, V, new_k, new_v, snap_k, snap_v, HAS_NEW,
                    HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED, LINES_KEPT,
                )  # fmt: skip
            elif HAS_NEW:
                if write >= 0:
                    keep_state(S, new_state + write * new_n + head * new_h, block, K, new_k, new_v)
    else:
        # What does not change in the loops is formed anew: it would fill the registers.
        for half in tl.range(HALVES, disable_licm=True):
            block = first_block + half
            S = opened(
                old, snaps, staged, opens, opening, start, head, block, half + 1 < HALVES,
                K, old_k, old_v, snap_k, snap_v, HAS_STATE, AHEAD,
                HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED,
            )  # fmt: skip
            for item in tl.range(begin, last, disable_licm=True):
                low = (first_chunk + item - begin) * 64
                if (half == 0) | (last - begin > 1):
                    make_tiles(
                        rows, gates, place, low, head, key_head, tiles, scale,
                        K, V, GATE, BETA, HAS_G, HAS_BETA, HAS_BIAS, NORMALISE,
                    )  # fmt: skip
                after = -1
                if HAS_SNAPSHOTS:
                    after = gl.load(items + item * 3 + 2)
                S = advance(
                    S, outs, snaps, staged, tiles, place, low, after, write, item + 1 < last,
                    head, block, scale, K, V, new_k, new_v, snap_k, snap_v, HAS_NEW,
                    HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED, LINES_KEPT,
                )  # fmt: skip
                # Before the next chunk's rows take the place of these.
                thread_barrier()
            if HAS_NEW:
                if (begin >= last) & (write >= 0):
                    keep_state(S, new_state + write * new_n + head * new_h, block, K, new_k, new_v)
