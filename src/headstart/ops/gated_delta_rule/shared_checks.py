"""Checks that the rule and the convolution share: schedules, states, snapshots, slot lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.runtime.checks import (
    INTEGERS,
    checking,
    dtype_name,
    expect_dtype,
    expect_own_memory,
    expect_shape,
    host_flags,
    host_ints,
    in_memory,
    shown,
)


def expect_positions(schedule: object, state: object) -> None:
    """Raise for a cache without a Schedule."""
    if isinstance(state, CacheSlots) and not isinstance(schedule, Schedule):
        raise ValueError(
            "schedule: expected a Schedule with a cache, since it holds positions, "
            f"got {shown(schedule)}"
        )


def schedule_of(
    schedule: Schedule | Sequence[int] | None, tokens: int, device: torch.device
) -> Schedule:
    """The schedule of packed inputs: the one given, or one built of lengths, or of one sequence."""
    if schedule is None:
        return Schedule([tokens], device=device)
    if not isinstance(schedule, Schedule):
        return Schedule(schedule, device=device)
    if schedule.device.type != device.type and device.type != "meta":
        raise ValueError(f"schedule: expected device {device}, got {schedule.device}")
    return schedule


def expect_updates(state: object, schedule: Schedule, return_state: bool) -> None:
    """Raise for a new state that would be returned and is updated in place, and for drafts that
    nothing can roll back."""
    if return_state and isinstance(state, (Pool, CacheSlots)):
        raise ValueError(
            "return_state: expected False with a Pool or a cache, updated in place, got True"
        )
    if any(schedule.drafts) and not isinstance(state, CacheSlots):
        raise ValueError(
            "schedule: expected no drafts without a DeltaCache, since a plain state cannot roll "
            f"back, got some with state {shown(state)}"
        )


def expect_same_memory(name: str, at: CacheSlots, x: torch.Tensor, of: str) -> None:
    """Raise unless a cache has the dtype and the device of an input, which is called `of`, and
    memory."""
    cache = at.cache
    if cache.dtype != x.dtype:
        raise ValueError(
            f"{name}: expected a cache of dtype {dtype_name(x.dtype)}, "
            f"got {dtype_name(cache.dtype)}"
        )
    if cache.device != x.device and x.device.type != "meta":
        raise ValueError(f"{name}: expected device {x.device} (that of {of}), got {cache.device}")
    cache.expect_in_memory()


def snapshot_slots(snapshots: Pool | CacheSlots, schedule: Schedule) -> list[int] | None:
    """Slots that snapshots go to, as a list where the host knows them."""
    count, entries = schedule.M, schedule.slot_count(schedule.M, 2)
    if isinstance(snapshots, CacheSlots):
        cache = snapshots.cache
        return host_slots("snapshots", snapshots.slots, count, entries, cache.slots, cache.device)
    if snapshots.write_slots is None:
        raise ValueError("snapshots: expected a Pool with write_slots, got write_slots None")
    limit, device = snapshots.tensor.shape[0], snapshots.tensor.device
    return host_slots("snapshots", snapshots.write_slots, count, entries, limit, device)


def host_slots(
    name: str,
    slots: Sequence[int] | torch.Tensor,
    count: int,
    entries: int,
    limit: int,
    device: torch.device,
) -> list[int] | None:
    """The first `count` of `entries` slots as a list, checked against -1 and `limit`.

    None for a tensor on the device of their pool, whose values the host does not look at unless
    HEADSTART_CHECK=1 asks for it.

    >>> host_slots("slots", [3, -1], 2, 2, 8, torch.device("cpu"))
    [3, -1]
    """
    if isinstance(slots, torch.Tensor) and slots.device.type != "cpu":
        _expect_near(name, slots, device)
        if slots.device.type == "meta" or not checking():
            if tuple(slots.shape) != (entries,):
                raise ValueError(f"{name}: expected [{entries}] slots, got {list(slots.shape)}")
            expect_dtype(name, slots, INTEGERS)
            return None
    found = host_ints(name, slots)
    if len(found) != entries:
        raise ValueError(f"{name}: expected {entries} slots, got {len(found)}")
    for slot in found[:count]:
        if not -1 <= slot < limit:
            raise ValueError(f"{name}: expected slots in [0, {limit}) or -1, got {slot}")
    return found[:count]


def pool_slots(pool: Pool, count: int, entries: int) -> tuple[list[int] | None, list[int] | None]:
    """Slots of a state pool that are read and written, as lists where the host knows them."""
    limit, device = pool.tensor.shape[0], pool.tensor.device
    read = write = None
    if pool.read_slots is not None:
        read = host_slots("read_slots", pool.read_slots, count, entries, limit, device)
    if pool.write_slots is not None:
        write = host_slots("write_slots", pool.write_slots, count, entries, limit, device)
    elif pool.read_slots is None:
        raise ValueError("write_slots: expected slots, since read_slots is None, got None")
    else:
        write = read
    if isinstance(pool.present, torch.Tensor):  # not read here: it may lie on a device
        expect_shape("present", pool.present, "[N]", (entries,))
        expect_dtype("present", pool.present, (torch.bool,))
        _expect_near("present", pool.present, device)
        in_memory("present", pool.present)
    elif pool.present is not None:
        host_flags("present", pool.present, entries)
    return read, write


def _expect_near(name: str, values: torch.Tensor, device: torch.device) -> None:
    """Raise unless a list of the caller's lies on the CPU or on the device of its pool."""
    if values.device.type not in ("cpu", device.type) and device.type != "meta":
        raise ValueError(
            f"{name}: expected a list on {device} or on the CPU, got one on {values.device}"
        )


