"""What a report shows of configurations: the rule's beside the fastest, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headstart.evidence.report.tables import NONE, Cell, Table, interval, number, table
from headstart.evidence.tuning.results import WITHIN, KeyResult, LeftOut, PointResult, changes


def keys(found: Sequence[KeyResult]) -> Table:
    """What was found of every key."""
    return table("Keys", ("device", *KeyResult.COLUMNS), [(x.device, *x.cells) for x in found])


def points(found: Sequence[KeyResult]) -> Table:
    """Every call that keys were compared on, the rule's largest regret on top."""
    rows = [
        (
            point.point,
            one.key,
            number(_milliseconds(one, point), ".4f"),
            Cell(f"{point.rule_regret:.1%}", "bad" if point.rule_regret > WITHIN else "good")
            if point.decided
            else Cell(f"{point.rule_regret:.1%}, in doubt", "quiet"),
            changes(one.rule, point.fastest),
            Cell(f"moved, {point.chosen_regret:.1%}", "bad") if point.moved else NONE,
        )
        for one, point in sorted(
            ((one, point) for one in found for point in one.points),
            key=lambda pair: -pair[1].rule_regret,
        )
    ]
    columns = ("call", "key", "the rule's ms", "the rule's regret", "fastest there",
               "ranking")  # fmt: skip
    return table("Calls, the rule's largest regret on top", columns, rows)


def trials(found: Sequence[KeyResult]) -> Table:
    """Every configuration on every call, and those that are out."""
    columns = ("key", "configuration", "call", "ms", "to the rule's [95 %]", "out")
    return table("All that was tried", columns, list(_trials(found)), folded=True)


def left_out(found: Sequence[LeftOut]) -> Table:
    """What was not swept, and why."""
    return table("Left out", ("what", "why"), [(one.what, one.why) for one in found])


def _trials(found: Sequence[KeyResult]) -> Iterator[tuple[object, ...]]:
    for one in found:
        for trial in one.trials:
            words = changes(one.rule, trial.configuration)
            for at in trial.measured:
                yield one.key, words, at.point, f"{at.milliseconds:.4f}", interval(at.ratio), None
            if trial.refused:
                yield one.key, words, None, None, None, Cell(trial.refused, "bad")


def _milliseconds(one: KeyResult, point: PointResult) -> float | None:
    """The rule's on a point."""
    return next((x.milliseconds for x in one.trials[0].measured if x.point == point.point), None)
