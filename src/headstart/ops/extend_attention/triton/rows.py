"""The rows of a program: which tile it takes, its queries, and where its results go.

A tile has BM rows: BT new tokens of a sequence, each with the PACK query heads that share a key
head. Rows that fill a tile up are zeros, see what other rows see, and are not stored.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from headstart.ops.extend_attention.tile_table import SEQUENCE_COLUMNS, TILE_COLUMNS
from headstart.ops.extend_attention.triton.keys import widened
from headstart.ops.extend_attention.triton.softmax import NOTHING, finish

_SEQUENCE = tl.constexpr(SEQUENCE_COLUMNS)
_TILE = tl.constexpr(TILE_COLUMNS)


@triton.jit
def facts_of(sequences, n):
    """Row of sequence n in the table of sequences; -1: rows of none."""
    return sequences + (n + 1) * _SEQUENCE


@triton.jit
def tile_of(i, sequences, tiles, listed, total, BT: tl.constexpr):
    """Sequence, row, length, first token, piece and scratch row of tile i.

    Tiles behind the listed ones are the rows of no sequence; the sequence is -1 for them. The first
    token is not below the length where there is nothing to do.
    """
    n = tl.full((), -1, tl.int32)
    first = (i - listed) * BT
    piece = n
    scratch = n
    if i < listed:
        n = tl.load(tiles + i * _TILE)
        first = tl.load(tiles + i * _TILE + 1)
        piece = tl.load(tiles + i * _TILE + 2)
        scratch = tl.load(tiles + i * _TILE + 3)
    facts = facts_of(sequences, n)
    row = tl.load(facts)
    length = tl.load(facts + 1).to(tl.int32)
    if i >= listed:
        length = (total - row).to(tl.int32)
    elif n < 0:
        length = first
    return n, row, length, first, piece, scratch


@triton.jit
def head_of(block, GROUP: tl.constexpr, PACK: tl.constexpr):
    """Key head of a block of heads, and the first of its query heads within the group."""
    blocks: tl.constexpr = (GROUP + PACK - 1) // PACK
    return block // blocks, (block % blocks) * PACK


@triton.jit
def rows_of(
    row, first, length, group_head,
    GROUP: tl.constexpr, PACK: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Packed row of the tile's first token; then token in the tile, head in the group and whether
    the row is one, all [BM].
    """
    r = tl.arange(0, BM)
    o_t = r // PACK
    o_h = group_head + r % PACK
    m_row = (o_t < BT) & (first + o_t < length) & (o_h < GROUP)
    return row + first, o_t, o_h, m_row


@triton.jit
def places_of(rows, token, head):
    """Where rows [BM] of a tile lie: an offset of them all, and of each behind it, in 64 bits.

    token, head: strides. Within a tile numbers are small and have no sign, which is one
    multiplication each.
    """
    first_row, o_t, o_h, _ = rows
    return first_row * token, widened(o_t) * widened(token) + widened(o_h) * widened(head)


@triton.jit
def query_rows(q, rows, q_token, q_head):
    """Pointers [BM] to the queries of a tile."""
    base, at = places_of(rows, q_token, q_head)
    return q + base + at


@triton.jit
def read_queries(q, rows, q_token, q_head, D: tl.constexpr, BD: tl.constexpr):
    """Queries [BM, BD] of a tile, zeros where there are none."""
    o_d = tl.arange(0, BD)
    pointers = query_rows(q, rows, q_token, q_head)[:, None] + o_d[None, :]
    mask = rows[3][:, None]
    if D < BD:
        mask = mask & (o_d < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def read_query_parts(
    q, rows, q_token, q_head, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr
):
    """The same in parts of BD columns, as `read_parts` does with keys."""
    SIZE: tl.constexpr = D if PARTS == 1 else BD
    found = ()
    for part in tl.static_range(PARTS):
        b_x = read_queries(q + part * BD, rows, q_token, q_head, SIZE, BD)
        found += (b_x,)
    return found


@triton.jit
def store_rows(base, at, b_x, m_row, channel, SIZE: tl.constexpr, BD: tl.constexpr):
    """Rows [BM, BD] to offsets `at` [BM]."""
    o_d = tl.arange(0, BD)
    pointers = base + at[:, None] + (o_d * channel)[None, :]
    tl.store(pointers, b_x.to(base.dtype.element_ty), mask=m_row[:, None] & (o_d < SIZE)[None, :])


@triton.jit
def keep(
    acc, m, l, o, lse, sinks, part_acc, part_m, part_l, rows, piece, scratch, n,  # noqa: E741
    strides, heads, DV: tl.constexpr, BDV: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Write what a tile gives: o and LSE, or the state of a piece.

    rows: as of `rows_of`, with heads of all groups. strides: of a token, a head and a channel of o,
    of a token and a head of the LSE. heads: of all queries.
    """
    _, o_t, o_h, m_row = rows
    o_token, o_head, o_channel, lse_token, lse_head = strides
    if piece >= 0:
        entry = (scratch + o_t).to(tl.int64) * heads + o_h
        store_rows(part_acc, entry * DV, acc, m_row, 1, DV, BDV)
        tl.store(part_m + entry, m, mask=m_row)
        tl.store(part_l + entry, l, mask=m_row)
    else:
        sink = tl.full(m.shape, NOTHING, tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + o_h, mask=m_row & (n >= 0), other=NOTHING).to(tl.float32)
        share, b_lse = finish(m, l, sink)
        base, at = places_of(rows, o_token, o_head)
        store_rows(o + base, at, acc * share[:, None], m_row, o_channel, DV, BDV)
        if HAS_LSE:
            base, at = places_of(rows, lse_token, lse_head)
            tl.store(lse + base + at, b_lse, mask=m_row)
