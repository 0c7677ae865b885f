"""Where the cached keys of a sequence lie: three ways to say which slot holds its key j."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class Consecutive:
    """Key j of sequence n lies in slot first[n] + j.

    row: rows of a padded cache, or None where the slots are not told apart in rows.
    """

    first: list[int]
    row: int | None = None

    def find(self, n: int, begin: int, end: int) -> range:
        """Slots of keys [begin, end) of sequence n."""
        return range(self.first[n] + begin, self.first[n] + end)

    def bounds(self, n: int, count: int) -> tuple[int, int]:
        """Lowest and highest slot of the first `count` keys of sequence n."""
        return (self.first[n], self.first[n] + count - 1) if count else (0, -1)

    def with_room(self, capacity: tuple[int, int, int]) -> Consecutive:
        """Itself: host facts need no room."""
        return self

    def stored_in(self, other: Slots) -> Consecutive:
        """Itself: host facts live nowhere."""
        return self


@dataclass(frozen=True, eq=False)
class Listed:
    """Key j of sequence n lies in slot indices[indptr[n] + j]."""

    indptr: list[int]
    indices: torch.Tensor

    def find(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Slots of keys [begin, end) of sequence n."""
        return self.indices[self.indptr[n] + begin : self.indptr[n] + end]

    def bounds(self, n: int, count: int) -> tuple[int, int]:
        """Lowest and highest slot of the first `count` keys of sequence n; reads the device."""
        return _bounds(self.find(n, 0, count))

    def with_room(self, capacity: tuple[int, int, int]) -> Listed:
        """The same with room for as many indices as the capacity has keys."""
        room = _room((max(capacity[2], self.indices.numel()),), self.indices)
        room[: self.indices.numel()] = self.indices
        return Listed(self.indptr, room)

    def stored_in(self, other: Slots) -> Listed:
        """The same, its indices copied into the memory of `other`."""
        if not isinstance(other, Listed) or other.indices.numel() < self.indptr[-1]:
            raise ValueError("kv_indices: expected no more entries than the plan has room for")
        used = self.indptr[-1]
        other.indices[:used].copy_(self.indices[:used])
        return Listed(self.indptr, other.indices)


@dataclass(frozen=True, eq=False)
class Paged:
    """Key j of sequence n lies in row j % page_size of page table[n, j // page_size]."""

    table: torch.Tensor
    page_size: int

    def find(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Slots of keys [begin, end) of sequence n."""
        keys = torch.arange(begin, end, device=self.table.device)
        pages = self.pages(n, begin, end)[keys // self.page_size - begin // self.page_size]
        return pages.long() * self.page_size + keys % self.page_size

    def pages(self, n: int, begin: int, end: int) -> torch.Tensor:
        """Pages that hold keys [begin, end) of sequence n, in order."""
        return self.table[n, begin // self.page_size : -(-end // self.page_size)]

    def bounds(self, n: int, count: int) -> tuple[int, int]:
        """Lowest and highest slot of the first `count` keys of sequence n; reads the device.

        Of any page that a table can hold: the slots of most do not fit in 64 bits.
        """
        if not count:
            return 0, -1
        pages, rows = self.pages(n, 0, count), self.page_size
        last = int(pages[-1]) * rows + (count - 1) % rows
        highest = int(pages[:-1].max()) * rows + rows - 1 if len(pages) > 1 else last
        return int(pages.min()) * rows, max(last, highest)

    def with_room(self, capacity: tuple[int, int, int]) -> Paged:
        """The same with room for as many sequences and pages as the capacity allows."""
        rows = max(capacity[0], self.table.shape[0])
        columns = max(-(-capacity[2] // self.page_size), self.table.shape[1])
        room = _room((rows, columns), self.table)
        room[: self.table.shape[0], : self.table.shape[1]] = self.table
        return Paged(room, self.page_size)

    def stored_in(self, other: Slots) -> Paged:
        """The same, its table copied into the memory of `other`."""
        rows, columns = self.table.shape
        if (
            not isinstance(other, Paged)
            or other.page_size != self.page_size
            or other.table.shape[0] < rows
            or other.table.shape[1] < columns
        ):
            raise ValueError("page_table: expected the page size and room of the plan")
        other.table[:rows, :columns].copy_(self.table)
        return Paged(other.table, self.page_size)


Slots: TypeAlias = Consecutive | Listed | Paged


def _room(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    # A plain tensor even under inference mode: later updates may come outside of it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _bounds(slots: torch.Tensor) -> tuple[int, int]:
    return (int(slots.min()), int(slots.max())) if slots.numel() else (0, -1)
