"""Devices that no target stands for: configured as their family, or declined with a sentence."""

import pytest
import torch

pytest.importorskip("triton")

import headstart
from headstart import ExtendPlan, Schedule
from headstart.runtime.declined import Declined
from headstart.runtime.rehearsal import rehearsing
from headstart.runtime.static import TARGETS, Target


def rule(**how):
    q = torch.zeros(70, 2, 128, dtype=torch.bfloat16, device="meta")
    v, g = q.new_zeros(70, 4, 128), torch.zeros(70, 4, device="meta")
    schedule = Schedule([70], device="meta")
    headstart.gated_delta_rule(q, q, v, g, g, schedule=schedule, **how)


def attention(**how):
    q = torch.zeros(70, 8, 128, dtype=torch.bfloat16, device="meta")
    k = q.new_zeros(70, 2, 128)
    plan = ExtendPlan.from_lengths([70], device="meta")
    headstart.extend_attention(q, k, k, plan=plan, **how)


def convolution(**how):
    x = torch.zeros(70, 64, dtype=torch.bfloat16, device="meta")
    headstart.causal_conv1d(x, x.new_zeros(64, 4), schedule=Schedule([70], device="meta"), **how)


def norm(**how):
    x = torch.zeros(70, 64, dtype=torch.bfloat16, device="meta")
    headstart.rms_norm_gated(x, x.new_zeros(64), x, **how)


CALLS = pytest.mark.parametrize("call", [rule, attention, convolution, norm])


def launches(target: Target, call) -> list[tuple]:
    with rehearsing(target, 40) as rehearsal:
        call(implementation="triton")
    return [(launch.kernel, sorted(launch.options.items())) for launch in rehearsal.launches]


@CALLS
@pytest.mark.parametrize(
    ("arch", "family"),
    [(86, "cuda:89"), (103, "cuda:100"), (121, "cuda:120"), ("gfx90a", "hip:gfx942"),
     ("gfx1100", "hip:gfx1151")],
)  # fmt: skip
def test_a_device_of_a_known_family_is_configured_as_that(call, arch, family):
    like = TARGETS[family]
    target = Target(f"{like.backend}:{arch}", like.backend, arch, like.warp_size)
    assert launches(target, call) == launches(like, call)


@CALLS
@pytest.mark.parametrize(
    "target",
    [Target("cuda:75", "cuda", 75, 32), Target("cuda:150", "cuda", 150, 32),
     Target("hip:gfx906", "hip", "gfx906", 64), Target("hip:gfx1201", "hip", "gfx1201", 32)],
    ids=lambda target: target.name,
)  # fmt: skip
def test_kernels_decline_a_device_of_an_unknown_one(call, target):
    with pytest.raises(Declined, match=f"know the families .* of .*, not that of {target.name}"):
        launches(target, call)
    with rehearsing(target, 40), pytest.raises(Declined, match="implementation torch"):
        call()  # what would serve it there
