"""What a plan asks of kernels, as tables on the device: its sequences, and the tiles of its rows.

Every table is a pure function of host facts and is kept by the plan, so a call copies nothing from
the device, and `update_` refreshes what a captured graph reads. The tiles are listed, heavy ones
first, so that no block of a launch stands for rows that do not exist. A tile may be cut into pieces
of `piece` keys each, which programs of their own reduce and a second launch joins. That is done
with a tile that is the only one of its sequence: short rows on long prefixes (decoding) then fill
the device. And with the last tiles, where they fill at most half of it: the others took full
rounds, and the last round would last as long as one of them. Pieces that lie wholly before what a
window shows are not listed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headstart.ops.extend_attention.locate import Consecutive, Listed
from headstart.ops.extend_attention.plan import ExtendPlan

SEQUENCE_COLUMNS = 12
"""first packed row, length, query start, key start, prefix keys, new keys, place of key 0 (a slot,
or an entry of the index list or page table), number of the first new key, custom mask: entry of
row 0 and key 0, entries of a row, column of the first new key; key positions: entry of key 0."""
TILE_COLUMNS = 4
"""sequence (-1: none), first row in it, piece (-1: all keys), row of the scratch for its first."""
JOIN_COLUMNS = 4
"""packed row (-1: none), row of the scratch of its first piece, pieces, rows from one to the next.
"""

ROUNDS = 8
"""Full rounds from which the last one is left as it is: it is a small part of a launch."""
LAST_ROWS = 4096
"""Rows of scratch up to which the last tiles are cut: 64 MiB for 64 heads of 64 channels."""


@dataclass(frozen=True)
class Cut:
    """How a launch sees a plan: what its tables depend on besides the plan.

    part: as of the call. joined: prefix and new keys of a sequence are one run of cached keys where
    their positions are. tokens: new tokens of a tile. piece: keys of a piece, 0: nothing is cut;
    absolute: pieces are counted from position 0, not from the first prefix key. at_once: tiles that
    a device takes at a time, 0: the last ones are left as they are. window: positions up to its own
    that a row sees where it is cut, 0: all.
    """

    part: str
    joined: bool
    tokens: int
    piece: int
    absolute: bool
    at_once: int = 0
    window: int = 0


@dataclass(frozen=True, eq=False)
class TileTable:
    """The tables of one plan in one cut.

    sequences: int64 [1 + N, SEQUENCE_COLUMNS]; the first row is that of rows of no sequence, which
    begin at the plan's T. tiles: int32 [., TILE_COLUMNS]. joins: int32 [., JOIN_COLUMNS], the rows
    whose tiles are cut. scratch_rows: rows of scratch, over all pieces.
    """

    sequences: torch.Tensor
    tiles: torch.Tensor
    joins: torch.Tensor
    scratch_rows: int


def tile_table(plan: ExtendPlan, cut: Cut) -> TileTable:
    """The tables of a plan, kept by it.

    >>> plan = ExtendPlan.from_lengths([70, 1], [0, 300], device="cpu")
    >>> table = tile_table(plan, Cut("all", False, tokens=64, piece=256, absolute=False))
    >>> table.tiles.tolist()
    [[1, 0, 0, 0], [1, 0, 1, 1], [0, 64, -1, 0], [0, 0, -1, 0]]
    >>> table.joins.tolist(), table.scratch_rows
    ([[70, 0, 2, 1]], 2)
    """
    if cut not in plan.tables:
        sequences, tiles, joins = (plan.on_device(build) for build in _builders(cut))
        plan.tables[cut] = TileTable(sequences, tiles, joins, scratch_rows(plan, cut))
    return plan.tables[cut]


def key_positions(plan: ExtendPlan) -> torch.Tensor:
    """Positions of all prefix keys, int32, as `ExtendPlan.on_device` wants them."""
    found = torch.tensor(plan.key_positions or [], dtype=torch.int32, device="cpu")
    return _filled(found, 0 if plan.capacity is None else plan.capacity[2], 0)


def scratch_rows(plan: ExtendPlan, cut: Cut) -> int:
    """Rows of scratch that the pieces of a plan take, or may take after an update."""
    if not cut.piece:
        return 0
    if plan.capacity is None:
        return sum(tile.rows * len(tile.pieces) for tile in _cut_tiles(plan, cut))
    return cut.tokens * _most_pieces(plan, cut)


@functools.cache
def _builders(cut: Cut) -> tuple[Callable[[ExtendPlan], torch.Tensor], ...]:
    """The tables as `ExtendPlan.on_device` wants them: the same function for the same table."""
    return tuple(
        functools.partial(build, cut=cut) for build in (_sequence_rows, _tile_rows, _join_rows)
    )


def _sequence_rows(plan: ExtendPlan, cut: Cut) -> torch.Tensor:
    rows = [[plan.T] + [0] * (SEQUENCE_COLUMNS - 1)]
    mask = 0
    for n in range(plan.N):
        length, prefix = plan.lengths[n], plan.prefix[n]
        cached = 0 if cut.part == "extend" else prefix
        fresh = 0 if cut.part == "prefix" else length
        if cut.joined and _continues(plan, n):
            cached, fresh = cached + fresh, 0
        columns = plan.mask_columns(n)
        column = prefix if plan.mask_covers == "all" else 0
        rows.append([
            plan.offsets[n], length, plan.query_start[n], plan.key_start[n], cached, fresh,
            _place(plan, n), prefix, mask, columns, column, plan.prefix_offsets[n],
        ])  # fmt: skip
        mask += length * columns
    found = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return _filled(found, 0 if plan.capacity is None else 1 + plan.capacity[0], 0)


def _place(plan: ExtendPlan, n: int) -> int:
    """Where the place of a sequence's first key is found: its slot, or an entry of a table."""
    slots = plan.slots
    if slots is None:
        return 0
    if isinstance(slots, Consecutive):
        return slots.first[n]
    return slots.indptr[n] if isinstance(slots, Listed) else n * slots.table.stride(0)


