"""The reproducible kernel: a row's bits depend on its own sequence and positions alone.

Tiles of BN keys are anchored at position 0 and taken from left to right. Keys are reduced in blocks
of PIECE consecutive positions, each starting from nothing, and blocks are joined in order; under a
short window (PIECE is 0) there is one block. A block or tile in which a row sees no key leaves the
row's bits as they are, so a prefix hit, a step, another batch or more heads beside it change
nothing. Tiles that lie whole in one run of keys are read from it alone, through descriptors where
those serve; the few others are read key by key, from both. A piece of a tile is one block, so that
decoding joins the same states in the same order. While a block is reduced the state joined so far
is parked in scratch: registers hold one state, as the default kernel's do. So a few programs stay
and take tile after tile. Where every whole tile is read late, a loop runs through the ends of
blocks, and registers hold both states: it need not fill its pipeline again.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.triton.keys import beside_float8, read_scale, scaled_numbers
from headstart.ops.extend_attention.triton.parked import join_parked, park, place_of
from headstart.ops.extend_attention.triton.rows import (
    facts_of,
    head_of,
    keep,
    query_rows,
    read_queries,
    rows_of,
    tile_of,
)
from headstart.ops.extend_attention.triton.softmax import NOTHING, join
from headstart.ops.extend_attention.triton.sweep import (
    clear,
    sweep,
    sweep_late,
    take_both,
    visible,
)

THROUGH_MOST = tl.constexpr(128)
"""Columns up to which a loop runs through the ends of blocks: beside wider sums registers do not
hold what is carried over an end."""


@triton.jit
def fact(facts, column: tl.constexpr):
    """A fact of a sequence in 32 bits."""
    return tl.load(facts + column).to(tl.int32)


@triton.jit
def runs_of(facts, FOUND: tl.constexpr, NEW: tl.constexpr):
    """Cached and new keys of a sequence: (position of the first, count)."""
    none = tl.zeros((), tl.int32)
    old_run, new_run = (none, none), (none, none)
    if FOUND != "":
        old_run = (fact(facts, 3), fact(facts, 4))
    if NEW != "":
        new_run = (fact(facts, 2), fact(facts, 5))
    return old_run, new_run


@triton.jit
def positions_of(facts, first, BT: tl.constexpr):
    """First and last position of the new tokens of a tile."""
    start, length = fact(facts, 2), fact(facts, 1)
    return start + first, start + tl.minimum(first + BT, length) - 1


@triton.jit
def seen_of(
    facts, first, window,
    FOUND: tl.constexpr, NEW: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Old and new run, and first and past the last position that some row of a tile sees.

    Where no row sees a key these are the same, somewhere.
    """
    old_run, new_run = runs_of(facts, FOUND, NEW)
    early, late = positions_of(facts, first, BT)
    old_lower, old_upper = visible(
        early, late, old_run[0], old_run[1], window, CAUSAL and MASK != "all", WINDOWED
    )
    new_lower, new_upper = visible(
        early, late, new_run[0], new_run[1], window, CAUSAL and MASK == "", WINDOWED
    )
    old_seen, new_seen = old_lower < old_upper, new_lower < new_upper
    lower = tl.where(old_seen, old_run[0] + old_lower, new_run[0] + new_lower)
    upper = tl.where(new_seen, new_run[0] + new_upper, old_run[0] + old_upper)
    return (old_run, new_run), lower, tl.where(old_seen | new_seen, upper, lower)


