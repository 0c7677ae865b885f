"""Transcripts of an engine against a float64 replay; the driver is that of `headstart verify`."""

import pytest

import headstart
from headstart.evidence.verify.transcript import FORMS, live


@pytest.fixture
def convolve(implementation):
    if not hasattr(headstart, "causal_conv1d"):
        pytest.skip("no convolution yet")

    def run(*args, **kwargs):
        return headstart.causal_conv1d(*args, implementation=implementation, **kwargs)

    return run


SEEDS = {"torch": 5, "reference": 1}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", range(4))
def test_transcripts_of_the_rule_alone(rule, implementation, form, part):
    for seed in range(SEEDS[implementation]):
        live(rule, None, form, seed=1000 * part + seed, turns=25)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", range(8))
def test_transcripts_with_the_convolution_in_the_same_cache(
    rule, convolve, implementation, form, part
):
    for seed in range(SEEDS[implementation]):
        live(rule, convolve, form, seed=1000 * part + seed + 500, turns=25)


def test_the_driver_reaches_every_kind_of_event():
    """A transcript test that never restores or rolls back proves nothing."""
    seen = {"restored": 0, "drafts": 0, "dropped": 0, "snapshots": 0, "long": 0, "reused": 0}
    dirty = set()

    def watch(*args, schedule, state, snapshots, **kwargs):
        seen["drafts"] += sum(schedule.drafts)
        seen["snapshots"] += schedule.M
        seen["long"] += sum(length > 64 for length in schedule.lengths)
        for slot, start in zip(state.slots, schedule.starts, strict=True):
            seen["reused"] += start == 0 and slot in dirty
            dirty.add(slot)
            if slot >= 0 and start > 0:
                end = int(state.cache.tensors["end"][slot, 0])
                held = int(state.cache.tensors["position"][slot, 0])
                seen["dropped"] += start < end
                seen["restored"] += start == end == held
        return headstart.gated_delta_rule(
            *args, schedule=schedule, state=state, snapshots=snapshots, **kwargs
        )

    for seed in range(5):
        live(watch, None, "float32", seed=seed, turns=40)
    assert all(count >= 5 for count in seen.values()), seen
