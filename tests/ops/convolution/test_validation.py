"""Every mistake has one error that names the argument, before anything is written."""

import re

import pytest
import torch
from tests.ops.convolution.oracle import cache_of, draw

import headstart
from headstart import Pool, Schedule, causal_conv1d, rms_norm_gated
from headstart.runtime.workspace import default_workspace

X, WEIGHT, BIAS = draw(10)
AT_70 = Schedule([10], start_positions=70, snapshot_positions=[[64]], device="cpu")
KEPT = Schedule([10], snapshot_positions=[[0]], device="cpu")
STEP, PAIR = Schedule([10], device="cpu"), Schedule([5, 5], device="cpu")
POOL = torch.zeros(4, 3, 5)


MISTAKES = {
    "x: expected a tensor, got list": {"x": [1.0]},
    "x: expected [T, channels] or [B, L, channels], got [5]": {"x": X[0]},
    "x: expected dtype float32 or bfloat16 or float16 or float64, got int64": {"x": X.long()},
    "x: expected a contiguous last dimension": {"x": torch.zeros(5, 10).t()},
    "weight: expected [channels, width] = [5, any], got [4, 5]": {"weight": WEIGHT.t()},
    "weight: expected a width of at least 2, got [5, 1]": {"weight": WEIGHT[:, :1]},
    "weight: expected dtype": {"weight": WEIGHT.int()},
    "bias: expected [channels] = [5], got [4]": {"bias": BIAS[:4]},
    "bias: expected device cpu (that of x), got device meta": {"bias": BIAS.to("meta")},
    "activation: expected one of ['silu', None], got 'relu'": {"activation": "relu"},
    "schedule: expected at most T = 10 tokens, got 11": {"schedule": [11]},
    "schedule: expected None with x [B, L, channels]": {"x": X[None], "schedule": [10]},
    "schedule: expected a Schedule with a cache": {"state": cache_of().at([0])},
    "schedule: expected no drafts without a DeltaCache": {
        "schedule": Schedule([2], drafts=True, device="cpu")
    },
    "state: expected [N, width - 1, channels] = [1, 3, 5], got [1, 5, 3]": {
        "state": torch.zeros(1, 5, 3)
    },
    "state: expected dtype float32, got float16": {"state": torch.zeros(1, 3, 5).half()},
    "state: expected None, a tensor, a Pool or cache.at(slots), got DeltaCache": {
        "state": cache_of()
    },
    "state: expected a cache with a convolution, got conv_channels 0": {
        "schedule": STEP,
        "state": headstart.DeltaCache(1, H=1, HV=1, K=2, V=2, dtype=torch.float32, device="cpu").at(
            [0]
        ),
    },
    "state: expected a cache with [conv_channels, conv_width] = [5, 4], got [5, 3]": {
        "schedule": STEP,
        "state": cache_of(width=3).at([0]),
    },
    "state: expected a cache of dtype float32, got float16": {
        "schedule": STEP,
        "state": cache_of(dtype=torch.float16).at([0]),
    },
    "state: expected slots in [0, 4) or -1, got 4": {
        "schedule": STEP,
        "state": cache_of().at([4]),
    },
    "state: expected 1 slots, got 2": {"schedule": STEP, "state": cache_of().at([0, 1])},
    "state: expected every slot to be written once, got slot 2 twice": {
        "schedule": PAIR,
        "state": cache_of().at(torch.tensor([2, 2])),
    },
    "state: expected [S, width - 1, channels] = [any, 3, 5], got [4, 3, 6]": {
        "state": Pool(torch.zeros(4, 3, 6), [0])
    },
    "state: expected dtype float32, got bfloat16": {"state": Pool(POOL.bfloat16(), [0])},
    "state: expected a Pool without a layout, got layout 'vk'": {
        "state": Pool(POOL, [0], layout="vk")
    },
    "read_slots: expected slots in [0, 4) or -1, got -2": {"state": Pool(POOL, [-2])},
    "write_slots: expected slots in [0, 4) or -1, got 9": {"state": Pool(POOL, [0], [9])},
    "write_slots: expected slots, since read_slots is None": {"state": Pool(POOL)},
    "present: expected one for each of 1 sequences, got 2": {
        "state": Pool(POOL, [0], present=[True, True])
    },
    "present: expected True or False, got 1": {"state": Pool(POOL, [0], present=[1])},
    "present: expected [N] = [1], got [2]": {
        "state": Pool(POOL, [0], present=torch.ones(2, dtype=torch.bool))
    },
    "present: expected dtype bool, got float32": {"state": Pool(POOL, [0], present=torch.ones(1))},
    "return_state: expected True or False, got None": {"return_state": None},
    "activation: expected one of ['silu', None], got a float32 tensor [2, 3]": {
        "activation": torch.zeros(2, 3)
    },
    "state: slot 1 is written for sequence 0 and read for sequence 1": {
        "schedule": PAIR,
        "state": Pool(POOL, [0, 1], [1, 2]),
    },
    "return_state: expected False with a Pool or a cache": {
        "state": Pool(POOL, [0]),
        "return_state": True,
    },
    "snapshots: expected the dtype of x, float32, got float64": {"snapshots": torch.float64},
    "snapshots: expected None, the dtype of x, a Pool or cache.at(slots), got True": {
        "snapshots": True
    },
    "snapshots: expected a Pool with write_slots": {"snapshots": Pool(POOL, [0])},
    "snapshots: expected 1 slots, got 0": {
        "schedule": KEPT,
        "snapshots": Pool(POOL, write_slots=[]),
    },
    "snapshots: expected slots that no sequence uses in this call, got [1]": {
        "schedule": KEPT,
        "state": Pool(POOL, [1]),
        "snapshots": Pool(POOL, write_slots=[1]),
    },
    "snapshots: expected every slot to be written once, got slot 1 twice": {
        "schedule": Schedule([5, 5], snapshot_positions=[[0], [0]], device="cpu"),
        "snapshots": cache_of().at([1, 1]),
    },
    "snapshot_positions: position 64 lies before the plain history at 70": {
        "schedule": AT_70,
        "snapshots": torch.float32,
    },
    "out: expected the shape of x = [10, 5], got [9, 5]": {"out": torch.zeros(9, 5)},
    "out: expected dtype float32, got float16": {"out": torch.zeros(10, 5).half()},
    "out: expected a contiguous last dimension": {"out": torch.zeros(5, 10).t()},
    "out: expected memory of its own, got that of x": {"out": X},
    "weight: requires grad, but causal_conv1d has no backward": {
        "weight": WEIGHT.clone().requires_grad_()
    },
    "state: requires grad": {"state": torch.zeros(1, 3, 5).requires_grad_()},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_named(message):
    given = {"x": X, "weight": WEIGHT, "bias": BIAS} | MISTAKES[message]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        causal_conv1d(**given)
    assert not POOL.any()


def test_gradients_matter_only_in_grad_mode():
    weight = WEIGHT.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(causal_conv1d(X, weight).y, causal_conv1d(X, WEIGHT).y)


def test_finite_inputs_are_checked_when_asked_for(monkeypatch):
    x = X.clone()
    x[7] = torch.nan
    causal_conv1d(x, WEIGHT)
    monkeypatch.setattr("headstart.runtime.checks.asked", True)
    causal_conv1d(x, WEIGHT, schedule=[7])
    with pytest.raises(ValueError, match="x: expected finite values"):
        causal_conv1d(x, WEIGHT)


NORM_MISTAKES = {
    "x: expected [..., D], got []": {"x": torch.tensor(1.0)},
    "x: expected dtype": {"x": X.int()},
    "weight: expected [D] = [5], got [4]": {"weight": BIAS[:4]},
    "gate: expected the shape of x = [10, 5], got [1, 5]": {"gate": X[:1]},
    "gate: expected dtype": {"gate": X.bool()},
    "eps: expected a finite number >= 0, got -1.0": {"eps": -1.0},
    "eps: expected a finite number >= 0, got nan": {"eps": float("nan")},
    "eps: expected a finite number >= 0, got 'silu'": {"eps": "silu"},
    "eps: expected a finite number >= 0, got inf": {"eps": float("inf")},
    "eps: expected a finite number >= 0, got True": {"eps": True},
    "eps: expected a finite number >= 0, got None": {"eps": None},
    "activation: expected one of ['silu', 'sigmoid'], got None": {"activation": None},
    "gate: requires grad, but rms_norm_gated has no backward": {"gate": X.clone().requires_grad_()},
}


@pytest.mark.parametrize("message", NORM_MISTAKES)
def test_a_mistake_in_the_norm_is_named(message):
    given = {"x": X, "weight": BIAS, "gate": X} | NORM_MISTAKES[message]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        rms_norm_gated(**given)


# Dispatch


def test_who_runs_a_call():
    assert [row[:2] for row in headstart.explain("causal_conv1d", X, WEIGHT)] == [
        ("torch", True),
        ("triton", False),
        ("reference", True),
    ]
    there = X.to("meta")
    assert [row[:2] for row in headstart.explain("causal_conv1d", there, WEIGHT.to("meta"))] == [
        ("triton", True),
        ("torch", True),
        ("reference", True),
    ]
    wide = X.double()
    assert [row[:2] for row in headstart.explain("rms_norm_gated", wide, BIAS, wide)] == [
        ("torch", False),
        ("triton", False),
        ("reference", True),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "channels"), [(0, 5), (1, 5), (7, 3000), (900, 700)])
def test_the_scratch_is_the_stated_one(tokens, channels, dtype):
    x, weight, bias = draw(tokens, channels, dtype=dtype)
    workspace = default_workspace(x.device)
    for name, arguments in {
        "causal_conv1d": (x, weight),
        "rms_norm_gated": (x, bias, x),
    }.items():
        workspace.release()
        getattr(headstart, name)(*arguments)
        assert headstart.workspace_bytes(name, *arguments) == workspace.bytes
        on_meta = [tensor.to("meta") for tensor in arguments]
        assert headstart.workspace_bytes(name, *on_meta, implementation="torch") == workspace.bytes
    workspace.release()
