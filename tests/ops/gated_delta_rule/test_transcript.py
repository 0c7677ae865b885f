"""Transcripts of an engine against a float64 replay; the driver is that of `headstart verify`."""

import pytest
from tests.implementations import DEVICE

import headstart
from headstart.evidence.verify.transcript import FORMS, live, verify_transcript

SEEDS = {"torch": 5, "reference": 1, "triton": 2, "hopper": 5}


def expect_no_failure(implementation, form, first, convolution):
    for seed in range(first, first + SEEDS[implementation]):
        try:
            found = verify_transcript(
                implementation, form, seed, convolution=convolution, turns=25, device=DEVICE
            )
        except headstart.Declined as reason:
            pytest.skip(str(reason))
        assert found.failure is None, f"seed {seed}: {found.failure}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", range(4))
def test_transcripts_of_the_rule_alone(implementation, form, part):
    expect_no_failure(implementation, form, 1000 * part, convolution=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", range(8))
def test_transcripts_with_the_convolution_in_the_same_cache(implementation, form, part):
    expect_no_failure(implementation, form, 1000 * part + 500, convolution=True)


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
