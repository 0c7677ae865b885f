"""A clock whose truth is known: does an interval hold what it promises?

It has what real ones have: two performance states that last for tens of launches, a slow drift,
scatter of a launch, rare launches that take much longer, and a first place in a round that costs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headstart.evidence.paired import corrected_interval, orders, percentile_interval
from headstart.evidence.runs import Record

SCATTER = 0.012
SLOW_STATE = 1.08
SWITCH = 1 / 60
DRIFT = 0.0005
SPIKES = (0.02, 0.3)
FIRST_PLACE = 0.004
COVERED, FOUND = (0.92, 0.98), 0.95
"""What is asked of a 95 % interval: how often it holds the truth, and finds what is planted."""


class SimulatedClock:
    """Times of launches in milliseconds, from a seed.

    >>> SimulatedClock(1).launch(1.0, 0) == SimulatedClock(1).launch(1.0, 0)
    True
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.slow = bool(self.random.random() < 0.5)
        self.level = 0.25

    def launch(self, factor: float, place: int) -> float:
        """Time of one launch of an arm that truly takes `factor`, at a place of its round."""
        if self.random.random() < SWITCH:
            self.slow = not self.slow
        self.level *= float(np.exp(DRIFT * self.random.standard_normal()))
        time = self.level * factor * float(np.exp(SCATTER * self.random.standard_normal()))
        time *= SLOW_STATE if self.slow else 1.0
        time *= 1 + (FIRST_PLACE if place == 0 else 0.0)
        if self.random.random() < SPIKES[0]:
            time *= 1 + float(self.random.exponential(SPIKES[1]))
        return time


class Promise(Record):
    """What intervals of many experiments kept.

    interval: "percentile" or "corrected". planted: what the second arm truly takes more.
    coverage: share of intervals of an arm against itself that hold 1.
    found: share of experiments in which the planted difference was decided, the right way.
    width: mean width of the intervals of an arm against itself.
    """

    interval: str
    experiments: int
    rounds: int
    planted: float
    coverage: float
    found: float
    width: float

    @property
    def kept(self) -> bool:
        """Whether coverage lies within 92 to 98 % and the planted difference is found in 95 %."""
        return COVERED[0] <= self.coverage <= COVERED[1] and self.found >= FOUND

    @property
    def verdict(self) -> str:
        """Both figures beside what is asked of them."""
        low, high = COVERED
        return (
            f"{self.interval} holds 1 in {self.coverage:.1%} of {self.experiments} experiments, "
            f"expected {low:.0%} to {high:.0%}; {self.planted:.1%} found in {self.found:.1%}, "
            f"expected {FOUND:.0%}"
        )


INTERVALS: dict[str, Callable[[np.ndarray], tuple[float, float]]] = {
    "percentile": percentile_interval,
    "corrected": corrected_interval,
}


def simulate(*, experiments: int = 400, rounds: int = 60, planted: float = 0.03) -> list[Promise]:
    """Run an arm, the same arm again and one `planted` slower through seeded experiments."""
    covered = dict.fromkeys(INTERVALS, 0)
    found = dict.fromkeys(INTERVALS, 0)
    width = dict.fromkeys(INTERVALS, 0.0)
    factors = (1.0, 1.0, 1.0 + planted)
    for seed in range(experiments):
        clock = SimulatedClock(seed)
        times = np.empty((rounds, len(factors)))
        for index, order in enumerate(orders(len(factors), rounds)):
            for place, arm in enumerate(order):
                times[index, arm] = clock.launch(factors[arm], place)
        for name, interval in INTERVALS.items():
            low, high = interval(times[:, 1] / times[:, 0])
            covered[name] += low <= 1 <= high
            width[name] += high - low
            found[name] += interval(times[:, 2] / times[:, 0])[0] > 1
    return [
        Promise(
            interval=name,
            experiments=experiments,
            rounds=rounds,
            planted=planted,
            coverage=covered[name] / experiments,
            found=found[name] / experiments,
            width=width[name] / experiments,
        )
        for name in INTERVALS
    ]
