"""What a sweep found of a key: its ranking, the rule's regret, and whether lengths change it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from headstart.evidence.paired import Ratio
from headstart.evidence.runs import Record
from headstart.runtime.table_files import Key, Row, RunnerUp


class Measured(Record):
    """A configuration on one point: its time over the rule's, and its median in milliseconds."""

    point: str
    ratio: Ratio
    milliseconds: float


@dataclass
class Trial:
    """A configuration that was tried; refused: the sentence why it is out, or ""."""

    configuration: Any
    measured: dict[str, Measured] = field(default_factory=dict)
    refused: str = ""

    @property
    def mean(self) -> float:
        """Geometric mean of its ratios to the rule; infinite where it is out."""
        return self._mean("ratio")

    @property
    def most(self) -> float:
        """The same of the upper ends of their intervals."""
        return self._mean("high")

    def _mean(self, end: str) -> float:
        if self.refused or not self.measured:
            return math.inf
        logs = [math.log(getattr(one.ratio, end)) for one in self.measured.values()]
        return math.exp(sum(logs) / len(logs))


class TrialResult(Record):
    """A trial as a record holds it; mean: geometric mean of its ratios, None where it is out."""

    configuration: dict[str, int]
    mean: float | None
    refused: str
    measured: tuple[Measured, ...]


class PointResult(Record):
    """One point of a key.

    rule_regret, chosen_regret: how much longer the rule's and the chosen configuration take there
    than the fastest one there does: 0.02 is 2 %. decided, moved: whether that one is faster than
    the rule's, than the chosen, beyond doubt. Where it moved, the ranking depends on lengths (or
    on the batch).
    """

    point: str
    rule_regret: float
    chosen_regret: float
    fastest: dict[str, int]
    decided: bool
    moved: bool


class KeyResult(Record):
    """A key: regret of the rule over its points, what goes into a table, and every trial.

    decided: whether the fastest is faster than the rule's beyond doubt; else the rule's is chosen.
    """

    operation: str
    kernel: str
    key: str
    rule: dict[str, int]
    chosen: dict[str, int]
    decided: bool
    regret: float
    points: tuple[PointResult, ...]
    trials: tuple[TrialResult, ...]


@dataclass(frozen=True)
class Found:
    """A key, the rule's configuration, and the trials, the rule's own first."""

    key: Key
    rule: Any
    trials: tuple[Trial, ...]

    @property
    def ranked(self) -> list[Trial]:
        """Those that are not out, the fastest first."""
        return sorted((x for x in self.trials if x.mean < math.inf), key=lambda x: x.mean)

    @property
    def decided(self) -> bool:
        """Whether the fastest is faster than the rule's beyond doubt."""
        return bool(self.ranked) and self.ranked[0].most < 1

    @property
    def chosen(self) -> Trial:
        """What goes into a table: the fastest, where that is decided."""
        return self.ranked[0] if self.decided else self.trials[0]

    @property
    def regret(self) -> float:
        """How much longer the rule's takes than the fastest: 0.02 is 2 %."""
        return 1 / self.ranked[0].mean - 1 if self.ranked else 0.0

    def points(self) -> list[PointResult]:
        """Point by point, whether another configuration is the fastest there."""
        names = list(self.chosen.measured)
        found = []
        for name in names:
            there = [x for x in self.ranked if name in x.measured]
            fastest = min(there, key=lambda x: x.measured[name].ratio.ratio)
            at, mine = fastest.measured[name].ratio, self.chosen.measured[name].ratio
            found.append(
                PointResult(
                    point=name,
                    rule_regret=1 / at.ratio - 1,
                    chosen_regret=mine.ratio / at.ratio - 1,
                    fastest=asdict(fastest.configuration),
                    decided=at.high < 1,
                    moved=at.high < mine.low,
                )
            )
        return found

    def result(self) -> KeyResult:
        """As a record holds it."""
        return KeyResult(
            operation=self.key.operation,
            kernel=self.key.kernel,
            key=str(self.key),
            rule=asdict(self.rule),
            chosen=asdict(self.chosen.configuration),
            decided=self.decided,
            regret=self.regret,
            points=tuple(self.points()),
            trials=tuple(
                TrialResult(
                    configuration=asdict(trial.configuration),
                    mean=trial.mean if trial.mean < math.inf else None,
                    refused=trial.refused,
                    measured=tuple(trial.measured.values()),
                )
                for trial in self.trials
            ),
        )

    def row(self, triton: str, date: str) -> Row:
        """As a table holds it."""
        chosen = self.chosen
        others = [trial for trial in self.ranked if trial is not chosen]
        second = None
        if others:
            second = RunnerUp(others[0].configuration, others[0].mean / chosen.mean)
        times = {name: one.milliseconds for name, one in chosen.measured.items()}
        return Row(self.key, chosen.configuration, times, second, triton, date)


def changes(rule: Any, other: Any) -> str:
    """What a configuration changes, in words: "BN 32 -> 64", or "the rule's".

    >>> from headstart.ops.gated_delta_rule.passes.config import PrepareConfig
    >>> changes(PrepareConfig(64, 8), PrepareConfig(64, 4))
    'warps 8 -> 4'
    """
    before, after = asdict(rule), asdict(other)
    words = [f"{x} {before[x]} -> {after[x]}" for x in before if before[x] != after[x]]
    return ", ".join(words) or "the rule's"


def worst(found: Iterable[Found]) -> float:
    """The largest regret of the rule on any point of any key that is beyond doubt; else 0."""
    regrets = (p.rule_regret for one in found for p in one.points() if p.decided)
    return max(regrets, default=0.0)
