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
from headstart.runtime import checks, launcher
from headstart.runtime.dispatch import NUMBERS, Signature
from headstart.runtime.launcher import HostInts
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
        or (scale is not None and type(scale) not in NUMBERS)
        or (return_state is not False and return_state is not True)
        or (qk_l2norm is not False and qk_l2norm is not True)
        or (reproducible is not None and type(reproducible) is not bool)
        or (workspace is not None and type(workspace) is not Workspace)
        or checks.asked
    ):
        return None
    a_log, dt_bias = gate.a_log, gate.dt_bias
    rows, held = [q, k, v], []
    if g is not None:
        rows.append(g)
    if beta is not None:
        rows.append(beta)
    if a_log is not None:
        rows.append(a_log)
    if dt_bias is not None:
        rows.append(dt_bias)
    if out is not None:
        rows.append(out)
    drafts = state.cache.draft_tokens if type(state) is CacheSlots else 0
    step = schedule.beside.get(drafts) or schedule.facts_beside(drafts)
    of_state = of_snapshots = None
    if state is not None:
        of_state = state_facts(state, step, rows, held, used)
    if snapshots is not None:
        of_snapshots = snapshot_facts(snapshots, state, step, rows, held, used)
    if of_state is REFUSED or of_snapshots is REFUSED:
        return None
    facts = (
        g is None, beta is None, a_log is None, dt_bias is None, out is None,
        gate.kind, gate.beta, gate.lower_bound, return_state, scale, qk_l2norm, reproducible,
        None if workspace is None else workspace.device, schedule.device, step,
        of_state, of_snapshots,
    )  # fmt: skip
    return facts, rows, held


def state_facts(state: Any, step: tuple, rows: Tensors, held: Tensors, used: Used) -> Any:
    """Facts of a state argument, whose tensors are appended; REFUSED: the long way.

    step: facts of the schedule. used: picks those of a cache's tensors that the operation uses.
    """
    if type(state) is Tensor:
        rows.append(state)
        return "tensor"
    entries = step[0] if step[5] is None else step[5][0]
    if type(state) is CacheSlots:
        cache = state.cache
        slots = slot_facts(state.slots, entries, cache.slots, cache.device, rows, held, True)
        held += used(cache.tensors)
        return REFUSED if slots is REFUSED else (cache.kind, slots)
    if type(state) is not Pool or not isinstance(state.tensor, Tensor):
        return REFUSED
    read, write, limit = state.read_slots, state.write_slots, state.tensor.shape[0]
    device = state.tensor.device
    reads = slot_facts(read, entries, limit, device, rows, held, write is None)
    writes = slot_facts(write, entries, limit, device, rows, held, True)
    present = _present_facts(state.present, entries, device, rows, held)
    if reads is REFUSED or writes is REFUSED or present is REFUSED:
        return REFUSED
    if not _apart(read, write) and read != write:
        return REFUSED  # the long way sees whether one sequence reads what another writes
    rows.append(state.tensor)
    return "pool", state.layout, reads, writes, present


def snapshot_facts(
    place: Any, state: Any, step: tuple, rows: Tensors, held: Tensors, used: Used
) -> Any:
    """Facts of a snapshots argument, beside that of the state; REFUSED: the long way."""
    if type(place) is torch.dtype:
        return place
    if type(place) is CacheSlots:
        cache, slots = place.cache, place.slots
        limit, device = cache.slots, cache.device
        those = used(cache.tensors)
        same = type(state) is CacheSlots and _one(used(state.cache.tensors)[0], those[0])
        lists = (state.slots,) if same else ()
        facts = cache.kind, same
        held += those
    elif type(place) is Pool and isinstance(place.tensor, Tensor):
        slots, limit, device = place.write_slots, place.tensor.shape[0], place.tensor.device
        same = type(state) is Pool and _one(state.tensor, place.tensor)
        lists = (state.read_slots, state.write_slots) if same else ()
        facts = "pool", place.layout, same
        rows.append(place.tensor)
    else:
        return REFUSED
    entries = step[2] if step[5] is None else step[5][2]
    found = slot_facts(slots, entries, limit, device, rows, held, True)
    if slots is None or found is REFUSED or not all(_apart(slots, other) for other in lists):
        return REFUSED
    return *facts, found


def slot_facts(
    slots: Any, entries: int, limit: int, device: torch.device, rows: Tensors, held: Tensors,
    written: bool,
) -> Any:  # fmt: skip
    """Facts of slots, whose copy on the device is appended; REFUSED: the long way."""
    if slots is None:
        return None
    if type(slots) is HostInts:
        asked = entries, limit, written
        if asked not in slots.suited and not slots.suit(*asked):
            return REFUSED
        held.append(slots.on_device(device))
        return "host"
    return _on_device(slots, rows)


def _present_facts(
    present: Any, entries: int, device: torch.device, rows: Tensors, held: Tensors
) -> Any:
    if present is None:
        return None
    if type(present) is HostInts:
        if len(present) != entries or not set(map(type, present)) <= {bool}:
            return REFUSED
        held.append(present.on_device(device))
        return "host"
    return _on_device(present, rows)


def _on_device(values: Any, rows: Tensors) -> Any:
    """Facts of a list that the caller keeps on the device, where nobody looks at its values."""
    if not isinstance(values, Tensor) or not launcher.prepares(values):
        return REFUSED
    rows.append(values)
    return "device"


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
