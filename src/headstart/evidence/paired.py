"""How much faster one arm is than another, from launches that alternate.

Round i launches every arm once, in an order of `orders`. The ratio of two arms is the median over
rounds of time / time of the same round, so what drifts slower than a round (clocks, heat,
neighbours) cancels, and what follows from an arm's place in the order, or from the arm before it,
is spread over all.

The interval is a percentile bootstrap over rounds. A bias-corrected one needs the jackknife of the
median, which takes two or three values only; `headstart bench simulate` shows both against a
clock whose truth is known, and the percentile form keeps its coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from headstart.evidence.runs import Record

LEVEL = 0.95
RESAMPLES = 2000
SEED = 20_260_000


class Ratio(Record):
    """Time of an arm over the time of another: below 1 the arm is faster.

    ratio: median over the rounds. low, high: its 95 % interval.
    wins: rounds in which the arm was faster, out of `rounds`.
    """

    ratio: float
    low: float
    high: float
    wins: int
    rounds: int

    @property
    def decided(self) -> str:
        """ "faster", "slower" or "level", as the interval says."""
        return "faster" if self.high < 1 else "slower" if self.low > 1 else "level"

    def words(self, digits: int = 3) -> str:
        """The ratio with its interval.

        >>> Ratio(ratio=0.9, low=0.85, high=0.95, wins=9, rounds=9).words()
        '0.900 [0.850, 0.950]'
        """
        return f"{self.ratio:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def orders(count: int, rounds: int) -> list[tuple[int, ...]]:
    """In which order each round launches its arms.

    Over `count` rounds, twice as many where that is odd, every arm stands at every place equally
    often, and equally often right behind each other one: the clock that a hot kernel leaves behind
    slows nobody more than others. These are Williams' designs (E. J. Williams, Experimental designs
    balanced for the estimation of residual effects of treatments, 1949).

    Without arms there are no rounds.

    >>> orders(4, 4)
    [(0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1)]
    >>> orders(3, 4)
    [(0, 1, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    """
    first = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    found = []
    for index in range(rounds if count else 0):
        turn, shift = divmod(index, count)
        order = [(arm + shift) % count for arm in first]
        found.append(tuple(order[::-1] if turn % 2 else order))
    return found


def compare(times: Sequence[float], base: Sequence[float]) -> Ratio:
    """The ratio of two arms' times, round by round.

    >>> compare([2.0, 4.2, 2.1], [1.0, 2.0, 1.0]).ratio
    2.1
    """
    if len(times) != len(base) or not len(times):
        raise ValueError(
            f"times: expected as many rounds as base and at least one, got {len(times)} "
            f"and {len(base)}"
        )
    ratios = np.asarray(times, dtype=np.float64) / np.asarray(base, dtype=np.float64)
    low, high = percentile_interval(ratios)
    return Ratio(
        ratio=float(np.median(ratios)),
        low=low,
        high=high,
        wins=int((ratios < 1).sum()),
        rounds=len(ratios),
    )


def percentile_interval(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Interval of the median: quantiles of the medians of resampled rounds; seeded."""
    medians = _resampled_medians(values)
    tail = (1 - level) / 2
    low, high = np.quantile(medians, (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)


def corrected_interval(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """The bias-corrected and accelerated interval (Efron 1987), for comparison only."""
    medians, normal = _resampled_medians(values), NormalDist()
    middle = float(np.median(values))
    below = (medians < middle).mean() + (medians == middle).mean() / 2
    bias = normal.inv_cdf(min(max(below, 1e-6), 1 - 1e-6))
    left_out = np.array([np.median(np.delete(values, i)) for i in range(len(values))])
    away = left_out.mean() - left_out
    spread = float((away**2).sum())
    acceleration = float((away**3).sum()) / (6 * spread**1.5) if spread else 0.0

    def moved(probability: float) -> float:
        z = bias + normal.inv_cdf(probability)
        return normal.cdf(bias + z / (1 - acceleration * z))

    tail = (1 - level) / 2
    wanted = (moved(tail), moved(1 - tail))
    low, high = np.quantile(medians, wanted, method="inverted_cdf")
    return float(low), float(high)


def _resampled_medians(values: np.ndarray) -> np.ndarray:
    return np.median(values[_resampled(len(values))], axis=1)


@lru_cache(maxsize=8)
def _resampled(count: int) -> np.ndarray:
    """Rounds [RESAMPLES, count] drawn with replacement."""
    return np.random.default_rng(SEED).integers(0, count, (RESAMPLES, count))
