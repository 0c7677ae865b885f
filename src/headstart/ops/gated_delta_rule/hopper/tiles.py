"""What the scan's copying warp does: tiles of chunk after chunk into a ring in shared memory."""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# ruff: noqa: SIM102 (an outer test of a constant is decided when the kernel is compiled)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headstart.ops.gated_delta_rule import cutting
from headstart.ops.gated_delta_rule.hopper.gluon import copy_in
from headstart.ops.gated_delta_rule.hopper.prepare import READY

GATES = gl.constexpr(4)
"""Vectors of 64 a stage: Gamma_i0, beta, Gamma_Ci, and whether a row takes part."""
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
                begins = first + (stands - first_low) // 64
    return n, first, begins, last, first_low, before, after, stands


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
def gather_values(
    v, tail_v, values, first_column, source, low, start, end, tail_begins, slot, head,
    v_token, v_head, tail_v_slot, tail_v_head, tail_rows, V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    """Rows of v of a chunk that begins with rows of a tail, to shared memory, by one warp."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    columns = (first_column + gl.arange(0, BV, layout=gl.SliceLayout(0, LINES)))[None, :]
    kept = tail_v + gl.maximum(slot, 0).to(gl.int64) * tail_v_slot + head * tail_v_head + columns
    new = v + source.to(gl.int64) * v_token + head * v_head + columns
    for part in gl.static_range(0, 64, 8):
        rows = part + gl.arange(0, 8, layout=gl.SliceLayout(1, LINES))
        at = low + rows
        old = ((at >= tail_begins) & (at < start))[:, None]
        there = ((at >= start) & (at < end))[:, None]
        lines = gl.load(new + rows[:, None] * v_token, mask=there, other=0.0)
        held = gl.load(kept + (at % tail_rows)[:, None] * V, mask=old, other=0.0)
        values.slice(part, 8).store(gl.where(old, held, lines))


@gluon.jit
def copy_tiles(
    given, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BV: gl.constexpr,
    V: gl.constexpr, CACHED: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, STREAMED: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """Fill the ring, stage after stage."""
    (
        q_chunks, k_chunks, v_rows, T, P, v, tail_v,
        from_start, strengths, to_end, clean, sequences, pieces, base, read_slots,
        q_ring, k_ring, v_ring, T_ring, P_ring, gate_ring, full, empty,
        at_piece, head, block, first_item, q_head, k_head, v_token, v_head,
        tail_v_slot, tail_v_head, tail_rows,
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
    slot = n
    if CACHED:
        slot = gl.load(read_slots + n)
        tail_begins = gl.where((slot >= 0) & (start > 0), stands, start)
    key_head = head // (HV // H)
    BYTES: gl.constexpr = 64 * (K + 64 + (0 if MAPS else K + 64)) * 2
    until = begins
    for item in range(begins, last):
        turn = item - begins
        stage = turn % STAGES
        low = first_low + (item - first) * 64
        local = item - first_item
        tile = local * HV + head
        source = row + low - start
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
        if CACHED:
            gathered = low < start
            mbarrier.expect(bar, BYTES, pred=gathered)
            mbarrier.expect(bar, BYTES + 64 * GROUPS * BV * 2, pred=low >= start)
        else:
            mbarrier.expect(bar, BYTES + 64 * GROUPS * BV * 2)
        key_tile = (local * H + key_head) * 64
        if TILES:
            copy_in(k_chunks, [key_tile, 0], bar, k_ring.index(stage))
        else:
            copy_in(k_chunks, [source, key_head * k_head], bar, k_ring.index(stage))
        for group in gl.static_range(GROUPS):
            values = v_ring.index(stage * GROUPS + group)
            column = (block + group) * BV
            if CACHED:
                if gathered:
                    gather_values(
                        v, tail_v, values, column, source, low, start, end, tail_begins, slot,
                        head, v_token, v_head, tail_v_slot, tail_v_head, tail_rows, V, BV,
                    )  # fmt: skip
                else:
                    copy_in(v_rows, [source, head * v_head + column], bar, values)
            else:
                copy_in(v_rows, [source, head * v_head + column], bar, values)
        copy_in(T, [tile * 64, 0], bar, T_ring.index(stage))
        if not MAPS:
            if TILES:
                copy_in(q_chunks, [key_tile, 0], bar, q_ring.index(stage))
            else:
                copy_in(q_chunks, [source, key_head * q_head], bar, q_ring.index(stage))
            copy_in(P, [tile * 64, 0], bar, P_ring.index(stage))
        gate_ring.index(stage * GATES).store(inside)
        gate_ring.index(stage * GATES + 1).store(strength)
        gate_ring.index(stage * GATES + 2).store(outside)
        gate_ring.index(stage * GATES + 3).store(taking_part)
        mbarrier.arrive(bar, count=1)
