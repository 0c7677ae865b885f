"""What a call reads of earlier inputs and what it keeps of the new ones.

The history of a sequence at position p is its inputs p - width + 1 to p - 1; those before
position 0 are zeros. A cache keeps the inputs in a ring, input j in row j modulo the number of
rows, so that rolling back is passing a smaller start. Everything kept is gathered before
anything is written.
"""

from __future__ import annotations

import torch

from headstart.ops.convolution.spec import Convolution, ConvolutionCall
from headstart.ops.gated_delta_rule.cache import CacheSlots, DeltaCache
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.runtime.checks import host_ints, packs


class Histories:
    """The histories of one call.

    Raises ValueError, before anything is written, for a start or a snapshot whose inputs have left
    the ring of a cache that lies on the CPU.

    Attributes
    ----------
    before: [N, width - 1, channels] in x's dtype, the inputs before each first new token.
    """

    def __init__(self, call: ConvolutionCall) -> None:
        schedule, state = call.schedule, call.state
        self.call = call
        self._span = torch.arange(1 - call.width, 0, device=call.device)
        self._offsets = self._ints(schedule.offsets[:-1])
        self._starts = self._ints(schedule.starts)
        self._ends = self._starts + self._ints(schedule.lengths)
        shape = (schedule.N, call.width - 1, call.channels)
        if isinstance(state, CacheSlots):
            slots = _slots(call.read_slots, state.slots, schedule.N)
            if state.cache.device.type == "cpu":
                expect_in_ring(call, state.cache, slots)
            self._read = self._write = slots
            self.before = self._from_ring(state.cache, slots, schedule.starts)
            return
        if isinstance(state, Pool):
            if state.read_slots is None:
                read = [-1] * schedule.N
            else:
                read = _slots(call.read_slots, state.read_slots, schedule.N)
            if state.present is not None:
                read = [slot if state.present[n] else -1 for n, slot in enumerate(read)]
            given = state.read_slots if state.write_slots is None else state.write_slots
            self._read, self._write = read, _slots(call.write_slots, given, schedule.N)
            if max(read, default=-1) >= 0:
                index = self._ints(read)
                found = state.tensor[index.clamp(min=0)]
                self.before = torch.where((index < 0).view(-1, 1, 1), 0, found)
                return
        elif state is not None:
            self.before = state[: schedule.N]
            return
        self.before = torch.zeros(shape, dtype=call.x.dtype, device=call.device)

    def finish(self, y: torch.Tensor) -> Convolution:
        """Write states and snapshots, and return what the caller gets; y [T, channels]."""
        call, schedule = self.call, self.call.schedule
        state, target = call.state, call.snapshots
        new = snapshots = kept = None
        if call.return_state or isinstance(state, Pool):
            new = self._at(range(schedule.N), self._ends)
        if target is not None:
            kept = self._snapshots()
        if isinstance(state, Pool) and new is not None:
            _store(state.tensor, self._write, new)
        elif isinstance(state, CacheSlots):
            self._to_ring(state.cache)
        if isinstance(target, torch.dtype):
            snapshots = _padded(kept, schedule.slot_count(schedule.M, 2))
        elif target is not None and kept is not None:
            self._keep(target, kept)
        if call.return_state:
            new = _padded(new, schedule.slot_count(schedule.N, 0))
        return Convolution(deliver(call, y), new if call.return_state else None, snapshots)

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.call.device)

    def _at(self, sequences: range | list[int], positions: torch.Tensor) -> torch.Tensor:
        """Histories [M, width - 1, channels] of sequences at positions in [start, end]."""
        x, width = self.call.x, self.call.width
        n = self._ints(list(sequences))
        since = (positions - self._starts[n])[:, None] + self._span  # tokens after the start
        old = self.before[n[:, None], (since + width - 1).clamp(max=width - 2)]
        if not x.shape[0]:
            return old
        new = x[(self._offsets[n][:, None] + since).clamp(min=0)]
        return torch.where((since < 0)[..., None], old, new)

    def _snapshots(self) -> torch.Tensor:
        """The schedule's snapshots [M, width - 1, channels]."""
        schedule = self.call.schedule
        wanted = [(n, p) for n, places in enumerate(schedule.snapshot_positions) for p in places]
        sequences, places = [n for n, _ in wanted], [p for _, p in wanted]
        positions = self._ints(places)
        starts = self._starts[self._ints(sequences)]
        kept = self._at(sequences, torch.maximum(positions, starts))
        earlier = positions < starts
        if isinstance(self.call.state, CacheSlots) and bool(earlier.any()):
            slots = [self._read[n] for n in sequences]
            old = self._from_ring(self.call.state.cache, slots, places)
            kept = torch.where(earlier.view(-1, 1, 1), old, kept)
        return kept

    def _keep(self, target: Pool | CacheSlots, kept: torch.Tensor) -> None:
        schedule = self.call.schedule
        given = target.slots if isinstance(target, CacheSlots) else target.write_slots
        slots = _slots(self.call.snapshot_slots, given, schedule.M)
        if isinstance(target, Pool):
            _store(target.tensor, slots, kept)
            return
        places = [p for positions in schedule.snapshot_positions for p in positions]
        chosen = [i for i, slot in enumerate(slots) if slot >= 0]
        if not chosen:
            return
        tensors = target.cache.tensors
        slot, position = self._ints(slots)[chosen], self._ints(places)[chosen]
        rows = (position[:, None] + self._span) % target.cache.history_rows
        tensors["history"][slot[:, None], rows] = kept[chosen]
        first = (position + 1 - self.call.width).clamp(min=0)
        tensors["history_first"][slot, 0] = first.to(torch.int32)
        tensors["history_end"][slot, 0] = position.to(torch.int32)

    def _from_ring(self, cache: DeltaCache, slots: list[int], positions: list[int]) -> torch.Tensor:
        """Histories [M, width - 1, channels] of slots at positions, zeros for slot -1."""
        slot, wanted = self._ints(slots), self._ints(positions)[:, None] + self._span
        rows = wanted % cache.history_rows
        found = cache.tensors["history"][slot.clamp(min=0)[:, None], rows]
        empty = (wanted < 0) | (slot < 0)[:, None]
        return torch.where(empty[..., None], 0, found)

    def _to_ring(self, cache: DeltaCache) -> None:
        """Write the last new inputs of every sequence, as many as the ring keeps."""
        room = cache.history_rows
        slot = self._ints(self._write)
        written = slot >= 0
        position = self._ends[:, None] + torch.arange(-room, 0, device=self.call.device)
        n, at = torch.where((position >= self._starts[:, None]) & written[:, None])
        position = position[n, at]
        rows = self._offsets[n] + position - self._starts[n]
        cache.tensors["history"][slot[n], position % room] = self.call.x[rows]
        slot, starts, ends = slot[written], self._starts[written], self._ends[written]
        first = torch.where(starts == 0, 0, cache.tensors["history_first"][slot, 0])
        first = torch.maximum(first, ends - room)
        cache.tensors["history_first"][slot, 0] = first.to(torch.int32)
        cache.tensors["history_end"][slot, 0] = ends.to(torch.int32)


