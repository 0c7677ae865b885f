"""The scan for NVIDIA Hopper: one warp copies tiles, four warps run the chain of products.

    v_new = T beta (v - Gamma_i0 k S)    o = scale Gamma_i0 q S + P v_new
    S <- Gamma_C0 S + k^T (Gamma_Ci v_new)

[Gated Delta Networks, arXiv 2412.06464.] The sums of the portable scan (`triton/scan.py`, which
says where states, tails and snapshots go), one program per GROUPS blocks of V, value head and
sequence. What is particular: S, transposed [BV, K], and every left operand stay in registers; tiles
of k, q, v, T and P arrive through the tensor memory accelerator in a ring of STAGES; products are
issued before earlier ones have ended wherever nothing waits for them, and rows of o leave during
the next chunk. K and V are whole blocks: nothing is masked by column.

A tile is copied whole, with rows of other sequences in it. Those take no part: in v by a select, in
o by a masked store, in k because `prepare` keeps such tiles apart, in `k_edges`.
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

from headstart.ops.gated_delta_rule.hopper.prepare import READY, prepare_items, scratch

VARYING = ["first_item", "last_item", "parity"]
SLOTS = ["read_slots", "write_slots", "present", "snapshot_slots"]
GATES = gl.constexpr(4)
"""Vectors of 64 a stage: Gamma_i0, beta, Gamma_Ci, and whether a row takes part."""


@gluon.jit
def run_of(sequences, base, n, head, first_item, last_item, HV: gl.constexpr, CACHED: gl.constexpr):
    """The items of this span that program n runs, and where the state before them stands."""
    start = gl.load(sequences + n * 8 + 1)
    first_chunk = gl.load(sequences + n * 8 + 3)
    begin = gl.load(sequences + n * 8 + 4)
    count = gl.load(sequences + n * 8 + 5)
    first = gl.maximum(begin, first_item)
    last = gl.minimum(begin + count, last_item)
    stands = start
    if CACHED:
        stands = start // 64 * 64
        if count > 0:
            stands = gl.load(base + n * HV + head)
            if first == begin:
                first += (stands - first_chunk * 64) // 64
    return first, last, stands


@gluon.jit
def fence_async_global():
    """What other processors stored in the ordinary way is seen by later bulk copies."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ready_until(
    clean, item, first_item, last, head, key_head, LEAD: gl.constexpr, HV: gl.constexpr
):
    """Wait until `item` is prepared; the first of the next 32 that is not yet, at most `last`.

    LEAD: value heads of a key head, if its tiles come with the first of them alone; else 0.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, layout=LANES)
    tiles = clean + (item - first_item + lanes) * HV
    there = item + lanes < last
    nothing = gl.zeros([32], gl.int32, LANES)
    until = item
    while until == item:
        found = gl.atomic_or(tiles + head, nothing, mask=there, sem="acquire", scope="gpu")
        missing = there & (found < READY)
        if LEAD > 0:
            tiles_of_keys = tiles + key_head * LEAD
            found = gl.atomic_or(tiles_of_keys, nothing, mask=there, sem="acquire", scope="gpu")
            missing = missing | (there & (found < READY))
        until = item + gl.min(gl.where(missing, lanes, 32), 0)
    fence_async_global()
    return until


@gluon.jit
def copy_tiles(
    given, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BV: gl.constexpr,
    CACHED: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    STREAMED: gl.constexpr,
):  # fmt: skip
    """Fill the ring, stage after stage."""
    (
        q_chunks, k_chunks, v, T, P, k_edges, v_edges,
        from_start, strengths, to_end, clean, sequences, base, read_slots,
        q_ring, k_ring, v_ring, T_ring, P_ring, gate_ring, full, empty,
        n, head, block, first_item, last_item, q_head, k_head, v_head,
    ) = given  # fmt: skip
    ROWS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    rows = gl.arange(0, 64, layout=ROWS)
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    first_chunk = gl.load(sequences + n * 8 + 3)
    begin = gl.load(sequences + n * 8 + 4)
    first, last, stands = run_of(sequences, base, n, head, first_item, last_item, HV, CACHED)
    tail_begins = start
    if CACHED:
        held = (gl.load(read_slots + n) >= 0) & (start > 0)
        tail_begins = gl.where(held, stands, start)
    key_head = head // (HV // H)
    until = first
    for item in range(first, last):
        turn = item - first
        stage = turn % STAGES
        low = (first_chunk + item - begin) * 64
        local = item - first_item
        tile = local * HV + head
        source = row + low - start
        edge = 2 * n + gl.where(item > begin, 1, 0)
        if STREAMED:
            if item >= until:
                until = ready_until(
                    clean, item, first_item, last, head, key_head,
                    HV // H if HV > H else 0, HV,
                )  # fmt: skip
        inside = gl.load(from_start + tile * 64 + rows)
        strength = gl.load(strengths + tile * 64 + rows)
        outside = gl.load(to_end + tile * 64 + rows)
        first_spoiled = gl.load(clean + tile) - (READY if STREAMED else 0)
        upper = gl.minimum(first_spoiled, end - low)
        taking_part = gl.where((rows >= tail_begins - low) & (rows < upper), 1.0, 0.0)
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(bar, 64 * (2 * K + GROUPS * BV + 128) * 2)
        if TILES:
            key_tile = (local * H + key_head) * 64
            tma.async_copy_global_to_shared(k_chunks, [key_tile, 0], bar, k_ring.index(stage))
        elif (low < start) | (low + 64 > end):
            edge_tile = (edge * H + key_head) * 64
            tma.async_copy_global_to_shared(k_edges, [edge_tile, 0], bar, k_ring.index(stage))
        else:
            tma.async_copy_global_to_shared(
                k_chunks, [source, key_head * k_head], bar, k_ring.index(stage)
            )
        for group in gl.static_range(GROUPS):
            values = v_ring.index(stage * GROUPS + group)
            column = (block + group) * BV
            if CACHED:
                if low < start:
                    edge_tile = (edge * HV + head) * 64
                    tma.async_copy_global_to_shared(v_edges, [edge_tile, column], bar, values)
                else:
                    tma.async_copy_global_to_shared(
                        v, [source, head * v_head + column], bar, values
                    )
            else:
                tma.async_copy_global_to_shared(v, [source, head * v_head + column], bar, values)
        tma.async_copy_global_to_shared(T, [tile * 64, 0], bar, T_ring.index(stage))
        if TILES:
            key_tile = (local * H + key_head) * 64
            tma.async_copy_global_to_shared(q_chunks, [key_tile, 0], bar, q_ring.index(stage))
        else:
            tma.async_copy_global_to_shared(
                q_chunks, [source, key_head * q_head], bar, q_ring.index(stage)
            )
        tma.async_copy_global_to_shared(P, [tile * 64, 0], bar, P_ring.index(stage))
        gate_ring.index(stage * GATES).store(inside)
        gate_ring.index(stage * GATES + 1).store(strength)
        gate_ring.index(stage * GATES + 2).store(outside)
        gate_ring.index(stage * GATES + 3).store(taking_part)
        mbarrier.arrive(bar, count=1)


@gluon.jit
def store_state(S, tensor, k, v, sk, sv):
    """Store S [BV, K] at `tensor`, rounded to its dtype."""
    gl.store(tensor + k[None, :] * sk + v[:, None] * sv, S.to(tensor.dtype.element_ty))


@gluon.jit
def send_rows(
    ob, o_tile, o, o_rows, source, lower, upper, head, block, o_token, o_head,
    V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    """Rows [lower, upper) of a chunk's o^T [BV, 64]: whole chunks by one bulk copy."""
    tma.store_wait(0)
    o_tile.permute((1, 0)).store(ob)
    if (lower == 0) & (upper == 64):
        fence_async_shared()
        tma.async_copy_shared_to_global(o_rows, [source, head * o_head + block * BV], o_tile)
    else:
        LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        gl.thread_barrier()
        lines = o_tile.load(LINES)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
        columns = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, LINES))
        gl.store(
            o + (source + rows).to(gl.int64)[:, None] * o_token + head * o_head + columns[None, :],
            lines,
            mask=((rows >= lower) & (rows < upper))[:, None],
        )
        gl.thread_barrier()