@triton.jit
def clear_of(
    run, queries, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """First and past the last clear tile of a run."""
    start, count = run
    first, last = queries
    sure, unsure = clear(first, last, start, count, window, CAUSAL, WINDOWED)
    found = (tl.cdiv(start + sure, BN), (start + unsure) // BN)
    if MASKED:
        found = (start, start)
    return found


@triton.jit
def span_of(whole, clear_tiles, seen, HIDDEN: tl.constexpr):
    """As for `sweep`, of whole tiles. HIDDEN: whether more than the causal rule hides keys.

    That rule alone hides none of the first tiles: their bound is one that registers hold anyway.
    """
    first_clear = clear_tiles[0] if HIDDEN else whole[0]
    return whole[0], whole[1], first_clear, clear_tiles[1], seen


@triton.jit
def whole_of(
    old_run, new_run, limits, NEW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Tiles within `limits` that lie whole in the old run, and those that do in the new one."""
    begin, end = limits
    old_begin, old_end = tiles_in(old_run, BN)
    new_begin, new_end = tiles_in(new_run, BN)
    if NEW == "cached":
        # Those that are not one run with the prefix are read key by key, as borders are.
        new_begin, new_end = begin, begin
    old_begin = tl.minimum(tl.maximum(old_begin, begin), end)
    old_end = tl.minimum(tl.maximum(old_end, old_begin), end)
    new_begin = tl.minimum(tl.maximum(new_begin, old_end), end)
    new_end = tl.minimum(tl.maximum(new_end, new_begin), end)
    return (old_begin, old_end), (new_begin, new_end)


@triton.jit
def tiles_in(run, BN: tl.constexpr):
    """First and past the last tile that lies whole in a run; a run without keys has none."""
    start, count = run
    return (
        tl.where(count > 0, tl.cdiv(start, BN), 0), tl.where(count > 0, (start + count) // BN, 0)
    )  # fmt: skip


@triton.jit
def begun(acc, m, l, before, tile, first, TILES: tl.constexpr):  # noqa: E741
    """The state in front of `tile`: where a block begins there, nothing, and the last is joined.

    before: (acc, m, l) of earlier blocks. first: tile in which the first one begins. TILES: tiles
    of a block.
    """
    begins = (tile % TILES == 0) & (tile > first)
    if begins:
        before = join(before[0], before[1], before[2], acc, m, l)
    acc = tl.where(begins, 0.0, acc)
    m = tl.where(begins, NOTHING, m)
    l = tl.where(begins, 0.0, l)  # noqa: E741
    return acc, m, l, before


@triton.jit
def sweep_whole(
    acc, m, l, before, b_q, rows, run, span, store, places, tiles, numbers, first,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr, DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    TILES: tl.constexpr, SHORT: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Absorb tiles that lie whole in one run of keys, in either way: both give the same bits."""
    if DESCRIBED and (ORDER == "late" or FOUND == "pages") and not (SHORT or MASKED):
        acc, m, l, before = sweep_late(  # noqa: E741
            acc, m, l, before, b_q, rows, run, span, store, places, tiles, numbers, first,
            FOUND, PAGE, CAUSAL, WINDOWED, MASKED, BN, TILES, FORM, PRECISION, STAGES,
        )  # fmt: skip
    else:
        acc, m, l = sweep(  # noqa: E741
            acc, m, l, b_q, rows, run, span, store, (places, places, places), tiles, numbers,
            FOUND, PAGE, DESCRIBED, CAUSAL, WINDOWED, MASKED, False,
            D, DV, BD, BDV, BN, FORM, PRECISION, STAGES, SHORT, ORDER == "ahead",
        )  # fmt: skip
    return acc, m, l, before


@triton.jit
def reduce(
    b_q, limits, runs, rows, stores, tiles, places, custom_mask, numbers, b_v_scale,
    FOUND: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
    DESCRIBED: tl.constexpr, CACHE_DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr,
    PACK: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    TILES: tl.constexpr, SHORT: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """The state of tiles [begin, end) = `limits`, taken from left to right.

    Whole tiles of the prefix, then whole tiles of the new keys; before, between and behind them the
    tiles that have keys of both or a border. Mostly one of these three sides is all there is.
    runs: old and new, as of `runs_of`. rows: (facts of the sequence, first new token, which rows
    are read [BM], key head). stores: (k, v, their strides of a head, their strides) of old keys, of
    new ones, and rows of a page. tiles: (k, v) of old keys and of new ones as descriptors. numbers:
    as for `sweep`. b_v_scale: what all values lack, or None.
    """
    facts, first, m_row, key_head = rows
    old_store, new_store, page_rows = stores
    old_tiles, new_tiles = tiles
    acc = tl.zeros((BM, BDV), tl.float32)
    m = tl.full((BM,), NOTHING, tl.float32)
    l = tl.zeros((BM,), tl.float32)  # noqa: E741
    before = (acc, m, l)
    window = numbers[0]
    old_causal: tl.constexpr = CAUSAL and MASK != "all"
    new_causal: tl.constexpr = CAUSAL and MASK == ""
    if FOUND != "" or NEW != "":  # else there is no key; a loop without turns is compiled too
        old_whole, new_whole = whole_of(runs[0], runs[1], limits, NEW, BN)
        first_side = tl.where(old_whole[1] > limits[0], 0, 1) if FOUND != "" else 1
        end_side = tl.where(old_whole[1] < limits[1], 2, 1)
        end_side = tl.where(new_whole[1] < limits[1], 3, end_side)
        for side in tl.range(first_side, end_side, disable_licm=True):
            # Facts are read behind this: not ahead, where registers would hold them over all keys.
            tl.debug_barrier()
            queries = positions_of(facts, first, BT)
            old_run, new_run = runs_of(facts, FOUND, NEW)
            row, where = tl.load(facts), tl.load(facts + 6)
            border = fact(facts, 7)
            o_t = tl.arange(0, BM) // PACK
            p_mask, new_column = o_t, row
            if MASK != "":
                p_mask = custom_mask + tl.load(facts + 8) + (first + o_t) * tl.load(facts + 9)
                new_column = tl.load(facts + 10)
            old_rows = (queries[0] + o_t, p_mask, m_row)
            new_rows = (queries[0] + o_t, p_mask + new_column, m_row)

            wide_head = key_head.to(tl.int64)
            old_k, old_v, old_k_head, old_v_head, old_k_strides, old_v_strides = old_store
            new_k, new_v, new_k_head, new_v_head, new_k_strides, new_v_strides = new_store
            old_k += wide_head * old_k_head
            old_v += wide_head * old_v_head
            new_k += wide_head * new_k_head
            new_v += wide_head * new_v_head

            old_clear = clear_of(old_run, queries, window, old_causal, WINDOWED, MASK == "all", BN)
            new_clear = clear_of(new_run, queries, window, new_causal, WINDOWED, MASK != "", BN)
            seen = 0
            if WINDOWED and FOUND != "run":
                seen = tl.maximum(queries[0] - window + 1 - old_run[0], 0)
            old_whole, new_whole = whole_of(old_run, new_run, limits, NEW, BN)
            old_begin, old_end = old_whole
            new_begin, new_end = new_whole
            begin, end = limits
            # Triton 3.6 takes what a loop carries for dead where it only bounds loops within: here
            # nothing is carried from one side to the next but the state.
            low = tl.where(side == 0, begin, tl.where(side == 1, old_end, new_end))
            high = tl.where(side == 0, old_begin, tl.where(side == 1, new_begin, end))
            for tile in tl.range(low, high, num_stages=1, disable_licm=True):
                if TILES > 0:
                    acc, m, l, before = begun(acc, m, l, before, tile, limits[0], TILES)  # noqa: E741
                acc, m, l = take_both(  # noqa: E741
                    acc, m, l, b_q, old_rows, old_run, new_run, (tile, old_clear, new_clear, seen),
                    (old_k, old_v, old_k_strides, old_v_strides, page_rows, where, border),
                    (new_k, new_v, new_k_strides, new_v_strides, row),
                    places, new_column, numbers, FOUND, PAGE, NEW, CAUSAL, WINDOWED, MASK,
                    D, DV, BD, BDV, BN, FORM, PRECISION,
                )  # fmt: skip
            if FOUND != "":  # noqa: SIM102
                if side == 0:
                    acc, m, l, before = sweep_whole(  # noqa: E741
                        acc, m, l, before, b_q, old_rows, (old_run[0], old_run[1], old_run[0]),
                        span_of(old_whole, old_clear, seen, WINDOWED or MASK == "all"),
                        (old_k, old_v, old_k_strides, old_v_strides, page_rows, where, 0), places,
                        (old_tiles[0], old_tiles[1], key_head * old_k_head, key_head * old_v_head),
                        numbers, limits[0], FOUND, PAGE, CACHE_DESCRIBED,
                        old_causal, WINDOWED, MASK == "all",
                        D, DV, BD, BDV, BN, TILES, SHORT, FORM, PRECISION, STAGES, ORDER,
                    )  # fmt: skip
            if NEW == "packed":  # noqa: SIM102
                if side == 1:
                    acc, m, l, before = sweep_whole(  # noqa: E741
                        acc, m, l, before, b_q, new_rows, (new_run[0], new_run[1], new_run[0]),
                        span_of(new_whole, new_clear, 0, WINDOWED or MASK != ""),
                        (new_k, new_v, new_k_strides, new_v_strides, 1, row, 0), row,
                        (new_tiles[0], new_tiles[1], key_head * new_k_head, key_head * new_v_head),
                        numbers, limits[0], "run", 1, DESCRIBED, new_causal, WINDOWED, MASK != "",
                        D, DV, BD, BDV, BN, TILES, SHORT, FORM, PRECISION, STAGES, ORDER,
                    )  # fmt: skip
    if b_v_scale is not None:
        tl.static_assert(TILES == 0)  # what is joined in the loop would lack the scale
        acc = acc * b_v_scale
    if TILES > 0:  # noqa: SIM102
        if tl.cdiv(limits[1], TILES) - limits[0] // TILES > 1:
            acc, m, l = join(before[0], before[1], before[2], acc, m, l)  # noqa: E741
    return acc, m, l


@triton.jit
def taken(
    i, sequences, tiles, listed, total,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, BT: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """What piece of work i is: (sequence, first token, length, piece, scratch row), key head, rows.

    rows: as of `rows_of`, with heads of all groups.
    """
    n, row, length, first, piece, scratch = tile_of(
        i // HEADS, sequences, tiles, listed, total, BT
    )  # fmt: skip
    key_head, group_head = head_of(i % HEADS, GROUP, PACK)
    first_row, o_t, o_h, m_row = rows_of(row, first, length, group_head, GROUP, PACK, BT, BM)
    rows = (first_row, o_t, o_h + key_head * GROUP, m_row)
    return (n, first, length, piece, scratch), key_head, rows


@triton.jit(
    do_not_specialize=["work", "total", "listed", "page_rows", "window"],
    do_not_specialize_on_alignment=["places", "positions", "custom_mask"],
)
def unified_kernel(
    q, k, v, k_tiles, v_tiles, cache_k, cache_v, cache_k_tiles, cache_v_tiles, places,
    custom_mask, sinks, k_scale, v_scale, o, lse, part_acc, part_m, part_l, parked, drawn,
    sequences, tiles, work, total, listed, page_rows, window, inner, factor, k_number, v_number,
    q_token, q_head, k_token, k_head, v_token, v_head,
    o_token, o_head, o_channel, lse_token, lse_head,
    cache_k_page, cache_k_row, cache_k_head, cache_k_channel,
    cache_v_page, cache_v_row, cache_v_head, cache_v_channel, k_scale_head, v_scale_head,
    HQ: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, AGAIN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, PIECE: tl.constexpr,
    FOUND: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
    DESCRIBED: tl.constexpr, CACHE_DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr,
    SCALES: tl.constexpr, WIDE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """One tile and block of heads after another, `work` over all programs.

    A program draws the next one when it is done with one, so that all end at about the same time.
    parked: float32 [programs, BM * (BDV + 2)]. drawn: int32 [1], 0 where there is more work than
    programs (`clear_kernel`). Other arguments as for `extend_kernel`.
    """
    i = tl.program_id(0)
    while i < work:
        # Of this loop the compiler can be told to hoist nothing, which registers would have to hold
        # over all that is in it; of a `while` it cannot where the interpreter runs it too.
        # Not where a prefix is one run: there the longer turns take more than ends do.
        THROUGH: tl.constexpr = (
            ORDER == "late" and BD <= THROUGH_MOST and BDV <= THROUGH_MOST and MASK == ""
            and (FOUND == "" or (FOUND == "pages" and CACHE_DESCRIBED))
            and (NEW != "packed" or DESCRIBED)
        )  # fmt: skip
        for _ in tl.range(8 if PIECE > 0 else 1, disable_licm=True):
            if i < work:
                what, key_head, rows = taken(
                    i, sequences, tiles, listed, total, HEADS, GROUP, PACK, BT, BM
                )
                n, first, length, piece, _ = what
                if first < length:
                    if AGAIN:
                        b_q = (query_rows(q, rows, q_token, q_head), rows[3])
                    else:
                        b_q = read_queries(q, rows, q_token, q_head, D, BD)
                    b_v_scale, numbers = None, (window, inner, factor)
                    if WIDE:
                        b_q = b_q.to(tl.float32)
                    # No packed new keys beside float8 ones: the promise declines such caches.
                    if SCALES and NEW != "packed":
                        b_k_scale = read_scale(k_scale, k_number, key_head * k_scale_head)
                        b_v_scale = read_scale(v_scale, v_number, key_head * v_scale_head)
                        b_q, power = beside_float8(b_q)
                        numbers = scaled_numbers(window, inner, factor, b_k_scale * power, FORM)
                    old_store = (q, q, 0, 0, (0, 0, 0), (0, 0, 0))
                    if FOUND != "":
                        old_store = (
                            cache_k, cache_v, cache_k_head, cache_v_head,
                            (cache_k_page, cache_k_row, cache_k_channel),
                            (cache_v_page, cache_v_row, cache_v_channel),
                        )  # fmt: skip
                    new_store = (q, q, 0, 0, (0, 0, 0), (0, 0, 0))
                    if NEW == "packed":
                        new_store = (k, v, k_head, v_head, (k_token, 0, 1), (v_token, 0, 1))
                    stores = (old_store, new_store, page_rows)
                    key_tiles = ((cache_k_tiles, cache_v_tiles), (k_tiles, v_tiles))
                    facts = facts_of(sequences, n)
                    whose = (facts, first, rows[3], key_head)
                    runs, lower, upper = seen_of(
                        facts, first, window, FOUND, NEW, CAUSAL, WINDOWED, MASK, BT
                    )

                    place = place_of(parked, BM, BDV)
                    if PIECE == 0 or THROUGH:
                        # Under a short window there is one block, wherever it begins.
                        limits = (lower // BN, tl.cdiv(upper, BN))
                        if PIECE > 0 and piece >= 0:
                            limits = (
                                tl.maximum(limits[0], piece * (PIECE // BN)),
                                tl.minimum(limits[1], (piece + 1) * (PIECE // BN)),
                            )
                        acc, m, l = reduce(  # noqa: E741
                            b_q, limits, runs, whose, stores, key_tiles,
                            places, custom_mask, numbers, b_v_scale,
                            FOUND, PAGE, NEW, DESCRIBED, CACHE_DESCRIBED, CAUSAL, WINDOWED, MASK,
                            PACK, BT, BM, D, DV, BD, BDV, BN, PIECE // BN, PIECE == 0,
                            FORM, PRECISION, STAGES, ORDER,
                        )  # fmt: skip
                    else:
                        first_block, end_block = lower // PIECE, tl.cdiv(upper, PIECE)
                        if piece >= 0:
                            first_block = tl.maximum(first_block, piece)
                            end_block = tl.minimum(end_block, piece + 1)
                        acc = tl.zeros((BM, BDV), tl.float32)
                        m = tl.full((BM,), NOTHING, tl.float32)
                        l = tl.zeros((BM,), tl.float32)  # noqa: E741
                        for block in tl.range(first_block, end_block, disable_licm=True):
                            tl.debug_barrier()  # as in `reduce`
                            runs, lower, upper = seen_of(
                                facts, first, window, FOUND, NEW, CAUSAL, WINDOWED, MASK, BT
                            )
                            begin = tl.maximum(lower, block * PIECE) // BN
                            end = tl.cdiv(tl.minimum(upper, (block + 1) * PIECE), BN)
                            acc, m, l = reduce(  # noqa: E741
                                b_q, (begin, end), runs, whose, stores, key_tiles,
                                places, custom_mask, numbers, b_v_scale, FOUND, PAGE, NEW,
                                DESCRIBED, CACHE_DESCRIBED, CAUSAL, WINDOWED, MASK, PACK, BT, BM,
                                D, DV, BD, BDV, BN, 0, False, FORM, PRECISION, STAGES, ORDER,
                            )  # fmt: skip
                            if block != first_block:
                                acc, m, l = join_parked(place, acc, m, l)  # noqa: E741
                            if block + 1 < end_block:
                                park(place, acc, m, l)
                    # Rows are found again, so that registers need not hold them over the keys.
                    what, _, rows = taken(
                        i, sequences, tiles, listed, total, HEADS, GROUP, PACK, BT, BM
                    )
                    n, _, _, piece, scratch = what
                    keep(
                        acc, m, l, o, lse, sinks, part_acc, part_m, part_l, rows, piece, scratch, n,
                        (o_token, o_head, o_channel, lse_token, lse_head),
                        HQ, DV, BDV, HAS_SINKS, HAS_LSE,
                    )  # fmt: skip
                following = work
                if PIECE > 0:
                    programs = tl.num_programs(0)
                    if work > programs:
                        following = programs + tl.atomic_add(drawn, 1, sem="relaxed")
                i = following


@triton.jit
def clear_kernel(drawn):
    """Nothing is drawn yet."""
    tl.store(drawn, 0)
