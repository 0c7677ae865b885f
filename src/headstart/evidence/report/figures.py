"""The figures of a report: from results to an `svg` element, or None where there are no points."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from headstart.evidence import cases
from headstart.evidence.arms.sources import NOISE
from headstart.evidence.cases import Case
from headstart.evidence.mutants import Found
from headstart.evidence.report.drawing import (
    THEME,
    canvas,
    legend,
    length_axis,
    look,
    name_rows,
    svg,
    value_axis,
)
from headstart.evidence.report.reading import Benched, arm_names
from headstart.evidence.stages import AS_IT_STANDS, StagesResult
from headstart.evidence.verify.verification import Verification

COLUMNS = 3
LEAST_EXCESS = 1e-3
"""Errors below this share of their tolerance are drawn there."""
MOST_EXCESS = 1e4
EDGES = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Of the factors over a tolerance that mutants are counted by."""


def time_figure(group: Sequence[Benched], name: str) -> Markup | None:
    """Time against prompt length, a panel for cases that differ in nothing else."""
    families = [family for family in _families(group) if len(family[1]) > 1]
    if not families:
        return None
    columns = min(COLUMNS, len(families))
    rows = -(-len(families) // columns)
    arms = arm_names(group)
    with canvas(rows, columns, 0.7 + 2.7 * rows) as (figure, axes):
        for panel, (title, members) in zip(axes, families, strict=False):
            _time_panel(panel, members, arms)
            panel.set_title(title, loc="left")
        for panel in axes[len(families) :]:
            panel.set_axis_off()
        legend(figure, axes, len(arms) + 1)
        return svg(figure, name)


def _time_panel(panel: Axes, members: Sequence[Benched], arms: Sequence[str]) -> None:
    members = sorted(members, key=lambda one: one.result.tokens)
    lengths = [one.result.tokens for one in members]
    floors = [one.result.floor_ms for one in members]
    panel.plot(lengths, floors, color=THEME["quiet"], linestyle="--", linewidth=1, label="floor")
    shown = list(floors)
    for index, arm in enumerate(arms):
        points = [
            (one.result.tokens, timed.median_ms)
            for one in members
            for timed in one.timed
            if timed.arm == arm and timed.median_ms is not None
        ]
        if points:
            panel.plot(*zip(*points, strict=True), **look(index), markersize=4.5, label=arm)  # type: ignore[arg-type]
            shown += [value for _, value in points]
    length_axis(panel, lengths)
    value_axis(panel, "y", shown, around=shown[0])
    panel.set_xlabel("new tokens")
    panel.set_ylabel("median of a call, ms")


def _families(group: Sequence[Benched]) -> list[tuple[str, list[Benched]]]:
    """Cases of one sequence that differ in its length alone, with what they have in common."""
    found: dict[Case, list[Benched]] = {}
    for one in group:
        try:
            case: Any = cases.get(one.result.case)
        except ValueError:  # a case of another revision
            continue
        if (
            len(case.lengths) == 1
            and one.result.tokens
            and not getattr(case, "snapshot_positions", ())
        ):
            common = {"definition": ""} if hasattr(case, "definition") else {}
            alike = replace(case, id="", why="", lengths=(0,), **common)
            found.setdefault(alike, []).append(one)
    return [(_described(case), members) for case, members in found.items()]


def _described(case: Any) -> str:
    if case.op == "extend_attention":
        words = [f"HQ {case.HQ}, HK {case.HK}, D {case.D}"]
        words += [f"window {case.window}"] if case.window else []
        words += ["sinks"] if case.sinks else []
        words += [f"on {case.prefixes[0]:,}"] if any(case.cached) else []
    elif case.op == "causal_conv1d":
        words = [f"{case.channels:,} channels, width {case.width}"]
    else:
        words = [f"H {case.H}, HV {case.HV}"]
        words += ["per channel"] if case.per_channel else []
        words += [f"state: {case.state}"] if case.state != "plain" else []
        words += [f"on {case.starts[0]:,}"] if case.starts else []
    return ", ".join([*words, case.dtype])


def ratio_figure(group: Sequence[Benched], name: str) -> Markup | None:
    """Ratios to the first arm with their intervals, case by case; the noise floor in grey."""
    arms = [arm for arm in arm_names(group) if arm != group[0].first.arm]
    members = [one for one in group if one.first.status == "timed"]
    points = [
        (row, arm)
        for row, one in enumerate(members)
        for arm in one.result.arms
        if arm.ratio is not None and arm.status == "timed"
    ]
    if not points:
        return None
    with canvas(1, 1, _row_height(len(members), len(arms) + 1)) as (figure, (axes,)):
        axes.axvline(1, color=THEME["ink"], linewidth=1)
        shown = []
        for place, arm_name in enumerate([NOISE, *arms]):
            mine = [(row, arm.ratio) for row, arm in points if arm.arm == arm_name and arm.ratio]
            if not mine:
                continue
            offset = _offset(place, len(arms) + 1)
            centres = [ratio.ratio for _, ratio in mine]
            spread = (
                [ratio.ratio - ratio.low for _, ratio in mine],
                [ratio.high - ratio.ratio for _, ratio in mine],
            )
            style: dict[str, Any] = look(place)
            if arm_name == NOISE:
                style = {"color": THEME["quiet"], "marker": "|"}
            axes.errorbar(
                centres,
                [row + offset for row, _ in mine],
                xerr=spread,
                linestyle="none",
                markersize=4.5,
                elinewidth=1.3,
                label=arm_name,
                **style,
            )
            shown += [value for _, ratio in mine for value in (ratio.low, ratio.high)]
        name_rows(axes, [one.result.case for one in members])
        value_axis(axes, "x", shown)
        axes.set_xlabel(f"time / time of {group[0].first.arm} (left of 1: faster than it)")
        legend(figure, [axes], len(arms) + 1)
        return svg(figure, name)


def floor_figure(group: Sequence[Benched], name: str) -> Markup | None:
    """How many times the floor each arm takes, case by case."""
    arms = arm_names(group)
    members = [one for one in group if one.timed and one.result.floor_ms]
    points = [
        (row, arm.arm, times)
        for row, one in enumerate(members)
        for arm in one.timed
        if (times := one.floors(arm)) is not None
    ]
    if not points:
        return None
    with canvas(1, 1, _row_height(len(members), len(arms) / 2)) as (figure, (axes,)):
        axes.axvline(1, color=THEME["ink"], linewidth=1)
        for index, arm_name in enumerate(arms):
            mine = [(value, row) for row, arm, value in points if arm == arm_name]
            if mine:
                axes.plot(
                    *zip(*mine, strict=True),  # type: ignore[arg-type]
                    **look(index),
                    linestyle="none",
                    markersize=5.5,
                    label=arm_name,
                )
        name_rows(axes, [one.result.case for one in members])
        value_axis(axes, "x", [value for *_, value in points])
        axes.set_xlabel("median time / floor of the case (1: nothing is left to gain)")
        legend(figure, [axes], len(arms))
        return svg(figure, name)


def error_figure(found: Sequence[Verification], name: str) -> Markup | None:
    """The largest figure of every output in units of its tolerance, a row for a kind of output."""
    points: dict[str, list[tuple[str, float]]] = {}
    for one in found:
        for output in one.outputs:
            row = f"{one.op}: {output.output}"
            points.setdefault(row, []).append((one.implementation, output.excess))
    if not points:
        return None
    points = dict(sorted(points.items(), key=lambda item: item[0].partition(":")[0]))
    implementations = list(dict.fromkeys(who for row in points.values() for who, _ in row))
    with canvas(1, 1, max(1.1 + 0.42 * len(points), 1.9)) as (figure, (axes,)):
        axes.axvline(1, color=THEME["bad"], linewidth=1.3)
        for index, who in enumerate(implementations):
            offset = _offset(index, len(implementations))
            mine = [
                (min(max(excess, LEAST_EXCESS), MOST_EXCESS), row + offset)
                for row, members in enumerate(points.values())
                for by, excess in members
                if by == who
            ]
            axes.plot(
                *zip(*mine, strict=True),  # type: ignore[arg-type]
                **look(index),
                linestyle="none",
                markersize=4.5,
                alpha=0.65,
                label=who,
            )
        name_rows(axes, list(points))
        excesses = [excess for row in points.values() for _, excess in row]
        clamped = [min(max(excess, LEAST_EXCESS), MOST_EXCESS) for excess in excesses]
        value_axis(axes, "x", clamped)
        axes.set_xlabel("largest figure of a case / its tolerance (right of 1: fails)")
        legend(figure, [axes], len(implementations))
        return svg(figure, name)


def mutant_figure(found: Sequence[Found], name: str) -> Markup | None:
    """By what factor over its tolerance the killing check failed, and what a cosine gate says."""
    killed = [one for one in found if one.killed_by is not None]
    if not killed:
        return None
    kinds = {
        "a cosine gate lets it live": (True, THEME["series-2"], ""),
        "a cosine gate fails too": (False, THEME["series-1"], ""),
        "no cosine is taken": (None, "none", "////"),
    }
    places = range(len(EDGES) + 1)
    with canvas(1, 1, 3.0) as (figure, (axes,)):
        below = [0 for _ in places]
        for label, (passes, color, hatch) in kinds.items():
            alike = [_bin(one.excess) for one in killed if one.cosine_passes is passes]
            counts = [alike.count(place) for place in places]
            # What has no figure stands apart.
            axes.bar(
                [place + (place == len(EDGES)) for place in places],
                counts,
                bottom=below,
                color=color,
                hatch=hatch,
                edgecolor=THEME["quiet"],
                linewidth=0.6,
                label=label,
            )
            below = [one + more for one, more in zip(below, counts, strict=True)]
        ticks = [place - 0.5 for place in range(len(EDGES))] + [len(EDGES) + 1.0]
        axes.set_xticks(ticks, [*(f"{edge:,}" for edge in EDGES), "bits, crash\nor hang"])
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("figure of the check that killed it / its tolerance")
        axes.set_ylabel("mutants")
        legend(figure, [axes], len(kinds))
        return svg(figure, name)


def _bin(excess: float) -> int:
    """Which edges an excess lies between; the last place is for what has no figure."""
    return len(EDGES) if not isfinite(excess) else max(bisect(EDGES, excess) - 1, 0)


def stage_figure(found: Sequence[StagesResult], name: str) -> Markup | None:
    """Device time and what the device waits for the host, arm by arm, cases as they stand."""
    rows = [one for one in found if one.variant == AS_IT_STANDS and one.wall_us is not None]
    if not rows:
        return None
    with canvas(1, 1, max(1.0 + 0.3 * len(rows), 1.9)) as (figure, (axes,)):
        for index, one in enumerate(rows):
            spent = one.device_us if one.gap_us is not None else one.wall_us
            axes.barh(index, spent or 0, color=THEME["series-1"], height=0.6)
            if one.gap_us is not None:
                axes.barh(index, max(one.gap_us, 0), left=spent, color="none", height=0.6,
                          edgecolor=THEME["quiet"], hatch="////", linewidth=0.6)  # fmt: skip
        name_rows(axes, [f"{one.case}, {one.arm}" for one in rows])
        axes.set_xlabel("microseconds of a call")
        parts = [Patch(color=THEME["series-1"], label="computing")]
        if any(one.gap_us is not None for one in rows):
            parts.append(Patch(facecolor="none", edgecolor=THEME["quiet"], hatch="////",
                               label="waiting for the host"))  # fmt: skip
        figure.legend(handles=parts, loc="outside upper left", ncols=2)
        return svg(figure, name)


def _row_height(rows: int, arms: float) -> float:
    return max(1.1 + rows * (0.16 + 0.07 * arms), 1.9)


def _offset(place: int, count: int) -> float:
    """Where within its row a series stands."""
    return 0.0 if count == 1 else 0.6 * (place / (count - 1) - 0.5)