@gluon.jit
def chain(
    given, group: gl.constexpr,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    old_k: gl.constexpr, old_v: gl.constexpr, new_k: gl.constexpr, new_v: gl.constexpr,
    snap_k: gl.constexpr, snap_v: gl.constexpr, HAS_STATE: gl.constexpr, HAS_READ: gl.constexpr,
    HAS_PRESENT: gl.constexpr, HAS_NEW: gl.constexpr, HAS_WRITE: gl.constexpr,
    HAS_SNAPSHOTS: gl.constexpr, HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr,
    CACHED: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Chunk after chunk: products, outputs, states of one block of V."""
    if group >= GROUPS:
        return
    (
        v, o, o_rows, k_tiles, log_decays, strengths, base, carry, sequences, items, old_state,
        read_slots, present, new_state, write_slots, snapshots, snapshot_slots, snapshot_position,
        snapshot_end, position, tail_end, tail_k, tail_v, tail_decay, tail_beta, q_ring, k_ring,
        v_ring, T_ring, P_ring, gate_ring, o_tiles, full, empty, n, head, first_block, first_item,
        last_item, parity, scale, v_token, v_head, o_token, o_head, old_n, old_h, new_n, new_h,
        snap_n, snap_h, snap_position, position_slot, tail_k_slot, tail_k_head, tail_v_slot,
        tail_v_head, tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    ) = given  # fmt: skip
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    BY_ROW: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    BY_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ROW)
    dtype: gl.constexpr = k_ring.dtype
    block = first_block + group
    o_tile = o_tiles.index(group)
    key_head = head // (HV // H)
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    first_chunk = gl.load(sequences + n * 8 + 3)
    begin = gl.load(sequences + n * 8 + 4)
    count = gl.load(sequences + n * 8 + 5)
    fold = gl.load(sequences + n * 8 + 6)
    opening = gl.load(sequences + n * 8 + 7)
    first, last, stands = run_of(sequences, base, n, head, first_item, last_item, HV, CACHED)
    ck = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))
    cv = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
    rows = gl.arange(0, 64, layout=COLUMN)

    # The state that the first chunk of this span meets, and where tail rows begin.
    tail_begins = start
    if CACHED:
        held = (gl.load(read_slots + n) >= 0) & (start > 0)
        tail_begins = gl.where(held, stands, start)
    S = gl.zeros((BV, K), gl.float32, STATE)
    if begin >= first_item:
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
            found = found + ck[None, :] * old_k + cv[:, None] * old_v
            S = gl.load(found, mask=there, other=0.0).to(gl.float32)
        if HAS_SNAPSHOTS:
            if (opening >= 0) & (stands == start // 64 * 64):
                target = opening.to(gl.int64)
                if HAS_SNAPSHOT_SLOTS:
                    target = gl.load(snapshot_slots + opening).to(gl.int64)
                if target >= 0:
                    kept = snapshots + target * snap_n + head * snap_h
                    store_state(S, kept, ck, cv, snap_k, snap_v)
                    if SNAPSHOTS_CACHED:
                        if block == 0:
                            gl.store(snapshot_position + target * snap_position + head, stands)
                            gl.store(snapshot_end + target * snap_position + head, stands)
    else:
        carried = carry + ((1 - parity) * HV + head) * (K * V)
        carried = carried + ck[None, :] * V + cv[:, None]
        S = gl.load(carried).to(gl.float32)

    write = n.to(gl.int64)
    if HAS_WRITE:
        write = gl.load(write_slots + n).to(gl.int64)

    ob = gl.zeros((BV, 64), dtype, ROW)
    for item in range(first, last):
        turn = item - first
        stage = turn % STAGES
        low = (first_chunk + item - begin) * 64
        left = gl.convert_layout(S.to(dtype), BY_ROW)
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        k_tile = k_ring.index(stage)
        x = warpgroup_mma(
            left, k_tile.permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
            use_acc=False, is_async=True,
        )  # fmt: skip
        y = warpgroup_mma(
            left, q_ring.index(stage).permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
            use_acc=False, is_async=True,
        )  # fmt: skip
        inside = gate_ring.index(stage * GATES).load(COLUMN)
        strength = gate_ring.index(stage * GATES + 1).load(COLUMN)
        outside = gate_ring.index(stage * GATES + 2).load(COLUMN)
        after = -1
        if HAS_SNAPSHOTS:
            after = gl.load(items + item * 3 + 2)
        whole = gl.sum(gl.where(rows == 63, inside, 0.0), 0)
        # Gamma_i0 is NaN from the first row on that is not finite.
        some_left_out = (low < tail_begins) | (low + 64 > end) | (whole != whole)
        vt = v_ring.index(stage * GROUPS + group).permute((1, 0)).load(ROW)
        # The branch also keeps what stands above it from sinking below the wait.
        if turn > 0:
            before = low - 64
            send_rows(
                ob, o_tile, o, o_rows, row + before - start, gl.maximum(start - before, 0), 64,
                head, block, o_token, o_head, V, BV,
            )  # fmt: skip
        x, left = warpgroup_mma_wait(1, deps=[x, left])
        r = (vt.to(gl.float32) - x * inside[None, :]) * strength[None, :]
        if some_left_out:
            taking_part = gate_ring.index(stage * GATES + 3).load(COLUMN)
            r = gl.where((taking_part != 0.0)[None, :], r, 0.0)
        right = gl.convert_layout(r.to(dtype), BY_ROW)
        v_new = warpgroup_mma(
            right, T_ring.index(stage).permute((1, 0)), gl.zeros((BV, 64), gl.float32, ROW),
            use_acc=False, is_async=True,
        )  # fmt: skip
        S = S * whole
        y, left = warpgroup_mma_wait(1, deps=[y, left])
        y = y * (inside * scale)[None, :]
        if STAGES > 1:
            if turn > 0:
                mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
        v_new, right = warpgroup_mma_wait(0, deps=[v_new, right])
        rounded = gl.convert_layout(v_new.to(dtype), BY_ROW)
        out = warpgroup_mma(rounded, P_ring.index(stage).permute((1, 0)), y, is_async=True)
        update = gl.convert_layout((v_new * outside[None, :]).to(dtype), BY_STATE)
        S = warpgroup_mma(update, k_tile, S, is_async=True)
        out, rounded = warpgroup_mma_wait(1, deps=[out, rounded])
        ob = out.to(dtype)
        S, update = warpgroup_mma_wait(0, deps=[S, update])
        if STAGES == 1:
            # With more stages, sending rows has brought the warps together before a stage is left.
            gl.thread_barrier()
            mbarrier.arrive(empty.index(0), count=1)
        if HAS_SNAPSHOTS:
            if after >= 0:
                target = after.to(gl.int64)
                if HAS_SNAPSHOT_SLOTS:
                    target = gl.load(snapshot_slots + after).to(gl.int64)
                if target >= 0:
                    kept = snapshots + target * snap_n + head * snap_h
                    store_state(S, kept, ck, cv, snap_k, snap_v)
                    if SNAPSHOTS_CACHED:
                        if block == 0:
                            gl.store(snapshot_position + target * snap_position + head, low + 64)
                            gl.store(snapshot_end + target * snap_position + head, low + 64)
        if CACHED:
            if low + 64 == fold:
                if write >= 0:
                    kept = new_state + write * new_n + head * new_h
                    store_state(S, kept, ck, cv, new_k, new_v)
    if last > first:
        low = (first_chunk + last - 1 - begin) * 64
        send_rows(
            ob, o_tile, o, o_rows, row + low - start, gl.maximum(start - low, 0),
            gl.minimum(end - low, 64), head, block, o_token, o_head, V, BV,
        )  # fmt: skip
    if last < begin + count:
        store_state(S, carry + (parity * HV + head) * (K * V), ck, cv, V, 1)
    elif HAS_NEW:
        if write >= 0:
            store_state(S, new_state + write * new_n + head * new_h, ck, cv, new_k, new_v)
    tma.store_wait(0)
    if CACHED:
        if write >= 0:
            keep_tail(
                v, k_tiles, log_decays, strengths, position, tail_end,
                tail_k, tail_v, tail_decay, tail_beta, n, head, key_head, block, write,
                row, start, end, first_chunk, begin, first, last, first_item, fold, count,
                v_token, v_head, position_slot, tail_k_slot, tail_k_head, tail_v_slot, tail_v_head,
                tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
                H, HV, K, V, BV,
            )  # fmt: skip


@gluon.jit
def keep_tail(
    v, k_tiles, log_decays, strengths, position, tail_end,
    tail_k, tail_v, tail_decay, tail_beta, n, head, key_head, block, write,
    row, start, end, first_chunk, begin, first, last, first_item, fold, count,
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
        low = (first_chunk + item - begin) * 64
        if (item >= first) & (low >= fold):
            at = low + rows
            new = (at >= start) & (at < end)
            local = item - first_item
            tile = (local * HV + head).to(gl.int64)
            key_tile = (local * H + key_head).to(gl.int64)
            ring = (at % tail_rows).to(gl.int64)
            source = (row + at - start).to(gl.int64)
            there = new[:, None]
            values = gl.load(
                v + source[:, None] * v_token + head * v_head + in_block[None, :],
                mask=there, other=0.0,
            )  # fmt: skip
            kept_v = tail_v + write * tail_v_slot + head * tail_v_head
            gl.store(kept_v + ring[:, None] * V + in_block[None, :], values, mask=there)
            if block == 0:
                if head % (HV // H) == 0:
                    square = key_tile * (64 * K) + rows[:, None] * K + channels[None, :]
                    keys = gl.load(k_tiles + square)
                    kept_k = tail_k + write * tail_k_slot + key_head * tail_k_head
                    gl.store(
                        kept_k + ring[:, None] * K + channels[None, :],
                        keys,
                        mask=new[:, None],
                    )
                decays = tail_decay + write * tail_decay_slot + head * tail_decay_head
                gl.store(decays + ring, gl.load(log_decays + tile * 64 + rows), mask=new)
                betas = tail_beta + write * tail_beta_slot + head * tail_beta_head
                gl.store(betas + ring, gl.load(strengths + tile * 64 + rows), mask=new)
    if (block == 0) & (last == begin + count):
        gl.store(position + write * position_slot + head, fold)
        gl.store(tail_end + write * position_slot + head, end)


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def scan_kernel(
    q_chunks, k_chunks, v_rows, T, P, o_rows, k_edge_tiles, v_edge_tiles, q_rows, k_rows,
    q, k, v, o, T_rows, P_rows, q_tiles, k_tiles, k_edges, v_edges,
    sums, from_start, to_end, log_decays, strengths, clean, base, carry, sequences, items, slots,
    old_state, read_slots, present, new_state, write_slots,
    snapshots, snapshot_slots, snapshot_position, snapshot_end,
    position, tail_end, tail_k, tail_v, tail_decay, tail_beta,
    first_item, last_item, parity, scale,
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
    HAS_SNAPSHOT_SLOTS: gl.constexpr, SNAPSHOTS_CACHED: gl.constexpr, CACHED: gl.constexpr,
    NORMALISE: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    PREPARERS: gl.constexpr,
):  # fmt: skip
    """One program per (block, head, sequence), behind PREPARERS that make T and P meanwhile.

    q_chunks .. k_rows are descriptors.
    """
    if PREPARERS > 0:
        if gl.program_id(0) < PREPARERS:
            rows = q_rows, k_rows, v_rows, sequences, items, first_item, q_head, k_head, v_head
            given = (
                T, P, T_rows, P_rows,
                q, k, v, q_tiles, k_tiles, k_edges, v_edges, tail_k, tail_v,
                sums, from_start, strengths, clean, base, sequences, items, slots,
                first_item, scale, q_token, q_head, k_token, k_head, v_token, v_head,
                tail_k_slot, tail_k_head, tail_v_slot, tail_v_head, tail_rows,
            )  # fmt: skip
            first = gl.program_id(0) * 3
            count = last_item - first_item
            a = scratch(q.dtype.element_ty, K, True)
            b = scratch(q.dtype.element_ty, K, True)
            c = scratch(q.dtype.element_ty, K, True)
            gl.thread_barrier()
            gl.warp_specialize(
                [
                    (prepare_items, (
                        rows, given, a, first, PREPARERS * 3, count,
                        H, HV, K, V, NORMALISE, CACHED, TILES,
                    )),
                    (prepare_items, (
                        rows, given, b, first + 1, PREPARERS * 3, count,
                        H, HV, K, V, NORMALISE, CACHED, TILES,
                    )),
                    (prepare_items, (
                        rows, given, c, first + 2, PREPARERS * 3, count,
                        H, HV, K, V, NORMALISE, CACHED, TILES,
                    )),
                ],
                [4, 4],
                [168, 168],
            )  # fmt: skip
            return
    program = gl.program_id(0) - PREPARERS
    block = program % (V // BV // GROUPS) * GROUPS
    head = program // (V // BV // GROUPS) % HV
    n = program // (V // BV // GROUPS * HV)
    begin = gl.load(sequences + n * 8 + 4)
    count = gl.load(sequences + n * 8 + 5)
    first = gl.maximum(begin, first_item)
    last = gl.minimum(begin + count, last_item)
    if (first > last) | ((first == last) & (count > 0)):
        return
    dtype: gl.constexpr = q.dtype.element_ty
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, K], q_chunks.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, K], k_chunks.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, 64, BV], v_rows.layout)
    T_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], T.layout)
    P_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], P.layout)
    o_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 64, BV], o_rows.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gate_ring = gl.allocate_shared_memory(gl.float32, [STAGES * GATES, 64], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    given = (
        v, o, o_rows, k_tiles, log_decays, strengths, base, carry, sequences, items, old_state,
        read_slots, present, new_state, write_slots, snapshots, snapshot_slots, snapshot_position,
        snapshot_end, position, tail_end, tail_k, tail_v, tail_decay, tail_beta, q_ring, k_ring,
        v_ring, T_ring, P_ring, gate_ring, o_tiles, full, empty, n, head, block, first_item,
        last_item, parity, scale, v_token, v_head, o_token, o_head, old_n, old_h, new_n, new_h,
        snap_n, snap_h, snap_position, position_slot, tail_k_slot, tail_k_head, tail_v_slot,
        tail_v_head, tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    )  # fmt: skip
    copied = (
        q_chunks, k_chunks, v_rows, T, P, k_edge_tiles, v_edge_tiles,
        from_start, strengths, to_end, clean, sequences, base, read_slots,
        q_ring, k_ring, v_ring, T_ring, P_ring, gate_ring, full, empty,
        n, head, block, first_item, last_item, q_head, k_head, v_head,
    )  # fmt: skip
    if STAGES == 1:
        gl.warp_specialize(
            [
                (chain, (
                    given, 0, H, HV, K, V, BV, old_k, old_v, new_k, new_v, snap_k, snap_v,
                    HAS_STATE, HAS_READ, HAS_PRESENT, HAS_NEW, HAS_WRITE, HAS_SNAPSHOTS,
                    HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED, CACHED, STAGES, GROUPS,
                )),
                (copy_tiles, (
                    copied, H, HV, K, BV, CACHED, TILES, STAGES, GROUPS, PREPARERS > 0,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (chain, (
                    given, 0, H, HV, K, V, BV, old_k, old_v, new_k, new_v, snap_k, snap_v,
                    HAS_STATE, HAS_READ, HAS_PRESENT, HAS_NEW, HAS_WRITE, HAS_SNAPSHOTS,
                    HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED, CACHED, STAGES, GROUPS,
                )),
                (chain, (
                    given, 1, H, HV, K, V, BV, old_k, old_v, new_k, new_v, snap_k, snap_v,
                    HAS_STATE, HAS_READ, HAS_PRESENT, HAS_NEW, HAS_WRITE, HAS_SNAPSHOTS,
                    HAS_SNAPSHOT_SLOTS, SNAPSHOTS_CACHED, CACHED, STAGES, GROUPS,
                )),
                (copy_tiles, (
                    copied, H, HV, K, BV, CACHED, TILES, STAGES, GROUPS, PREPARERS > 0,
                )),
            ],
            [4, 1],
            [240, 24] if GROUPS == 2 else [24, 96],
        )  # fmt: skip
