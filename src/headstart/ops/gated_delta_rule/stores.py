"""Where states are read and written, by head range: tensors, pools, caches, snapshots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots, DeltaCache
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.spec import GatedDelta, GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import SequenceStep
from headstart.runtime.checks import packs


@dataclass(frozen=True, eq=False)
class Stores:
    """The outputs of a call, allocated, and access to its states by head range."""

    call: GatedDeltaCall
    o: torch.Tensor
    """[T, HV, V], rows past the last length already zero."""
    state: torch.Tensor | None
    snapshots: torch.Tensor | None

    @staticmethod
    def allocate(call: GatedDeltaCall, wide: torch.dtype) -> Stores:
        """Outputs for `call`; `wide` is the dtype of states nobody gave a dtype."""
        _, HV, K, V = call.sizes
        out = call.out
        if out is None or (out.dim() == 4 and not packs(out)):
            packed = (call.q.shape[0], HV, V)
            o = torch.empty(packed, dtype=call.q.dtype, device=call.device)
        else:
            o = out.view(-1, HV, V) if out.dim() == 4 else out
        if o.shape[0] > call.schedule.T:
            o[call.schedule.T :].zero_()
        state = snapshots = None
        # Every entry is written but those past N that a capacity has room for.
        fresh = torch.empty if call.schedule.capacity is None else torch.zeros
        if call.return_state:
            kind = call.state.dtype if isinstance(call.state, torch.Tensor) else wide
            count = call.schedule.slot_count(call.schedule.N, 0)
            state = fresh(count, HV, K, V, dtype=kind, device=call.device)
        if isinstance(call.snapshots, torch.dtype):
            count = call.schedule.slot_count(call.schedule.M, 2)
            snapshots = fresh(count, HV, K, V, dtype=call.snapshots, device=call.device)
        return Stores(call, o, state, snapshots)

    @property
    def result(self) -> GatedDelta:
        """What the caller gets."""
        out = self.call.out
        if out is None:
            out = self.o.view(self.call.shape)
        elif out.dim() == 4 and not packs(out):
            out.copy_(self.o.view(self.call.shape))
        return GatedDelta(out, self.state, self.snapshots)

    def read(self, step: SequenceStep, heads: slice) -> torch.Tensor | None:
        """The old state [heads, K, V] of a sequence, or None for zeros."""
        if step.read < 0:
            return None
        state = self.call.state
        if isinstance(state, torch.Tensor):
            return state[step.n, heads]
        if isinstance(state, CacheSlots):
            return state.cache.tensors["state"][step.read, heads]
        assert isinstance(state, Pool)
        found = state.tensor[step.read, heads]
        return found if state.layout == "kv" else found.mT

    def write(self, step: SequenceStep, heads: slice, value: torch.Tensor) -> None:
        """Store the new state [heads, K, V] of a sequence, rounded to nearest even."""
        state = self.call.state
        if self.state is not None:
            self.state[step.n, heads].copy_(value)
        elif isinstance(state, CacheSlots):
            if step.write >= 0:
                state.cache.tensors["state"][step.write, heads].copy_(value)
        elif isinstance(state, Pool):
            _store(state, step.write, heads, value)

    def finish(self, step: SequenceStep, heads: slice) -> None:
        """Record in a cache where the sequence stands now."""
        state = self.call.state
        if isinstance(state, CacheSlots) and step.write >= 0:
            state.cache.tensors["position"][step.write, heads] = step.fold
            state.cache.tensors["end"][step.write, heads] = step.end

    def keep(self, position: int, index: int, heads: slice, value: torch.Tensor | None) -> None:
        """Store a snapshot [heads, K, V] (None: zeros) taken at `position`."""
        target = self.call.snapshots
        if self.snapshots is not None:
            view = self.snapshots[index, heads]
            view.zero_() if value is None else view.copy_(value)
            return
        slot = self.call.snapshot_slots[index]  # type: ignore[index]
        if slot < 0:
            return
        if isinstance(target, Pool):
            _store(target, slot, heads, value)
            return
        assert isinstance(target, CacheSlots)
        tensors = target.cache.tensors
        if value is not None:
            tensors["state"][slot, heads].copy_(value)
        tensors["position"][slot, heads] = position
        tensors["end"][slot, heads] = position

    @property
    def tail_cache(self) -> DeltaCache | None:
        """The cache whose tails this call reads and writes."""
        return self.call.state.cache if isinstance(self.call.state, CacheSlots) else None


def _store(pool: Pool, slot: int, heads: slice, value: torch.Tensor | None) -> None:
    if slot < 0:
        return
    view = pool.tensor[slot, heads]
    view = view if pool.layout == "kv" else view.mT
    view.zero_() if value is None else view.copy_(value)
