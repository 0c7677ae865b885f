"""The sweep: which keys calls ask for, and of each key which configuration is the fastest.

Of a key every configuration is computed on every point first and held against what the rule's gives
there, then all are timed in turns. What counts is the ratio to the rule, its geometric mean over
the points of the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

from headstart.evidence import compiling
from headstart.evidence.arms import Arm, Outputs
from headstart.evidence.benching import expect_alive
from headstart.evidence.cases.record import Draws
from headstart.evidence.compiling import Progress
from headstart.evidence.paired import compare, orders
from headstart.evidence.timing import Clock, make_clock, synchronize
from headstart.evidence.tuning.candidates import candidates
from headstart.evidence.tuning.points import KERNELS, Point
from headstart.evidence.tuning.results import Found, Measured, Trial
from headstart.evidence.verify.figures import Meter
from headstart.evidence.verify.tolerances import tolerance
from headstart.runtime import dispatch
from headstart.runtime.bundle_programs import Program, programs_of
from headstart.runtime.checks import dtype_name
from headstart.runtime.declined import Declined
from headstart.runtime.launcher import processors, target_of
from headstart.runtime.rehearsal import Rehearsal, rehearsing
from headstart.runtime.tables import Key, using

Clocks = Callable[[Sequence[Arm], torch.device], Clock]
"""Makes the clock that times arms which are warm already."""


@dataclass(frozen=True)
class Plan:
    """What is to be swept: of each key the rule's configuration and the points that ask for it.

    left_out: name of a point -> the sentence why no kernel that has rows computes it.
    """

    keys: Mapping[Key, tuple[Any, tuple[Point, ...]]]
    left_out: Mapping[str, str]


def plan(points: Sequence[Point], device: torch.device) -> Plan:
    """The keys whose configurations change what these points launch on a device by default."""
    found: dict[Key, tuple[Any, tuple[Point, ...]]] = {}
    left_out: dict[str, str] = {}
    for point in points:
        try:
            if sentence := _served_by_others(point, device):
                raise Declined(sentence)
            by_rule = rehearsed(point, {}, device)
            for key, rule in by_rule.asked.items():
                if _decides(point, key, rule, by_rule, device):
                    found[key] = rule, (*found.get(key, (rule, ()))[1], point)
        except Declined as sentence:
            left_out[point.name] = str(sentence)
    return Plan(found, left_out)


def _served_by_others(point: Point, device: torch.device) -> str:
    """The sentence that what a GPU takes for a point by default has no rows in tables, or ""."""
    if device.type != "cuda":
        return ""
    operation, call, _ = dispatch.bound(point.operation, (), point.blank)
    with rehearsing(target_of(device), processors(device)):
        chosen = dispatch.choose(operation, call, None).name
    return "" if chosen == KERNELS else f"{chosen} computes it, whose kernels have no rows."


def rehearsed(point: Point, rows: Mapping[Key, Any], device: torch.device) -> Rehearsal:
    """What a point would launch with these configurations and the rule's for all other keys."""
    operation, call, _ = dispatch.bound(point.operation, (), point.blank)
    with using(rows), rehearsing(target_of(device), processors(device)) as rehearsal:
        dispatch.run(operation, call, KERNELS)
    return rehearsal


def _decides(point: Point, key: Key, rule: Any, by_rule: Rehearsal, device: torch.device) -> bool:
    """Whether another configuration of a key is another launch: an answer may be asked for, and
    then another one, since keys cannot be copied as the first would."""
    found = _launches(by_rule)
    tried = candidates(key, rule, target_of(device).name)
    return any(_launches(rehearsed(point, {key: one}, device)) != found for one in tried)


def _launches(rehearsal: Rehearsal) -> list[Any]:
    """What tells launches apart: kernels, options, and arguments that are no tensors."""
    plain = int | float | str
    return [
        (run.kernel, run.options, {x: v for x, v in run.arguments.items() if isinstance(v, plain)})
        for run in rehearsal.launches
    ]


@contextmanager
def compiled(swept: Plan, device: torch.device, jobs: int, progress: Progress) -> Iterator[None]:
    """While this lasts, the programs of all first steps are there, compiled by `jobs` processes.

    One that does not compile is told where it is measured. No more than that on a CPU.
    """
    if device.type != "cuda":
        yield
        return
    programs: dict[str, Program] = {}
    for key, (rule, points) in swept.keys.items():
        for tried in (rule, *candidates(key, rule, target_of(device).name)):
            for point in points:
                programs |= programs_of(rehearsed(point, {key: tried}, device))
    with compiling.compiled(programs, jobs, progress):
        yield


