"""A part of a device, or another with fewer processors, gives the promised bits all the same."""

import importlib

import pytest
import torch
from tests.implementations import INTERPRETED
from tests.ops.gated_delta_rule.inputs import draw

from headstart import DeltaCache, Schedule
from headstart.runtime.dispatch import operations

OPERATION = "headstart.ops.gated_delta_rule"
ASKING = ("passes.launch", "passes.scratch", "hopper.call", "hopper.short_call")
"""Modules that ask how many processors there are."""


@pytest.fixture(params=[1] if INTERPRETED else [1, 8, 40])
def smaller(implementation, monkeypatch, request):
    """Makes the device one of so many processors."""
    if implementation not in ("triton", "hopper"):
        pytest.skip("only kernels ask for processors")

    def become():
        for name in ASKING:
            module = importlib.import_module(f"{OPERATION}.{name}")
            monkeypatch.setattr(module, "processors", lambda device: request.param)
        # Launches that are repeated would be those of the whole device.
        operations()["gated_delta_rule"].prepared.clear()

    yield become
    operations()["gated_delta_rule"].prepared.clear()


def lived(rule):
    """Outputs of a whole prefill on plain states, and of steps, decodes and drafts on a cache."""
    lengths = [130, 70, 1]
    x = draw(sum(lengths), 2, 4, dtype=torch.float16, seed=1)
    schedule = Schedule(lengths, device="cpu")
    plain = rule(*x, schedule=schedule, reproducible=True, return_state=True)
    found = [plain.o, plain.state]
    cache = DeltaCache(3, **x.sizes, dtype=torch.float16, draft_tokens=4, device="cpu")
    slots, starts = cache.at([2, 0, 1]), [0, 0, 0]
    for step, drafts in (
        (lengths, False),
        ([1, 1, 1], False),
        ([4, 3, 1], True),
        ([70, 2, 64], False),
    ):
        given = x[: sum(step)]
        schedule = Schedule(step, start_positions=starts, drafts=drafts, device="cpu")
        found.append(rule(*given, schedule=schedule, state=slots).o)
        if not drafts:
            starts = [a + b for a, b in zip(starts, step, strict=True)]
    return [*found, cache.export([0, 1, 2])[1]]


def test_fewer_processors_give_the_same_bits(rule, smaller):
    whole = lived(rule)
    smaller()
    for one, other in zip(whole, lived(rule), strict=True):
        assert torch.equal(one, other)
