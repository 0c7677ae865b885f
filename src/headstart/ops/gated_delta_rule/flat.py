"""Schedules, states and snapshots as tensors and numbers, and back: what registered ops take.

Inside `torch.compile` the first half is traced, so it asks objects for little more than attributes;
the second half runs when the graph does. The rule and the convolution share both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots, DeltaCache
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.runtime.checks import shown
from headstart.runtime.handles import found, handle_of
from headstart.runtime.launcher import HostInts

ARGUMENTS = (
    # A handle, or lengths; how many new states and snapshots the call returns.
    "Tensor? schedule, SymInt[]? lengths, SymInt entries, SymInt kept_entries, "
    "Tensor? state, Tensor(a!)? pool, str layout, Tensor(b!)[] cache, SymInt[] sizes, "
    # Lists are on a device, or known to the host.
    "Tensor? read, SymInt[]? host_read, Tensor? write, SymInt[]? host_write, "
    "Tensor? present, bool[]? host_present, "
    # beside: snapshots go where the state lies, which is then given once.
    "ScalarType? snapshots, Tensor(c!)? kept_pool, str kept_layout, Tensor(d!)[] kept_cache, "
    "SymInt[] kept_sizes, Tensor? kept, SymInt[]? host_kept, bool beside, bool return_state"
)
"""Arguments of an op on sequences, beside its own."""

Flat = dict[str, Any]


def flat(
    lead: Sequence[int],
    schedule: Any,
    state: Any,
    snapshots: Any,
    return_state: bool,
    names: Sequence[str],
) -> Flat:
    """ARGUMENTS of a call.

    lead: [T] of its packed inputs, or [B, L]. names: of a cache's tensors that it uses.
    """
    returned = isinstance(snapshots, torch.dtype)
    return {
        **_flat_schedule(lead, schedule, return_state, returned),
        **_flat_state(state, names),
        **_flat_snapshots(snapshots, state, names),
        "return_state": return_state,
    }


def _flat_schedule(lead: Sequence[int], schedule: Any, states: bool, snapshots: bool) -> Flat:
    handle = lengths = None
    entries = lead[0] if len(lead) == 2 else 1
    kept = 0
    if isinstance(schedule, Schedule):
        handle = handle_of(schedule)
        # Counts are asked for only where they shape a result: a graph holds what it asked for.
        entries = schedule.slot_count(schedule.N, 0) if states else 0
        kept = schedule.slot_count(schedule.M, 2) if snapshots else 0
    elif isinstance(schedule, (list, tuple)):
        lengths, entries = list(schedule), len(schedule)
    elif schedule is not None:
        raise ValueError(
            "schedule: expected None, a Schedule or a list of lengths in a traced call, "
            f"got {shown(schedule)}"
        )
    return {"schedule": handle, "lengths": lengths, "entries": entries, "kept_entries": kept}


def _flat_state(state: Any, names: Sequence[str]) -> Flat:
    pool = plain = read = write = present = None
    layout, cache, sizes = "kv", [], []
    if isinstance(state, CacheSlots):
        cache, sizes, read = _held(state.cache, names), state.cache.sizes, state.slots
    elif isinstance(state, Pool):
        pool, layout = state.tensor, state.layout
        read, write, present = state.read_slots, state.write_slots, state.present
    elif state is None or isinstance(state, torch.Tensor):
        plain = state
    else:
        raise ValueError(
            f"state: expected None, a tensor, a Pool or cache.at(slots), got {type(state).__name__}"
        )
    return {
        "state": plain, "pool": pool, "layout": layout, "cache": cache, "sizes": sizes,
        **_flat_list("read", read), **_flat_list("write", write),
        **_flat_list("present", present),
    }  # fmt: skip


def _flat_snapshots(snapshots: Any, state: Any, names: Sequence[str]) -> Flat:
    dtype = pool = slots = None
    layout, cache, sizes, beside = "kv", [], [], False
    if isinstance(snapshots, CacheSlots):
        slots = snapshots.slots
        beside = isinstance(state, CacheSlots) and state.cache is snapshots.cache
        if not beside:
            cache, sizes = _held(snapshots.cache, names), snapshots.cache.sizes
    elif isinstance(snapshots, Pool):
        slots, layout = snapshots.write_slots, snapshots.layout
        beside = isinstance(state, Pool) and state.tensor is snapshots.tensor
        if not beside:
            pool = snapshots.tensor
    elif snapshots is None or isinstance(snapshots, torch.dtype):
        dtype = snapshots
    else:
        raise ValueError(
            f"snapshots: expected None, a dtype, a Pool or cache.at(slots), got {shown(snapshots)}"
        )
    return {
        "snapshots": dtype, "kept_pool": pool, "kept_layout": layout, "kept_cache": cache,
        "kept_sizes": sizes, "beside": beside, **_flat_list("kept", slots),
    }  # fmt: skip


def _flat_list(name: str, values: Any) -> Flat:
    if values is None or isinstance(values, torch.Tensor):
        return {name: values, f"host_{name}": None}
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name}: expected a list or a tensor, got {shown(values)}")
    return {name: None, f"host_{name}": list(values)}


def _held(cache: DeltaCache, names: Iterable[str]) -> list[torch.Tensor]:
    return [cache.tensors[name] for name in names if name in cache.tensors]


def rebuilt(given: Flat, names: Sequence[str]) -> Flat:
    """What `flat` was given, as keyword arguments of the public function."""
    state, lengths = _state(given, names), given["lengths"]
    return {
        "schedule": found(Schedule, given["schedule"]) if lengths is None else lengths,
        "state": state,
        "snapshots": _snapshots(given, state, names),
        "return_state": given["return_state"],
    }


def _state(given: Flat, names: Sequence[str]) -> torch.Tensor | Pool | CacheSlots | None:
    if given["cache"]:
        return _cache(given["sizes"], given["cache"], names).at(_list(given, "read"))
    if given["pool"] is None:
        return given["state"]
    read, write, present = (_list(given, name) for name in ("read", "write", "present"))
    return Pool(given["pool"], read, write, present, given["layout"])


def _snapshots(given: Flat, state: Any, names: Sequence[str]) -> Any:
    slots, pool = _list(given, "kept"), given["kept_pool"]
    if given["kept_cache"]:
        return _cache(given["kept_sizes"], given["kept_cache"], names).at(slots)
    if given["beside"] and isinstance(state, CacheSlots):
        return state.cache.at(slots)
    if given["beside"]:
        pool = state.tensor
    if pool is None:
        return given["snapshots"]
    return Pool(pool, write_slots=slots, layout=given["kept_layout"])


def _list(given: Flat, name: str) -> Any:
    listed = given[f"host_{name}"]
    if listed is None:
        return given[name]
    return (_flags if name == "present" else _ints)(tuple(listed))


@functools.lru_cache(maxsize=4096)
def _ints(values: tuple[int, ...]) -> HostInts:
    """The same for the same slots: their copy on a device is made once."""
    return HostInts(values)


@functools.lru_cache(maxsize=4096)
def _flags(values: tuple[bool, ...]) -> HostInts:
    return HostInts(values)


def _cache(
    sizes: Sequence[int], tensors: Sequence[torch.Tensor], names: Sequence[str]
) -> DeltaCache:
    held = dict(zip(names, tensors, strict=True))
    dtype = held["tail_k" if "tail_k" in held else "history"].dtype
    return DeltaCache.holding(sizes, dtype, held)
