"""Going over tiles of keys: read, score, hide, absorb.

Tile i of a run of keys at positions start, start + 1, ... holds its keys [i BN - origin, ...), so
that tiles are counted from the first key (origin 0) or from position 0 (origin start). A tile may
reach beyond a run's last key, not before its first. Every row sees every key of a clear tile, which
takes no mask; the others are the border.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportUnboundVariable=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.triton.keys import (
    find,
    load_parts,
    look_up,
    offsets,
    operand,
    parts_of,
    read,
    read_either,
    read_parts,
    row_of_tile,
)
from headstart.ops.extend_attention.triton.softmax import (
    NOTHING,
    absorb,
    add_values,
    column,
    join,
    tanh,
    top,
    weigh,
    weigh_two,
    weights,
)


@triton.jit
def visible(first, last, start, count, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """First and past the last of a run's keys that a row at positions [first, last] sees."""
    lower = start * 0
    upper = count
    if WINDOWED:
        lower = tl.maximum(first - window + 1 - start, 0)
    if CAUSAL:
        upper = tl.minimum(count, last + 1 - start)
    return lower, tl.maximum(upper, lower)


@triton.jit
def clear(first, last, start, count, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """First and past the last of a run's keys that all rows at positions [first, last] see."""
    return visible(last, first, start, count, window, CAUSAL, WINDOWED)


@triton.jit
def score(b_q, b_k, inner, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """Scores [BM, BN] of queries [BM, BD] and keys [BN, BD], in units that FORM names.

    Queries and keys are tiles, or tuples of as many parts of one. inner: a number, or one a row
    [BM].
    """
    b_q, b_k = parts_of(b_q), parts_of(b_k)
    b_s = tl.dot(b_q[0], tl.trans(b_k[0]), input_precision=PRECISION)
    for part in tl.static_range(1, len(b_q)):
        b_s = tl.dot(b_q[part], tl.trans(b_k[part]), b_s, input_precision=PRECISION)
    return formed(b_s, inner, FORM)


@triton.jit
def score_again(
    queries, keys, inner, count,
    D: tl.constexpr, BD: tl.constexpr, FORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with queries that are read again for every tile of keys, BD columns at a time.

    queries: (pointers [BM], which of them there are). keys: as for `read_either`. count: a number
    that is not negative, which compilers do not know. Else they read all columns first, into
    registers that they do not have.
    """
    turns = tl.cdiv(D, BD) + (count < 0).to(tl.int32)
    p_q, m_row = queries
    b_s = tl.zeros((p_q.shape[0], keys[0][0].shape[0]), tl.float32)
    for turn in tl.range(turns, num_stages=1):
        b_q = read(p_q, m_row, 1, D, BD, turn * BD)
        b_k = read_either(keys, D, BD, p_q.dtype.element_ty, turn * BD)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=PRECISION)
    return formed(b_s, inner, FORM)


@triton.jit
def formed(b_s, inner, FORM: tl.constexpr):
    """Products of queries and keys in the units of scores."""
    if FORM == "scaled":
        b_s = b_s * column(inner)
    if FORM == "tanh":
        b_s = tanh(b_s * column(inner))
    return b_s


@triton.jit
def shown(p_mask, seen, places, KEYS: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Which keys [BM, KEYS] of a tile a custom mask shows, spread over threads as scores are.

    p_mask: pointer to key 0's entry [BM]; seen: which rows are read [BM]. places: of the tile's
    first key and of their count, among keys whose entries begin with column 0; the same of keys
    that begin with another column, and this. Others than these have no entry.
    That spread comes from a product with 1. Else the compiler may spread the weights of a masked
    tile as the entries were loaded, and the sum over a row would be taken in another order, with
    other bits than without a mask. Its terms come a few columns of entries at a time, which
    registers hold.
    """
    low, count, other_low, other_count, other_column = places
    SLICE: tl.constexpr = 32 if KEYS > 32 else KEYS
    o_c = tl.arange(0, KEYS)
    # Sums of one term are exact in half of the registers; of float32 products the spread is theirs.
    KIND: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.float16
    found = tl.zeros((p_mask.shape[0], KEYS), KIND)
    for part in tl.static_range(KEYS // SLICE):
        o_part = part * SLICE + tl.arange(0, SLICE)
        o_key, o_other = low + o_part, other_low + o_part
        m_key = (o_key >= 0) & (o_key < count)
        m_other = (o_other >= 0) & (o_other < other_count)
        o_column = tl.where(m_other, other_column + o_other, o_key)
        entries = tl.load(
            p_mask[:, None] + o_column[None, :], mask=seen[:, None] & (m_key | m_other)[None, :],
            other=0,
        )  # fmt: skip
        one = (o_part[:, None] == o_c[None, :]).to(KIND)
        found = tl.dot(
            (entries != 0).to(KIND), one, found, input_precision=PRECISION, out_dtype=KIND
        )
    return found > 0.5


@triton.jit
def hide(
    b_s, rows, low, run, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores with -inf where a row does not see a key; the tile begins at key `low` of the run.

    rows: (position, pointer to key 0's entry in a custom mask, whether to read it), all [BM].
    Bounds are counted from the tile's first key, so that each costs one comparison.
    """
    o_own, p_mask, seen = rows
    start, count = run
    o_c = tl.arange(0, b_s.shape[1])[None, :]
    base = start + low
    upper = count - 1 - low
    if CAUSAL and not MASKED:
        upper = tl.minimum(o_own - base, upper)[:, None]
    m_seen = o_c <= upper
    if WINDOWED:
        m_seen = m_seen & (o_c > (o_own - base - window)[:, None])
    if MASKED:
        places = (low, count, 0, 0, 0)
        m_seen = m_seen & shown(p_mask, seen, places, b_s.shape[1], dtype, PRECISION)
    return tl.where(m_seen, b_s, NOTHING)


@triton.jit
def hide_listed(
    b_s, rows, low, count, o_position, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The same for keys at any positions o_position [BN]."""
    o_own, p_mask, seen = rows
    o_c = tl.arange(0, b_s.shape[1])[None, :]
    m_seen = o_c < count - low
    if MASKED:
        m_entry = m_seen & seen[:, None]
        m_seen = m_seen & (tl.load(p_mask[:, None] + (low + o_c), mask=m_entry, other=0) != 0)
    elif CAUSAL:
        m_seen = m_seen & (o_position[None, :] <= o_own[:, None])
    if WINDOWED:
        m_seen = m_seen & (o_position[None, :] > o_own[:, None] - window)
    return tl.where(m_seen, b_s, NOTHING)


@triton.jit
def hide_both(
    b_s, rows, low, keys, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr,
    dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for a tile that begins at position `low` and may have keys of both runs.

    keys: which are of the prefix and which are new, [BN], and where a custom mask, which covers
    "all" keys, the "new" ones or none, has their entries, as for `shown`.
    """
    o_own, p_mask, seen = rows
    m_old, m_new, places = keys
    o_c = tl.arange(0, b_s.shape[1])
    m_key = m_old | m_new
    m_seen = m_key[None, :]
    # Bounds are counted from the tile's first key, so that each costs one comparison.
    m_causal = o_c[None, :] <= (o_own - low)[:, None]
    if CAUSAL and MASK == "":
        m_seen = m_seen & m_causal
    if MASK != "":
        m_shown = shown(p_mask, seen, places, b_s.shape[1], dtype, PRECISION)
        if MASK == "new" and CAUSAL:
            m_shown = m_shown | (m_old[None, :] & m_causal)
        elif MASK == "new":
            m_shown = m_shown | m_old[None, :]
        m_seen = m_seen & m_shown
    if WINDOWED:
        m_seen = m_seen & (o_c[None, :] > (o_own - low - window)[:, None])
    return tl.where(m_seen, b_s, NOTHING)


@triton.jit
def sweep(
    acc, m, l, b_q, rows, run, span, store, lists, tiles, numbers,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr, DESCRIBED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, LISTED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SHORT: tl.constexpr,
    AHEAD: tl.constexpr = False,
):  # fmt: skip
    """Absorb tiles of one run of keys, from left to right, each before the next.

    SHORT: whether a window is short, so that there are few turns.

    AHEAD: whether the next tiles are asked for before the weights of this one. Triton's pipeliner
    asks for them behind all that a turn makes of its own tiles, but before a branch whose results
    only the next turn takes: so weights and their product stand in one that is always taken.
    b_q: queries, as a tile, as parts, or as rows to read again (`score_again`).
    DESCRIBED: whether they are read through descriptors; then every row of them must be a key of
    the run. rows: (position, pointer into a custom mask, whether to read it). run: (start, count,
    origin). span: (begin, end, first and past the last clear tile, the run's first key that some
    row sees). store: (k, v, their strides, rows of a page, where, number of the run's first key
    there). lists: (places, positions, entry).
    tiles: (k, v, their columns) as descriptors. numbers: (window, inner, factor).
    """
    start, count, origin = run
    begin, end, clear_begin, clear_end, seen = span
    k, v, k_strides, v_strides, page_rows, where, number = store
    places, positions, entry = lists
    k_tiles, v_tiles, k_column, v_column = tiles
    window, inner, factor = numbers
    b_q = parts_of(b_q)
    AGAIN: tl.constexpr = b_q[0].dtype.is_ptr()
    dtype: tl.constexpr = b_q[0].dtype.element_ty if AGAIN else b_q[0].dtype
    # Copies that wait for an entry of a table take a stage more each, where loops are long enough.
    deep: tl.constexpr = FOUND != "run" and STAGES > 2 and not SHORT
    # Addresses of a custom mask's entries are not worth registers over the loop.
    for tile in tl.range(
        begin, end, num_stages=2 * STAGES - 1 if deep else STAGES, disable_licm=MASKED and BN > 32
    ):
        low = tile * BN - origin
        o_key = low + tl.arange(0, BN)
        m_key = o_key < count
        if DESCRIBED:
            row = row_of_tile(places, where, number + low, FOUND, PAGE)
            b_s = score(b_q, load_parts(k_tiles, row, k_column, len(b_q)), inner, FORM, PRECISION)
        else:
            o_number, m_read = number + o_key, m_key
            if WINDOWED and FOUND != "run" and not LISTED:
                # What every row has left may be another's by now, and NaN, of which no weight makes
                # nothing: the first key that is seen stands for it.
                o_number = tl.maximum(o_number, number + seen)
            if FOUND != "run" and PAGE == 1:
                # The entry of the last key stands for those behind it: that costs less than masks.
                o_number, m_read = tl.minimum(o_number, number + count - 1), None
            found = look_up(places, where, o_number, m_read, FOUND, PAGE)
            page, row = find(found, where, o_number, page_rows, FOUND, PAGE)
            p_k = k + offsets(page, row, k_strides, PAGE)
            if AGAIN:
                keys = ((p_k, m_key, k_strides[2]),)
                b_s = score_again(b_q, keys, inner, count, D, BD, FORM, PRECISION)
            else:
                b_k = read_parts(p_k, m_read, k_strides[2], D, BD, len(b_q), dtype)
                b_s = score(b_q, b_k, inner, FORM, PRECISION)
        if LISTED:
            o_position = tl.load(positions + entry + o_key, mask=m_key, other=0)
            b_s = hide_listed(b_s, rows, low, count, o_position, window, CAUSAL, WINDOWED, MASKED)
        elif (tile < clear_begin) | (tile >= clear_end):
            b_s = hide(
                b_s, rows, low, (start, count), window, CAUSAL, WINDOWED, MASKED, dtype, PRECISION
            )
        if DESCRIBED:
            b_v = v_tiles.load([row, v_column])
        else:
            b_v = read(v + offsets(page, row, v_strides, PAGE), m_read, v_strides[2], DV, BDV)
        if AHEAD:
            m_new = top(m, b_s, factor)
            if tile < end:
                b_p, decay, l = weights(m, m_new, l, b_s, factor)  # noqa: E741
                acc = add_values(acc, decay, b_p, operand(b_v, dtype), PRECISION)
                m = m_new
        else:
            acc, m, l = absorb(acc, m, l, b_s, operand(b_v, dtype), factor, PRECISION)  # noqa: E741
    return acc, m, l


@triton.jit
def sweep_late(
    acc, m, l, before, b_q, rows, run, span, store, places, tiles, numbers, first,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr,
    TILES: tl.constexpr, FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same through descriptors, with the same bits, the values of a tile a turn later.

    Their product runs beside the weights of the next tile, which need no result of it: one warp
    group keeps the matrix units busy. In the first turn, before there are weights, the values are
    rows in front of the tensor, which a descriptor reads as zeros. Weights are carried in float32:
    rounded ones would be registers that are written while a product reads them, and the compiler
    would wait for it.

    TILES: tiles of a block of keys; 0: there is one block, or the caller ends them. Else the loop
    runs through their ends: a block's sums are joined to those `before` = (acc, m, l), a turn after
    the next block began, when its last values are there. first: tile in which the first begins.
    """
    start, count, origin = run
    begin, end, clear_begin, clear_end, _ = span
    where, number = store[5], store[6]
    k_tiles, v_tiles, k_column, v_column = tiles
    window, inner, factor = numbers
    b_q = parts_of(b_q)
    dtype: tl.constexpr = b_q[0].dtype
    if begin < end:
        b_p = tl.zeros((acc.shape[0], BN), tl.float32)
        decay = tl.full((acc.shape[0],), 1.0, tl.float32)
        row = tl.full((), -BN, tl.int32)
        ended, begins = (m, l), begin < 0
        for tile in tl.range(begin, end, num_stages=STAGES):
            low = tile * BN - origin
            v_row = row
            row = row_of_tile(places, where, number + low, FOUND, PAGE)
            b_k = load_parts(k_tiles, row, k_column, len(b_q))
            b_v = v_tiles.load([v_row, v_column])
            b_w = b_p.to(dtype)
            b_s = score(b_q, b_k, inner, FORM, PRECISION)
            if TILES > 0:
                # One branch, which takes the scores: Triton would put another in front of their
                # product, where it has to wait for that of the values, or behind everything.
                if (tile < clear_begin) | (tile >= clear_end) | begins:
                    b_s = hide(
                        b_s, rows, low, (start, count), window, CAUSAL, WINDOWED, MASKED, dtype,
                        PRECISION,
                    )  # fmt: skip
                    if begins:
                        before = join(before[0], before[1], before[2], acc, ended[0], ended[1])
                        acc = tl.zeros(acc.shape, tl.float32)
                acc = add_values(acc, decay, b_w, b_v, PRECISION)
                begins = (tile % TILES == 0) & (tile > first)
                # Without a choice Triton 3.6 takes what is carried for the loop's first m and l.
                ended = (tl.where(begins, m, ended[0]), tl.where(begins, l, ended[1]))
                m = tl.where(begins, NOTHING, m)
                l = tl.where(begins, 0.0, l)  # noqa: E741
                m_new = top(m, b_s, factor)
                # As AHEAD of `sweep` says, so that the next tiles are asked for before the weights:
                # a whole tile begins in front of the run's end, which the compiler does not know.
                if low < count:
                    b_p, decay, l = weights(m, m_new, l, b_s, factor)  # noqa: E741
                m = m_new
            else:
                acc = add_values(acc, decay, b_w, b_v, PRECISION)
                if (tile < clear_begin) | (tile >= clear_end):
                    b_s = hide(
                        b_s, rows, low, (start, count), window, CAUSAL, WINDOWED, MASKED, dtype,
                        PRECISION,
                    )  # fmt: skip
                b_p, decay, m, l = weigh(m, l, b_s, factor)  # noqa: E741
        if TILES > 0:  # noqa: SIM102
            if begins:
                before = join(before[0], before[1], before[2], acc, ended[0], ended[1])
                acc = tl.zeros(acc.shape, tl.float32)
        acc = add_values(acc, decay, b_p, v_tiles.load([row, v_column]), PRECISION)
    return acc, m, l, before


@triton.jit
def sweep_early(
    acc, m, l, b_q, rows, run, span, store, places, tiles, numbers,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same through descriptors, with the same bits, the scores of a tile a turn early.

    A turn ends with the product of weights and values, which runs beside the next softmax, and with
    the question for the next tiles, which arrive beside it too. The first scores stand in a branch
    that is always taken: so the memory of their keys is free again in the loop. The last turn
    scores its own keys once more, for nothing.
    """
    start, count, origin = run
    begin, end, clear_begin, clear_end, _ = span
    where, number = store[5], store[6]
    k_tiles, v_tiles, k_column, v_column = tiles
    window, inner, factor = numbers
    b_q = parts_of(b_q)
    dtype: tl.constexpr = b_q[0].dtype
    if begin < end:
        b_s = tl.full((acc.shape[0], BN), NOTHING, tl.float32)
        row = row_of_tile(places, where, number + begin * BN - origin, FOUND, PAGE)
        if count > 0:
            b_k = load_parts(k_tiles, row, k_column, len(b_q))
            b_s = score(b_q, b_k, inner, FORM, PRECISION)
        for tile in tl.range(begin, end, num_stages=STAGES):
            low = tile * BN - origin
            v_row = row
            after = tl.minimum(tile + 1, end - 1) * BN - origin
            row = row_of_tile(places, where, number + after, FOUND, PAGE)
            if (tile < clear_begin) | (tile >= clear_end):
                b_s = hide(
                    b_s, rows, low, (start, count), window, CAUSAL, WINDOWED, MASKED, dtype,
                    PRECISION,
                )  # fmt: skip
            b_p, decay, m, l = weigh(m, l, b_s, factor)  # noqa: E741
            # Loads stand where they are waited for.
            b_k = load_parts(k_tiles, row, k_column, len(b_q))
            b_s = score(b_q, b_k, inner, FORM, PRECISION)
            b_v = v_tiles.load([v_row, v_column])
            acc = add_values(acc, decay, b_p, b_v, PRECISION)
    return acc, m, l


@triton.jit
def sweep_pairs(
    acc, m, l, b_q, rows, run, span, places, where, tiles, numbers,  # noqa: E741
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `sweep_late` for tiles of two whole pages each, read through descriptors."""
    start, count, _ = run
    begin, end, clear_begin, clear_end, seen = span
    k_tiles, v_tiles, k_column, v_column = tiles
    window, inner, factor = numbers
    b_q = parts_of(b_q)
    dtype: tl.constexpr = b_q[0].dtype
    if begin < end:
        b_p = tl.zeros((acc.shape[0], PAGE), tl.float32)
        b_p_next = b_p
        decay = tl.full((acc.shape[0],), 1.0, tl.float32)
        row = tl.full((), -PAGE, tl.int32)
        row_next = row
        for tile in tl.range(begin, end, num_stages=STAGES):
            low = tile * (2 * PAGE)
            b_v, b_v_next = v_tiles.load([row, v_column]), v_tiles.load([row_next, v_column])
            p_page = places + where + 2 * tile
            p_first = p_page
            if WINDOWED:
                p_first = places + where + tl.maximum(2 * tile, seen // PAGE)  # as in `sweep`
            row = tl.load(p_first).to(tl.int32) * PAGE
            row_next = tl.load(p_page + 1).to(tl.int32) * PAGE
            b_k = load_parts(k_tiles, row, k_column, len(b_q))
            b_k_next = load_parts(k_tiles, row_next, k_column, len(b_q))
            b_w, b_w_next = b_p.to(dtype), b_p_next.to(dtype)
            b_s = score(b_q, b_k, inner, FORM, PRECISION)
            b_s_next = score(b_q, b_k_next, inner, FORM, PRECISION)
            acc = add_values(acc, decay, b_w, b_v, PRECISION)
            acc = tl.dot(b_w_next, b_v_next, acc, input_precision=PRECISION)
            if (tile < clear_begin) | (tile >= clear_end):
                b_s = hide(
                    b_s, rows, low, (start, count), window, CAUSAL, WINDOWED, MASKED, dtype,
                    PRECISION,
                )  # fmt: skip
                b_s_next = hide(
                    b_s_next, rows, low + PAGE, (start, count), window, CAUSAL, WINDOWED, MASKED,
                    dtype, PRECISION,
                )  # fmt: skip
            b_p, b_p_next, decay, m, l = weigh_two(m, l, b_s, b_s_next, factor)  # noqa: E741
        acc = add_values(acc, decay, b_p, v_tiles.load([row, v_column]), PRECISION)
        b_v_next = v_tiles.load([row_next, v_column])
        acc = tl.dot(b_p_next.to(dtype), b_v_next, acc, input_precision=PRECISION)
    return acc, m, l


@triton.jit
def take_both(
    acc, m, l, b_q, rows, old_run, new_run, span, old, new, places, new_column, numbers,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Absorb one tile at absolute positions, whichever run each of its keys is of.

    old_run, new_run: (position of the first key, count). old: (k, v, their strides, rows of a
    page, where, number of the first new key); new: (k, v, their strides, packed row of the first
    new key). new_column: column of the first new key in a custom mask. span: (tile, first and past
    the last clear tile of either run, the first old key that some row sees). The rest as for
    `sweep`.
    """
    old_k, old_v, old_k_strides, old_v_strides, page_rows, where, border = old
    new_k, new_v, new_k_strides, new_v_strides, first_row = new
    tile, old_clear, new_clear, seen = span
    window, inner, factor = numbers
    b_q = parts_of(b_q)
    AGAIN: tl.constexpr = b_q[0].dtype.is_ptr()
    dtype: tl.constexpr = b_q[0].dtype.element_ty if AGAIN else b_q[0].dtype
    o_c = tl.arange(0, BN)
    low = tile * BN
    o_old, o_new = low + o_c - old_run[0], low + o_c - new_run[0]
    m_old = (o_old >= seen) & (o_old < old_run[1])
    m_new = (o_new >= 0) & (o_new < new_run[1])
    m_key = m_old | m_new
    keys, values = (), ()
    if FOUND != "":
        o_number, m_cached = o_old, m_old
        if NEW == "cached":
            o_number, m_cached = tl.where(m_new, border + o_new, o_old), m_key
        found = look_up(places, where, o_number, m_cached, FOUND, PAGE)
        page, row = find(found, where, o_number, page_rows, FOUND, PAGE)
        p_k = old_k + offsets(page, row, old_k_strides, PAGE)
        p_v = old_v + offsets(page, row, old_v_strides, PAGE)
        keys += ((p_k, m_cached, old_k_strides[2]),)
        values += ((p_v, m_cached, old_v_strides[2]),)
    if NEW == "packed":
        o_row = first_row + o_new
        keys += ((new_k + o_row * new_k_strides[0], m_new, 1),)
        values += ((new_v + o_row * new_v_strides[0], m_new, 1),)
    if AGAIN:
        b_s = score_again(b_q, keys, inner, new_run[1], D, BD, FORM, PRECISION)
        b_v = read_either(values, DV, BDV, dtype)
    else:
        b_k = read_either(keys, D, BD, dtype)
        b_v = read_either(values, DV, BDV, dtype)
        b_s = score(b_q, b_k, inner, FORM, PRECISION)
    is_clear = (tile >= old_clear[0]) & (tile < old_clear[1])
    is_clear = is_clear | ((tile >= new_clear[0]) & (tile < new_clear[1]))
    old_count = 0 if MASK == "new" else old_run[1]
    new_low = low - new_run[0]
    entries = (low - old_run[0], old_count, new_low, new_run[1], new_column.to(tl.int32))
    which = (m_old, m_new, entries)
    if not is_clear:
        b_s = hide_both(b_s, rows, low, which, window, CAUSAL, WINDOWED, MASK, dtype, PRECISION)
    acc, m, l = absorb(acc, m, l, b_s, b_v, factor, PRECISION)  # noqa: E741
    return acc, m, l
