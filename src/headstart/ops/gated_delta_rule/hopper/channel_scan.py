"""The scan for a decay per channel on NVIDIA Hopper: one warp copies, four run the products.

    v_new = T beta (v - k_start S)    o = scale q_start S + P v_new
    S <- Gamma_C0 S + k_end^T v_new

[Kimi Linear, arXiv 2510.26692.] Rows of q and k come decayed from `prepare`: from the chunk's start
(q_start, k_start) or to its end (k_end). The rest is as in `hopper/scan.py`. What is particular: a
chunk is 72 KiB, so k_end, which is needed last, has a ring of its own with fewer places.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# ruff: noqa: SIM102 (an outer test of a constant is decided when the kernel is compiled)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headstart.ops.gated_delta_rule import cutting
from headstart.ops.gated_delta_rule.hopper.gluon import copy_in, thread_barrier
from headstart.ops.gated_delta_rule.hopper.results import load_state, send_rows, store_state
from headstart.ops.gated_delta_rule.hopper.tiles import OPENS, idle, odd_words, own_rows, piece_of

VARYING = ["first_item", "first_piece"]
SLOTS = ["read_slots", "write_slots", "present", "snapshot_slots"]
IDENTITY, CLOSES = gl.constexpr(cutting.IDENTITY), gl.constexpr(cutting.CLOSES)
ABSENT, SPOILED = gl.constexpr(-1.0), gl.constexpr(-2.0)
"""Stand for the beta of a row that takes no part, and of one that is not finite."""


@gluon.jit
def keep_tail(
    v, keys, log_decays, strengths, position, tail_end,
    tail_k, tail_v, tail_decay, tail_beta, head, key_head, block, write,
    row, start, end, first, begins, last, first_low, first_item, fold, closes,
    v_token, v_head, position_slot, tail_k_slot, tail_k_head, tail_v_slot, tail_v_head,
    tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    """Rows past the state are the tail; it lies in the last two chunks."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    in_block = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, LINES))
    channels = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))
    for back in gl.static_range(2):
        item = last - 2 + back
        low = first_low + (item - first) * 64
        if (item >= begins) & (low >= fold):
            at = low + rows
            new = (at >= start) & (at < end)
            there = new[:, None]
            local = item - first_item
            tile = (local * HV + head).to(gl.int64)
            ring = (at % tail_rows).to(gl.int64)
            first_row = (row + low - start).to(gl.int64)
            values = v + first_row * v_token + head * v_head
            values = values + (rows * v_token)[:, None] + in_block[None, :]
            kept_v = tail_v + write * tail_v_slot + head * tail_v_head
            kept_v = kept_v + ring[:, None] * V + in_block[None, :]
            gl.store(kept_v, gl.load(values, mask=there, other=0.0), mask=there)
            if block == 0:
                square = rows[:, None] * K + channels[None, :]
                tail_row = ring[:, None] * K + channels[None, :]
                if head % (HV // H) == 0:
                    found = keys + (local * H + key_head).to(gl.int64) * (64 * K) + square
                    kept_k = tail_k + write * tail_k_slot + key_head * tail_k_head + tail_row
                    gl.store(kept_k, gl.load(found), mask=there)
                decays = tail_decay + write * tail_decay_slot + head * tail_decay_head + tail_row
                gl.store(decays, gl.load(log_decays + tile * (64 * K) + square), mask=there)
                betas = tail_beta + write * tail_beta_slot + head * tail_beta_head + ring
                gl.store(betas, gl.load(strengths + tile * 64 + rows), mask=new)
    if (block == 0) & closes:
        gl.store(position + write * position_slot + head, fold)
        gl.store(tail_end + write * position_slot + head, end)


@gluon.jit
def chain(
    given,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    old_k: gl.constexpr, old_v: gl.constexpr, new_k: gl.constexpr, new_v: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr, HAS_STATE: gl.constexpr, HAS_READ: gl.constexpr,
    HAS_PRESENT: gl.constexpr, HAS_NEW: gl.constexpr, HAS_WRITE: gl.constexpr,
    HAS_SNAPSHOTS: gl.constexpr, HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
    CACHED: gl.constexpr, STAGES: gl.constexpr, ENDS: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """Chunk after chunk: products, outputs, states of one block of V."""
    (
        v, o, o_rows, keys, log_decays, strengths, base, carry, sequences, items, pieces,
        old_state, read_slots, present, new_state, write_slots, snapshots, snapshot_slots,
        snapshot_position,
        snapshot_end, position, tail_end, tail_k, tail_v, tail_decay, tail_beta, q_ring, k_ring,
        end_ring, v_ring, T_ring, P_ring, beta_ring, whole_ring, o_tile, full, empty, end_full,
        end_empty, at_piece, head, block,
        first_item, scale, v_token, v_head, o_token, o_head, old_n, old_h, new_n, new_h,
        snap_n, snap_h, snap_position, position_slot, tail_k_slot, tail_k_head, tail_v_slot,
        tail_v_head, tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    ) = given  # fmt: skip
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    BY_ROW: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    BY_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ROW)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, STATE)
    dtype: gl.constexpr = k_ring.dtype
    key_head = head // (HV // H)
    n, first, begins, last, first_low, before, after_all, stands = piece_of(
        pieces, at_piece, sequences, base, head, HV, CACHED
    )
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    fold = gl.load(sequences + n * 8 + 6)
    opening = gl.load(sequences + n * 8 + 7)
    first_column = block * BV

    # The state that the first chunk of this piece meets.
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
        ck = gl.arange(0, K, layout=CHANNEL)
        cv = first_column + gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
        S = gl.where(ck[None, :] == cv[:, None], 1.0, 0.0)

    write = n.to(gl.int64)
    if HAS_WRITE:
        write = gl.load(write_slots + n).to(gl.int64)

    ob = gl.zeros((BV, 64), dtype, ROW)
    for item in range(begins, last):
        turn = item - begins
        stage = turn % STAGES
        low = first_low + (item - first) * 64
        left = gl.convert_layout(S.to(dtype), BY_ROW)
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        x = warpgroup_mma(
            left, k_ring.index(stage).permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
            use_acc=False, is_async=True,
        )  # fmt: skip
        if not MAPS:
            y = warpgroup_mma(
                left, q_ring.index(stage).permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
                use_acc=False, is_async=True,
            )  # fmt: skip
        strength = beta_ring.index(stage).load(COLUMN)
        whole = whole_ring.index(stage).load(CHANNEL)
        after = -1
        if HAS_SNAPSHOTS and not MAPS:
            after = gl.load(items + item * 3 + 2)
        vt = v_ring.index(stage).permute((1, 0)).load(ROW)
        if MAPS:
            x, left = warpgroup_mma_wait(0, deps=[x, left])
        else:
            # The branch also keeps what stands above it from sinking below the wait.
            if turn > 0:
                earlier = low - 64
                send_rows(
                    ob, o_tile, o, o_rows, row + earlier - start, gl.maximum(start - earlier, 0),
                    64, head, block, o_token, o_head, V, BV,
                )  # fmt: skip
            x, left = warpgroup_mma_wait(1, deps=[x, left])
        values = vt.to(gl.float32)
        if MAPS:
            if before == IDENTITY:
                values = gl.zeros((BV, 64), gl.float32, ROW)
        r = (values - x) * strength[None, :]
        r = gl.where((strength >= 0.0)[None, :], r, 0.0)
        right = gl.convert_layout(r.to(dtype), BY_ROW)
        v_new = warpgroup_mma(
            right, T_ring.index(stage).permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
            use_acc=False, is_async=True,
        )  # fmt: skip
        S = S * whole[None, :]
        if not MAPS:
            y, left = warpgroup_mma_wait(1, deps=[y, left])
            y = y * gl.where(strength == SPOILED, float("nan"), scale)[None, :]
        v_new, right = warpgroup_mma_wait(0, deps=[v_new, right])
        rounded = v_new.to(dtype)
        if not MAPS:
            by_row = gl.convert_layout(rounded, BY_ROW)
            out = warpgroup_mma(by_row, P_ring.index(stage).permute((1, 0)), y, is_async=True)
        update = gl.convert_layout(rounded, BY_STATE)
        mbarrier.wait(end_full.index(turn % ENDS), turn // ENDS & 1)
        S = warpgroup_mma(update, end_ring.index(turn % ENDS), S, is_async=True)
        if not MAPS:
            out, by_row = warpgroup_mma_wait(1, deps=[out, by_row])
            ob = out.to(dtype)
        S, update = warpgroup_mma_wait(0, deps=[S, update])
        thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(end_empty.index(turn % ENDS), count=1)
        if HAS_SNAPSHOTS and not MAPS:
            if after >= 0:
                target = after.to(gl.int64)
                if HAS_SNAPSHOT_SLOTS:
                    target = gl.load(snapshot_slots + after).to(gl.int64)
                if target >= 0:
                    kept = snapshots + target * snap_n + head * snap_h
                    store_state(S, kept, first_column, snap_k, snap_v)
                    if SNAPSHOTS_CACHED:
                        if block == 0:
                            gl.store(snapshot_position + target * snap_position + head, low + 64)
                            gl.store(snapshot_end + target * snap_position + head, low + 64)
        if CACHED:
            if low + 64 == fold:
                if write >= 0:
                    kept = new_state + write * new_n + head * new_h
                    store_state(S, kept, first_column, new_k, new_v)
    if not MAPS:
        if last > begins:
            low = first_low + (last - 1 - first) * 64
            send_rows(
                ob, o_tile, o, o_rows, row + low - start, gl.maximum(start - low, 0),
                gl.minimum(end - low, 64), head, block, o_token, o_head, V, BV,
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
                v, keys, log_decays, strengths, position, tail_end,
                tail_k, tail_v, tail_decay, tail_beta, head, key_head, block, write,
                row, start, end, first, begins, last, first_low, first_item, fold,
                after_all == CLOSES,
                v_token, v_head, position_slot, tail_k_slot, tail_k_head, tail_v_slot, tail_v_head,
                tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
                H, HV, K, V, BV,
            )  # fmt: skip


@gluon.jit
def copy_end(k_ends, end_ring, full, empty, turn, tile, K: gl.constexpr, ENDS: gl.constexpr):
    """Ask for k_end of a chunk."""
    place = turn % ENDS
    mbarrier.wait(empty.index(place), (turn // ENDS & 1) ^ 1)
    mbarrier.expect(full.index(place), 64 * K * 2)
    copy_in(k_ends, [tile * 64, 0], full.index(place), end_ring.index(place))


@gluon.jit
def copy_tiles(
    given, HV: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, CACHED: gl.constexpr,
    STAGES: gl.constexpr, ENDS: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """Fill the rings, stage after stage."""
    (
        q_starts, k_starts, k_ends, v_rows, T, P,
        strengths, whole_decay, clean, sequences, pieces, base, read_slots,
        q_ring, k_ring, end_ring, v_ring, T_ring, P_ring, beta_ring, whole_ring,
        landed, empty, end_full, end_empty, at_piece, head, block, first_item, v_head,
    ) = given  # fmt: skip
    ROWS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    rows = gl.arange(0, 64, layout=ROWS)
    channels = gl.arange(0, K, layout=WIDE)
    n, first, begins, last, first_low, _before, _after, stands = piece_of(
        pieces, at_piece, sequences, base, head, HV, CACHED
    )
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    tail_begins = start
    if CACHED:
        tail_begins = gl.where((gl.load(read_slots + n) >= 0) & (start > 0), stands, start)
    BYTES: gl.constexpr = 64 * (K + 64 + BV + (0 if MAPS else K + 64)) * 2
    for item in range(begins, last):
        turn = item - begins
        stage = turn % STAGES
        low = first_low + (item - first) * 64
        tile = (item - first_item) * HV + head
        strength = gl.load(strengths + tile * 64 + rows)
        whole = gl.load(whole_decay + tile * K + channels)
        spoiled = gl.load(clean + tile)
        there = (rows >= tail_begins - low) & (rows < end - low)
        strength = gl.where(there, strength, ABSENT)
        strength = gl.where(rows < spoiled, strength, SPOILED)
        whole = gl.where(spoiled < 64, float("nan"), whole)
        bar = landed.index(stage)
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        copy_in(k_starts, [tile * 64, 0], bar, k_ring.index(stage))
        source = [row + low - start, head * v_head + block * BV]
        copy_in(v_rows, source, bar, v_ring.index(stage))
        copy_in(T, [tile * 64, 0], bar, T_ring.index(stage))
        if not MAPS:
            copy_in(q_starts, [tile * 64, 0], bar, q_ring.index(stage))
            copy_in(P, [tile * 64, 0], bar, P_ring.index(stage))
        beta_ring.index(stage).store(strength)
        whole_ring.index(stage).store(whole)
        thread_barrier()
        mbarrier.arrive(bar, count=1)
        # k_end has fewer places; asked for a turn later it is in nobody's way.
        if turn > 0:
            copy_end(k_ends, end_ring, end_full, end_empty, turn - 1, tile - HV, K, ENDS)
    if last > begins:
        tile = (last - 1 - first_item) * HV + head
        copy_end(k_ends, end_ring, end_full, end_empty, last - 1 - begins, tile, K, ENDS)


@gluon.jit
def finish_tiles(
    given, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    CACHED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Make rows of v what the chain takes, see `hopper/tiles.py`."""
    (
        tail_v, sequences, pieces, base, read_slots, v_ring, beta_ring, whole_ring, landed, full,
        at_piece, head, block, tail_v_slot, tail_v_head, tail_rows,
    ) = given  # fmt: skip
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    n, first, begins, last, first_low, _before, _after, stands = piece_of(
        pieces, at_piece, sequences, base, head, HV, CACHED
    )
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    tail_begins = start
    slot = n.to(gl.int64)
    if CACHED:
        slot = gl.load(read_slots + n).to(gl.int64)
        tail_begins = gl.where((slot >= 0) & (start > 0), stands, start)
        slot = gl.maximum(slot, 0)
    values = tail_v + slot * tail_v_slot + head * tail_v_head
    for item in range(begins, last):
        turn = item - begins
        stage = turn % STAGES
        low = first_low + (item - first) * 64
        mbarrier.wait(landed.index(stage), turn // STAGES & 1)
        tile = v_ring.index(stage)
        if (low < start) | (low + 64 > end):
            own_rows(
                tile, values, tail_rows, block * BV, low, start, end, tail_begins, BV, V, CACHED, 2
            )
        odd = odd_words(tile, BV, 2)
        if gl.reduce_or(odd.reshape([32 * BV]), 0) != 0:
            # From the first such row on rows count as empty, and what they read is NaN.
            spoiled = gl.reduce_or(odd, 1) != 0
            row = gl.arange(0, 64, layout=spoiled.type.layout)
            upper = gl.min(gl.where(spoiled, row, 64), 0)
            kept = gl.arange(0, 64, layout=ROWS) < upper
            strength = beta_ring.index(stage)
            strength.store(gl.where(kept, strength.load(ROWS), SPOILED))
            whole = whole_ring.index(stage)
            whole.store(gl.full([K], float("nan"), gl.float32, ROWS))
        thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def scan_channels_kernel(
    q_starts, k_starts, k_ends, v_rows, T, P, o_rows,
    q, v, o, keys,
    whole_decay, log_decays, strengths, clean, base, carry, sequences, items, pieces,
    old_state, read_slots, present, new_state, write_slots,
    snapshots, snapshot_slots, snapshot_position, snapshot_end,
    position, tail_end, tail_k, tail_v, tail_decay, tail_beta,
    first_item, first_piece, scale,
    v_token, v_head, o_token, o_head, old_n, old_h, new_n, new_h,
    snap_n, snap_h, snap_position, position_slot,
    tail_k_slot, tail_k_head, tail_v_slot, tail_v_head,
    tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    old_k: gl.constexpr, old_v: gl.constexpr, new_k: gl.constexpr, new_v: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr,
    HAS_STATE: gl.constexpr, HAS_READ: gl.constexpr, HAS_PRESENT: gl.constexpr,
    HAS_NEW: gl.constexpr, HAS_WRITE: gl.constexpr, HAS_SNAPSHOTS: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr, CACHED: gl.constexpr,
    STAGES: gl.constexpr, ENDS: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """One program per (block, head, piece). q_starts .. o_rows are descriptors."""
    program = gl.program_id(0)
    block = program % (V // BV)
    head = program // (V // BV) % HV
    at_piece = first_piece + program // (V // BV * HV)
    if gl.load(pieces + at_piece * 6) < 0:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, K], q_starts.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, K], k_starts.layout)
    end_ring = gl.allocate_shared_memory(dtype, [ENDS, 64, K], k_ends.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, BV], v_rows.layout)
    T_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], T.layout)
    P_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], P.layout)
    o_tile = gl.allocate_shared_memory(dtype, [64, BV], o_rows.layout)
    beta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN)
    whole_ring = gl.allocate_shared_memory(gl.float32, [STAGES, K], PLAIN)
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    end_full = gl.allocate_shared_memory(gl.int64, [ENDS, 1], BARRIER)
    end_empty = gl.allocate_shared_memory(gl.int64, [ENDS, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(landed.index(i), count=2)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(ENDS):
        mbarrier.init(end_full.index(i), count=1)
        mbarrier.init(end_empty.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    given = (
        v, o, o_rows, keys, log_decays, strengths, base, carry, sequences, items, pieces,
        old_state, read_slots, present, new_state, write_slots, snapshots, snapshot_slots,
        snapshot_position,
        snapshot_end, position, tail_end, tail_k, tail_v, tail_decay, tail_beta, q_ring, k_ring,
        end_ring, v_ring, T_ring, P_ring, beta_ring, whole_ring, o_tile, full, empty, end_full,
        end_empty, at_piece, head, block,
        first_item, scale, v_token, v_head, o_token, o_head, old_n, old_h, new_n, new_h,
        snap_n, snap_h, snap_position, position_slot, tail_k_slot, tail_k_head, tail_v_slot,
        tail_v_head, tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    )  # fmt: skip
    copied = (
        q_starts, k_starts, k_ends, v_rows, T, P,
        strengths, whole_decay, clean, sequences, pieces, base, read_slots,
        q_ring, k_ring, end_ring, v_ring, T_ring, P_ring, beta_ring, whole_ring,
        landed, empty, end_full, end_empty, at_piece, head, block, first_item, v_head,
    )  # fmt: skip
    finished = (
        tail_v, sequences, pieces, base, read_slots, v_ring, beta_ring, whole_ring, landed, full,
        at_piece, head, block, tail_v_slot, tail_v_head, tail_rows,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (chain, (
                given, H, HV, K, V, BV, old_k, old_v, new_k, new_v, snap_k, snap_v,
                HAS_STATE, HAS_READ, HAS_PRESENT, HAS_NEW, HAS_WRITE, HAS_SNAPSHOTS,
                HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED, CACHED, STAGES, ENDS, MAPS,
            )),
            (idle, (at_piece,)),
            (copy_tiles, (copied, HV, K, BV, CACHED, STAGES, ENDS, MAPS)),
            (finish_tiles, (finished, HV, K, V, BV, CACHED, STAGES)),
        ],
        [4, 1, 2],
        [24, 96, 96],
    )  # fmt: skip