class _CutTile(NamedTuple):
    """A tile that is cut: its sequence, first row and rows, and its pieces."""

    n: int
    first: int
    rows: int
    pieces: range


def _cut_tiles(plan: ExtendPlan, cut: Cut) -> list[_CutTile]:
    """The tiles that are cut: those alone in their sequence, then the last of the others."""
    lengths = plan.lengths
    alone = [
        _CutTile(n, 0, lengths[n], found) for n in range(plan.N) if (found := _alone(plan, cut, n))
    ]
    if not cut.at_once or not cut.piece or plan.capacity is not None:
        return alone
    cut_alone = {tile.n for tile in alone}
    count = sum(-(-lengths[n] // cut.tokens) for n in range(plan.N) if n not in cut_alone)
    rounds, behind = divmod(count, cut.at_once)
    if rounds >= ROUNDS or not 0 < 2 * behind <= cut.at_once:
        return alone
    last = [
        _CutTile(n, first, min(cut.tokens, lengths[n] - first), found)
        for n, first in _whole_tiles(plan, cut)[count - behind :].tolist()
        if (found := _pieces(plan, cut, n, first))
    ]
    return alone + last if sum(len(t.pieces) * t.rows for t in last) <= LAST_ROWS else alone


def _whole_tiles(plan: ExtendPlan, cut: Cut) -> torch.Tensor:
    """Sequence and first row of every tile but those cut as alone in theirs, heavy ones first."""
    lengths = torch.tensor(plan.lengths, dtype=torch.int64, device="cpu")
    counts = (lengths + cut.tokens - 1) // cut.tokens
    whole = [not _alone(plan, cut, n) for n in range(plan.N)]
    counts = counts * torch.tensor(whole, dtype=torch.int64, device="cpu")
    n = torch.repeat_interleave(torch.arange(plan.N, device="cpu"), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    first = (torch.arange(len(n), device="cpu") - before) * cut.tokens
    keys = torch.tensor(plan.prefix, dtype=torch.int64, device="cpu")[n] + first
    order = keys.argsort(descending=True, stable=True)
    return torch.stack([n[order], first[order]], dim=1)


def _tile_rows(plan: ExtendPlan, cut: Cut) -> torch.Tensor:
    # Pieces of lone tiles first: they are as heavy as any tile. Those of the last tiles come last.
    whole, pieces = _whole_tiles(plan, cut), _cut_tiles(plan, cut)
    lone = [tile for tile in pieces if _alone(plan, cut, tile.n)]
    last = pieces[len(lone) :]
    if last:
        gone = {(tile.n, tile.first) for tile in last}
        whole = whole[[i for i, (n, first) in enumerate(whole.tolist()) if (n, first) not in gone]]
    listed, row = [], 0
    for tile in pieces:
        for piece in tile.pieces:
            listed.append([tile.n, tile.first, piece, row])
            row += tile.rows
    ends = sum(len(tile.pieces) for tile in lone)
    cut_table = torch.tensor(listed, dtype=torch.int64, device="cpu").view(-1, TILE_COLUMNS)
    uncut = torch.tensor([-1, 0], device="cpu").expand(len(whole), 2)  # no piece, no scratch
    whole_table = torch.cat([whole, uncut], dim=1)
    found = torch.cat([cut_table[:ends], whole_table, cut_table[ends:]]).to(torch.int32)
    most = 0
    if plan.capacity is not None:
        most = plan.capacity[1] // cut.tokens + plan.capacity[0] + _most_pieces(plan, cut)
    return _filled(found, most, -1)


def _join_rows(plan: ExtendPlan, cut: Cut) -> torch.Tensor:
    rows, scratch = [], 0
    for tile in _cut_tiles(plan, cut):
        row = plan.offsets[tile.n] + tile.first
        pieces = len(tile.pieces)
        rows += [[row + t, scratch + t, pieces, tile.rows] for t in range(tile.rows)]
        scratch += pieces * tile.rows
    found = torch.tensor(rows, dtype=torch.int32, device="cpu").view(-1, JOIN_COLUMNS)
    most = 0
    if plan.capacity is not None and cut.piece:
        most = min(plan.capacity[1], plan.capacity[0] * cut.tokens)
    return _filled(found, most, -1)


def _alone(plan: ExtendPlan, cut: Cut, n: int) -> range:
    """The pieces of sequence n's one tile; empty where it has more or the tile is not cut."""
    return _pieces(plan, cut, n, 0) if 0 < plan.lengths[n] <= cut.tokens else range(0)


def _pieces(plan: ExtendPlan, cut: Cut, n: int, first: int) -> range:
    """The pieces that the tile of sequence n at row `first` sees; empty where they are below two.

    The last piece of a sequence is always among them: it takes the new keys too.
    """
    keys, continues = plan.prefix[n], _continues(plan, n)
    start, own = plan.key_start[n], plan.query_start[n]
    if not cut.piece or cut.part == "extend" or (cut.absolute and not continues):
        return range(0)
    if cut.window and start + keys > own:
        return range(0)  # keys behind the rows: `_most_pieces` counts on none
    if cut.part == "all" and continues and (cut.absolute or cut.joined):
        keys += plan.lengths[n]
    left = min(max(own + first - cut.window + 1 - start, 0), keys) if cut.window else 0
    origin = start if cut.absolute else 0
    found = range((origin + left) // cut.piece, -(-(origin + keys) // cut.piece))
    return found if len(found) > 1 else range(0)


def _continues(plan: ExtendPlan, n: int) -> bool:
    """Whether sequence n's new keys sit right behind its prefix."""
    behind = plan.key_start[n] + plan.prefix[n] == plan.query_start[n]
    return behind and plan.key_positions is None


def _most_pieces(plan: ExtendPlan, cut: Cut) -> int:
    """Pieces that any forward within the plan's capacity may have."""
    assert plan.capacity is not None
    sequences, tokens, keys = plan.capacity
    if not cut.piece:
        return 0
    # A run of n keys touches at most n // piece + 2 blocks of absolute positions.
    most = (keys + tokens) // cut.piece + 2 * sequences
    if cut.window:
        seen = cut.window + cut.tokens - 1
        most = min(most, sequences * (seen // cut.piece + 2))
    return most


def _filled(table: torch.Tensor, rows: int, value: int) -> torch.Tensor:
    """The table with at least `rows` rows, the further ones all `value`."""
    if len(table) >= rows:
        return table
    fill = table.new_full((rows - len(table), *table.shape[1:]), value)
    return torch.cat([table, fill])
