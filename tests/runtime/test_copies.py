"""A copy of what describes a step, or holds scratch, is another one: `copy.copy` too."""

import copy
import pickle

import pytest
import torch

import headstart
from headstart import ExtendPlan, Schedule, Workspace

COPIES = pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)


def lengths_of(step):
    return step.lengths


def lengths_tensor(plan):
    return torch.tensor(plan.lengths)


@COPIES
@pytest.mark.parametrize("capacity", [None, (2, 200, 4)])
def test_a_copied_schedule_describes_its_own_step(copied, capacity):
    schedule = Schedule([130], snapshot_every=64, device="cpu", capacity=capacity)
    facts = schedule.facts, schedule.chunk_count(False), schedule.window(4)
    assert schedule.on_device(lengths_of).tolist() == [130]
    twin = copied(schedule)
    assert (twin.facts, twin.chunk_count(False), twin.window(4)) == facts
    twin.update_([3])
    assert twin.on_device(lengths_of).tolist() == [3]
    assert schedule.on_device(lengths_of).tolist() == [130]
    assert (schedule.facts, schedule.chunk_count(False), schedule.window(4)) == facts
    assert twin.facts != facts[0]


@COPIES
@pytest.mark.parametrize("capacity", [None, (2, 8, 8)])
def test_a_copied_plan_describes_its_own_forward(copied, capacity):
    def described(indices):
        return [2], [0, len(indices)], indices

    keys = headstart.KVCache(torch.randn(9, 1, 16), torch.randn(9, 1, 16))
    new = torch.randn(2, 2, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)

    def attended(plan):
        return headstart.extend_attention(*new, plan=plan, cache=keys)

    plan = ExtendPlan.from_slots(*described([0, 1, 2]), new_in_cache=False, capacity=capacity)
    assert plan.on_device(lengths_tensor).tolist() == [2]
    first = attended(plan)
    twin = copied(plan)
    assert torch.equal(attended(twin), first)
    twin.update_(*described([8, 7]), new_in_cache=False)
    other = attended(twin)
    assert not torch.equal(other, first)
    assert torch.equal(attended(plan), first)
    assert torch.equal(attended(twin), other)


@COPIES
def test_what_is_kept_of_places_in_memory_is_not_copied(copied):
    """A copy's memory lies elsewhere: prepared launches would read the original's."""
    plan = ExtendPlan.from_lengths([2], device="cpu")
    plan.on_device(lengths_tensor)
    plan.prepared["facts"], plan.tables["tiles"] = None, "a table"
    schedule = Schedule([2], device="cpu")
    schedule.on_device(lengths_of)
    schedule.found["whoever"] = [7]
    workspace = Workspace("cpu")
    workspace.buffer("state", (4,), torch.float32).fill_(7)
    workspace.bound["whoever"] = (7,)
    for held, names in (
        (plan, ("prepared", "tables", "_on_device")),
        (schedule, ("found", "_on_device")),
        (workspace, ("bound", "_memory")),
    ):
        twin = copied(held)
        for name in names:
            assert getattr(held, name), name
            assert getattr(twin, name) == {}, name
    assert copied(workspace).bytes == 0
