"""Lengths, starts and slots compile nothing new: a rehearsal tells what would be compiled."""

import random

import pytest
import torch
from tests.implementations import INTERPRETED

import headstart
from headstart import DeltaCache, Schedule
from headstart.runtime.rehearsal import rehearsing
from headstart.runtime.static import TARGETS

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")

H, HV, K, V = 16, 32, 128, 128
SLOTS = 40
META = torch.device("meta")


def batches(seed):
    """(lengths, starts) of fifty steps of all sizes, decodes among them."""
    dice = random.Random(seed)
    sizes = [0, 1, 2, 3, 16, 17, 63, 64, 65, 128]
    for _ in range(50):
        N = dice.randint(1, 9)
        lengths = [dice.choice([*sizes, dice.randint(0, 6000)]) for _ in range(N)]
        lengths[-1] = max(lengths[-1], 1)
        yield lengths, [dice.choice([*sizes, dice.randint(0, 5000)]) for _ in range(N)]


def rows(T, per_channel):
    shape = (T, HV, K) if per_channel else (T, HV)
    made = [torch.empty(T, heads, K, dtype=torch.bfloat16, device=META) for heads in (H, H, HV)]
    return *made, torch.empty(shape, device=META), torch.empty(T, HV, device=META)


def step(lengths, starts, form):
    """The state and the schedule of a step in one form."""
    if form == "plain states":
        state = torch.empty(len(lengths), HV, K, V, device=META)
        return {"state": state, "return_state": True, "schedule": Schedule(lengths, device=META)}
    cache = DeltaCache(SLOTS, H=H, HV=HV, K=K, V=V, dtype=torch.bfloat16, device=META,
                       per_channel=form == "per channel")  # fmt: skip
    slots = cache.at(random.Random(sum(lengths)).sample(range(SLOTS), len(lengths)))
    every = 64 if form == "snapshots" else 0
    schedule = Schedule(lengths, start_positions=starts, snapshot_every=every, device=META)
    snapshots = {"snapshots": torch.float32} if every else {}
    return {"state": slots, "schedule": schedule, **snapshots}


def compiled_for(seed, form, implementation):
    """(kernel, its constants) -> programs, over fifty batches."""
    from headstart.runtime.bundle_programs import programs_of

    with rehearsing(TARGETS["cuda:90"], 132) as rehearsal, torch.inference_mode():
        for lengths, starts in batches(seed):
            headstart.gated_delta_rule(
                *rows(sum(lengths), form == "per channel"), **step(lengths, starts, form),
                qk_l2norm=True, implementation=implementation,
            )  # fmt: skip
    found = {}
    for key, program in programs_of(rehearsal).items():
        names = program.kernel.arg_names
        chosen = {p.name for p in program.kernel.params if p.is_constexpr}
        constants = {names[path[0]]: value for path, value in program.source.constants.items()}
        mine = sorted((name, str(constants[name])) for name in chosen & set(constants))
        found.setdefault((program.name, str(mine)), set()).add(key)
    return found


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize("form", ["cache", "snapshots", "per channel", "plain states"])
def test_fifty_batches_compile_what_fifty_others_do(form, implementation):
    """One program for what a kernel is told at compile time, and no length is told then."""
    found = compiled_for(0, form, implementation)
    assert found
    assert {kernel: len(keys) for kernel, keys in found.items() if len(keys) > 1} == {}
    assert set(found) == set(compiled_for(1, form, implementation))
