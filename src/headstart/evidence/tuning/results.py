"""What a sweep found of a key: its ranking, the rule's regret, and whether lengths change it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Self

from pydantic import StringConstraints, model_validator

from headstart.evidence.paired import Ratio
from headstart.evidence.runs import Record
from headstart.runtime.table_files import Key, Row, RunnerUp

WITHIN = 0.05
"""Regret up to which the rule is as good as a table."""


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

    point: Annotated[str, StringConstraints(pattern=r"\S")]
    rule_regret: float
    chosen_regret: float
    fastest: dict[str, int]
    decided: bool
    moved: bool

    @property
    def case(self) -> str:
        """The case of the catalogue that it is, or is a share of.

        >>> PointResult.model_construct(point="oss-16k-win@0.25 reproducible").case
        'oss-16k-win'
        """
        return self.point.split()[0].partition("@")[0]


class KeyResult(Record):
    """A key: regret of the rule over its points, what goes into a table, and every trial.

    decided: whether the fastest is faster than the rule's beyond doubt; else the rule's is chosen.
    trials: the rule's first.
    """

    device: str
    operation: str
    kernel: str
    key: str
    rule: dict[str, int]
    chosen: dict[str, int]
    decided: bool
    regret: float
    points: tuple[PointResult, ...]
    trials: tuple[TrialResult, ...]

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        others = [self.chosen, *(point.fastest for point in self.points)]
        others += [trial.configuration for trial in self.trials]
        if any(other.keys() != self.rule.keys() for other in others):
            raise ValueError(f"expected configurations of {list(self.rule)}, as the rule's")
        return self

    COLUMNS: ClassVar = (
        "key", "chosen", "ratio", "second", "rule's regret", "points", "tried", "out"
    )  # fmt: skip
    """Of a table of keys."""

    @property
    def cells(self) -> tuple[object, ...]:
        """What stands in them; second: how much longer it takes than the chosen one, as a ratio."""
        ranked = sorted((x.mean, i) for i, x in enumerate(self.trials) if x.mean is not None)
        others = [(mean, self.trials[i].configuration) for mean, i in ranked]
        (chosen,) = (mean for mean, one in others if one == self.chosen)
        second = next(((mean, one) for mean, one in others if one != self.chosen), None)
        return (
            self.key,
            changes(self.rule, self.chosen),
            f"{chosen:.3f}",
            "-" if second is None
            else f"{second[0] / chosen:.3f} {changes(self.chosen, second[1])}",
            f"{self.regret:.1%}",
            len(self.points),
            len(self.trials),
            sum(bool(trial.refused) for trial in self.trials),
        )  # fmt: skip


class LeftOut(Record):
    """A key that was not swept, or a point that no kernel computes, and why."""

    what: str
    why: str


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

    def result(self, device: str) -> KeyResult:
        """As a record holds it."""
        return KeyResult(
            device=device,
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

    def row(self, triton: str, date: str, gain: float = 0.0) -> Row:
        """As a table holds it: the chosen one, or the rule's where its regret is not above `gain`,
        beside a runner-up with a ratio below 1.
        """
        chosen = self.chosen if self.regret > gain else self.trials[0]
        others = [trial for trial in self.ranked if trial is not chosen]
        second = None
        if others:
            ratio = round(others[0].mean / chosen.mean, 4)
            second = RunnerUp(asdict(others[0].configuration), ratio)
        times = {name: round(one.milliseconds, 5) for name, one in chosen.measured.items()}
        return Row(self.key, asdict(chosen.configuration), times, second, triton, date)


def changes(rule: Mapping[str, int], other: Mapping[str, int]) -> str:
    """What a configuration changes, in words, or "the rule's".

    >>> changes({"BC": 64, "warps": 8}, {"BC": 64, "warps": 4})
    'warps 8 -> 4'
    """
    words = [f"{x} {rule[x]} -> {other[x]}" for x in rule if rule[x] != other[x]]
    return ", ".join(words) or "the rule's"


def worst(points: Iterable[PointResult]) -> float:
    """The largest regret of the rule on any of the points that is beyond doubt; else 0."""
    return max((point.rule_regret for point in points if point.decided), default=0.0)
