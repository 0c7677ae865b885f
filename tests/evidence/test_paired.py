"""The statistics of paired launches, against numbers and a clock whose truth is known."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from headstart.evidence.paired import compare, corrected_interval, orders, percentile_interval
from headstart.evidence.simulated_clock import SimulatedClock, simulate


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_arm_stands_at_every_place_equally_often(count):
    found = orders(count, 2 * count)
    for place in range(count):
        assert Counter(order[place] for order in found) == dict.fromkeys(range(count), 2)
    assert all(sorted(order) == list(range(count)) for order in found)


def test_without_arms_there_are_no_rounds():
    assert orders(0, 5) == []


def test_orders_change_who_goes_before():
    pairs = {pair for order in orders(3, 6) for pair in pairwise(order)}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}


def test_drift_common_to_a_round_cancels():
    drift = np.exp(np.linspace(0, 3, 41))
    found = compare(1.25 * drift, drift)
    assert found.ratio == pytest.approx(1.25)
    assert found.low == pytest.approx(1.25)
    assert found.high == pytest.approx(1.25)
    assert (found.wins, found.rounds, found.decided) == (0, 41, "slower")


def test_one_wild_round_moves_nothing():
    base = np.ones(31)
    times = np.full(31, 0.9)
    times[7] = 1e6
    found = compare(times, base)
    assert found.ratio == pytest.approx(0.9)
    assert (found.wins, found.decided) == (30, "faster")


def test_intervals_narrow_with_the_root_of_the_rounds():
    random = np.random.default_rng(5)
    widths = []
    for count in (40, 160, 640):
        low, high = percentile_interval(np.exp(0.02 * random.standard_normal(count)))
        widths.append(high - low)
    assert 1.3 < widths[0] / widths[1] < 3.2
    assert 1.3 < widths[1] / widths[2] < 3.2


def test_intervals_are_the_same_every_time():
    values = np.random.default_rng(1).random(33)
    assert percentile_interval(values) == percentile_interval(values.copy())
    assert corrected_interval(values) == corrected_interval(values.copy())


@pytest.mark.parametrize("times", [[], [1.0, 2.0]])
def test_rounds_must_match(times):
    with pytest.raises(ValueError, match="times: expected as many rounds as base"):
        compare(times, [1.0])


def test_the_simulated_clock_has_two_states_and_repeats():
    clock, again = SimulatedClock(3), SimulatedClock(3)
    times = [clock.launch(1.0, 1) for _ in range(2000)]
    assert times == [again.launch(1.0, 1) for _ in range(2000)]
    assert np.quantile(times, 0.9) / np.quantile(times, 0.1) > 1.06


@pytest.mark.slow
def test_the_interval_keeps_its_promise_over_400_experiments():
    found = {one.interval: one for one in simulate(experiments=400, rounds=60)}["percentile"]
    assert 0.92 <= found.coverage <= 0.98
    assert found.found >= 0.95
    assert 0 < found.width < 0.03


def test_an_interval_that_is_too_narrow_would_be_noticed(monkeypatch):
    from headstart.evidence import simulated_clock

    def half(values):
        low, high = percentile_interval(values)
        middle = float(np.median(values))
        return middle + (low - middle) / 2, middle + (high - middle) / 2

    monkeypatch.setattr(simulated_clock, "INTERVALS", {"percentile": half})
    (found,) = simulate(experiments=100, rounds=30)
    assert found.coverage < 0.85
