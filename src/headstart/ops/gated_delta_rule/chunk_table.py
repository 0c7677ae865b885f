"""What a step asks of kernels, as int32 tables on the device: its sequences and their chunks.

Every table is a pure function of host facts (lengths, starts, drafts, snapshot positions), so a
call needs no copy from the device. Where a cache's state stands, P, is known on the device alone:
it is F = 64 floor(start / 64) or, after drafts, F - 64; an item for the chunk before F is therefore
always listed for a cache that takes drafts, and a kernel passes over it where P = F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headstart.ops.gated_delta_rule.schedule import Schedule

CHUNK = 64
SEQUENCE_COLUMNS = 8
"""row, start, length, first chunk, first item, items, fold position, snapshot at the opening."""
ITEM_COLUMNS = 4
"""sequence (-1: none), position of the chunk's first row, snapshot after the chunk (-1: none),
whether the chunk holds no row before `start` and none past the end."""


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The tables of one schedule.

    sequences: int32 [N, 8]; items: int32 [items, 4], chunk by chunk, sequence after sequence. Both
    have the schedule's capacity in rows where it has one; rows past N have -1 items, items
    past the last have sequence -1.
    item_offsets: host list [N + 1], first item of each sequence.
    """

    sequences: torch.Tensor
    items: torch.Tensor
    item_offsets: list[int]

    @property
    def count(self) -> int:
        """Rows of `items`, the grid of a launch over all chunks."""
        return self.items.shape[0]


def table_rows(
    schedule: Schedule, cached: bool, drafting: bool
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Rows of both tables and the item offsets, from host facts alone."""
    sequences, items, offsets, kept = [], [], [0], 0
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
        begin = len(items)
        for chunk in range(first, last):
            low = chunk * CHUNK
            full = low >= start and low + CHUNK <= end
            items.append([n, low, after.get(low + CHUNK, -1), int(full)])
        count = len(items) - begin
        opening_snapshot = after.get(opening * CHUNK, -1)
        sequences.append([row, start, length, first, begin, count, fold, opening_snapshot])
        offsets.append(len(items))
    return sequences, items, offsets


def item_capacity(capacity: tuple[int, int, int], drafting: bool) -> int:
    """Most items that a step of this capacity can have."""
    sequences, tokens, _ = capacity
    return tokens // CHUNK + sequences * (3 if drafting else 2)


def build(
    schedule: Schedule, cached: bool, drafting: bool, into: ChunkTable | None = None
) -> ChunkTable:
    """Tables of a schedule; `into`: tables of the same capacity whose memory is written instead."""
    sequences, items, offsets = table_rows(schedule, cached, drafting)
    if schedule.capacity is not None:
        rows = item_capacity(schedule.capacity, drafting)
        items += [[-1, 0, -1, 0]] * (rows - len(items))
        nobody = [0, 0, 0, 0, 0, -1, 0, -1]
        sequences += [nobody] * (schedule.capacity[0] - len(sequences))
    new_sequences = torch.tensor(sequences, dtype=torch.int32).view(-1, SEQUENCE_COLUMNS)
    new_items = torch.tensor(items, dtype=torch.int32).view(-1, ITEM_COLUMNS)
    if into is None:
        device = schedule.device
        return ChunkTable(new_sequences.to(device), new_items.to(device), offsets)
    # Pageable memory: staged before the call returns, so the sources may go.
    into.sequences.copy_(new_sequences, non_blocking=True)
    into.items.copy_(new_items, non_blocking=True)
    return ChunkTable(into.sequences, into.items, offsets)
