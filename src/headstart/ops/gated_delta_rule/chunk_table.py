"""What a step asks of kernels, as int32 tables on the device: its sequences and their chunks.

Every table is a pure function of host facts (lengths, starts, drafts, snapshot positions), so a
call needs no copy from the device. Where a cache's state stands, P, is known on the device alone:
it is F = 64 floor(start / 64) or, after drafts, F - 64; an item for the chunk before F is therefore
always listed for a cache that takes drafts, and a kernel passes over it where P = F.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from headstart.ops.gated_delta_rule.schedule import Schedule

CHUNK = 64
"""Tokens of a chunk on the absolute grid of a sequence."""
SEQUENCE_COLUMNS = 8
"""row, start, length, first chunk, first item, items (-1: no sequence), fold position, snapshot at
the opening (-1: none)."""
ITEM_COLUMNS = 3
"""sequence (-1: none), position of the chunk's first row, snapshot after the chunk (-1: none)."""


class ChunkTable(NamedTuple):
    """The tables of one step, row after row: of its sequences, and of its chunks in their order."""

    sequences: torch.Tensor
    items: torch.Tensor

    @property
    def chunks(self) -> int:
        """Rows of `items`, the grid of a launch over all chunks."""
        return self.items.numel() // ITEM_COLUMNS


def chunk_table(schedule: Schedule, cached: bool, drafting: bool) -> ChunkTable:
    """The tables of a schedule, kept by it.

    cached: whether states live in a cache; drafting: whether that cache takes drafts.

    >>> from headstart import Schedule
    >>> table = chunk_table(Schedule([70], device="cpu"), cached=False, drafting=False)
    >>> table.sequences.tolist(), table.items.view(-1, 3).tolist()
    ([0, 0, 70, 0, 0, 2, 70, -1], [[0, 0, -1], [0, 64, -1]])
    """
    sequences, items = _builders(cached, drafting)
    return ChunkTable(schedule.on_device(sequences), schedule.on_device(items))


@functools.cache
def _builders(
    cached: bool, drafting: bool
) -> tuple[Callable[[Schedule], list[int]], Callable[[Schedule], list[int]]]:
    """Both tables as `Schedule.on_device` wants them: the same function for the same table."""

    def sequences(schedule: Schedule) -> list[int]:
        return [entry for row in _rows(schedule, cached, drafting)[0] for entry in row]

    def items(schedule: Schedule) -> list[int]:
        return [entry for row in _rows(schedule, cached, drafting)[1] for entry in row]

    return sequences, items


def _rows(
    schedule: Schedule, cached: bool, drafting: bool
) -> tuple[list[list[int]], list[list[int]]]:
    sequences, items, kept = [], [], 0
    for n, (row, start, length, draft, positions) in enumerate(
        zip(
            schedule.offsets,
            schedule.starts,
            schedule.lengths,
            schedule.drafts,
            schedule.snapshot_positions,
            strict=False,
        )
    ):
        opening, end = start // CHUNK, start + length
        first = opening - 1 if drafting and opening > 0 else opening
        last = -(-end // CHUNK) if length else opening
        fold = opening if draft else end // CHUNK
        fold = fold * CHUNK if cached else end
        after = {position: kept + i for i, position in enumerate(positions)}
        kept += len(positions)
        at_opening = after.get(opening * CHUNK, -1)
        sequences.append([row, start, length, first, len(items), last - first, fold, at_opening])
        items += [
            [n, chunk * CHUNK, after.get((chunk + 1) * CHUNK, -1)] for chunk in range(first, last)
        ]
    if schedule.capacity is not None:
        room, tokens, _ = schedule.capacity
        most = tokens // CHUNK + room * (3 if drafting else 2)
        sequences += [[0, 0, 0, 0, 0, -1, 0, -1]] * (room - len(sequences))
        items += [[-1, 0, -1]] * (most - len(items))
    return sequences, items
