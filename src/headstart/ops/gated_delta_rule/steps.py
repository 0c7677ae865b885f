"""What one call does to each sequence, worked out on the host from positions alone.

The rows of a sequence in a call are its tail (positions base to start) and its new tokens (start to
end); the chunks from base to end are computed in order. The arithmetic is elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import CHUNK, floor_chunk
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall


@dataclass(frozen=True)
class SequenceStep:
    """One sequence of one call."""

    n: int
    row: int
    """First packed row."""
    start: int
    """Position of the first new token; row `row + (p - start)` holds position p >= start."""
    length: int
    base: int
    """Position of the state that is read: start, or in a cache P <= start."""
    tail: bool
    """Whether rows base to start are read from the cache's tail (otherwise they are empty)."""
    read: int
    """Slot the old state is read from; -1 reads zeros."""
    write: int
    """Slot that is written; -1 writes nothing."""
    fold: int
    """Position of the state after the call: the end, or in a cache the new P."""
    snapshots: tuple[tuple[int, int], ...]
    """(position, index among the call's snapshots)."""

    @property
    def end(self) -> int:
        """Position after the last new token."""
        return self.start + self.length

    @property
    def chunks(self) -> range:
        """The chunks of the absolute grid that are computed."""
        last = self.end if self.length else self.fold
        return range(self.base // CHUNK, -(-last // CHUNK))


def sequence_steps(call: GatedDeltaCall) -> list[SequenceStep]:
    """The steps of all sequences; ValueError if a start is not legal in its slot.

    Reads the positions of a cache, so it is for caches that lie on the CPU.
    """
    schedule = call.schedule
    cached = isinstance(call.state, CacheSlots)
    held = _held(call) if cached else None
    steps, kept = [], 0
    for n, (row, start, length) in enumerate(
        zip(schedule.offsets, schedule.starts, schedule.lengths, strict=False)
    ):
        positions = schedule.snapshot_positions[n] if call.snapshots is not None else []
        snapshots = tuple((p, kept + i) for i, p in enumerate(positions))
        kept += len(schedule.snapshot_positions[n])
        read = write = n
        base, fold, tail = start, start + length, False
        if isinstance(call.state, Pool):
            present = call.state.present is None or bool(call.state.present[n])
            read = call.read_slots[n] if call.read_slots is not None and present else -1
            write = call.write_slots[n]  # type: ignore[index]
        elif held is not None:
            read = write = call.read_slots[n]  # type: ignore[index]
            opening = floor_chunk(start)
            fold = opening if schedule.drafts[n] else floor_chunk(start + length)
            base, tail = opening, False
            if read >= 0 and start > 0:
                stands = held[n]
                if stands is None:
                    raise ValueError(
                        f"state: slot {read} holds heads at different positions, as an interrupted "
                        f"call leaves them; start it at 0 again, or load it"
                    )
                base, end = stands
                tail = True
                if not base <= start <= end:
                    raise ValueError(
                        f"start_positions: sequence {n} in slot {read} holds positions "
                        f"{base} to {end}, got start {start}"
                    )
            if start == 0 or base == 0:
                read = -1
        elif call.state is None:
            read = -1
        steps.append(SequenceStep(n, row, start, length, base, tail, read, write, fold, snapshots))
    return steps


def _held(call: GatedDeltaCall) -> list[tuple[int, int] | None]:
    """P and the end of the tail of each sequence's slot; None where its heads do not agree."""
    assert isinstance(call.state, CacheSlots)
    tensors = call.state.cache.tensors
    slots = torch.tensor(call.read_slots or [], dtype=torch.long, device="cpu").clamp(min=0)
    stands = torch.stack((tensors["position"][slots], tensors["end"][slots]), 1).cpu()  # [N, 2, HV]
    agree = (stands == stands[..., :1]).all(-1).all(-1).tolist()
    return [
        (place[0], place[1]) if same else None
        for place, same in zip(stands[..., 0].tolist(), agree, strict=True)
    ]
