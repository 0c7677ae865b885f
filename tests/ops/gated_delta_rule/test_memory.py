"""What a call writes has memory of its own: nothing of its inputs, no element twice."""

import pytest
import torch
from tests.ops.gated_delta_rule.test_validation import (
    HV,
    K,
    T,
    V,
    filled,
    new_cache,
    refused,
    scheduled,
    tensors,
)

import headstart
from headstart import Pool


def views(name):
    """Arguments of a call whose output lies in other memory of the call."""
    x, cache = tensors(), new_cache()
    buffer = torch.randn(T + 1, HV, V)
    if name == "v":
        return x | {"v": buffer[:T], "out": buffer[1:]}
    if name == "state":
        memory = torch.randn(T * HV * V)
        states = memory[: HV * K * V].view(1, HV, K, V)
        return x | {"state": Pool(states, [0]), "out": memory.view(T, HV, V)}
    taken = cache.tensors["state"].flatten()[: 10 * HV * V].view(10, HV, V)
    few = {key: tensor[:10] for key, tensor in x.items()}
    return few | {"schedule": scheduled([10]), "state": cache.at([0]), "out": taken}


@pytest.mark.parametrize("name", ["v", "state", "the cache's state"])
def test_out_lies_in_no_other_memory_of_the_call(name):
    arguments = views(name)
    before = arguments["out"].clone()
    refused(f"out: expected memory of its own, got that of {name}", **arguments)
    assert torch.equal(arguments["out"], before)


def test_out_may_be_other_columns_of_the_rows_of_v():
    buffer = torch.randn(T, HV, 2 * V)
    x = tensors() | {"v": buffer[..., :V]}
    expected = headstart.gated_delta_rule(**x).o
    headstart.gated_delta_rule(**x, out=buffer[..., V:])
    assert torch.equal(buffer[..., V:], expected)


@pytest.mark.parametrize("where", ["out", "snapshots", "state"])
def test_an_expansion_is_no_place_for_results(where):
    """Torch refuses to write there only when the cache has been written already."""
    cache = filled(headstart.gated_delta_rule)
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    one = torch.zeros(1, HV, K, V).expand(4, HV, K, V)
    given = {"schedule": scheduled(start_positions=100, snapshot_positions=[[128]])}
    if where == "state":
        given = {"schedule": scheduled([50, T - 50]), "state": Pool(one, [0, 1])}
    else:
        given |= {"state": cache.at([1])}
    if where == "snapshots":
        given |= {"snapshots": Pool(one, write_slots=[1])}
    if where == "out":
        given |= {"out": torch.zeros(1, HV, V).expand(T, HV, V)}
    refused(f"{where}: expected memory of its own for every element", **tensors(), **given)
    assert all(torch.equal(cache.tensors[name], before[name]) for name in before)