def expect_in_ring(call: ConvolutionCall, cache: DeltaCache, slots: list[int]) -> None:
    """Raise unless the cache still has the inputs of every start and of every kept snapshot."""
    schedule = call.schedule
    firsts, ends = (cache.tensors[f"history_{name}"][:, 0] for name in ("first", "end"))
    for n, (slot, start) in enumerate(zip(slots, schedule.starts, strict=True)):
        if slot < 0 or start == 0:
            continue
        first, end = int(firsts[slot]), int(ends[slot])
        first = first and first + call.width - 1  # inputs below position 0 are zeros
        if not first <= start <= end:
            raise ValueError(
                f"start_positions: sequence {n} in slot {slot} has the convolution inputs for "
                f"a start of {first} to {end}, got {start}"
            )
        places = schedule.snapshot_positions[n] if call.snapshots is not None else []
        if places and 0 < places[0] < first:
            raise ValueError(
                f"snapshot_positions: sequence {n} in slot {slot} has the convolution inputs "
                f"for a position of {first} to {end}, got {places[0]}"
            )


def output(call: ConvolutionCall) -> torch.Tensor:
    """Where y [T, channels] is computed: `out` if it can be seen so; its contents are undefined."""
    out = call.out
    if out is None or (out.dim() == 3 and not packs(out)):
        return torch.empty(call.x.shape, dtype=call.x.dtype, device=call.device)
    return out.view(-1, call.channels) if out.dim() == 3 else out


def allocate(call: ConvolutionCall) -> torch.Tensor:
    """`output`, with zeros in the rows past the last sequence."""
    y = output(call)
    y[call.schedule.T :].zero_()
    return y


def deliver(call: ConvolutionCall, y: torch.Tensor) -> torch.Tensor:
    """What the caller gets for a computed `output` y: `out`, or y in the shape of x."""
    out = call.out
    if out is None:
        return y.view(call.shape)
    if out.dim() == 3 and not packs(out):
        out.copy_(y.view(call.shape))
    return out


def _slots(known: list[int] | None, given: object, count: int) -> list[int]:
    """Slots as a list; those that lie on a device are read back here, before the first launch."""
    return host_ints("slots", given)[:count] if known is None else known


def _store(pool: torch.Tensor, slots: list[int], histories: torch.Tensor) -> None:
    chosen = [i for i, slot in enumerate(slots) if slot >= 0]
    if chosen:
        pool[[slots[i] for i in chosen]] = histories[chosen]


def _padded(histories: torch.Tensor | None, entries: int) -> torch.Tensor | None:
    """Histories with zeros behind them, for schedules with a capacity."""
    if histories is None or len(histories) == entries:
        return histories
    result = histories.new_zeros(entries, *histories.shape[1:])
    result[: len(histories)] = histories
    return result
