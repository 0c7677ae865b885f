"""New tokens on a cached prefix, in one launch.

A program takes a tile of rows. It goes over tiles of BN prefix keys, then over tiles of new keys,
both bounded as `tiles.py` says; only tiles on the border, which some row sees in part, take a mask.
Heavy tiles of rows come first. A piece of a tile takes PIECE prefix keys; the last one the new keys
too. PIECE is 0 under a short window, where no tile is cut.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.triton.keys import beside_float8, read_scale, scaled_numbers
from headstart.ops.extend_attention.triton.rows import (
    facts_of,
    head_of,
    keep,
    query_rows,
    read_query_parts,
    rows_of,
    tile_of,
)
from headstart.ops.extend_attention.triton.softmax import NOTHING
from headstart.ops.extend_attention.triton.sweep import (
    clear,
    sweep,
    sweep_early,
    sweep_late,
    sweep_pairs,
    visible,
)


@triton.jit
def run_of_tiles(
    acc, m, l, b_q, rows, run, limits, queries, store, lists, tiles, numbers,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr, DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, LISTED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ORDER: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Absorb what the rows at positions `queries` see of one run, within the tiles `limits`.

    SHORT: whether a window is short, so that there are few turns.
    """
    start, count = run
    first, last = queries
    window = numbers[0]
    causal: tl.constexpr = CAUSAL and not MASKED
    # Positions from a list follow no order: every tile may be seen.
    lower, upper = visible(
        first, last, start, count, window, causal and not LISTED, WINDOWED and not LISTED
    )
    begin = tl.maximum(lower // BN, limits[0])
    end = tl.maximum(tl.minimum((upper + BN - 1) // BN, limits[1]), begin)
    # Without visible keys there is no tile, wherever the bounds lie within one.
    end = tl.where(lower < upper, end, begin)
    held = end
    if DESCRIBED:
        held = tl.maximum(tl.minimum(end, count // BN), begin)
    sure, unsure = clear(first, last, start, count, window, causal, WINDOWED)
    if MASKED:
        unsure = 0
    span = (begin, held, tl.cdiv(sure, BN), unsure // BN, lower)
    if DESCRIBED and FOUND == "pages" and PAGE < BN:
        acc, m, l = sweep_pairs(  # noqa: E741
            acc, m, l, b_q, rows, (start, count, 0), span, lists[0], store[5], tiles, numbers,
            PAGE, causal, WINDOWED, MASKED, FORM, PRECISION, STAGES,
        )  # fmt: skip
    elif DESCRIBED and ORDER == "early" and not (MASKED or LISTED):
        acc, m, l = sweep_early(  # noqa: E741
            acc, m, l, b_q, rows, (start, count, 0), span, store, lists[0], tiles, numbers,
            FOUND, PAGE, causal, WINDOWED, MASKED, BN, FORM, PRECISION, STAGES,
        )  # fmt: skip
    elif DESCRIBED and (ORDER == "late" or FOUND == "pages") and not (SHORT or MASKED or LISTED):
        acc, m, l, _ = sweep_late(  # noqa: E741
            acc, m, l, (m, l), b_q, rows, (start, count, 0), span, store, lists[0], tiles, numbers,
            (0, store[0]), FOUND, PAGE, causal, WINDOWED, MASKED, BN, 0, FORM, PRECISION, STAGES,
        )  # fmt: skip
    else:
        acc, m, l = sweep(  # noqa: E741
            acc, m, l, b_q, rows, (start, count, 0), span, store, lists, tiles, numbers,
            FOUND, PAGE, DESCRIBED, causal, WINDOWED, MASKED, LISTED,
            D, DV, BD, BDV, BN, FORM, PRECISION, STAGES, SHORT, ORDER == "ahead",
        )  # fmt: skip
    if DESCRIBED:
        # Rows behind the run belong to others: the keys of the last tile are read one by one.
        BR: tl.constexpr = 32 if BN > 32 else BN
        part: tl.constexpr = BN // BR
        ragged = tl.minimum(end * part, tl.cdiv(count, BR))
        acc, m, l = sweep(  # noqa: E741
            acc, m, l, b_q, rows, (start, count, 0), (held * part, ragged, ragged, ragged, lower),
            store, lists, tiles, numbers, FOUND, PAGE, False, causal, WINDOWED, MASKED, LISTED,
            D, DV, BD, BDV, BR, FORM, PRECISION, 1, SHORT,
        )  # fmt: skip
    return acc, m, l


@triton.jit(
    do_not_specialize=["total", "listed", "page_rows", "window", "heads", "blocks"],
    do_not_specialize_on_alignment=["places", "positions", "custom_mask"],
)
def extend_kernel(
    q, k, v, k_tiles, v_tiles, cache_k, cache_v, cache_k_tiles, cache_v_tiles, places, positions,
    custom_mask, sinks, k_scale, v_scale, o, lse, part_acc, part_m, part_l, sequences, tiles,
    total, listed, page_rows, window, heads, blocks, inner, factor, k_number, v_number,
    q_token, q_head, k_token, k_head, v_token, v_head,
    o_token, o_head, o_channel, lse_token, lse_head,
    cache_k_page, cache_k_row, cache_k_head, cache_k_channel,
    cache_v_page, cache_v_row, cache_v_head, cache_v_channel, k_scale_head, v_scale_head,
    GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PARTS: tl.constexpr, AGAIN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, PIECE: tl.constexpr,
    FOUND: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
    DESCRIBED: tl.constexpr, CACHE_DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr, LISTED: tl.constexpr,
    SCALES: tl.constexpr, WIDE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """One program for each tile and each of its `blocks` of heads, of all `heads` of queries.

    FOUND: how cached keys are found, "" where there are none; PAGE and page_rows: as for `look_up`
    and `find`. NEW: where new keys are: "packed", "cached" or "". MASK: what a custom mask covers:
    "", "new" or "all". SCALES: whether the cache is float8. WIDE: whether cached keys meet float32
    queries. PARTS: in how many parts of BD columns queries and keys are read. AGAIN: whether
    queries are read again for every tile of keys, BD columns at a time. ORDER: as `order` in
    config.py says, where tiles are read through descriptors.
    """
    i = tl.program_id(0)
    n, row, length, first, piece, scratch = tile_of(
        i // blocks, sequences, tiles, listed, total, BT
    )  # fmt: skip
    if first >= length:
        return
    key_head, group_head = head_of(i % blocks, GROUP, PACK)
    first_row, o_t, o_h, m_row = rows_of(row, first, length, group_head, GROUP, PACK, BT, BM)
    tile_rows = (first_row, o_t, o_h + key_head * GROUP, m_row)
    facts = facts_of(sequences, n)
    query_start = tl.load(facts + 2).to(tl.int32)
    key_start = tl.load(facts + 3).to(tl.int32)
    cached = tl.load(facts + 4).to(tl.int32)
    fresh = tl.load(facts + 5).to(tl.int32)
    where = tl.load(facts + 6)
    if AGAIN:
        b_q = (query_rows(q, tile_rows, q_token, q_head), m_row)
    else:
        b_q = read_query_parts(q, tile_rows, q_token, q_head, D, BD, PARTS)
    o_own = query_start + first + o_t
    queries = (query_start + first, query_start + tl.minimum(first + BT, length) - 1)
    p_mask, new_column = o_t, 0
    if MASK != "":
        p_mask = custom_mask + tl.load(facts + 8) + (first + o_t) * tl.load(facts + 9)
        new_column = tl.load(facts + 10)
    acc = tl.zeros((BM, BDV), tl.float32)
    m = tl.full((BM,), NOTHING, tl.float32)
    l = tl.zeros((BM,), tl.float32)  # noqa: E741

    last_piece = (piece < 0) | ((piece + 1) * PIECE >= cached)
    if FOUND != "":
        b_old, b_v_scale, old_numbers = b_q, 1.0, (window, inner, factor)
        if WIDE:
            b_old = b_q[0].to(tl.float32)
        if SCALES:
            b_k_scale = read_scale(k_scale, k_number, key_head * k_scale_head)
            b_v_scale = read_scale(v_scale, v_number, key_head * v_scale_head)
            b_old, power = beside_float8(b_q[0])
            old_numbers = scaled_numbers(window, inner, factor, b_k_scale * power, FORM)
        old_k = cache_k + key_head.to(tl.int64) * cache_k_head
        old_v = cache_v + key_head.to(tl.int64) * cache_v_head
        k_strides = (cache_k_page, cache_k_row, cache_k_channel)
        v_strides = (cache_v_page, cache_v_row, cache_v_channel)
        piece_end = tl.where(piece < 0, tl.cdiv(cached, BN), (piece + 1) * (PIECE // BN))
        limits = (tl.maximum(piece, 0) * (PIECE // BN), piece_end)
        entry = where
        if LISTED:
            entry = tl.load(facts + 11)
        acc, m, l = run_of_tiles(  # noqa: E741
            acc, m, l, b_old, (o_own, p_mask, m_row), (key_start, cached), limits, queries,
            (old_k, old_v, k_strides, v_strides, page_rows, where, 0), (places, positions, entry),
            (cache_k_tiles, cache_v_tiles, key_head * cache_k_head, key_head * cache_v_head),
            old_numbers, FOUND, PAGE, CACHE_DESCRIBED, CAUSAL, WINDOWED, MASK == "all", LISTED,
            D, DV, BD, BDV, BN, FORM, PRECISION, STAGES, ORDER, PIECE == 0,
        )  # fmt: skip
        if SCALES and NEW != "cached":
            acc = acc * b_v_scale
    if NEW != "":
        limits = (0, tl.where(last_piece, tl.cdiv(fresh, BN), 0))
        rows = (o_own, p_mask + new_column, m_row)
        if NEW == "cached":
            border = tl.load(facts + 7).to(tl.int32)
            acc, m, l = run_of_tiles(  # noqa: E741
                acc, m, l, b_old, rows, (query_start, fresh), limits, queries,
                (old_k, old_v, k_strides, v_strides, page_rows, where, border),
                (places, positions, where),
                (cache_k_tiles, cache_v_tiles, 0, 0), old_numbers, FOUND, PAGE, False,
                CAUSAL, WINDOWED, MASK != "", False,
                D, DV, BD, BDV, BN, FORM, PRECISION, STAGES, ORDER, PIECE == 0,
            )  # fmt: skip
            if SCALES:
                acc = acc * b_v_scale
        else:
            acc, m, l = run_of_tiles(  # noqa: E741
                acc, m, l, b_q, rows, (query_start, fresh), limits, queries,
                (
                    k + key_head.to(tl.int64) * k_head, v + key_head.to(tl.int64) * v_head,
                    (k_token, 0, 1), (v_token, 0, 1), 1, row, 0,
                ),
                (row, positions, row),
                (k_tiles, v_tiles, key_head * k_head, key_head * v_head),
                (window, inner, factor), "run", 1, DESCRIBED, CAUSAL, WINDOWED, MASK != "", False,
                D, DV, BD, BDV, BN, FORM, PRECISION, STAGES, ORDER, PIECE == 0,
            )  # fmt: skip
    keep(
        acc, m, l, o, lse, sinks, part_acc, part_m, part_l, tile_rows,
        piece, scratch, n, (o_token, o_head, o_channel, lse_token, lse_head),
        heads, DV, BDV, HAS_SINKS, HAS_LSE,
    )  # fmt: skip
