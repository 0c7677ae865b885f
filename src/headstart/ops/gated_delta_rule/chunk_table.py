"""What a step asks of kernels, as int32 tables on the device: sequences, chunks and pieces.

Every table is a pure function of host facts (lengths, starts, drafts, snapshot positions), so a
call needs no copy from the device. Where a cache's state stands, P, is known on the device alone:
it is F = 64 floor(start / 64) or, after drafts, F - 64; an item for the chunk before F is therefore
always listed for a cache that takes drafts, and a kernel passes over it where P = F.

Chunks are computed in spans, since tiles of all of them would take too much room. A piece is what a
span has of a sequence (`cutting`). States go from piece to piece through rows of `carry`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from headstart.ops.gated_delta_rule.cutting import CHUNK, WHOLE, Cut, pieces_of_spans

if TYPE_CHECKING:
    from headstart.ops.gated_delta_rule.schedule import Schedule

SEQUENCE_COLUMNS = 8
"""row, start, length, first chunk, first item, items (-1: no sequence), fold position, snapshot at
the opening (-1: none)."""
ITEM_COLUMNS = 3
"""sequence (-1: none), position of the chunk's first row, snapshot after the chunk (-1: none)."""
PIECE_COLUMNS = 6
"""sequence (-1: none), first item, end of its items, position of the first item's first row, where
the state before it is (a row of `carry`, or OPENS, ...), where the state after it goes (a row of
`carry`, or CLOSES)."""
NO_PIECE = [-1, 0, 0, 0, 0, 0]


class ChunkTable(NamedTuple):
    """The tables of one step, row after row: of its sequences, and of its chunks and pieces in the
    order of spans. pieces: None where a kernel has no spans."""

    sequences: torch.Tensor
    items: torch.Tensor
    pieces: torch.Tensor | None = None


def chunk_table(
    schedule: Schedule, cached: bool, drafting: bool, cut: Cut | None = None
) -> ChunkTable:
    """The tables of a schedule, kept by it.

    cached: whether states live in a cache; drafting: whether that cache takes drafts; cut: how its
    chunks are cut into spans and pieces, None for a kernel that has no spans: no table, and no copy
    to the device, for what it does not read.

    >>> from headstart import Schedule
    >>> table = chunk_table(Schedule([70], device="cpu"), cached=False, drafting=False, cut=WHOLE)
    >>> table.sequences.tolist(), table.items.view(-1, 3).tolist(), table.pieces.tolist()
    ([0, 0, 70, 0, 0, 2, 70, -1], [[0, 0, -1], [0, 64, -1]], [0, 0, 2, 0, -1, -1])
    """
    builders = _builders(cached, drafting, cut or WHOLE)
    return ChunkTable(*map(schedule.on_device, builders if cut else builders[:2]))


Builder = Callable[["Schedule"], list[int]]


@functools.cache
def _builders(cached: bool, drafting: bool, cut: Cut) -> tuple[Builder, Builder, Builder]:
    """The tables as `Schedule.on_device` wants them: the same function for the same table."""

    def sequences(schedule: Schedule) -> list[int]:
        return [entry for row in _rows(schedule, cached, drafting, cut)[0] for entry in row]

    def items(schedule: Schedule) -> list[int]:
        return [entry for row in _rows(schedule, cached, drafting, cut)[1] for entry in row]

    def pieces(schedule: Schedule) -> list[int]:
        return [entry for row in _rows(schedule, cached, drafting, cut)[2] for entry in row]

    return sequences, items, pieces


Rows = list[list[int]]


def _rows(schedule: Schedule, cached: bool, drafting: bool, cut: Cut) -> tuple[Rows, Rows, Rows]:
    chunks = schedule.chunk_spans(drafting)
    spans = pieces_of_spans([last - first for first, last in chunks], cut)
    sequences, after, kept = [], [], 0
    for start, length, draft, positions, (first, last), row in zip(
        schedule.starts,
        schedule.lengths,
        schedule.drafts,
        schedule.snapshot_positions,
        chunks,
        schedule.offsets,
        strict=False,
    ):
        opening, end = start // CHUNK, start + length
        fold = opening if draft else end // CHUNK
        fold = fold * CHUNK if cached else end
        after.append({position: kept + i for i, position in enumerate(positions)})
        kept += len(positions)
        at_opening = after[-1].get(opening * CHUNK, -1)
        sequences.append([row, start, length, first, 0, last - first, fold, at_opening])
    items: Rows = []
    pieces: Rows = []
    room, chunk_rows = len(sequences), schedule.chunk_count(drafting)
    if schedule.capacity is not None:
        room = schedule.capacity[0]
        sequences += [[0, 0, 0, 0, 0, -1, 0, -1]] * (room - len(sequences))
    for span in spans:
        begins = {}
        for n, begin, end, source, target in span:
            if n < 0:
                pieces.append(NO_PIECE)
                continue
            lows = range(chunks[n][0] + begin, chunks[n][0] + end)
            if (n, begin) not in begins:  # a map of a segment runs over the segment's own items
                begins[n, begin] = len(items)
                if begin == 0:
                    sequences[n][4] = len(items)
                items += [[n, c * CHUNK, after[n].get((c + 1) * CHUNK, -1)] for c in lows]
            at = begins[n, begin]
            low = (chunks[n][0] + begin) * CHUNK
            pieces.append([n, at, at + end - begin, low, source, target])
        pieces += [NO_PIECE] * (cut.rows(room) - len(span))
    missing = cut.spans(chunk_rows) * cut.rows(room) - len(pieces)
    pieces += [NO_PIECE] * missing
    items += [[-1, 0, -1]] * (chunk_rows - len(items))
    return sequences, items, pieces
