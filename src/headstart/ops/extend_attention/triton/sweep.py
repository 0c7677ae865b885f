"""Going over tiles of keys: read, score, hide, absorb.

Tile i of a run of keys at positions start, start + 1, ... holds its keys [i BN - origin, ...), so
that tiles are counted from the first key (origin 0) or from position 0 (origin start). Every row
sees every key of a clear tile, which takes no mask; the others are the border.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.triton.keys import find, offsets, operand, read
from headstart.ops.extend_attention.triton.softmax import NOTHING, absorb, tanh


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
    """Scores [BM, BN] of queries [BM, BD] and keys [BN, BD], in units that FORM names."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if FORM == "scaled":
        b_s = b_s * inner
    if FORM == "tanh":
        b_s = tanh(b_s * inner)
    return b_s


@triton.jit
def hide(
    b_s, rows, low, run, window, HELD: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores with -inf where a row does not see a key; the tile begins at key `low` of the run.

    rows: (position, pointer to key 0's entry in a custom mask, whether to read it), all [BM].
    HELD: whether all BN rows of the tile are keys of the run. Bounds are counted from the tile's
    first key, so that each costs one comparison.
    """
    o_own, p_mask, seen = rows
    start, count = run
    o_c = tl.arange(0, b_s.shape[1])[None, :]
    upper = count - 1 - low
    if CAUSAL and not MASKED:
        upper = tl.minimum(o_own - (start + low), upper)[:, None]
    if not HELD or (CAUSAL and not MASKED):
        b_s = tl.where(o_c <= upper, b_s, NOTHING)
    if WINDOWED:
        b_s = tl.where(o_c > (o_own - (start + low) - window)[:, None], b_s, NOTHING)
    if MASKED:
        m_entry = seen[:, None] & (o_c < count - low)
        entries = tl.load(p_mask[:, None] + (low + o_c), mask=m_entry, other=0)
        b_s = tl.where(entries != 0, b_s, NOTHING)
    return b_s


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
def sweep(
    acc, m, l, b_q, rows, run, span, store, lists, tiles, numbers,  # noqa: E741
    FOUND: tl.constexpr, PAGE: tl.constexpr, DESCRIBED: tl.constexpr, CLEAR: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, LISTED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    FORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Absorb tiles [begin, end) of one run of keys, of which `skipped` from `hole` on are left out.

    CLEAR: whether nothing is to be hidden in them. DESCRIBED: whether they are read through
    descriptors; then every row of them must be a key of the run.
    rows: (o_own, p_mask, seen) of the tile's rows. run: (start, count, origin). span: (begin, end,
    hole, skipped). store: (k, v, their strides, where, number of the run's first key there).
    lists: (places, positions, entry). tiles: (k, v, their columns) as descriptors. numbers:
    (window, inner, factor).
    """
    start, count, origin = run
    begin, end, hole, skipped = span
    k, v, k_strides, v_strides, where, number = store
    places, positions, entry = lists
    k_tiles, v_tiles, k_column, v_column = tiles
    window, inner, factor = numbers
    dtype: tl.constexpr = b_q.dtype
    for i in tl.range(begin, end, num_stages=STAGES):
        tile = i
        if not CLEAR:
            tile = i + tl.where(i >= hole, skipped, 0)
        low = tile * BN - origin
        o_key = low + tl.arange(0, BN)
        m_key = (o_key >= 0) & (o_key < count)
        if DESCRIBED:
            if FOUND == "pages":
                page = tl.load(places + where + (number + low) // PAGE).to(tl.int32)
                row = page * PAGE + (number + low) % PAGE
            else:
                row = (where + number + low).to(tl.int32)
            b_k = k_tiles.load([row, k_column])
        else:
            page, row = find(places, where, number + o_key, m_key, FOUND, PAGE)
            at = offsets(page, row, k_strides, PAGE)
            b_k = read(k, at, m_key, k_strides[2], CLEAR, D, BD)
        b_s = score(b_q, operand(b_k, dtype), inner, FORM, PRECISION)
        if LISTED:
            o_position = tl.load(positions + entry + o_key, mask=m_key, other=0)
            b_s = hide_listed(b_s, rows, low, count, o_position, window, CAUSAL, WINDOWED, MASKED)
        elif not CLEAR:
            b_s = hide(b_s, rows, low, (start, count), window, DESCRIBED, CAUSAL, WINDOWED, MASKED)
        if DESCRIBED:
            b_v = v_tiles.load([row, v_column])
        else:
            at = offsets(page, row, v_strides, PAGE)
            b_v = read(v, at, m_key, v_strides[2], CLEAR, DV, BDV)
        acc, m, l = absorb(acc, m, l, b_s, operand(b_v, dtype), factor, PRECISION)  # noqa: E741
    return acc, m, l
