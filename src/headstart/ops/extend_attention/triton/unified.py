"""The reproducible kernel: a row's bits depend on its own sequence and positions alone.

Tiles of BN keys are anchored at position 0 and taken from left to right. Without a window keys are
reduced in blocks of BLOCK consecutive positions, each starting from nothing; blocks are joined in
order. A block or tile in which a row sees no key leaves the row's bits as they are, so a prefix
hit, a step, another batch or more heads beside it change nothing. Tiles that lie whole in one run
of keys are read from it alone, through descriptors where those serve; the few others are read key
by key, from both. A piece of a tile is one block, so that decoding joins the same states in the
same order. While a block is reduced the state joined so far is parked in scratch: registers hold
one state, as the default kernel's do. So a program takes tile after tile.
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
    read_queries,
    rows_of,
    tile_of,
)
from headstart.ops.extend_attention.triton.softmax import NOTHING, join
from headstart.ops.extend_attention.triton.sweep import (
    clear,
    sweep,
    sweep_both,
    sweep_late,
    visible,
)


@triton.jit
def span_of(
    run, queries, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of one run: visible positions, tiles that lie in it whole, and clear tiles.

    Without visible keys the first three are empty, somewhere; a run without keys has no tiles.
    """
    start, count = run
    first, last = queries
    lower, upper = visible(first, last, start, count, window, CAUSAL, WINDOWED)
    sure, unsure = clear(first, last, start, count, window, CAUSAL, WINDOWED)
    whole = (
        tl.where(count > 0, tl.cdiv(start, BN), 0), tl.where(count > 0, (start + count) // BN, 0)
    )  # fmt: skip
    unmasked = (tl.cdiv(start + sure, BN), (start + unsure) // BN)
    if MASKED:
        unmasked = (start, start)
    return start + lower, start + upper, whole, unmasked


@triton.jit
def sweep_whole(
    acc, m, l, b_q, rows, run, span, store, places, tiles, numbers,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr, DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Absorb tiles that lie whole in one run of keys, in either way: both give the same bits."""
    if DESCRIBED and (LATE or FOUND == "pages") and not (WINDOWED or MASKED):
        acc, m, l = sweep_late(  # noqa: E741
            acc, m, l, b_q, rows, run, span, store, places, tiles, numbers, FOUND, PAGE,
            CAUSAL, WINDOWED, MASKED, BN, FORM, PRECISION, STAGES,
        )  # fmt: skip
    else:
        acc, m, l = sweep(  # noqa: E741
            acc, m, l, b_q, rows, run, span, store, (places, places, places), tiles, numbers,
            FOUND, PAGE, DESCRIBED, CAUSAL, WINDOWED, MASKED, False,
            D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
        )  # fmt: skip
    return acc, m, l


@triton.jit
def reduce(
    acc, m, l, b_q, limits, old_side, new_side, new_column, numbers,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
    DESCRIBED: tl.constexpr, CACHE_DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Absorb tiles [begin, end) = `limits`, from left to right.

    A side is (rows, run, whole tiles, clear tiles, store, places, tiles); rows as for `sweep`.
    Whole tiles of the prefix, then whole tiles of the new keys; before, between and behind them the
    tiles that have keys of both or a border.
    """
    begin, end = limits
    old_rows, old_run, old_whole, old_clear, old, places, old_tiles = old_side
    new_rows, new_run, new_whole, new_clear, new, row, new_tiles = new_side
    old_begin = tl.minimum(tl.maximum(old_whole[0], begin), end)
    old_end = tl.minimum(tl.maximum(old_whole[1], old_begin), end)
    new_begin = tl.minimum(tl.maximum(new_whole[0], old_end), end)
    new_end = tl.minimum(tl.maximum(new_whole[1], new_begin), end)
    if FOUND != "" or NEW != "":  # else there is no key; a loop without turns is compiled too
        for side in tl.range(0 if FOUND != "" else 1, 3, disable_licm=True):
            # Triton 3.6 takes what a loop carries for dead where it only bounds loops within: here
            # nothing is carried from one side to the next but the state.
            first = tl.where(side == 0, begin, tl.where(side == 1, old_end, new_end))
            last = tl.where(side == 0, old_begin, tl.where(side == 1, new_begin, end))
            acc, m, l = sweep_both(  # noqa: E741
                acc, m, l, b_q, old_rows, old_run, new_run, (first, last, old_clear, new_clear),
                old, new, places, new_column, numbers, FOUND, PAGE, NEW, CAUSAL, WINDOWED, MASK,
                D, DV, BD, BDV, BN, FORM, PRECISION,
            )  # fmt: skip
            if FOUND != "":  # noqa: SIM102
                if side == 0:
                    acc, m, l = sweep_whole(  # noqa: E741
                        acc, m, l, b_q, old_rows, (old_run[0], old_run[1], old_run[0]),
                        (old_begin, old_end, old_clear[0], old_clear[1]),
                        (old[0], old[1], old[2], old[3], old[4], old[5], 0), places,
                        old_tiles, numbers, FOUND, PAGE, CACHE_DESCRIBED,
                        CAUSAL and MASK != "all", WINDOWED, MASK == "all",
                        D, DV, BD, BDV, BN, FORM, PRECISION, STAGES, LATE,
                    )  # fmt: skip
            if NEW == "packed":  # noqa: SIM102
                if side == 1:
                    acc, m, l = sweep_whole(  # noqa: E741
                        acc, m, l, b_q, new_rows, (new_run[0], new_run[1], new_run[0]),
                        (new_begin, new_end, new_clear[0], new_clear[1]),
                        (new[0], new[1], new[2], new[3], 1, row, 0), row, new_tiles,
                        numbers, "run", 1, DESCRIBED, CAUSAL and MASK == "", WINDOWED, MASK != "",
                        D, DV, BD, BDV, BN, FORM, PRECISION, STAGES, LATE,
                    )  # fmt: skip
    return acc, m, l


@triton.jit(
    do_not_specialize=["work", "total", "listed", "page_rows", "window"],
    do_not_specialize_on_alignment=["places", "positions", "custom_mask"],
)
def unified_kernel(
    q, k, v, k_tiles, v_tiles, cache_k, cache_v, cache_k_tiles, cache_v_tiles, places,
    custom_mask, sinks, k_scale, v_scale, o, lse, part_acc, part_m, part_l, parked,
    sequences, tiles, work, total, listed, page_rows, window, inner, factor, k_number, v_number,
    q_token, q_head, k_token, k_head, v_token, v_head,
    o_token, o_head, o_channel, lse_token, lse_head,
    cache_k_page, cache_k_row, cache_k_head, cache_k_channel,
    cache_v_page, cache_v_row, cache_v_head, cache_v_channel, k_scale_head, v_scale_head,
    HQ: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
    FOUND: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
    DESCRIBED: tl.constexpr, CACHE_DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr,
    SCALES: tl.constexpr, WIDE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """One tile and block of heads after another, `work` over all programs; one under a window.

    Rounds go to and fro over the programs, so that all get as many heavy tiles. parked: float32
    [programs, BM, BDV]. Other arguments as for `extend_kernel`.
    """
    programs = tl.num_programs(0)
    turns = 1
    if not WINDOWED:
        turns = tl.cdiv(work, programs)
    for turn in tl.range(turns, disable_licm=True):
        place = tl.program_id(0)
        if turn % 2 == 1:
            place = programs - 1 - place
        i = turn * programs + place  # behind the last item there is nothing to do
        n, row, length, first, piece, scratch = tile_of(
            i // HEADS, sequences, tiles, listed, total, BT
        )
        key_head, group_head = head_of(i % HEADS, GROUP, PACK)
        if first < length:
            o_t, o_row, o_h, m_row = rows_of(row, first, length, group_head, GROUP, PACK, BT, BM)
            o_h += key_head * GROUP
            facts = facts_of(sequences, n)
            query_start = tl.load(facts + 2).to(tl.int32)
            none = tl.zeros((), tl.int32)
            old_run, new_run = (none, none), (none, none)
            if FOUND != "":
                old_run = (tl.load(facts + 3).to(tl.int32), tl.load(facts + 4).to(tl.int32))
            if NEW != "":
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

            # No packed new keys beside float8 ones: the promise declines a cache of another dtype.
            SCALED: tl.constexpr = SCALES and NEW != "packed"
            b_v_scale, numbers = 1.0, (window, inner, factor)
            if WIDE:
                b_q = b_q.to(tl.float32)
            if SCALED:
                b_k_scale = read_scale(k_scale, k_number, key_head * k_scale_head)
                b_v_scale = read_scale(v_scale, v_number, key_head * v_scale_head)
                b_q, power = beside_float8(b_q)
                numbers = scaled_numbers(window, inner, factor, b_k_scale * power, FORM)
            wide_head = key_head.to(tl.int64)
            old = (q, q, (0, 0, 0), (0, 0, 0), page_rows, where, border)
            if FOUND != "":
                old = (
                    cache_k + wide_head * cache_k_head, cache_v + wide_head * cache_v_head,
                    (cache_k_page, cache_k_row, cache_k_channel),
                    (cache_v_page, cache_v_row, cache_v_channel), page_rows, where, border,
                )  # fmt: skip
            old_tiles = (
                cache_k_tiles, cache_v_tiles, key_head * cache_k_head, key_head * cache_v_head
            )  # fmt: skip
            new = (q, q, (0, 0, 0), (0, 0, 0), row)
            if NEW == "packed":
                new = (
                    k + wide_head * k_head, v + wide_head * v_head,
                    (k_token, 0, 1), (v_token, 0, 1), row,
                )  # fmt: skip

            new_tiles = (k_tiles, v_tiles, key_head * k_head, key_head * v_head)
            old_causal: tl.constexpr = CAUSAL and MASK != "all"
            new_causal: tl.constexpr = CAUSAL and MASK == ""
            old_lower, old_upper, old_whole, old_clear = span_of(
                old_run, queries, window, old_causal, WINDOWED, MASK == "all", BN
            )
            new_lower, new_upper, new_whole, new_clear = span_of(
                new_run, queries, window, new_causal, WINDOWED, MASK != "", BN
            )
            if NEW == "cached":
                # Those that are not one run with the prefix are read key by key, as borders are.
                new_whole = (none, none)
            old_seen, new_seen = old_lower < old_upper, new_lower < new_upper
            lower = tl.where(old_seen, old_lower, new_lower)
            upper = tl.where(new_seen, new_upper, old_upper)
            upper = tl.where(old_seen | new_seen, upper, lower)

            acc = tl.zeros((BM, BDV), tl.float32)
            m = tl.full((BM,), NOTHING, tl.float32)
            l = tl.zeros((BM,), tl.float32)  # noqa: E741
            old_side = (rows, old_run, old_whole, old_clear, old, places, old_tiles)
            new_side = (new_rows, new_run, new_whole, new_clear, new, row, new_tiles)
            if WINDOWED:
                # The keys that a row sees fit in one block, wherever it begins.
                acc, m, l = reduce(  # noqa: E741
                    acc, m, l, b_q, (lower // BN, tl.cdiv(upper, BN)), old_side, new_side,
                    new_column, numbers, FOUND, PAGE, NEW, DESCRIBED, CACHE_DESCRIBED,
                    CAUSAL, WINDOWED, MASK, D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
                    LATE,
                )  # fmt: skip
                if SCALED:
                    acc = acc * b_v_scale
            else:
                first_block, end_block = lower // BLOCK, tl.cdiv(upper, BLOCK)
                if piece >= 0:
                    first_block = tl.maximum(first_block, piece)
                    end_block = tl.minimum(end_block, piece + 1)
                o_r = tl.program_id(0) * BM + tl.arange(0, BM)
                p_parked = parked + o_r[:, None].to(tl.int64) * BDV + tl.arange(0, BDV)[None, :]
                for block in tl.range(first_block, end_block, disable_licm=True):
                    begin = tl.maximum(lower, block * BLOCK) // BN
                    end = tl.cdiv(tl.minimum(upper, (block + 1) * BLOCK), BN)
                    acc, b_m, b_l = reduce(
                        tl.zeros((BM, BDV), tl.float32), tl.full((BM,), NOTHING, tl.float32),
                        tl.zeros((BM,), tl.float32), b_q, (begin, end), old_side, new_side,
                        new_column, numbers, FOUND, PAGE, NEW, DESCRIBED, CACHE_DESCRIBED,
                        CAUSAL, WINDOWED, MASK, D, DV, BD, BDV, BN, FORM, PRECISION, STAGES,
                        LATE,
                    )  # fmt: skip
                    if SCALED:
                        acc = acc * b_v_scale
                    if block == first_block:
                        m, l = b_m, b_l  # noqa: E741
                    else:
                        # Another thread of this program may have stored what one loads.
                        tl.debug_barrier()
                        acc, m, l = join(tl.load(p_parked), m, l, acc, b_m, b_l)  # noqa: E741
                    if block + 1 < end_block:
                        tl.store(p_parked, acc)
            keep(
                acc, m, l, o, lse, sinks, part_acc, part_m, part_l, (o_row, o_t, o_h, m_row),
                piece, scratch, n, (o_token, o_head, o_channel, lse_token, lse_head),
                HQ, DV, BDV, HAS_SINKS, HAS_LSE,
            )  # fmt: skip