def expect_draft_lengths(schedule: Schedule, draft_tokens: int) -> None:
    """Raise if a step with drafts brings more tokens than a cache can roll back."""
    for n, (draft, length) in enumerate(zip(schedule.drafts, schedule.lengths, strict=True)):
        if draft and length > draft_tokens:
            raise ValueError(
                f"schedule: expected at most draft_tokens = {draft_tokens} tokens in a step with "
                f"drafts, got {length} for sequence {n}"
            )


def share_slots(
    state: torch.Tensor | None, snapshots: torch.Tensor | None, plain: bool = False
) -> bool:
    """Whether states and snapshots lie in slots of one pool, by whichever views of it.

    plain: whether the states are no pool but a tensor, which snapshots must not overwrite. Raises
    ValueError if their memory meets in any other way.

    >>> pool = torch.zeros(8, 2, 4)
    >>> share_slots(pool, pool[:6]), share_slots(pool[:6], pool[6:])
    (True, False)
    """
    if state is None or snapshots is None:
        return False
    if not plain and (state is snapshots or _slots_of(state) == _slots_of(snapshots)):
        return True
    expect_own_memory("snapshots", snapshots, state=state)
    return False


def _slots_of(pool: torch.Tensor) -> object:
    """Where the slots of a pool lie, however many it has; without memory, the pool itself."""
    if pool.device.type == "meta":
        return id(pool)
    return pool.data_ptr(), pool.device, pool.dtype, pool.shape[1:], pool.stride()


def expect_no_races(
    name: str, written: list[int] | None, read: list[int] | None, snapshots: list[int] | None
) -> None:
    """Raise if a slot is written twice, or written for one sequence and read for another."""
    taken = [slot for slot in written or [] if slot >= 0]
    if len(set(taken)) != len(taken):
        raise ValueError(
            f"{name}: expected every slot to be written once, got slot {_repeated(taken)} twice"
        )
    for n, slot in enumerate(read or []):
        others = [m for m, other in enumerate(written or []) if other == slot and m != n]
        if slot >= 0 and others:
            raise ValueError(
                f"{name}: slot {slot} is written for sequence {others[0]} "
                f"and read for sequence {n} of the same call"
            )
    kept = [slot for slot in snapshots or [] if slot >= 0]
    if len(set(kept)) != len(kept):
        raise ValueError(
            f"snapshots: expected every slot to be written once, got slot {_repeated(kept)} twice"
        )
    both = set(kept) & ({slot for slot in read or [] if slot >= 0} | set(taken))
    if both:
        raise ValueError(
            "snapshots: expected slots that no sequence uses in this call, "
            f"got {shown(sorted(both))}"
        )


def _repeated(slots: list[int]) -> int:
    """The first slot that is listed twice."""
    return next(slot for i, slot in enumerate(slots) if slot in slots[:i])
