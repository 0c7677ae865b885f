"""Kernels may take another form where a batch fills a device: every sequence keeps its bits."""

import torch
from tests.ops.gated_delta_rule.inputs import draw, packed

from headstart import DeltaCache, Schedule

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
