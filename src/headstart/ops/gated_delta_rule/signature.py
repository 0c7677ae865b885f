"""Signatures of calls on sequences: host facts, and tensors in a fixed order.

None stands for a call that goes the long way each time: whatever is wrong or out of the ordinary is
told, converted or declined there (see `runtime/steady.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.chunk_table import chunk_table
from headstart.ops.gated_delta_rule.gate import Gate
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.runtime.checks import INTEGERS, checking
from headstart.runtime.dispatch import Signature
from headstart.runtime.launcher import HostInts, prepares
from headstart.runtime.steady import layout
from headstart.runtime.workspace import Workspace

Tensors = list[torch.Tensor]
TENSORS = (torch.Tensor, torch.nn.Parameter)
NUMBERS = (float, int, type(None))
REFUSED = object()
"""Facts of an argument that goes the long way."""


def signature(
    q: Any, k: Any, v: Any, g: Any, beta: Any, schedule: Any, state: Any, gate: Any, snapshots: Any,
    return_state: Any, scale: Any, qk_l2norm: Any, reproducible: Any, workspace: Any, out: Any,
) -> Signature | None:  # fmt: skip
    """The signature of a call of the gated delta rule."""
    if (
        type(q) is not torch.Tensor
        or not prepares(q.device)
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
    tensors = [q, k, v]
    given = [x for x in (g, beta, gate.a_log, gate.dt_bias, out) if x is not None]
    tensors += given
    facts: list[Any] = [
        g is None, beta is None, gate.kind, gate.beta, gate.lower_bound, gate.a_log is None,
        gate.dt_bias is None, out is None, return_state, scale, qk_l2norm, reproducible,
        workspace and workspace.device, schedule.device, schedule.facts,
    ]  # fmt: skip
    entries, room = schedule.slot_count(schedule.N, 0), schedule.slot_count(schedule.M, 2)
    of_state = state_facts(state, entries, device, tensors)
    of_snapshots = snapshot_facts(snapshots, state, room, device, tensors)
    if of_state is REFUSED or of_snapshots is REFUSED or not plain(tensors):
        return None
    facts += (of_state, of_snapshots, *[layout(x) for x in tensors[: 3 + len(given)]])
    cached = type(state) is CacheSlots
    table = chunk_table(schedule, cached, cached and state.cache.draft_tokens > 0)
    tensors += (table.sequences, table.items)
    facts.append(table.count)
    return tuple(facts), tensors


def plain(tensors: Tensors) -> bool:
    """Whether these are tensors that need no gradient now."""
    graded = torch.is_grad_enabled()
    for x in tensors:
        if type(x) not in TENSORS or x.layout is not torch.strided:
            return False
        if graded and x.requires_grad:
            return False
    return True


def state_facts(state: Any, entries: int, device: torch.device, tensors: Tensors) -> Any:
    """Facts of a state argument, whose tensors are appended; REFUSED: the long way."""
    kind = type(state)
    if state is None:
        return None
    if kind is torch.Tensor:
        tensors.append(state)
        return layout(state)
    if kind is CacheSlots:
        slots = slot_facts(state.slots, entries, state.cache.slots, device, tensors)
        if slots is REFUSED or not _distinct(state.slots):
            return REFUSED
        tensors += state.cache.tensors.values()
        return state.cache.kind, state.cache.device, slots
    if kind is not Pool or type(state.tensor) is not torch.Tensor:
        return REFUSED
    read, write, limit = state.read_slots, state.write_slots, state.tensor.shape[0]
    facts = [
        "pool", state.layout, layout(state.tensor),
        slot_facts(read, entries, limit, device, tensors),
        slot_facts(write, entries, limit, device, tensors),
        _present_facts(state.present, entries, device, tensors),
    ]  # fmt: skip
    tensors.append(state.tensor)
    if REFUSED in facts or not _distinct(read if write is None else write):
        return REFUSED
    both = isinstance(read, HostInts) and isinstance(write, HostInts)
    if both and read != write and not read.used.isdisjoint(write.used):  # type: ignore[union-attr]
        return REFUSED  # the long way sees whether one sequence reads what another writes
    return tuple(facts)


def snapshot_facts(
    place: Any, state: Any, entries: int, device: torch.device, tensors: Tensors
) -> Any:
    """Facts of a snapshots argument, beside that of the state; REFUSED: the long way."""
    if place is None or type(place) is torch.dtype:
        return place
    if type(place) is CacheSlots:
        slots, limit = place.slots, place.cache.slots
        same = type(state) is CacheSlots and state.cache is place.cache
        facts = ("cache", place.cache.kind, place.cache.device, same)
        held = place.cache.tensors.values()
    elif type(place) is Pool and type(place.tensor) is torch.Tensor:
        slots, limit = place.write_slots, place.tensor.shape[0]
        same = type(state) is Pool and state.tensor is place.tensor
        facts = ("pool", place.layout, layout(place.tensor), same)
        held = (place.tensor,)
    else:
        return REFUSED
    found = slot_facts(slots, entries, limit, device, tensors)
    if slots is None or found is REFUSED or not _distinct(slots):
        return REFUSED
    if same and isinstance(slots, HostInts) and not _apart(slots, state):
        return REFUSED
    tensors += held
    return *facts, found


def slot_facts(slots: Any, entries: int, limit: int, device: torch.device, tensors: Tensors) -> Any:
    """Facts of slots, whose copy on the device is appended; REFUSED: the long way."""
    if slots is None:
        return None
    if type(slots) is HostInts:
        if len(slots) != entries or not slots.plain or not slots.within(limit):
            return REFUSED
        tensors.append(slots.on_device(device))
        return "host"
    return _on_device(slots, INTEGERS, entries, device, tensors)


def _present_facts(present: Any, entries: int, device: torch.device, tensors: Tensors) -> Any:
    if present is None:
        return None
    if type(present) is HostInts:
        if len(present) != entries or not all(type(flag) is bool for flag in present):
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
        type(values) is not torch.Tensor
        or values.device.type == "cpu"
        or values.device != device
        or values.shape != (entries,)
        or values.dtype not in dtypes
        or not values.is_contiguous()
    ):
        return REFUSED
    tensors.append(values)
    return values.dtype


def _distinct(slots: Any) -> bool:
    return type(slots) is not HostInts or slots.distinct


def _apart(slots: HostInts, state: CacheSlots | Pool) -> bool:
    """Whether no slot is one of the state's, in the same memory."""
    lists = (
        (state.slots,) if isinstance(state, CacheSlots) else (state.read_slots, state.write_slots)
    )
    return all(type(own) is not HostInts or slots.used.isdisjoint(own.used) for own in lists)
