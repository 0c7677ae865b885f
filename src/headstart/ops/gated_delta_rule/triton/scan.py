"""Serial over the chunks of a sequence: outputs and states, for one value head and a block of V.

    v_new = T beta (v - Gamma_i0 k S)    o = scale Gamma_i0 q S + P v_new
    S <- Gamma_C0 S + k^T (Gamma_Ci v_new)

[Gated Delta Networks, arXiv 2412.06464.] S is kept in float32 registers, transposed [BV, K], so it
and v_new are first operands straight from registers; columns of V never mix. T, P and the decays
come from `prepare`. A program runs a piece, see `cutting.py`: between pieces S goes through `carry`
in float32. MAPS: only what pieces do to states is asked for. A cache's tail, position and end are
written here, where no program reads them: `prepare` has left a copy of the position in `base`.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: SIM102 (an outer test of a constant is decided when the kernel is compiled)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headstart.ops.gated_delta_rule import cutting
from headstart.runtime.launcher import reads_descriptors
from headstart.runtime.static import Target

VARYING = ["first_item", "first_piece"]
SLOTS = ["read_slots", "write_slots", "present", "snapshot_slots"]
OPENS, IDENTITY = tl.constexpr(cutting.OPENS), tl.constexpr(cutting.IDENTITY)
CLOSES = tl.constexpr(cutting.CLOSES)


@dataclass(frozen=True)
class ScanConfig:
    """How the scan is built: columns of V that one program holds, its warps and stages."""

    BV: int
    warps: int
    stages: int


def scan_configuration(K: int, dtype: torch.dtype, target: Target) -> ScanConfig:
    """The one configuration of a kind of call; it never depends on lengths or on the batch.

    Measured on Hopper alone; the others come from static figures (no vector spills for 16-bit
    inputs, but on gfx1151) and have not run.
    """
    wide = dtype == torch.float32 or K > 128
    if target.backend == "hip":
        warps = 4 if target.warp_size == 64 else 16
        return ScanConfig(BV=16, warps=warps, stages=1)
    if not reads_descriptors(target):
        return ScanConfig(BV=32, warps=8, stages=1 if wide else 2)
    if target.arch == 90:
        # Of K = 64, 96 and 256 tiles of 16 columns take 9, 11 and 17 % less time than those of 32
        # on an H200; of 128 those of 64 were the fastest on long prompts. Of 256 eight warps take
        # 25 % less than four, and two stages 28 % less than one.
        if dtype == torch.float32:
            return ScanConfig(BV=64, warps=4, stages=1)
        if K > 128:
            return ScanConfig(BV=16, warps=8, stages=2)
        return ScanConfig(BV=64 if K == 128 else 16, warps=4, stages=3)
    # A float32 product is three, on 100 each with an accumulator in tensor memory: with tiles of 64
    # columns Triton 3.6 needs 576 to 1,216 of its 512 columns, and compiles to a trap. Tiles of 16
    # do without, and of those that do, eight warps spill the least: K = 128 39 words.
    return ScanConfig(BV=16 if dtype == torch.float32 else 64, warps=8, stages=1 if wide else 3)


@triton.jit
def store_state(state, tensor, k, v, K: tl.constexpr, V: tl.constexpr, sk, sv):
    """Store S [BV, K] at `tensor`, rounded to its dtype."""
    tl.store(
        tensor + k[None, :] * sk + v[:, None] * sv,
        state.to(tensor.dtype.element_ty),
        mask=(v[:, None] < V) & (k[None, :] < K),
    )


@triton.jit
def tile_of(x, row, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DESCRIBED: tl.constexpr):
    """Rows [row, row + 64) and COLUMNS columns of x [rows, WIDTH]: a descriptor or a pointer."""
    if DESCRIBED:
        found = x.load([row, column])
    else:
        i = (row + tl.arange(0, 64)).to(tl.int64)
        found = tl.load(x + i[:, None] * WIDTH + column + tl.arange(0, COLUMNS)[None, :])
    return found


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def scan_kernel(
    q,
    k,
    v,
    o,
    T,
    P,
    k_tiles,
    k_starts,
    v_tiles,
    clean,
    from_start,
    to_end,
    whole_decay,
    log_decays,
    strengths,
    base,
    carry,
    sequences,
    items,
    pieces,
    old_state,
    read_slots,
    present,
    new_state,
    write_slots,
    snapshots,
    snapshot_slots,
    snapshot_position,
    snapshot_end,
    position,
    tail_end,
    tail_k,
    tail_v,
    tail_decay,
    tail_beta,
    first_item,
    first_piece,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    o_token,
    o_head,
    old_n,
    old_h,
    new_n,
    new_h,
    snap_n,
    snap_h,
    snap_position,
    position_slot,
    tail_k_slot,
    tail_k_head,
    tail_v_slot,
    tail_v_head,
    tail_decay_slot,
    tail_decay_head,
    tail_beta_slot,
    tail_beta_head,
    tail_rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WIDTH: tl.constexpr,
    DESCRIBED: tl.constexpr,
    old_k: tl.constexpr,
    old_v: tl.constexpr,
    new_k: tl.constexpr,
    new_v: tl.constexpr,
    snap_k: tl.constexpr,
    snap_v: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_READ: tl.constexpr,
    HAS_PRESENT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_WRITE: tl.constexpr,
    HAS_SNAPSHOTS: tl.constexpr,
    HAS_SNAPSHOT_SLOTS: tl.constexpr,
    SNAPSHOTS_CACHED: tl.constexpr,
    CACHED: tl.constexpr,
    TILES: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    MAPS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (block of V, value head, piece).

    Strides within a state are fixed when it is compiled: addresses that a rare branch takes then
    cost no registers in the loop.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    piece = pieces + (first_piece + tl.program_id(2)) * 6
    n = tl.load(piece)
    if n < 0:
        return
    first = tl.load(piece + 1)
    last = tl.load(piece + 2)
    first_low = tl.load(piece + 3)
    before = tl.load(piece + 4)
    after_all = tl.load(piece + 5)
    key_head = head // (HV // H)
    row = tl.load(sequences + n * 8)
    start = tl.load(sequences + n * 8 + 1)
    length = tl.load(sequences + n * 8 + 2)
    count = tl.load(sequences + n * 8 + 5)
    fold = tl.load(sequences + n * 8 + 6)
    opening = tl.load(sequences + n * 8 + 7)
    end = start + length
    dtype = o.dtype.element_ty
    rows = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv = block * BV + tl.arange(0, BV)
    in_k = ck[None, :] < K
    in_v = cv < V
    in_state = in_v[:, None] & in_k

    # The state that the first chunk of this piece meets, and where that state stands.
    S = tl.zeros((BV, BK), tl.float32)
    stands = start
    if CACHED:
        stands = start // 64 * 64
        if count > 0:
            stands = tl.load(base + n * HV + head)
    begins = first
    if before == OPENS:
        slot = n.to(tl.int64)
        if HAS_READ:
            slot = tl.load(read_slots + n).to(tl.int64)
        there = slot >= 0
        if HAS_PRESENT:
            there = there & (tl.load(present + n) != 0)
        if CACHED:
            there = there & (start > 0) & (stands > 0)
            begins += (stands - first_low) // 64 if count > 0 else 0
        if HAS_STATE:
            slot = tl.maximum(slot, 0)
            if there:
                S = tl.load(
                    old_state
                    + slot * old_n
                    + head * old_h
                    + ck[None, :] * old_k
                    + cv[:, None] * old_v,
                    mask=in_state,
                    other=0.0,
                ).to(tl.float32)
        if HAS_SNAPSHOTS and not MAPS:
            if (opening >= 0) & (stands == start // 64 * 64):
                target = opening.to(tl.int64)
                if HAS_SNAPSHOT_SLOTS:
                    target = tl.load(snapshot_slots + opening).to(tl.int64)
                if target >= 0:
                    store_state(
                        S, snapshots + target * snap_n + head * snap_h, ck, cv, K, V, snap_k, snap_v
                    )
                    if SNAPSHOTS_CACHED:
                        if block == 0:
                            tl.store(snapshot_position + target * snap_position + head, stands)
                            tl.store(snapshot_end + target * snap_position + head, stands)
    elif before >= 0:
        S = tl.load(
            carry + (before * HV + head).to(tl.int64) * (K * V) + ck[None, :] * V + cv[:, None],
            mask=in_state,
            other=0.0,
        ).to(tl.float32)
    elif before == IDENTITY:
        S = tl.where(ck[None, :] == cv[:, None], 1.0, 0.0)

    write = n.to(tl.int64)
    if HAS_WRITE:
        write = tl.load(write_slots + n).to(tl.int64)

    for item in tl.range(begins, last, num_stages=STAGES):
        low = first_low + (item - first) * 64
        local = item - first_item
        tile = local * HV + head
        key_tile = local * H + key_head
        at = low + rows
        new = (at >= start) & (at < end)
        source = (row + at - start).to(tl.int64)
        t = tile_of(T, tile * 64, 0, 64, 64, DESCRIBED)
        if not MAPS:
            p = tile_of(P, tile * 64, 0, 64, 64, DESCRIBED)
        # Rows of other sequences and those that are not finite may be NaN in k, v or Gamma_i0.
        takes_part = rows < tl.load(clean + tile)
        if TILES:
            vv = tile_of(v_tiles, tile * 64, block * BV, WIDTH, BV, DESCRIBED)
        else:
            takes_part = takes_part & new
            if DESCRIBED:
                vv = tl.reshape(v_tiles.load([row + low - start, head, block * BV]), (64, BV))
            else:
                vv = tl.load(
                    v + source[:, None] * v_token + head * v_head + cv[None, :],
                    mask=new[:, None] & in_v[None, :],
                    other=0.0,
                )
        if PER_CHANNEL:
            # Decayed already, so of every value head: Gamma_Ci k, Gamma_i0 k and Gamma_i0 q.
            kk = tile_of(k, tile * 64, 0, BK, BK, DESCRIBED)
            k_start = tile_of(k_starts, tile * 64, 0, BK, BK, DESCRIBED)
            if not MAPS:
                qq = tile_of(q, tile * 64, 0, BK, BK, DESCRIBED)
        elif TILES:
            kk = tile_of(k, key_tile * 64, 0, BK, BK, DESCRIBED)
            if not MAPS:
                qq = tile_of(q, key_tile * 64, 0, BK, BK, DESCRIBED)
        else:
            # Rows of other sequences would meet zeros of v_new, but 0 * NaN is NaN: masked.
            kk = tl.load(
                k + source[:, None] * k_token + key_head * k_head + ck[None, :],
                mask=new[:, None] & in_k,
                other=0.0,
            )
            if not MAPS:
                if DESCRIBED:
                    qq = tl.reshape(q.load([row + low - start, key_head, 0]), (64, BK))
                else:
                    qq = tl.load(
                        q + source[:, None] * q_token + key_head * q_head + ck[None, :],
                        mask=new[:, None] & in_k,
                        other=0.0,
                    )
        inside = tl.load(from_start + tile * 64 + rows)
        whole = tl.load(from_start + tile * 64 + 63)
        b = tl.load(strengths + tile * 64 + rows)
        if PER_CHANNEL:
            whole = whole * tl.load(whole_decay + tile * BK + ck)[None, :]
        else:
            outside = tl.load(to_end + tile * 64 + rows)
            k_start = kk
        s = S.to(dtype)
        x = tl.dot(s, tl.trans(k_start), input_precision=PRECISION)
        if not MAPS:
            y = tl.dot(s, tl.trans(qq), input_precision=PRECISION)
        values = tl.trans(vv).to(tl.float32)
        if MAPS:
            if before == IDENTITY:
                values = tl.zeros((BV, 64), tl.float32)
        r = (values - x * inside[None, :]) * b[None, :]
        r = tl.where(takes_part[None, :], r, 0.0).to(dtype)
        v_new = tl.dot(r, tl.trans(t), input_precision=PRECISION)
        update = v_new if PER_CHANNEL else v_new * outside[None, :]
        S = tl.dot(update.to(dtype), kk, S * whole, input_precision=PRECISION)
        if not MAPS:
            y = y * (inside * scale)[None, :]
            out = tl.dot(v_new.to(dtype), tl.trans(p), y, input_precision=PRECISION)
            tl.store(
                o + source[:, None] * o_token + head * o_head + cv[None, :],
                tl.trans(out).to(dtype),
                mask=new[:, None] & in_v[None, :],
            )
        if HAS_SNAPSHOTS and not MAPS:
            after = tl.load(items + item * 3 + 2)
            if after >= 0:
                target = after.to(tl.int64)
                if HAS_SNAPSHOT_SLOTS:
                    target = tl.load(snapshot_slots + after).to(tl.int64)
                if target >= 0:
                    store_state(
                        S, snapshots + target * snap_n + head * snap_h, ck, cv, K, V, snap_k, snap_v
                    )
                    if SNAPSHOTS_CACHED:
                        if block == 0:
                            tl.store(snapshot_position + target * snap_position + head, low + 64)
                            tl.store(snapshot_end + target * snap_position + head, low + 64)
        if CACHED:
            if low + 64 == fold:
                if write >= 0:
                    store_state(
                        S, new_state + write * new_n + head * new_h, ck, cv, K, V, new_k, new_v
                    )
    if after_all >= 0:
        kept = carry + (after_all * HV + head).to(tl.int64) * (K * V)
        store_state(S, kept, ck, cv, K, V, V, 1)
    elif HAS_NEW and not MAPS:
        if (after_all == CLOSES) & (write >= 0):
            store_state(S, new_state + write * new_n + head * new_h, ck, cv, K, V, new_k, new_v)

    if CACHED:
        if write >= 0:
            # Rows past the state are the tail; it lies in the last two chunks.
            for back in tl.static_range(2):
                item = last - 2 + back
                low = first_low + (item - first) * 64
                if (item >= begins) & (low >= fold):
                    at = low + rows
                    new = (at >= start) & (at < end)
                    local = item - first_item
                    tile = (local * HV + head).to(tl.int64)
                    key_tile = (local * H + key_head).to(tl.int64)
                    ring = (at % tail_rows).to(tl.int64)
                    source = (row + at - start).to(tl.int64)
                    values = tl.load(
                        v + source[:, None] * v_token + head * v_head + cv[None, :],
                        mask=new[:, None] & in_v[None, :],
                    )
                    tl.store(
                        tail_v
                        + write * tail_v_slot
                        + head * tail_v_head
                        + ring[:, None] * V
                        + cv[None, :],
                        values,
                        mask=new[:, None] & in_v[None, :],
                    )
                    if block == 0:
                        if head % (HV // H) == 0:
                            kept_k = tail_k + write * tail_k_slot + key_head * tail_k_head
                            for c in tl.range(0, BK, 16, num_stages=1):
                                cc = (c + tl.arange(0, 16))[None, :]
                                square = key_tile * (64 * BK) + rows[:, None] * BK + cc
                                keys = tl.load(k_tiles + square)
                                there = new[:, None] & (cc < K)
                                tl.store(kept_k + ring[:, None] * K + cc, keys, mask=there)
                        decays = tail_decay + write * tail_decay_slot + head * tail_decay_head
                        if PER_CHANNEL:
                            for c in tl.range(0, BK, 16, num_stages=1):
                                cc = (c + tl.arange(0, 16))[None, :]
                                square = tile * (64 * BK) + rows[:, None] * BK + cc
                                kept_decay = tl.load(log_decays + square)
                                there = new[:, None] & (cc < K)
                                tl.store(decays + ring[:, None] * K + cc, kept_decay, mask=there)
                        else:
                            tl.store(
                                decays + ring, tl.load(log_decays + tile * 64 + rows), mask=new
                            )
                        tl.store(
                            tail_beta + write * tail_beta_slot + head * tail_beta_head + ring,
                            tl.load(strengths + tile * 64 + rows),
                            mask=new,
                        )
            if (block == 0) & (after_all == CLOSES):
                tl.store(position + write * position_slot + head, fold)
                tl.store(tail_end + write * position_slot + head, end)
