"""What hits are worth in the operations: prefills of a trace as a scheduler would batch them.

Every request brings the tokens past its hit, which depends on the grain of the cache. A step takes
so many new tokens, first those left of the request under way, then of the next ones; what does not
fit waits, cut at a multiple of 64. Each step is a case of one layer, timed like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from headstart.evidence import arms
from headstart.evidence.cases import Case
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.gated_delta_rule import DeltaCase
from headstart.evidence.paired import compare, orders
from headstart.evidence.timing import make_clock, warm
from headstart.evidence.traffic.records import Workload
from headstart.evidence.traffic.trace import GRAIN
from headstart.runtime.checks import expect_int

COLD = 0
"""The grain of a cache that is never hit."""


@dataclass(frozen=True)
class Shape:
    """Heads of a model's two kinds of layer, as cases take them; None: it has none of the kind."""

    linear: Mapping[str, Any] | None
    softmax: Mapping[str, Any]
    dtype: str


SHAPES = {
    "qwen3-next-80b": Shape(
        {"H": 16, "HV": 32, "K": 128, "V": 128}, {"HQ": 16, "HK": 2, "D": 256}, "bfloat16"
    ),
    "gpt-oss-20b": Shape(None, {"HQ": 64, "HK": 8, "D": 64, "sinks": True}, "bfloat16"),
    "tiny-qwen3-next": Shape(
        {"H": 2, "HV": 4, "K": 128, "V": 128}, {"HQ": 4, "HK": 2, "D": 128}, "float32"
    ),
}


def schedule(pairs: Sequence[tuple[int, int]], budget: int) -> list[list[tuple[int, int]]]:
    """Steps of (new, prefix) of each sequence, at most `budget` new tokens a step.

    pairs: (new, prefix) of each request, prefixes at multiples of 64. budget: 64 or more.

    >>> schedule([(100, 64), (300, 0), (10, 128)], 256)
    [[(100, 64), (128, 0)], [(172, 128), (10, 128)]]
    """
    expect_int("step-tokens", budget, GRAIN)
    steps: list[list[tuple[int, int]]] = []
    room = 0
    for new, prefix in pairs:
        while new:
            if room < min(new, GRAIN):
                steps.append([])
                room = budget
            taken = new if new <= room else room - room % GRAIN
            steps[-1].append((taken, prefix))
            new, prefix, room = new - taken, prefix + taken, room - taken
    return steps


def cases(model: str, grain: int, steps: Sequence[Sequence[tuple[int, int]]]) -> list[list[Case]]:
    """Of each kind of layer that the model has, a case for each step."""
    shape = SHAPES[model]
    found: list[list[Case]] = [[], []]
    for index, step in enumerate(steps):
        lengths, prefixes = (tuple(column) for column in zip(*step, strict=True))
        common: dict[str, Any] = {
            "id": f"trace-{grain}-{index}",
            "why": "a step of a trace",
            "dtype": shape.dtype,
            "lengths": lengths,
        }
        if shape.linear:
            found[0].append(DeltaCase(**common, **shape.linear, state="cache", starts=prefixes))
        paged = {"layout": "pages", "page_size": GRAIN, "new_in_cache": True}
        found[1].append(AttentionCase(**common, **shape.softmax, **paged, prefixes=prefixes))
    return [one for one in found if one]


def time_workloads(
    prompts: Sequence[int],
    hits: Mapping[int, Sequence[int]],
    *,
    model: str,
    device: torch.device,
    step_tokens: int = 8192,
    rounds: int = 6,
    progress: Callable[[str], None] = lambda words: None,
) -> list[Workload]:
    """Time the prefills of requests at several grains, side by side.

    prompts: tokens of each request. hits: grain -> tokens that each request finds; 64 must be one
        of them. The n-th steps of all grains are timed in the same rounds, in rotated order.
    """
    pairs = {
        grain: [(total - hit, hit) for total, hit in zip(prompts, found, strict=True)]
        for grain, found in hits.items()
    }
    steps = {grain: schedule(one, step_tokens) for grain, one in pairs.items()}
    by_grain = {grain: cases(model, grain, one) for grain, one in steps.items()}
    found = []
    for kind in range(len(by_grain[GRAIN])):
        rows = {grain: kinds[kind] for grain, kinds in by_grain.items()}
        times, served, clock = _time(rows, device, rounds, progress)
        found += [
            Workload(
                op=rows[grain][0].op,
                model=model,
                device=str(device),
                served=served,
                clock=clock,
                grain=grain,
                requests=len(prompts),
                steps=len(steps[grain]),
                step_tokens=step_tokens,
                new_tokens=sum(new for new, _ in pairs[grain]),
                prefix_tokens=sum(prefix for _, prefix in pairs[grain]),
                ms=tuple(times[grain]),
                median_ms=median(times[grain]),
                ratio=compare(times[grain], times[GRAIN]),
            )
            for grain in rows
        ]
    return found


@torch.inference_mode()
def _time(
    rows: Mapping[int, Sequence[Case]],
    device: torch.device,
    rounds: int,
    progress: Callable[[str], None],
) -> tuple[dict[int, list[float]], str, str]:
    """Milliseconds of all steps of each grain, by round; who served them; the clock."""
    times = {grain: [0.0] * rounds for grain in rows}
    served: set[str] = set()
    clocks: set[str] = set()
    longest = max(map(len, rows.values()))
    for index in range(longest):
        progress(f"step {index + 1} of {longest}")
        here = [grain for grain in rows if index < len(rows[grain])]
        built = [arms.build("headstart", rows[grain][index], device) for grain in here]
        for arm in built:
            warm(arm)
        clock, _, _ = make_clock(built, device)
        for turn, order in enumerate(orders(len(built), rounds)):
            found = clock.round([built[at] for at in order])
            for at, milliseconds in zip(order, found, strict=True):
                times[here[at]][turn] += milliseconds
        served |= {arm.served for arm in built}
        clocks.add(clock.name)
    return times, ", ".join(sorted(served)), ", ".join(sorted(clocks))
