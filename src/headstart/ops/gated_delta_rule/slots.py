"""Checks of slot lists where the host can know them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.runtime.checks import (
    checking,
    expect_dtype,
    expect_shape,
    host_flags,
    host_ints,
    shown,
)


def host_slots(
    name: str, slots: Sequence[int] | torch.Tensor, count: int, entries: int, limit: int
) -> list[int] | None:
    """The first `count` of `entries` slots as a list, checked against -1 and `limit`.

    None for a tensor on another device, whose values the host does not look at unless
    HEADSTART_CHECK=1 asks for it.

    >>> host_slots("slots", [3, -1], 2, 2, 8)
    [3, -1]
    """
    if isinstance(slots, torch.Tensor) and slots.device.type != "cpu" and not checking():
        if tuple(slots.shape) != (entries,):
            raise ValueError(f"{name}: expected [{entries}] slots, got {list(slots.shape)}")
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
    limit = pool.tensor.shape[0]
    read = write = None
    if pool.read_slots is not None:
        read = host_slots("read_slots", pool.read_slots, count, entries, limit)
    if pool.write_slots is not None:
        write = host_slots("write_slots", pool.write_slots, count, entries, limit)
    elif pool.read_slots is None:
        raise ValueError("write_slots: expected slots, since read_slots is None, got None")
    else:
        write = read
    if isinstance(pool.present, torch.Tensor):  # not read here: it may lie on a device
        expect_shape("present", pool.present, "[N]", (entries,))
        expect_dtype("present", pool.present, (torch.bool,))
    elif pool.present is not None:
        host_flags("present", pool.present, entries)
    return read, write


def expect_draft_lengths(schedule: Schedule, draft_tokens: int) -> None:
    """Raise if a step with drafts brings more tokens than a cache can roll back."""
    for n, (draft, length) in enumerate(zip(schedule.drafts, schedule.lengths, strict=True)):
        if draft and length > draft_tokens:
            raise ValueError(
                f"schedule: expected at most draft_tokens = {draft_tokens} tokens in a step with "
                f"drafts, got {length} for sequence {n}"
            )


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
