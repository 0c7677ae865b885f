"""The reproducible kernel: a row's bits depend on its own sequence and positions alone.

Tiles of BN keys are anchored at position 0. Keys are reduced in blocks of PIECE consecutive
positions, each starting from nothing, its tiles from left to right; blocks are joined in order.
A block or tile in which a row sees no key leaves the row's bits as they are, so a prefix hit, a
step, another batch or more heads beside it change nothing. A block of tiles that lie whole among
the prefix or the new keys may be read through descriptors; all others are read key by key, from
both. A piece of a tile is one block, so that decoding joins the same states in the same order.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.triton.keys import read_scale
from headstart.ops.extend_attention.triton.rows import (
    facts_of,
    head_of,
    keep,
    read_queries,
    rows_of,
    tile_of,
)
from headstart.ops.extend_attention.triton.softmax import NOTHING, join
from headstart.ops.extend_attention.triton.sweep import clear, sweep, sweep_both, visible


@triton.jit
def span_of(
    run, queries, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of one run: visible positions, tiles that lie in it whole, and clear tiles.

    Without visible keys the first three are empty, somewhere.
    """
    start, count = run
    first, last = queries
    lower, upper = visible(first, last, start, count, window, CAUSAL, WINDOWED)
    sure, unsure = clear(first, last, start, count, window, CAUSAL, WINDOWED)
    whole = (tl.cdiv(start, BN), (start + count) // BN)
    unmasked = (tl.cdiv(start + sure, BN), (start + unsure) // BN)
    if MASKED:
        unmasked = (start, start)
    return start + lower, start + upper, whole, unmasked


@triton.jit
def sweep_old_or_both(
    acc, m, l, b_q, rows, old_run, new_run, span, in_old, old, new, places, tiles,  # noqa: E741
    new_column, numbers,
    FOUND: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr, UNIT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Absorb tiles from the prefix alone where that is described and has them whole, or of both."""
    if DESCRIBED:
        if in_old:
            unmasked = span[2]
            acc, m, l = sweep(  # noqa: E741
                acc, m, l, b_q, rows, (old_run[0], old_run[1], old_run[0]),
                (span[0], span[1], unmasked[0], unmasked[1]),
                (old[0], old[1], old[2], old[3], old[4], 0), (places, places, old[4]), tiles,
                numbers, FOUND, PAGE, True, CAUSAL and MASK != "all", WINDOWED, MASK == "all",
                False, D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
            )  # fmt: skip
        else:
            acc, m, l = sweep_both(  # noqa: E741
                acc, m, l, b_q, rows, old_run, new_run, span, old, new, places, new_column,
                numbers, FOUND, PAGE, NEW, UNIT, CAUSAL, WINDOWED, MASK,
                D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
            )  # fmt: skip
    else:
        acc, m, l = sweep_both(  # noqa: E741
            acc, m, l, b_q, rows, old_run, new_run, span, old, new, places, new_column,
            numbers, FOUND, PAGE, NEW, UNIT, CAUSAL, WINDOWED, MASK,
            D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
        )  # fmt: skip
    return acc, m, l


@triton.jit(
    do_not_specialize=["total", "listed", "window"],
    do_not_specialize_on_alignment=["places", "positions", "custom_mask"],
)
def unified_kernel(
    q, k, v, k_tiles, v_tiles, cache_k, cache_v, cache_k_tiles, cache_v_tiles, places,
    custom_mask, sinks, k_scale, v_scale, o, lse, part_acc, part_m, part_l, sequences, tiles,
    total, listed, window, inner, factor, k_number, v_number,
    q_token, q_head, k_token, k_head, v_token, v_head,
    o_token, o_head, o_channel, lse_token, lse_head,
    cache_k_page, cache_k_row, cache_k_head, cache_k_channel,
    cache_v_page, cache_v_row, cache_v_head, cache_v_channel, k_scale_head, v_scale_head,
    HQ: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
    FOUND: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr, UNIT: tl.constexpr,
    DESCRIBED: tl.constexpr, CACHE_DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr,
    SCALES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each tile and block of heads; arguments as for `extend_kernel`."""
    n, row, length, first, piece, scratch = tile_of(sequences, tiles, listed, total, BT, HEADS)
    if first >= length:
        return
    key_head, group_head = head_of(HEADS, GROUP, PACK)
    o_t, o_row, o_h, m_row = rows_of(row, first, length, group_head, GROUP, PACK, BT, BM)
    o_h += key_head * GROUP
    facts = facts_of(sequences, n)
    query_start = tl.load(facts + 2).to(tl.int32)
    old_run = (tl.load(facts + 3).to(tl.int32), tl.load(facts + 4).to(tl.int32))
    new_run = (query_start, tl.load(facts + 5).to(tl.int32))
    where = tl.load(facts + 6)
    border = tl.load(facts + 7).to(tl.int32)
    b_q = read_queries(q, o_row, o_h, m_row, q_token, q_head, D, BD)
    o_own = query_start + first + o_t
    queries = (query_start + first, query_start + tl.minimum(first + BT, length) - 1)
    p_mask, new_column = o_row, row
    if MASK != "":
        p_mask = custom_mask + tl.load(facts + 8) + (first + o_t) * tl.load(facts + 9)
        new_column = tl.load(facts + 10)
    rows = (o_own, p_mask, m_row)
    new_rows = (o_own, p_mask + new_column, m_row)

    numbers = (window, inner, factor)
    b_v_scale = 1.0
    if SCALES:
        b_k_scale = read_scale(k_scale, k_number, key_head * k_scale_head)
        b_v_scale = read_scale(v_scale, v_number, key_head * v_scale_head)
        if FORM == "plain":
            numbers = (window, inner, factor * b_k_scale)
        else:
            numbers = (window, inner * b_k_scale, factor)
    wide_head = key_head.to(tl.int64)
    old = (q, q, (0, 0, 0), (0, 0, 0), where, border)
    if FOUND != "":
        old = (
            cache_k + wide_head * cache_k_head, cache_v + wide_head * cache_v_head,
            (cache_k_page, cache_k_row, cache_k_channel),
            (cache_v_page, cache_v_row, cache_v_channel), where, border,
        )  # fmt: skip
    old_tiles = (
        cache_k_tiles, cache_v_tiles, key_head * cache_k_head, key_head * cache_v_head
    )  # fmt: skip
    new = (q, q, (0, 0, 0), (0, 0, 0), row)
    if NEW == "packed":
        new = (
            k + wide_head * k_head, v + wide_head * v_head, (k_token, 0, 1), (v_token, 0, 1), row,
        )  # fmt: skip

    old_causal: tl.constexpr = CAUSAL and MASK != "all"
    new_causal: tl.constexpr = CAUSAL and MASK == ""
    old_lower, old_upper, old_whole, old_clear = span_of(
        old_run, queries, window, old_causal, WINDOWED, MASK == "all", BN
    )
    new_lower, new_upper, new_whole, new_clear = span_of(
        new_run, queries, window, new_causal, WINDOWED, MASK != "", BN
    )
    old_seen, new_seen = old_lower < old_upper, new_lower < new_upper
    lower = tl.where(old_seen, old_lower, new_lower)
    upper = tl.where(new_seen, new_upper, old_upper)
    upper = tl.where(old_seen | new_seen, upper, lower)

    acc = tl.zeros((BM, BDV), tl.float32)
    m = tl.full((BM,), NOTHING, tl.float32)
    l = tl.zeros((BM,), tl.float32)  # noqa: E741
    first_block, end_block = lower // BLOCK, tl.cdiv(upper, BLOCK)
    if piece >= 0:
        first_block, end_block = tl.maximum(first_block, piece), tl.minimum(end_block, piece + 1)
    for block in range(first_block, end_block):
        begin = tl.maximum(lower, block * BLOCK) // BN
        end = tl.cdiv(tl.minimum(upper, (block + 1) * BLOCK), BN)
        b_acc = tl.zeros((BM, BDV), tl.float32)
        b_m = tl.full((BM,), NOTHING, tl.float32)
        b_l = tl.zeros((BM,), tl.float32)
        in_old = (old_whole[0] <= begin) & (end <= old_whole[1])
        in_new = (new_whole[0] <= begin) & (end <= new_whole[1])
        if DESCRIBED:
            if in_new:
                b_acc, b_m, b_l = sweep(
                    b_acc, b_m, b_l, b_q, new_rows, (new_run[0], new_run[1], new_run[0]),
                    (begin, end, new_clear[0], new_clear[1]),
                    (new[0], new[1], new[2], new[3], row, 0), (row, row, row),
                    (k_tiles, v_tiles, key_head * k_head, key_head * v_head),
                    numbers, "run", 1, True, new_causal, WINDOWED, MASK != "", False,
                    D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
                )  # fmt: skip
            else:
                b_acc, b_m, b_l = sweep_old_or_both(
                    b_acc, b_m, b_l, b_q, rows, old_run, new_run,
                    (begin, end, old_clear, new_clear), in_old, old, new, places, old_tiles,
                    new_column, numbers, FOUND, PAGE, NEW, UNIT, CACHE_DESCRIBED,
                    CAUSAL, WINDOWED, MASK, D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
                )  # fmt: skip
        else:
            b_acc, b_m, b_l = sweep_old_or_both(
                b_acc, b_m, b_l, b_q, rows, old_run, new_run,
                (begin, end, old_clear, new_clear), in_old, old, new, places, old_tiles,
                new_column, numbers, FOUND, PAGE, NEW, UNIT, CACHE_DESCRIBED,
                CAUSAL, WINDOWED, MASK, D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
            )  # fmt: skip
        if SCALES:
            b_acc = b_acc * b_v_scale
        acc, m, l = join(acc, m, l, b_acc, b_m, b_l)  # noqa: E741
    keep(
        acc, m, l, o, lse, sinks, part_acc, part_m, part_l, (o_row, o_t, o_h, m_row),
        piece, scratch, n, (o_token, o_head, o_channel, lse_token, lse_head),
        HQ, DV, BDV, HAS_SINKS, HAS_LSE,
    )  # fmt: skip
