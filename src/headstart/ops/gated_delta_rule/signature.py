"""Signatures of calls on sequences: host facts, and tensors in a fixed order.

None stands for a call that goes the long way each time: whatever is wrong or out of the ordinary is
told, converted or declined there (see `runtime/steady.py`). This runs in every call, so it spells
out what a loop or a helper would say.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.gate import Gate
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.ops.gated_delta_rule.torch_op import NAMES
from headstart.runtime import launcher
from headstart.runtime.checks import INTEGERS, checking
from headstart.runtime.dispatch import NUMBERS, Signature
from headstart.runtime.launcher import HostInts
from headstart.runtime.steady import layouts
from headstart.runtime.workspace import Workspace

Tensors = list[Tensor]
Used = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
used: Used = itemgetter(*NAMES)
"""Those of a cache's tensors that the rule uses."""
REFUSED = object()
"""Facts of an argument that goes the long way."""


def signature(
    q: Any, k: Any, v: Any, g: Any, beta: Any, schedule: Any, state: Any, gate: Any, snapshots: Any,
    return_state: Any, scale: Any, qk_l2norm: Any, reproducible: Any, workspace: Any, out: Any,
) -> Signature | None:  # fmt: skip
    """The signature of a call of the gated delta rule."""
    if (
        type(q) is not Tensor
        or not launcher.prepares(q)
        or type(schedule) is not Schedule
        or type(gate) is not Gate
        or type(scale) not in NUMBERS
        or type(return_state) is not bool
        or type(qk_l2norm) is not bool
        or (reproducible is not None and type(reproducible) is not bool)
        or (workspace is not None and type(workspace) is not Workspace)
        or checking()
    ):
        return None
    device = q.device
    a_log, dt_bias = gate.a_log, gate.dt_bias
    tensors = [x for x in (q, k, v, g, beta, a_log, dt_bias, out) if x is not None]
    of_rows = layouts(tensors)
    drafts = state.cache.draft_tokens if type(state) is CacheSlots else 0
    step = schedule.facts_beside(drafts)
    count, _, kept, _, _, capacity, _, _ = step
    if capacity is not None:
        count, _, kept = capacity
    of_state = of_snapshots = None
    if state is not None:
        of_state = state_facts(state, count, device, tensors, used)
    if snapshots is not None:
        of_snapshots = snapshot_facts(snapshots, state, kept, device, tensors, used)
    if of_state is REFUSED or of_snapshots is REFUSED or of_rows is None:
        return None
    facts = (
        g is None, beta is None, a_log is None, dt_bias is None, out is None,
        gate.kind, gate.beta, gate.lower_bound, return_state, scale, qk_l2norm, reproducible,
        None if workspace is None else workspace.device, schedule.device, step,
        of_state, of_snapshots, *of_rows,
    )  # fmt: skip
    return facts, tensors


def state_facts(
    state: Any, entries: int, device: torch.device, tensors: Tensors, used: Used
) -> Any:
    """Facts of a state argument, whose tensors are appended; REFUSED: the long way.

    used: picks those of a cache's tensors that the operation uses.
    """
    if type(state) is CacheSlots:
        cache = state.cache
        slots = slot_facts(state.slots, entries, cache.slots, device, tensors, written=True)
        if slots is REFUSED:
            return REFUSED
        tensors += used(cache.tensors)
        return cache.kind, cache.device, slots
    if type(state) is Tensor:
        tensors.append(state)
        of_state = layouts((state,))
        return REFUSED if of_state is None else tuple(of_state)
    if type(state) is not Pool or (of_pool := layouts((state.tensor,))) is None:
        return REFUSED
    read, write, limit = state.read_slots, state.write_slots, state.tensor.shape[0]
    reads = slot_facts(read, entries, limit, device, tensors, written=write is None)
    writes = slot_facts(write, entries, limit, device, tensors, written=True)
    present = _present_facts(state.present, entries, device, tensors)
    if reads is REFUSED or writes is REFUSED or present is REFUSED:
        return REFUSED
    if not _apart(read, write) and read != write:
        return REFUSED  # the long way sees whether one sequence reads what another writes
    tensors.append(state.tensor)
    return "pool", state.layout, *of_pool, reads, writes, present


def snapshot_facts(
    place: Any, state: Any, entries: int, device: torch.device, tensors: Tensors, used: Used
) -> Any:
    """Facts of a snapshots argument, beside that of the state; REFUSED: the long way."""
    if type(place) is torch.dtype:
        return place
    if type(place) is CacheSlots:
        cache, slots, limit = place.cache, place.slots, place.cache.slots
        held = used(cache.tensors)
        same = type(state) is CacheSlots and _one(used(state.cache.tensors)[0], held[0])
        lists = (state.slots,) if same else ()
        facts = cache.kind, cache.device, same
    elif type(place) is Pool and (of_pool := layouts((place.tensor,))) is not None:
        slots, limit = place.write_slots, place.tensor.shape[0]
        same = type(state) is Pool and _one(state.tensor, place.tensor)
        lists = (state.read_slots, state.write_slots) if same else ()
        facts, held = (place.layout, *of_pool, same), (place.tensor,)
    else:
        return REFUSED
    found = slot_facts(slots, entries, limit, device, tensors, written=True)
    if slots is None or found is REFUSED or not all(_apart(slots, other) for other in lists):
        return REFUSED
    tensors += held
    return *facts, found


def slot_facts(
    slots: Any, entries: int, limit: int, device: torch.device, tensors: Tensors, *, written: bool
) -> Any:
    """Facts of slots, whose copy on the device is appended; REFUSED: the long way."""
    if slots is None:
        return None
    if type(slots) is HostInts:
        listed = slots.listed
        if (
            listed is None
            or len(slots) != entries
            or listed.least < -1
            or listed.most >= limit
            or (written and not listed.distinct)
        ):
            return REFUSED
        tensors.append(slots.on_device(device))
        return "host"
    return _on_device(slots, INTEGERS, entries, device, tensors)


def _present_facts(present: Any, entries: int, device: torch.device, tensors: Tensors) -> Any:
    if present is None:
        return None
    if type(present) is HostInts:
        if len(present) != entries or not set(map(type, present)) <= {bool}:
            return REFUSED
        tensors.append(present.on_device(device))
        return "host"
    return _on_device(present, (torch.bool,), entries, device, tensors)


def _on_device(
    values: Any,
    dtypes: tuple[torch.dtype, ...],
    entries: int,
    device: torch.device,
    tensors: Tensors,
) -> Any:
    """Facts of a list that the caller keeps on the device, where nobody looks at its values."""
    if (
        type(values) is not Tensor
        or values.device != device
        or values.shape != (entries,)
        or values.dtype not in dtypes
        or not values.is_contiguous()
    ):
        return REFUSED
    tensors.append(values)
    return values.dtype


def _one(pool: Tensor, other: Tensor) -> bool:
    """Whether two pools have one memory; a sparse one has none, which the long way tells."""
    try:
        return pool is other or pool.data_ptr() == other.data_ptr()
    except RuntimeError:
        return False


def _apart(slots: Any, others: Any) -> bool:
    """Whether no slot is in both lists, as far as the host knows them."""
    if type(slots) is not HostInts or type(others) is not HostInts:
        return True
    one, other = slots.listed, others.listed
    return one is not None and other is not None and one.used.isdisjoint(other.used)
