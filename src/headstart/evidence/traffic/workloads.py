"""What hits are worth in the operations: prefills of a trace as a scheduler would batch them.

Every request brings the tokens past its hit, which depends on the grain of the cache. A step takes
so many new tokens, first those left of the request under way, then of the next ones; what does not
fit waits, cut at a multiple of 64. Each step is timed in one layer of each kind that a model has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

import torch

from headstart.evidence.arms import Arm
from headstart.evidence.paired import compare, orders
from headstart.evidence.timing import make_clock, warm
from headstart.evidence.traffic.layers import Layer, Step, layer_of
from headstart.evidence.traffic.records import ALL_LAYERS, Workload
from headstart.evidence.traffic.shapes import SHAPES
from headstart.evidence.traffic.trace import GRAIN
from headstart.runtime import dispatch
from headstart.runtime.checks import expect_int

COLD = 0
"""The grain of a cache that is never hit."""


class Piece(NamedTuple):
    """What a step brings of a request, by its index: new tokens on a prefix."""

    request: int
    new: int
    prefix: int


def schedule(pairs: Sequence[tuple[int, int]], budget: int) -> list[list[Piece]]:
    """Steps of pieces of requests, at most `budget` new tokens a step.

    pairs: (new, prefix) of each request, prefixes at multiples of 64. budget: 64 or more.

    >>> for step in schedule([(100, 64), (300, 0), (10, 128)], 256):
    ...     print(*map(tuple, step))
    (0, 100, 64) (1, 128, 0)
    (1, 172, 128) (2, 10, 128)
    """
    expect_int("step-tokens", budget, GRAIN)
    steps: list[list[Piece]] = []
    room = 0
    for request, (new, prefix) in enumerate(pairs):
        while new:
            if room < min(new, GRAIN):
                steps.append([])
                room = budget
            taken = new if new <= room else room - room % GRAIN
            steps[-1].append(Piece(request, taken, prefix))
            new, prefix, room = new - taken, prefix + taken, room - taken
    return steps


def pages_of(step: Sequence[Piece]) -> int:
    """Pages that hold all keys of a step."""
    return sum(-(-(piece.new + piece.prefix) // GRAIN) for piece in step)


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

    prompts: tokens of each request. hits: grain -> tokens that each request finds; 64 and `COLD`
        must be among them. The n-th steps of all grains are timed in the same rounds, in balanced
        order.

    Of each kind of layer one is timed; last comes what all of them take, each kind as often as the
    model has it.
    """
    shape = SHAPES[model]
    pairs = {
        grain: [(total - hit, hit) for total, hit in zip(prompts, found, strict=True)]
        for grain, found in hits.items()
    }
    steps = {grain: schedule(one, step_tokens) for grain, one in pairs.items()}
    everything = list(chain(*steps.values()))
    found: list[Workload] = []
    total = {grain: [0.0] * rounds for grain in steps}

    def keep(
        kind: str, count: int, times: Mapping[int, list[float]], served: str, clock: str
    ) -> None:
        found.extend(
            Workload(
                kind=kind,
                layers=count,
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
                of_cold=compare(times[grain], times[COLD]),
            )
            for grain in steps
        )

    for kind, count in shape.layers.items():
        layer = layer_of(
            shape,
            kind,
            rows=step_tokens,
            slots=max(map(len, everything)),
            pages=max(map(pages_of, everything)),
            device=device,
        )
        times, served, clock = _time(
            layer, steps, device, rounds, lambda words, kind=kind: progress(f"{kind}, {words}")
        )
        keep(kind, 1, times, served, clock)
        for grain, one in times.items():
            total[grain] = [
                sofar + count * more for sofar, more in zip(total[grain], one, strict=True)
            ]
        del layer
    served = ", ".join(dict.fromkeys(one.served for one in found))
    keep(ALL_LAYERS, sum(shape.layers.values()), total, served, found[0].clock)
    return found


@torch.inference_mode()
def _time(
    layer: Layer,
    steps: Mapping[int, Sequence[Sequence[Piece]]],
    device: torch.device,
    rounds: int,
    progress: Callable[[str], None],
) -> tuple[dict[int, list[float]], str, str]:
    """Milliseconds of all steps of each grain, by round; who served them; the clock."""
    times = {grain: [0.0] * rounds for grain in steps}
    served: set[str] = set()
    clocks: set[str] = set()
    longest = max(map(len, steps.values()))
    for index in range(longest):
        progress(f"step {index + 1} of {longest}")
        here = [grain for grain in steps if index < len(steps[grain])]
        built = [_arm(layer, steps[grain][index]) for grain in here]
        for arm in built:
            warm(arm)
        # A step of an engine is no graph: its host facts are its own.
        clock, _, _ = make_clock(built, device, "auto" if device.type == "cpu" else "events")
        for turn, order in enumerate(orders(len(built), rounds)):
            found = clock.round([built[at] for at in order])
            for at, milliseconds in zip(order, found, strict=True):
                times[here[at]][turn] += milliseconds
        served |= {arm.served for arm in built}
        clocks.add(clock.name)
    return times, ", ".join(sorted(served)), ", ".join(sorted(clocks))


def _arm(layer: Layer, pieces: Sequence[Piece]) -> Arm:
    new, prefixes = ([getattr(piece, name) for piece in pieces] for name in ("new", "prefix"))
    places = layer.places([sum(pair) for pair in zip(new, prefixes, strict=True)])
    step = Step(new, prefixes, places)
    call = layer.call(step, slice(sum(new)))
    with dispatch.watching() as ran:
        layer.restore(step)
        call()
    served = ", ".join(dict.fromkeys(who for _, who in ran))
    return Arm("headstart", call, lambda o: {"o": o}, lambda: layer.restore(step), served)
