"""What a call writes has memory of its own: nothing of its inputs, no element twice."""

import pytest
import torch
from tests.ops.convolution.oracle import cache_of, draw

from headstart import Pool, Schedule, causal_conv1d

T, CHANNELS, WIDTH = 12, 5, 4


def views(name):
    """Arguments of a call whose output lies in other memory of the call."""
    x, weight, bias = draw(T, CHANNELS)
    given = {"x": x, "weight": weight, "bias": bias}
    memory = torch.randn(64 * CHANNELS)
    y = memory[: T * CHANNELS].view(T, CHANNELS)
    if name == "x":
        return given | {"x": memory[CHANNELS:][: T * CHANNELS].view(T, CHANNELS), "out": y}
    if name == "weight":
        return given | {"weight": memory[: CHANNELS * WIDTH].view(CHANNELS, WIDTH), "out": y}
    if name == "bias":
        return given | {"bias": y[-1], "out": y}
    histories = memory[: 4 * 3 * CHANNELS].view(4, WIDTH - 1, CHANNELS)
    if name == "state":
        return given | {"state": Pool(histories, [0]), "out": y}
    return given | {
        "schedule": Schedule([T], snapshot_positions=[[0]], device="cpu"),
        "snapshots": Pool(histories, write_slots=[1]),
        "out": y,
    }


@pytest.mark.parametrize("name", ["x", "weight", "bias", "state", "snapshots"])
def test_out_lies_in_no_other_memory_of_the_call(name):
    arguments = views(name)
    before = arguments["out"].clone()
    with pytest.raises(ValueError, match=rf"^out: expected memory of its own, got that of {name}"):
        causal_conv1d(**arguments)
    assert torch.equal(arguments["out"], before)


def test_out_lies_in_no_history_of_a_cache():
    x, weight, bias = draw(T, CHANNELS)
    cache = cache_of()
    inside = cache.tensors["history"].view(-1)[: T * CHANNELS].view(T, CHANNELS)
    with pytest.raises(ValueError, match=r"^out: expected memory of its own, got that of state"):
        causal_conv1d(
            x,
            weight,
            bias,
            schedule=Schedule([T], device="cpu"),
            state=cache.at([0]),
            out=inside,
        )


def test_out_may_be_other_columns_of_the_rows_of_x():
    x, weight, bias = draw(T, CHANNELS)
    rows = torch.randn(T, 2 * CHANNELS)
    rows[:, :CHANNELS] = x
    expected = causal_conv1d(x, weight, bias).y
    causal_conv1d(rows[:, :CHANNELS], weight, bias, out=rows[:, CHANNELS:])
    assert torch.equal(rows[:, CHANNELS:], expected)


@pytest.mark.parametrize("where", ["out", "state", "snapshots"])
def test_an_expansion_is_no_place_for_results(where):
    x, weight, bias = draw(T, CHANNELS)
    one = torch.zeros(1, WIDTH - 1, CHANNELS).expand(4, -1, -1)
    schedule = Schedule([T], snapshot_positions=[[0]], device="cpu")
    given = {
        "out": {"out": torch.zeros(1, CHANNELS).expand(T, -1)},
        "state": {"state": Pool(one, [1])},
        "snapshots": {"schedule": schedule, "snapshots": Pool(one, write_slots=[1])},
    }
    with pytest.raises(ValueError, match=rf"^{where}: expected memory of its own for every"):
        causal_conv1d(x, weight, bias, **given[where])
    assert not one.any()
