"""Spans of several sequences, and segments of one: the same rule, however it is cut.

The small sizes of these tests are below what is cut by itself, so what decides is lowered.
"""

import pytest
import torch
from tests.ops.gated_delta_rule.inputs import draw

SPANS = [None, 200_000, 130_000]


@pytest.fixture(autouse=True)
def kernels(implementation, monkeypatch):
    """The scratch module of the kernels, with little of everything."""
    if implementation not in ("triton", "hopper"):
        pytest.skip("only kernels run in spans of tiles")
    from headstart.ops.gated_delta_rule.passes import scratch

    for name, value in (("SEGMENTED", 2), ("SEGMENT", 1), ("LEAST", 2)):
        monkeypatch.setattr(scratch, name, value)
    return scratch


def inputs(lengths):
    """Tokens of sequences and their states, where the tests run."""
    given = draw(sum(lengths), seed=len(lengths), dtype=torch.float16)
    states = torch.randn(len(lengths), *(given.sizes[name] for name in ("HV", "K", "V")))
    return given, states


@pytest.mark.parametrize("scratch_bytes", SPANS)
@pytest.mark.parametrize("lengths", [[70, 130], [200, 130, 0, 64, 10]], ids=str)
def test_sequences_that_advance_together_give_the_bits_of_one_alone(
    rule, kernels, monkeypatch, lengths, scratch_bytes
):
    given, states = inputs(lengths)
    if scratch_bytes:
        scale = (states.shape[-1] // 16) ** 2
        monkeypatch.setattr(kernels, "SCRATCH", scratch_bytes * scale)
    kept = {"return_state": True, "reproducible": True}
    together = rule(*given, schedule=lengths, state=states, **kept)
    at = 0
    for n, length in enumerate(lengths):
        part = given[at : at + length]
        alone = rule(*part, schedule=[length], state=states[n : n + 1], **kept)
        assert torch.equal(together.o[at : at + length], alone.o)
        assert torch.equal(together.state[n], alone.state[0])
        at += length


@pytest.mark.parametrize("scratch_bytes", SPANS[:2])
@pytest.mark.parametrize("processors", [8, 12])
def test_segments_end_where_the_sequence_does(
    rule, kernels, monkeypatch, processors, scratch_bytes
):
    given, states = inputs([64 * 6 + 5])
    given = given.but(g=given.g * 0.01)  # where a segment begins is seen far behind it
    programs = 2 * -(-states.shape[-1] // 64)
    whole = rule(*given, state=states, return_state=True, reproducible=True)
    monkeypatch.setattr(kernels, "processors", lambda device: processors * programs // 2)
    if scratch_bytes:
        monkeypatch.setattr(kernels, "SCRATCH", scratch_bytes * (states.shape[-1] // 16) ** 2)
    cut = rule(*given, state=states, return_state=True)
    assert not torch.equal(cut.o, whole.o)  # it was cut
    for found, expected in ((cut.o, whole.o), (cut.state, whole.state)):
        error = (found - expected).float().norm() / expected.float().norm()
        assert error < 1e-3


def test_reproducible_calls_are_never_cut(rule, kernels, monkeypatch):
    given, states = inputs([64 * 6 + 5])
    before = rule(*given, state=states, reproducible=True)
    monkeypatch.setattr(kernels, "processors", lambda device: 64)
    assert torch.equal(rule(*given, state=states, reproducible=True).o, before.o)
