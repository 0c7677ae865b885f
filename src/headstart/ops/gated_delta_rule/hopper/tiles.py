"""What the scan's other warps do: bring tiles of chunk after chunk into a ring in shared memory.

One warp has tiles copied whole; two or four make them what the chain of products takes: rows of k
are normalised, rows of a tail come from the cache, those of other sequences are cleared, and rows
of v that are not finite are found.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# ruff: noqa: SIM102 (an outer test of a constant is decided when the kernel is compiled)

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from headstart.ops.gated_delta_rule import cutting
from headstart.ops.gated_delta_rule.hopper.gluon import copy_in, reinterpret, thread_barrier
from headstart.ops.gated_delta_rule.hopper.prepare import READY

GATES = gl.constexpr(6)
"""Vectors of 64 a stage: Gamma_i0, beta, Gamma_Ci, whether a row takes part; and where rows are
normalised what scales those of k, and those of q."""
OPENS = gl.constexpr(cutting.OPENS)


@gluon.jit
def piece_of(pieces, at, sequences, base, head, HV: gl.constexpr, CACHED: gl.constexpr):
    """Row `at` of the table of pieces, and where the state of its sequence stands.

    Returns (sequence, first item, first item that is computed, end of its items, position of the
    first item's first row, row of `carry` before, row after, position of the state). A sequence of
    -1 is none.
    """
    piece = pieces + at * 6
    n = gl.load(piece)
    first = gl.load(piece + 1)
    last = gl.load(piece + 2)
    first_low = gl.load(piece + 3)
    before = gl.load(piece + 4)
    after = gl.load(piece + 5)
    start = gl.load(sequences + gl.maximum(n, 0) * 8 + 1)
    stands = start
    begins = first
    if CACHED:
        stands = start // 64 * 64
        if last > first:
            stands = gl.load(base + n * HV + head)
            if before == OPENS:
                # A start that is not legal in its slot may spoil results; nobody waits for it.
                begins = first + gl.maximum(stands - first_low, 0) // 64
    return n, first, begins, last, first_low, before, after, stands


@gluon.jit
def fence_async_global():
    """What other processors stored in the ordinary way is seen by later bulk copies."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ready_until(clean, item, first_item, last, head, HV: gl.constexpr):
    """Wait until `item` is prepared; the first of the next 32 that is not yet, at most `last`."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, layout=LANES)
    tiles = clean + (item - first_item + lanes) * HV
    there = item + lanes < last
    nothing = gl.zeros([32], gl.int32, LANES)
    until = item
    while until == item:
        found = gl.atomic_or(tiles + head, nothing, mask=there, sem="acquire", scope="gpu")
        missing = there & (found < READY)
        until = item + gl.min(gl.where(missing, lanes, 32), 0)
    fence_async_global()
    return until


@gluon.jit
def copy_tiles(
    given, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BV: gl.constexpr,
    CACHED: gl.constexpr, NORMALISE: gl.constexpr, HAS_SNAPSHOTS: gl.constexpr,
    HAS_SNAPSHOT_SLOTS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    STREAMED: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """Fill the ring, stage after stage."""
    (
        q_rows, k_rows, v_rows, T, P, k_norms, q_reads,
        from_start, strengths, to_end, clean, sequences, items, pieces, base, read_slots,
        snapshot_slots, q_ring, k_ring, v_ring, T_ring, P_ring, gate_ring, kept_ring, landed, empty,
        at_piece, head, block, first_item, q_head, k_head, v_head,
    ) = given  # fmt: skip
    ROWS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    rows = gl.arange(0, 64, layout=ROWS)
    n, first, begins, last, first_low, _before, _after, stands = piece_of(
        pieces, at_piece, sequences, base, head, HV, CACHED
    )
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    tail_begins = start
    if CACHED:
        tail_begins = gl.where((gl.load(read_slots + n) >= 0) & (start > 0), stands, start)
    key_head = head // (HV // H)
    BYTES: gl.constexpr = 64 * (K + 64 + GROUPS * BV + (0 if MAPS else K + 64)) * 2
    until = begins
    for item in tl.range(begins, last, disable_licm=True):
        turn = item - begins
        stage = turn % STAGES
        low = first_low + (item - first) * 64
        tile = (item - first_item) * HV + head
        source = row + low - start
        if STREAMED:
            if item >= until:
                until = ready_until(clean, item, first_item, last, head, HV)
        inside = gl.load(from_start + tile * 64 + rows)
        strength = gl.load(strengths + tile * 64 + rows)
        outside = gl.load(to_end + tile * 64 + rows)
        if NORMALISE:
            norms = gl.load(k_norms + tile * 64 + rows)
            if not MAPS:
                reads = gl.load(q_reads + tile * 64 + rows)
        if HAS_SNAPSHOTS and not MAPS:
            # The chain would wait for its own load, which ends in a uniform register at once.
            kept = gl.load(items + item * 3 + 2)
            if HAS_SNAPSHOT_SLOTS:
                kept = gl.load(snapshot_slots + gl.maximum(kept, 0), mask=kept >= 0, other=-1)
        first_spoiled = gl.load(clean + tile) - (READY if STREAMED else 0)
        upper = gl.minimum(first_spoiled, end - low)
        taking_part = gl.where((rows >= tail_begins - low) & (rows < upper), 1.0, 0.0)
        bar = landed.index(stage)
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        copy_in(k_rows, [source, key_head * k_head], bar, k_ring.index(stage))
        for group in gl.static_range(GROUPS):
            column = head * v_head + (block + group) * BV
            copy_in(v_rows, [source, column], bar, v_ring.index(stage * GROUPS + group))
        copy_in(T, [tile * 64, 0], bar, T_ring.index(stage))
        if not MAPS:
            copy_in(q_rows, [source, key_head * q_head], bar, q_ring.index(stage))
            copy_in(P, [tile * 64, 0], bar, P_ring.index(stage))
        gate_ring.index(stage * GATES).store(inside)
        gate_ring.index(stage * GATES + 1).store(strength)
        gate_ring.index(stage * GATES + 2).store(outside)
        gate_ring.index(stage * GATES + 3).store(taking_part)
        if NORMALISE:
            gate_ring.index(stage * GATES + 4).store(norms)
            if not MAPS:
                gate_ring.index(stage * GATES + 5).store(reads)
        if HAS_SNAPSHOTS and not MAPS:
            kept_ring.index(stage).store(gl.zeros([64], gl.int32, ROWS) + kept.to(gl.int32))
        thread_barrier()
        mbarrier.arrive(bar, count=1)


@gluon.jit
def normalise_keys(k_tile, norms, K: gl.constexpr, WARPS: gl.constexpr):
    """Multiply rows of k by what `prepare` found, in the same way."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    for part in gl.static_range(0, 64, 16):
        lines = k_tile.slice(part, 16)
        x = lines.load(LINES)
        by = norms.slice(part, 16).load(gl.SliceLayout(1, LINES))
        lines.store((x.to(gl.float32) * by[:, None]).to(x.dtype))


@gluon.jit
def own_rows(
    tile, kept, tail_rows, first_column, low, start, end, tail_begins,
    COLUMNS: gl.constexpr, WIDTH: gl.constexpr, CACHED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Rows of a tail from the cache, at kept [R, WIDTH]; rows of other sequences are cleared."""
    LINES: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [WARPS, 1], [1, 0]
    )
    columns = (first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LINES)))[None, :]
    for part in gl.static_range(0, 64, 8):
        at = low + part + gl.arange(0, 8, layout=gl.SliceLayout(1, LINES))
        lines = tile.slice(part, 8)
        x = lines.load(LINES)
        new = ((at >= start) & (at < end))[:, None]
        x = gl.where(new, x, gl.zeros([8, COLUMNS], x.dtype, LINES))
        if CACHED:
            old = ((at >= tail_begins) & (at < start))[:, None]
            held = gl.load(kept + (at % tail_rows)[:, None] * WIDTH + columns, mask=old, other=0.0)
            x = gl.where(old, held, x)
        lines.store(x)


@gluon.jit
def odd_words(tile, BV: gl.constexpr, WARPS: gl.constexpr):
    """A tile in words of two numbers: not 0 where one of them is not finite, by row."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    half: gl.constexpr = tile.dtype == gl.float16
    exponents: gl.constexpr = 0x7C007C00 if half else 0x7F807F80
    carry: gl.constexpr = 0x04000400 if half else 0x00800080
    words = reinterpret(tile, gl.int32, [64, BV // 2], WORDS).load(LINES)
    # An exponent of ones overflows into its number's sign.
    return ((words & exponents) + carry) & -0x7FFF8000


@gluon.jit
def finish_tiles(
    given, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
    CACHED: gl.constexpr, NORMALISE: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Make every stage that has landed what the chain takes."""
    (
        tail_k, tail_v, sequences, pieces, base, read_slots, k_ring, v_ring, gate_ring, landed,
        full, at_piece, head, block,
        tail_k_slot, tail_k_head, tail_v_slot, tail_v_head, tail_rows,
    ) = given  # fmt: skip
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
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
    keys = tail_k + slot * tail_k_slot + head // (HV // H) * tail_k_head
    values = tail_v + slot * tail_v_slot + head * tail_v_head
    for item in tl.range(begins, last, disable_licm=True):
        turn = item - begins
        stage = turn % STAGES
        low = first_low + (item - first) * 64
        mbarrier.wait(landed.index(stage), turn // STAGES & 1)
        k_tile = k_ring.index(stage)
        if NORMALISE:
            normalise_keys(k_tile, gate_ring.index(stage * GATES + 4), K, WARPS)
        if (low < start) | (low + 64 > end):
            own_rows(
                k_tile, keys, tail_rows, 0, low, start, end, tail_begins, K, K, CACHED, WARPS
            )  # fmt: skip
            for group in gl.static_range(GROUPS):
                own_rows(
                    v_ring.index(stage * GROUPS + group), values, tail_rows, (block + group) * BV,
                    low, start, end, tail_begins, BV, V, CACHED, WARPS,
                )  # fmt: skip
        odd = odd_words(v_ring.index(stage * GROUPS), BV, WARPS)
        if GROUPS == 2:
            odd = odd | odd_words(v_ring.index(stage * GROUPS + 1), BV, WARPS)
        if gl.reduce_or(odd.reshape([32 * BV]), 0) != 0:
            # From the first such row on rows count as empty, and what they read is NaN.
            spoiled = gl.reduce_or(odd, 1) != 0
            row = gl.arange(0, 64, layout=spoiled.type.layout)
            upper = gl.min(gl.where(spoiled, row, 64), 0)
            kept = gl.arange(0, 64, layout=ROWS) < upper
            inside = gate_ring.index(stage * GATES)
            taking_part = gate_ring.index(stage * GATES + 3)
            inside.store(gl.where(kept, inside.load(ROWS), float("nan")))
            taking_part.store(gl.where(kept, taking_part.load(ROWS), 0.0))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def idle(at_piece):
    """A group of warps that the split needs and that does nothing."""
    return
