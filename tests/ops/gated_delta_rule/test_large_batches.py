"""Kernels may take another form where a batch fills a device: every sequence keeps its bits."""

import functools

import pytest
import torch
from tests.implementations import DEVICE
from tests.ops.gated_delta_rule.inputs import draw, packed

import headstart
from headstart import DeltaCache, Schedule
from headstart.evidence.verify.figures import Meter
from headstart.evidence.verify.tolerances import tolerance
from headstart.runtime.checks import dtype_name

MORE = 70
"""Tokens of the second step: more than a chunk, behind a state and a tail of any length."""


def stepped(rule, sequences, starts):
    """Outputs of the second step of sequences on a cache, and the states that it leaves."""
    sizes = sequences[0].sizes
    cache = DeltaCache(len(starts), **sizes, dtype=torch.float16, draft_tokens=0, device="cpu")
    slots = cache.at(list(range(len(starts))))
    first = packed(*(x[:start] for x, start in zip(sequences, starts, strict=True)))
    rule(*first, schedule=Schedule(starts, device="cpu"), state=slots)
    second = packed(*(x[start:] for x, start in zip(sequences, starts, strict=True)))
    schedule = Schedule([MORE] * len(starts), start_positions=starts, device="cpu")
    return rule(*second, schedule=schedule, state=slots).o, cache.tensors["state"]


def test_a_sequence_of_a_large_batch_has_the_bits_of_one_alone(rule, implementation):
    # Two heads in two blocks of columns: 560 programs, four for each processor of a large GPU.
    count = 140 if implementation == "hopper" else 3
    starts = [65 + 37 * n % 63 for n in range(count)]
    sequences = [draw(start + MORE, dtype=torch.float16, seed=n) for n, start in enumerate(starts)]
    o, states = stepped(rule, sequences, starts)
    for n in (0, count // 2, count - 1):
        alone, state = stepped(rule, sequences[n : n + 1], starts[n : n + 1])
        assert torch.equal(o[n * MORE : (n + 1) * MORE], alone)
        assert torch.equal(states[n], state[0])


LENGTHS = [(64, 1, 70, 5, 130)[n % 5] for n in range(260)]


@functools.cache
def drawn(size, dtype, per_channel):
    """A batch of so many sequences, and its outputs in float32."""
    x = draw(sum(LENGTHS), 2, 4, size, size, dtype=dtype, seed=3, per_channel=per_channel)
    wide = [tensor.float() for tensor in x]
    schedule = Schedule(LENGTHS, device="cpu")
    return x, headstart.gated_delta_rule(*wide, schedule=schedule, implementation="torch").o


@pytest.mark.skipif(DEVICE == "cpu", reason="as many programs take minutes in the interpreter")
@pytest.mark.parametrize("form", ["plain", "cache"])
@pytest.mark.parametrize(
    ("size", "dtype", "per_channel"),
    [
        (64, torch.bfloat16, False),
        (128, torch.bfloat16, False),
        (128, torch.float16, False),
        (256, torch.bfloat16, False),
        (128, torch.float32, False),
        (128, torch.bfloat16, True),
        (128, torch.float32, True),
    ],
    ids=str,
)
def test_every_configuration_over_a_thousand_blocks(
    rule, implementation, size, dtype, per_channel, form
):
    """Each pass has a program for each sequence (or chunk) and value head at least."""
    x, truth = drawn(size, dtype, per_channel)
    state = {}
    if form == "cache":
        cache = DeltaCache(len(LENGTHS), **x.sizes, dtype=dtype, device="cpu",
                           per_channel=per_channel)  # fmt: skip
        state = {"state": cache.at(list(range(len(LENGTHS))))}
    meter = Meter("o", rule(*x, schedule=Schedule(LENGTHS, device="cpu"), **state).o)
    meter.add(slice(0, 4), truth)
    kind = dtype_name(dtype)
    asked = tolerance("gated_delta_rule", "o", kind, kind, implementation)
    assert meter.measured(asked).failures == []