def sweep(
    key: Key,
    rule: Any,
    points: Sequence[Point],
    *,
    device: torch.device,
    seed: int = 0,
    rounds: int = 20,
    walks: int = 1,
    beside: Mapping[Key, Any] = MappingProxyType({}),
    clocks: Clocks = lambda arms, device: make_clock(arms, device)[0],
    progress: Progress = lambda words: None,
) -> Found:
    """The fastest configuration of a key on these points.

    walks: how many steps are taken from the rule's towards the fastest; each tries all that are one
    change away from the best of those before, and the last one finds nothing better or is the end.
    beside: configurations of other keys that are not the rule's.
    Raises `DeviceLost` where a configuration was the process's end.
    """
    target = target_of(device).name
    trials, best = {rule: Trial(rule)}, rule
    for walk in range(walks):
        new = {one: Trial(one) for one in candidates(key, best, target) if one not in trials}
        if not new:
            break
        running = [trials[rule], *([trials[best]] if best != rule else []), *new.values()]
        trials |= new
        for point in points:
            progress(f"{key}: {point.name}, walk {walk + 1}: {len(running)} configurations")
            with torch.inference_mode(), Draws.once():
                _measure(point, key, beside, running, device, seed, rounds, clocks)
        ranked = Found(key, rule, tuple(trials.values())).ranked
        if not ranked or ranked[0].configuration == best:
            break
        best = ranked[0].configuration
    return Found(key, rule, tuple(trials.values()))


def _measure(
    point: Point,
    key: Key,
    beside: Mapping[Key, Any],
    trials: Sequence[Trial],
    device: torch.device,
    seed: int,
    rounds: int,
    clocks: Clocks,
) -> None:
    """Check the trials on a point, the rule's first, then time those that are right in turns."""
    arm_of = point.arms(point.drawn(seed, device))
    running: list[tuple[Trial, Arm]] = []
    expected: Outputs = {}
    for trial in trials:
        if trial.refused:
            continue
        arm = arm_of(str(trial.configuration), {**beside, key: trial.configuration})
        try:
            found, again = _computed(arm), _computed(arm)
            synchronize(device)
        except Exception as error:  # what a compiler or a driver raises is the trial's result
            expect_alive(device, f"computing {trial.configuration}", error)
            trial.refused = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        else:
            expected = expected or found
            trial.refused = _wrong(point, expected, found, again)
        if trial is trials[0] and trial.refused:
            raise ValueError(f"{key}: the rule's own configuration fails: {trial.refused}")
        if not trial.refused:
            running.append((trial, arm))
    arms = [arm for _, arm in running]
    clock = clocks(arms, device)
    times: list[list[float]] = [[] for _ in arms]
    for order in orders(len(arms), rounds):
        for at, milliseconds in zip(order, clock.round([arms[i] for i in order]), strict=True):
            times[at].append(milliseconds)
    for (trial, _), mine in zip(running, times, strict=True):
        trial.measured[point.name] = Measured(
            point=point.name, ratio=compare(mine, times[0]), milliseconds=median(mine)
        )


def _computed(arm: Arm) -> Outputs:
    arm.restore()
    return {name: x.clone() for name, x in arm.outputs(arm.call()).items()}


def _wrong(point: Point, expected: Outputs, found: Outputs, again: Outputs) -> str:
    """Why outputs are not those of the rule's configuration within twice the tolerance, or ""."""
    for name, values in found.items():
        if not torch.equal(values.view(torch.uint8), again[name].view(torch.uint8)):
            return f"{name}: two runs give different bits"
        meter = Meter(name, _rows(values))
        truth = _rows(expected[name])
        meter.add(slice(0, truth.shape[1]), truth)
        kind, inputs = dtype_name(values.dtype), point.case.dtype
        most = tolerance(point.operation, name, kind, inputs, KERNELS)
        if failures := meter.measured(most.times(2, "of two that may both be off")).failures:
            return "; ".join(failures)
    return ""


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[rows, heads, vector]."""
    return values.flatten(2) if values.dim() > 2 else values.reshape(len(values), 1, -1)
