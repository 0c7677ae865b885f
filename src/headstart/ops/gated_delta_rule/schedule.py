"""Host facts of one step of a packed batch, shared by all layers of a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from headstart.ops.gated_delta_rule.cutting import CHUNK
from headstart.runtime.checks import (
    INT32_MAX,
    expect_int,
    expect_one_each,
    expect_place,
    host_flags,
    host_ints,
    positions_of_each,
    shown,
)
from headstart.runtime.handles import Handled
from headstart.runtime.record import current_record

WINDOW = 16
"""Rows of a chunk that hold the new ones of a small step, wherever it starts."""
FEW = 9
"""Tokens of a small step: they lie in the WINDOW rows from some multiple of 8 on."""


def floor_chunk(position: int) -> int:
    """The last chunk border at or below `position`.

    >>> floor_chunk(63), floor_chunk(64)
    (0, 64)
    """
    return position // CHUNK * CHUNK


class Schedule(Handled):
    """Which tokens of a packed batch belong to which sequence, and where each sequence stands.

    Sequence n brings the packed rows offsets[n] to offsets[n + 1], which are its tokens
    starts[n], starts[n] + 1, ... in absolute position.

    Parameters
    ----------
    lengths: new tokens of each sequence, a list or an int32 / int64 tensor [N].
    cu_seqlens: instead of lengths, their running sum [N + 1], starting at 0. A tensor on a device
        is read back once, here.
    start_positions: absolute position of each first new token; one int for all, or [N].
    drafts: whether a step brings drafts that may be rolled back; one bool for all, or [N]. Such a
        step has at most the cache's draft_tokens tokens, the known first one included.
    snapshot_positions: for each sequence a rising list of positions at which to keep the state:
        64 floor(start / 64), or multiples of 64 in (start, start + length]; with drafts only the
        first of these.
    snapshot_every: a multiple of 64: keep the state at all its multiples in
        (start, start + length]. Not with drafts, not together with snapshot_positions.
    device: device of the tensors of the calls that use this schedule.
    capacity: (sequences, tokens, snapshots): room for later `update_`s under a captured graph.
        Slot tensors then have that length; entries past N (or M) are ignored.

    Attributes
    ----------
    lengths, offsets, starts, drafts, snapshot_positions: the above as lists.
    N, T, M: number of sequences, packed tokens and snapshots.

    >>> schedule = Schedule([100, 30], start_positions=[0, 64], snapshot_every=64, device="cpu")
    >>> schedule.N, schedule.T, schedule.snapshot_positions
    (2, 130, [[64], []])
    """

    derived = ("_on_device", "found")

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor | None = None,
        *,
        cu_seqlens: Sequence[int] | torch.Tensor | None = None,
        start_positions: int | Sequence[int] | torch.Tensor = 0,
        drafts: bool | Sequence[bool] = False,
        snapshot_positions: Sequence[Sequence[int]] | None = None,
        snapshot_every: int = 0,
        device: torch.device | str,
        capacity: tuple[int, int, int] | None = None,
    ) -> None:
        self.device = expect_place("device", device)
        self.capacity = None if capacity is None else _capacity(capacity)
        self._on_device: dict[Callable[[Schedule], list[int]], torch.Tensor] = {}
        self._facts: tuple[int, int, int, int, bool, tuple[int, int, int] | None] | None = None
        self._chunks: dict[bool, int] = {}
        self._windows: dict[int, int] = {}
        self.beside: dict[int, tuple] = {}
        """What `facts_beside` found, for those who ask it in every call."""
        self.found: dict[object, list[int]] = {}
        """What others know of where the tables lie, by whom; forgotten when they move."""
        self.update_(
            lengths,
            cu_seqlens=cu_seqlens,
            start_positions=start_positions,
            drafts=drafts,
            snapshot_positions=snapshot_positions,
            snapshot_every=snapshot_every,
        )
        self.take_handle()

    def update_(
        self,
        lengths: Sequence[int] | torch.Tensor | None = None,
        *,
        cu_seqlens: Sequence[int] | torch.Tensor | None = None,
        start_positions: int | Sequence[int] | torch.Tensor = 0,
        drafts: bool | Sequence[bool] = False,
        snapshot_positions: Sequence[Sequence[int]] | None = None,
        snapshot_every: int = 0,
    ) -> Schedule:
        """Describe another step in place (arguments as for the class); all is copied before return.

        On an error the schedule stays as it was. Returns itself.
        """
        offsets = _offsets(lengths, cu_seqlens)
        count = len(offsets) - 1
        steps = [end - begin for begin, end in pairwise(offsets)]
        starts = positions_of_each("start_positions", start_positions, count)
        ends = [start + step for start, step in zip(starts, steps, strict=True)]
        if max(ends, default=0) > INT32_MAX:
            raise ValueError(f"lengths: expected ends <= {INT32_MAX}, got {max(ends)}")
        flags = (
            [drafts] * count if isinstance(drafts, bool) else host_flags("drafts", drafts, count)
        )
        if expect_int("snapshot_every", snapshot_every, 0) % CHUNK:
            raise ValueError(
                f"snapshot_every: expected a multiple of {CHUNK}, got {snapshot_every}"
            )
        if snapshot_every:
            if snapshot_positions is not None:
                raise ValueError(
                    f"snapshot_every: expected 0 beside snapshot_positions, got {snapshot_every}"
                )
            if any(flags):
                raise ValueError(
                    f"snapshot_every: expected 0 in a step that brings drafts, got {snapshot_every}"
                )
            kept = [
                list(
                    range(
                        (start // snapshot_every + 1) * snapshot_every,
                        start + step + 1,
                        snapshot_every,
                    )
                )
                for start, step in zip(starts, steps, strict=True)
            ]
        else:
            kept = _snapshot_positions(snapshot_positions, starts, steps, flags)
        if self.capacity is not None:
            found = (count, offsets[-1], sum(map(len, kept)))
            for name, have, room in zip(
                ("sequences", "tokens", "snapshots"), found, self.capacity, strict=True
            ):
                if have > room:
                    raise ValueError(f"capacity: expected at most {room} {name}, got {have}")
        self.offsets, self.lengths, self.starts = offsets, steps, starts
        self.drafts, self.snapshot_positions = flags, kept
        self._facts = None
        self._chunks.clear()
        self._windows.clear()
        self.beside.clear()
        if self.capacity is None:
            self._on_device.clear()
            self.found.clear()
        for build, tensor in self._on_device.items():
            # Pageable memory: staged before the call returns, so the source may go.
            values = torch.tensor(build(self), dtype=tensor.dtype, device="cpu")
            tensor.copy_(values, non_blocking=True)
        return self

    @property
    def N(self) -> int:  # noqa: N802
        """Sequences of the step."""
        return len(self.lengths)

    @property
    def T(self) -> int:  # noqa: N802
        """Packed tokens of the step."""
        return self.offsets[-1]

    @property
    def M(self) -> int:  # noqa: N802
        """Snapshots of the step."""
        return sum(map(len, self.snapshot_positions))

    @property
    def facts(self) -> tuple[int, int, int, int, bool, tuple[int, int, int] | None]:
        """What a call looks at on the host, beside the tables: see `runtime/steady.py`.

        N, T, M, the longest step with drafts (0: none), whether a snapshot lies before its
        sequence's start, and the capacity.
        """
        if self._facts is None:
            pairs = zip(self.drafts, self.lengths, strict=True)
            drafts = max((max(length, 1) for draft, length in pairs if draft), default=0)
            kept = zip(self.snapshot_positions, self.starts, strict=True)
            earlier = any(positions and positions[0] < start for positions, start in kept)
            self._facts = self.N, self.T, self.M, drafts, earlier, self.capacity
        return self._facts

    def facts_beside(self, draft_tokens: int) -> tuple:
        """`facts`, chunks and window of a call whose cache takes so many draft tokens."""
        found = self.beside.get(draft_tokens)
        if found is None:
            cut = self.chunk_count(draft_tokens > 0), self.window(draft_tokens)
            found = self.beside[draft_tokens] = (*self.facts, *cut)
        return found

    def chunk_spans(self, drafting: bool) -> list[tuple[int, int]]:
        """First chunk of each sequence that a step computes, and the one after its last.

        drafting: whether the states' cache takes drafts: then one chunk more, see `chunk_table`.
        """
        spans = []
        for start, length in zip(self.starts, self.lengths, strict=True):
            opening = start // CHUNK
            first = opening - 1 if drafting and opening > 0 else opening
            spans.append((first, -(-(start + length) // CHUNK) if length else opening))
        return spans

    def chunk_count(self, drafting: bool) -> int:
        """Chunks of a step, or of all that the capacity has room for."""
        if drafting not in self._chunks:
            if self.capacity is None:
                count = sum(last - first for first, last in self.chunk_spans(drafting))
            else:
                room, tokens, _ = self.capacity
                count = tokens // CHUNK + room * (3 if drafting else 2)
            self._chunks[drafting] = count
        return self._chunks[drafting]

    def window(self, draft_tokens: int = 0) -> int:
        """Rows of a chunk, WINDOW or CHUNK, that hold the new tokens of each sequence; or 0.

        0: tokens of a sequence lie in several chunks, or a capacity leaves the lengths open.
        draft_tokens: of a cache that takes drafts: then steps of at most as many may lie in two
        chunks; the window is one of either.

        >>> schedule = Schedule([60, 2], start_positions=[0, 63], device="cpu")
        >>> schedule.window(), schedule.window(4), schedule.window(60)
        (0, 0, 64)
        >>> Schedule([1, 4], start_positions=[100, 14], device="cpu").window()
        16
        """
        if draft_tokens not in self._windows:
            steps = zip(self.starts, self.lengths, strict=True)
            longest = max(self.lengths, default=0)
            if self.capacity is not None:
                short = False
            elif draft_tokens:
                short = longest <= draft_tokens
            else:
                short = all(start % CHUNK + length <= CHUNK for start, length in steps)
            rows = WINDOW if longest <= FEW else CHUNK
            self._windows[draft_tokens] = rows if short else 0
        return self._windows[draft_tokens]

    def on_device(self, build: Callable[[Schedule], list[int]]) -> torch.Tensor:
        """The integers that `build` makes of this schedule, int32 on its device, kept.

        Built at first use; `update_` writes them again where they lie, so `build` must return as
        many for every step that a schedule with a capacity may hold.

        >>> schedule = Schedule([2, 3], device="cpu", capacity=(2, 8, 0))
        >>> kept = schedule.on_device(lambda step: step.lengths)
        >>> _ = schedule.update_([4, 1])
        >>> kept.tolist()
        [4, 1]
        """
        if build not in self._on_device:
            # A plain tensor even when made under inference mode: the schedule outlives it.
            with torch.inference_mode(False):
                values = torch.tensor(build(self), dtype=torch.int32, device="cpu")
                self._on_device[build] = values.to(self.device, non_blocking=True)
        if (record := current_record()) is not None:
            record.tables[build] = self._on_device[build]
        return self._on_device[build]

    def slot_count(self, count: int, axis: int) -> int:
        """Entries that a slot list for `count` sequences (axis 0) or snapshots (axis 2) has."""
        return count if self.capacity is None else self.capacity[axis]

    def __repr__(self) -> str:
        return f"Schedule(lengths={self.lengths}, start_positions={self.starts})"


def _capacity(capacity: Sequence[int]) -> tuple[int, int, int]:
    values = host_ints("capacity", capacity, "counts", 0, INT32_MAX)
    if len(values) != 3:
        raise ValueError(
            f"capacity: expected (sequences, tokens, snapshots), got {shown(capacity)}"
        )
    return values[0], values[1], values[2]


def _offsets(lengths: object, cu_seqlens: object) -> list[int]:
    if (lengths is None) == (cu_seqlens is None):
        came = "neither" if lengths is None else "both"
        raise ValueError(f"lengths: expected exactly one of lengths and cu_seqlens, got {came}")
    if cu_seqlens is not None:
        offsets = host_ints("cu_seqlens", cu_seqlens, "sums", -INT32_MAX, INT32_MAX)
        if not offsets or offsets[0] != 0:
            raise ValueError(f"cu_seqlens: expected a running sum from 0, got {shown(offsets)}")
        for n, (begin, end) in enumerate(pairwise(offsets)):
            if end < begin:
                raise ValueError(
                    f"cu_seqlens: expected a rising running sum, got {end} after {begin} at {n + 1}"
                )
        return offsets
    offsets = [0, *accumulate(host_ints("lengths", lengths, "lengths", 0))]
    if offsets[-1] > INT32_MAX:
        raise ValueError(f"lengths: expected at most {INT32_MAX} tokens, got {offsets[-1]}")
    return offsets


def _snapshot_positions(
    given: Sequence[Sequence[int]] | None, starts: list[int], steps: list[int], drafts: list[bool]
) -> list[list[int]]:
    if given is None:
        return [[] for _ in starts]
    if not isinstance(given, (list, tuple)) and not (
        isinstance(given, torch.Tensor) and given.dim() == 2
    ):
        raise ValueError(
            f"snapshot_positions: expected one list for each sequence, got {shown(given)}"
        )
    expect_one_each("snapshot_positions", given, len(starts))
    kept = []
    for n, (positions, start, step, draft) in enumerate(
        zip(given, starts, steps, drafts, strict=True)
    ):
        positions = host_ints(f"snapshot_positions[{n}]", positions)
        opening = floor_chunk(start)
        for before, position in zip([-1, *positions], positions, strict=False):
            later = not draft and start < position <= start + step and position % CHUNK == 0
            if position != opening and not later:
                allowed = (
                    f"{opening}"
                    if draft
                    else (f"{opening} or a multiple of {CHUNK} in ({start}, {start + step}]")
                )
                raise ValueError(f"snapshot_positions[{n}]: expected {allowed}, got {position}")
            if position <= before:
                raise ValueError(
                    f"snapshot_positions[{n}]: expected rising positions, "
                    f"got {position} after {before}"
                )
        kept.append(positions)
    return kept
