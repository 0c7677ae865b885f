"""The scan for NVIDIA Hopper: some warps bring tiles, four warps run the chain of products.

    v_new = T beta (v - Gamma_i0 k S)    o = scale Gamma_i0 q S + P v_new
    S <- Gamma_C0 S + k^T (Gamma_Ci v_new)

[Gated Delta Networks, arXiv 2412.06464.] The sums of the portable scan (`triton/scan.py`, which
says where states, tails and snapshots go), one program per GROUPS blocks of V, value head and
piece. What is particular: S, transposed [BV, K], and every left operand stay in registers; tiles
of k, q, v, T and P arrive in a ring of STAGES, see `tiles.py`; products are issued before earlier
ones have ended wherever nothing waits for them, and rows of o leave during the next chunk. K and V
are whole blocks: nothing is masked by column.

A tile is copied whole, with rows of other sequences in it. Those take no part: in v by a select, in
o by a masked store, and in k they are cleared. Rows of q are read as they are: what they are
normalised by scales what they read.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# ruff: noqa: SIM102 (an outer test of a constant is decided when the kernel is compiled)

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.ops.gated_delta_rule import cutting
from headstart.ops.gated_delta_rule.hopper.gluon import in_pairs, thread_barrier
from headstart.ops.gated_delta_rule.hopper.prepare import prepare_items, scratch
from headstart.ops.gated_delta_rule.hopper.results import (
    keep_snapshot,
    keep_tail,
    load_state,
    send_rows,
    store_state,
)
from headstart.ops.gated_delta_rule.hopper.tiles import (
    GATES,
    OPENS,
    copy_tiles,
    finish_tiles,
    idle,
    piece_of,
)

VARYING = ["first_item", "first_piece", "items_there", "together"]
SLOTS = ["read_slots", "write_slots", "present", "snapshot_slots"]
IDENTITY, CLOSES = gl.constexpr(cutting.IDENTITY), gl.constexpr(cutting.CLOSES)


@gluon.jit
def beside_products(
    gate_ring, kept_ring, stage, scale, COLUMN: gl.constexpr, READS: gl.constexpr,
    KEPT: gl.constexpr,
):  # fmt: skip
    """What a chunk takes beside its products.

    -Gamma_i0, beta, the scale of rows of q, Gamma_C0 and the slot of the snapshot after it.
    """
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    minus = -gate_ring.index(stage * GATES).load(COLUMN)
    strength = gate_ring.index(stage * GATES + 1).load(COLUMN)
    reads = scale
    if READS:
        reads = gate_ring.index(stage * GATES + 5).load(COLUMN)
    whole = gl.sum(gate_ring.index(stage * GATES).slice(63, 1).load(EACH), 0)
    following = -1
    if KEPT:
        following = gl.sum(kept_ring.index(stage).slice(0, 1).load(EACH), 0)
    return minus, strength, reads, whole, following


@gluon.jit
def chain(
    given, group: gl.constexpr,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    old_k: gl.constexpr, old_v: gl.constexpr, new_k: gl.constexpr, new_v: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr, HAS_STATE: gl.constexpr, HAS_READ: gl.constexpr,
    HAS_PRESENT: gl.constexpr, HAS_NEW: gl.constexpr, HAS_WRITE: gl.constexpr,
    HAS_SNAPSHOTS: gl.constexpr, HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
    BULK: gl.constexpr, CACHED: gl.constexpr, NORMALISE: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """Chunk after chunk: products, outputs, states of one block of V."""
    (
        v, o, o_rows, log_decays, strengths, base, carry, sequences, pieces,
        old_state, read_slots, present, new_state, write_slots, snapshots, snapshot_slots,
        snapshot_tiles, snapshot_position,
        snapshot_end, position, tail_end, tail_v, tail_decay, tail_beta, q_ring, k_ring,
        v_ring, T_ring, P_ring, gate_ring, kept_ring, o_tiles, snapshot_tile,
        full, empty, at_piece, head, first_block,
        first_item, scale, v_token, v_head, o_token, o_head,
        old_n, old_h, new_n, new_h, snap_n, snap_h, snap_position, position_slot,
        tail_v_slot, tail_v_head,
        tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    ) = given  # fmt: skip
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    BY_ROW: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    BY_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ROW)
    dtype: gl.constexpr = k_ring.dtype
    block = first_block + group
    o_tile = o_tiles.index(group)
    n, first, begins, last, first_low, before, after_all, stands = piece_of(
        pieces, at_piece, sequences, base, head, HV, CACHED
    )
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    fold = gl.load(sequences + n * 8 + 6)
    opening = gl.load(sequences + n * 8 + 7)
    first_column = block * BV

    # The state that the first chunk of this piece meets, and where tail rows begin.
    tail_begins = start
    if CACHED:
        held = (gl.load(read_slots + n) >= 0) & (start > 0)
        tail_begins = gl.where(held, stands, start)
    S = gl.zeros((BV, K), gl.float32, STATE)
    if before == OPENS:
        slot = n.to(gl.int64)
        if HAS_READ:
            slot = gl.load(read_slots + n).to(gl.int64)
        there = slot >= 0
        if HAS_PRESENT:
            there = there & (gl.load(present + n) != 0)
        if CACHED:
            there = there & (start > 0) & (stands > 0)
        if HAS_STATE:
            found = old_state + gl.maximum(slot, 0) * old_n + head * old_h
            S = load_state(found, first_column, old_k, old_v, there, S)
        if HAS_SNAPSHOTS and not MAPS:
            if (opening >= 0) & (stands == start // 64 * 64):
                target = opening.to(gl.int64)
                if HAS_SNAPSHOT_SLOTS:
                    target = gl.load(snapshot_slots + opening).to(gl.int64)
                if target >= 0:
                    kept = snapshots + target * snap_n + head * snap_h
                    store_state(S, kept, first_column, snap_k, snap_v)
                    if SNAPSHOTS_CACHED:
                        if block == 0:
                            gl.store(snapshot_position + target * snap_position + head, stands)
                            gl.store(snapshot_end + target * snap_position + head, stands)
    elif before >= 0:
        carried = carry + (before * HV + head).to(gl.int64) * (K * V)
        S = load_state(carried, first_column, V, 1, True, S)
    elif before == IDENTITY:
        ck = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
        cv = first_column + gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
        S = gl.where(ck[None, :] == cv[:, None], 1.0, 0.0)

    write = n.to(gl.int64)
    if HAS_WRITE:
        write = gl.load(write_slots + n).to(gl.int64)

    snap = (
        snapshots, snapshot_tiles, snapshot_position, snapshot_end, head, first_column,
        snap_n, snap_h, snap_position,
    )  # fmt: skip
    # The slot of the snapshot after the chunk before: S is stored while first products run.
    after = -1
    ob = gl.zeros((BV, 64), dtype, ROW)
    # What products are scaled by is there before its chunk: it arrives while the state before ends.
    # Two groups have no registers for that.
    AHEAD: gl.constexpr = GROUPS == 1
    mbarrier.wait(full.index(0), 0, pred=last > begins)
    minus, strength, reads, whole, following = beside_products(
        gate_ring, kept_ring, 0, scale, COLUMN, NORMALISE and not MAPS, HAS_SNAPSHOTS and not MAPS
    )  # fmt: skip
    for item in tl.range(begins, last, disable_licm=True):
        turn = item - begins
        stage = turn % STAGES
        low = first_low + (item - first) * 64
        left = gl.convert_layout(S.to(dtype), BY_ROW)
        if not AHEAD:
            mbarrier.wait(full.index(stage), turn // STAGES & 1)
            minus, strength, reads, whole, following = beside_products(
                gate_ring, kept_ring, stage, scale, COLUMN, NORMALISE and not MAPS,
                HAS_SNAPSHOTS and not MAPS,
            )  # fmt: skip
        k_tile = k_ring.index(stage)
        vt = v_ring.index(stage * GROUPS + group).permute((1, 0)).load(ROW)
        x = warpgroup_mma(
            left, k_tile.permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
            use_acc=False, is_async=True,
        )  # fmt: skip
        # Gamma_i0 is NaN from the first row on that is not finite.
        some_left_out = (low < tail_begins) | (low + 64 > end) | (whole != whole)
        if MAPS:
            outside = gate_ring.index(stage * GATES + 2).load(COLUMN)
            x, left = warpgroup_mma_wait(0, deps=[x, left])
        else:
            # The branch also keeps what stands above it from sinking below the wait.
            if turn > 0:
                mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
                earlier = low - 64
                # o's tile is free until o goes out; one of its own is not waited for after that.
                if HAS_SNAPSHOTS and not BULK:
                    keep_snapshot(
                        S, after, low, o_tile, snap, K, V, snap_k, snap_v, SNAPSHOTS_CACHED, BULK
                    )  # fmt: skip
                send_rows(
                    ob, o_tile, o, o_rows, row + earlier - start, gl.maximum(start - earlier, 0),
                    64, head, block, o_token, o_head, V, BV,
                )  # fmt: skip
                if HAS_SNAPSHOTS and BULK:
                    keep_snapshot(
                        S, after, low, snapshot_tile, snap, K, V, snap_k, snap_v,
                        SNAPSHOTS_CACHED, BULK,
                    )  # fmt: skip
            if HAS_SNAPSHOTS:
                after = following
            outside = gate_ring.index(stage * GATES + 2).load(COLUMN)
            x, left = warpgroup_mma_wait(0, deps=[x, left])
        values = vt.to(gl.float32)
        if MAPS:
            if before == IDENTITY:
                values = gl.zeros((BV, 64), gl.float32, ROW)
        r = gl.fma(x, minus[None, :], values) * strength[None, :]
        if some_left_out:
            taking_part = gate_ring.index(stage * GATES + 3).load(COLUMN)
            r = gl.where((taking_part != 0.0)[None, :], r, 0.0)
        right = gl.convert_layout(r.to(dtype), BY_ROW)
        v_new = warpgroup_mma(
            right, T_ring.index(stage).permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
            use_acc=False, is_async=True,
        )  # fmt: skip
        if not MAPS:
            # Behind T, which is waited for next; its rows are scaled while the state is formed.
            y = warpgroup_mma(
                left, q_ring.index(stage).permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
                use_acc=False, is_async=True,
            )  # fmt: skip
        S = S * whole
        if MAPS:
            v_new, right = warpgroup_mma_wait(0, deps=[v_new, right])
        else:
            v_new, right = warpgroup_mma_wait(1, deps=[v_new, right])
        update = gl.convert_layout((v_new * outside[None, :]).to(dtype), BY_STATE)
        S = warpgroup_mma(update, k_tile, S, is_async=True)
        if not MAPS:
            rounded = gl.convert_layout(in_pairs(v_new, dtype), BY_ROW)
            y, left = warpgroup_mma_wait(1, deps=[y, left])
            y = y * (minus * -reads)[None, :]
            out = warpgroup_mma(rounded, P_ring.index(stage).permute((1, 0)), y, is_async=True)
        if AHEAD:
            next_stage = (turn + 1) % STAGES
            mbarrier.wait(full.index(next_stage), (turn + 1) // STAGES & 1, pred=item + 1 < last)
            minus, strength, reads, whole, following = beside_products(
                gate_ring, kept_ring, next_stage, scale, COLUMN, NORMALISE and not MAPS,
                HAS_SNAPSHOTS and not MAPS,
            )  # fmt: skip
        if MAPS:
            S, update = warpgroup_mma_wait(0, deps=[S, update])
        else:
            S, update = warpgroup_mma_wait(1, deps=[S, update])
            out, rounded = warpgroup_mma_wait(0, deps=[out, rounded])
            ob = out.to(dtype)
        if MAPS:
            # Otherwise sending rows brings the warps together before a stage is left.
            thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        if CACHED:
            if low + 64 == fold:
                if write >= 0:
                    kept = new_state + write * new_n + head * new_h
                    store_state(S, kept, first_column, new_k, new_v)
    if not MAPS:
        if last > begins:
            low = first_low + (last - 1 - first) * 64
            if HAS_SNAPSHOTS and not BULK:
                keep_snapshot(
                    S, after, low + 64, o_tile, snap, K, V, snap_k, snap_v, SNAPSHOTS_CACHED, BULK
                )  # fmt: skip
            send_rows(
                ob, o_tile, o, o_rows, row + low - start, gl.maximum(start - low, 0),
                gl.minimum(end - low, 64), head, block, o_token, o_head, V, BV,
            )  # fmt: skip
            if HAS_SNAPSHOTS and BULK:
                keep_snapshot(
                    S, after, low + 64, snapshot_tile, snap, K, V, snap_k, snap_v,
                    SNAPSHOTS_CACHED, BULK,
                )  # fmt: skip
    if after_all >= 0:
        kept = carry + (after_all * HV + head).to(gl.int64) * (K * V)
        store_state(S, kept, first_column, V, 1)
    elif HAS_NEW and not MAPS:
        if (after_all == CLOSES) & (write >= 0):
            store_state(S, new_state + write * new_n + head * new_h, first_column, new_k, new_v)
    tma.store_wait(0)
    if CACHED:
        if write >= 0:
            keep_tail(
                v, log_decays, strengths, position, tail_end,
                tail_v, tail_decay, tail_beta, n, head, block, write,
                row, start, end, first, begins, last, first_low, first_item, fold,
                after_all == CLOSES, v_token, v_head, position_slot, tail_v_slot, tail_v_head,
                tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
                HV, V, BV,
            )  # fmt: skip


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def scan_kernel(
    q_rows, k_rows, v_rows, o_rows, T, P, snapshot_tiles,
    q, k, v, o, T_rows, P_rows, k_norms, q_reads,
    sums, from_start, to_end, log_decays, strengths, clean, base, carry, sequences, items, pieces,
    slots, old_state, read_slots, present, new_state, write_slots,
    snapshots, snapshot_slots, snapshot_position, snapshot_end,
    position, tail_end, tail_k, tail_v, tail_decay, tail_beta,
    first_item, first_piece, items_there, together, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    old_n, old_h, new_n, new_h,
    snap_n, snap_h, snap_position, position_slot,
    tail_k_slot, tail_k_head, tail_v_slot, tail_v_head,
    tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    old_k: gl.constexpr, old_v: gl.constexpr, new_k: gl.constexpr, new_v: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr,
    HAS_STATE: gl.constexpr, HAS_READ: gl.constexpr, HAS_PRESENT: gl.constexpr,
    HAS_NEW: gl.constexpr, HAS_WRITE: gl.constexpr, HAS_SNAPSHOTS: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr, BULK: gl.constexpr,
    CACHED: gl.constexpr, NORMALISE: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    PREPARERS: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """One program per (block, head, piece), behind PREPARERS that make T and P meanwhile.

    q_rows .. snapshot_tiles are descriptors.
    """
    if PREPARERS == 0:
        gdc_wait()
        gdc_launch_dependents()
    else:
        if gl.program_id(0) < PREPARERS:
            rows = q_rows, k_rows, sequences, items, first_item, q_head, k_head
            given = (
                T, P, T_rows, P_rows, q, k, tail_k, k_norms, q_reads,
                sums, from_start, strengths, clean, base, sequences, items, slots,
                first_item, scale, q_token, q_head, k_token, k_head,
                tail_k_slot, tail_k_head, tail_rows,
            )  # fmt: skip
            first = gl.program_id(0) * 3
            count = items_there
            a = scratch(q.dtype.element_ty, K)
            b = scratch(q.dtype.element_ty, K)
            c = scratch(q.dtype.element_ty, K)
            thread_barrier()
            gl.warp_specialize(
                [
                    (prepare_items, (
                        rows, given, a, first, PREPARERS * 3, count, together,
                        H, HV, K, NORMALISE, CACHED,
                    )),
                    (prepare_items, (
                        rows, given, b, first + 1, PREPARERS * 3, count, together,
                        H, HV, K, NORMALISE, CACHED,
                    )),
                    (prepare_items, (
                        rows, given, c, first + 2, PREPARERS * 3, count, together,
                        H, HV, K, NORMALISE, CACHED,
                    )),
                ],
                [4, 4],
                [168, 168],
            )  # fmt: skip
            return
    program = gl.program_id(0) - PREPARERS
    block = program % (V // BV // GROUPS) * GROUPS
    head = program // (V // BV // GROUPS) % HV
    at_piece = first_piece + program // (V // BV // GROUPS * HV)
    if gl.load(pieces + at_piece * 6) < 0:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, K], q_rows.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, K], k_rows.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, 64, BV], v_rows.layout)
    T_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], T.layout)
    P_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], P.layout)
    o_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 64, BV], o_rows.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gate_ring = gl.allocate_shared_memory(gl.float32, [STAGES * GATES, 64], PLAIN)
    kept_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 64], PLAIN)
    snapshot_tile = o_tiles
    if BULK:
        snapshot_tile = gl.allocate_shared_memory(
            snapshots.dtype.element_ty, [1, K, BV] if snap_v == 1 else [1, BV, K],
            snapshot_tiles.layout,
        )  # fmt: skip
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(landed.index(i), count=2)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    thread_barrier()
    given = (
        v, o, o_rows, log_decays, strengths, base, carry, sequences, pieces,
        old_state, read_slots, present, new_state, write_slots, snapshots, snapshot_slots,
        snapshot_tiles, snapshot_position,
        snapshot_end, position, tail_end, tail_v, tail_decay, tail_beta, q_ring, k_ring,
        v_ring, T_ring, P_ring, gate_ring, kept_ring, o_tiles, snapshot_tile,
        full, empty, at_piece, head, block,
        first_item, scale, v_token, v_head, o_token, o_head,
        old_n, old_h, new_n, new_h, snap_n, snap_h, snap_position, position_slot,
        tail_v_slot, tail_v_head,
        tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    )  # fmt: skip
    copied = (
        q_rows, k_rows, v_rows, T, P, k_norms, q_reads,
        from_start, strengths, to_end, clean, sequences, items, pieces, base, read_slots,
        snapshot_slots, q_ring, k_ring, v_ring, T_ring, P_ring, gate_ring, kept_ring, landed, empty,
        at_piece, head, block, first_item, q_head, k_head, v_head,
    )  # fmt: skip
    finished = (
        tail_k, tail_v, sequences, pieces, base, read_slots, k_ring, v_ring, gate_ring, landed,
        full, at_piece, head, block,
        tail_k_slot, tail_k_head, tail_v_slot, tail_v_head, tail_rows,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (chain, (
                given, 0, H, HV, K, V, BV, old_k, old_v, new_k, new_v, snap_k, snap_v,
                HAS_STATE, HAS_READ, HAS_PRESENT, HAS_NEW, HAS_WRITE, HAS_SNAPSHOTS,
                HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED, BULK, CACHED, NORMALISE,
                STAGES, GROUPS, MAPS,
            )),
            ((chain, (
                given, 1, H, HV, K, V, BV, old_k, old_v, new_k, new_v, snap_k, snap_v,
                HAS_STATE, HAS_READ, HAS_PRESENT, HAS_NEW, HAS_WRITE, HAS_SNAPSHOTS,
                HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED, BULK, CACHED, NORMALISE,
                STAGES, GROUPS, MAPS,
            )) if GROUPS == 2 else (finish_tiles, (
                finished, H, HV, K, V, BV, CACHED, NORMALISE, STAGES, GROUPS, 4,
            ))),
            (copy_tiles, (
                copied, H, HV, K, BV, CACHED, NORMALISE, HAS_SNAPSHOTS, HAS_SNAPSHOT_SLOTS,
                STAGES, GROUPS, PREPARERS > 0, MAPS,
            )),
            ((finish_tiles, (
                finished, H, HV, K, V, BV, CACHED, NORMALISE, STAGES, GROUPS, 2,
            )) if GROUPS == 2 else (idle, (at_piece,))),
        ],
        [4, 1, 2],
        [232, 40, 40] if GROUPS == 2 else [96, 96, 24],
    )  # fmt: skip
