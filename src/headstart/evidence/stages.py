"""Where the time of a call goes: kernel by kernel, host and device apart.

An arm of headstart is also run with what its case leaves out (a schedule made in the call, a pool,
a cache, snapshots) and without what the case has, so that the cost of each can be read off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from headstart.evidence.arms import OURS, Arm, MissingPeer, Unfit, build, ours
from headstart.evidence.cases import Case
from headstart.evidence.cases.convolution import ConvolutionCase
from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.cases.gated_delta_rule import CHUNK, POOL_SLOTS, DeltaCase
from headstart.evidence.cases.record import Draws
from headstart.evidence.paired import Ratio, compare, orders
from headstart.evidence.runs import Record
from headstart.evidence.timing import described, host_and_wall, synchronize, warm

ROUNDS = 24
PROFILES = 5
AS_IT_STANDS = "the case"
FAILED = "failed"


class Stage(Record):
    """A kernel or copy on a GPU, an operator on a CPU: times a call, microseconds a call in all."""

    name: str
    count: float
    microseconds: float

    def cells(self, of: float | None) -> tuple[str, str, str, str]:
        """In words: its name, times, microseconds, and share of so many microseconds.

        >>> Stage(name="scan", count=2, microseconds=1250.0).cells(5000.0)
        ('scan', '2', '1,250.0', '25.0%')
        """
        share = self.microseconds / (of or 1)
        return self.name, f"{self.count:g}", f"{self.microseconds:,.1f}", f"{share:.1%}"


class StagesResult(Record):
    """One arm on one variant of a case.

    sentence: why it did not run; then nothing else is said.
    stages: by falling time. device_us: while any of them ran; less than their sum where launches
        overlap, since one that was started early waits inside itself for those before it.
    launches: kernels of a call (operators on a CPU).
    copies_to_host: copies from the device to the host in a call.
    wall_us: median until a call's work is done on an idle device. launch_us: median until the call
        returns. gap_us: wall_us - device_us: what the device waits for the host; None on a CPU.
    scratch: bytes of workspace that a call of headstart's takes, for the case as it stands.
    against: ratio of wall times to the arm compared with, paired by round; device_ratio: of
        device_us. None where that arm did not run.
    """

    case: str
    variant: str
    arm: str
    device: str
    served: str = ""
    note: str = ""
    sentence: str = ""
    stages: tuple[Stage, ...] = ()
    device_us: float | None = None
    launches: float | None = None
    copies_to_host: float | None = None
    wall_us: float | None = None
    launch_us: float | None = None
    gap_us: float | None = None
    scratch: int | None = None
    against: Ratio | None = None
    device_ratio: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the arm raised."""
        return self.sentence.startswith(FAILED)


Make = Callable[[torch.device, int], Arm]


def variants(case: Case, name: str) -> list[tuple[str, Make]]:
    """What an arm runs of a case: the case, and for headstart's arms its neighbours too."""
    if name not in OURS:
        return [(AS_IT_STANDS, lambda device, seed: build(name, case, device, seed))]

    def make(other: Case, plan_in_call: bool = False) -> Make:
        return lambda device, seed: ours.build(name, other, device, seed, plan_in_call=plan_in_call)

    found = [(AS_IT_STANDS, make(case))]
    if isinstance(case, (DeltaBlockCase, ConvolutionCase)):
        return found
    if not isinstance(case, DeltaCase):
        return [*found, ("plan made in the call", make(case, plan_in_call=True))]
    found.append(("schedule made in the call", make(case, plan_in_call=True)))
    for state, words in (
        ("none", "no states"),
        ("plain", "plain states"),
        ("pool", "states in a pool"),
        ("cache", "states in a cache"),
    ):
        fits = len(case.lengths) <= POOL_SLOTS or state != "pool"
        # Only a cache knows where a sequence starts.
        if state != case.state and fits and not case.starts:
            found.append((words, make(replace(case, state=state))))
    if case.snapshot_dtype is not None:
        plain = replace(case, snapshot_dtype=None, snapshot_every=0, snapshot_positions=())
        found.append(("no snapshots", make(plain)))
    elif not case.drafts and max(case.lengths, default=0) >= CHUNK:
        kept = {"snapshot_dtype": "float32"}
        ends = tuple(
            ((start + length) // CHUNK * CHUNK,)
            if (start + length) // CHUNK * CHUNK > start
            else ()
            for start, length in zip(case.positions, case.lengths, strict=True)
        )
        found.append(
            ("a snapshot at the end", make(replace(case, snapshot_positions=ends, **kept)))
        )
        every = replace(case, snapshot_every=CHUNK, **kept)
        found.append(("a snapshot every 64 tokens", make(every)))
    return found


def stages_of_case(
    case: Case,
    names: Sequence[str],
    *,
    device: torch.device,
    against: str | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda words: None,
) -> list[StagesResult]:
    """Profile every arm on every variant, wall times interleaved over all of them.

    against: the arm that others are compared with, on the case as it stands; None: the first.
    """
    if case.op == "model":
        raise ValueError(f"case: {case.id} is a whole model; bench runs the operations' cases")
    against = against or names[0]
    if against not in names:
        raise ValueError(f"against: expected one of the arms {list(names)}, got {against!r}")
    results: list[StagesResult] = []
    running: list[tuple[int, Arm]] = []
    with torch.inference_mode(), Draws.once():
        for name in names:
            for words, make in variants(case, name):
                progress(f"building {name}, {words}")
                result = StagesResult(
                    case=case.id, variant=words, arm=name, device=described(device)
                )
                try:
                    arm = make(device, seed)
                    warm(arm)
                    synchronize(device)
                except MissingPeer as missing:
                    result = result.model_copy(update={"sentence": f"missing: {missing}"})
                except (Unfit, NotImplementedError) as reason:
                    result = result.model_copy(update={"sentence": f"declined: {reason}"})
                except Exception as error:  # an arm that cannot run is a result
                    sentence = f"{FAILED}: {type(error).__name__}: {error}"
                    result = result.model_copy(update={"sentence": " ".join(sentence.split())})
                else:
                    running.append((len(results), arm))
                    update: dict[str, Any] = {"served": arm.served, "note": arm.note}
                    if words == AS_IT_STANDS and name in OURS:
                        update["scratch"] = ours.scratch(name, case, device, arm.served)
                    result = result.model_copy(update=update)
                results.append(result)
        pairs: dict[int, list[tuple[float, float]]] = {index: [] for index, _ in running}
        for number, order in enumerate(orders(len(running), rounds)):
            progress(f"round {number + 1} of {rounds}")
            for at in order:
                index, arm = running[at]
                pairs[index].append(host_and_wall(arm, device))
        for index, arm in running:
            progress(f"profiling {results[index].arm}, {results[index].variant}")
            launch = 1000 * median(host for host, _ in pairs[index])
            wall = 1000 * median(wall for _, wall in pairs[index])
            update = profile(arm, device)
            update |= {"wall_us": wall, "launch_us": launch}
            if device.type == "cuda":
                update["gap_us"] = wall - update["device_us"]
            results[index] = results[index].model_copy(update=update)
    return _compared(results, pairs, against)


def _compared(
    results: list[StagesResult], pairs: dict[int, list[tuple[float, float]]], against: str
) -> list[StagesResult]:
    """Results with their ratios to the chosen arm on the case as it stands."""
    bases = [
        index
        for index in pairs
        if results[index].arm == against and results[index].variant == AS_IT_STANDS
    ]
    if not bases:
        return results
    (base,) = bases
    walls = [wall for _, wall in pairs[base]]
    reference = results[base].device_us
    for index, mine in pairs.items():
        if index == base:
            continue
        spent = results[index].device_us
        update = {
            "against": compare([wall for _, wall in mine], walls),
            "device_ratio": spent / reference if spent and reference else None,
        }
        results[index] = results[index].model_copy(update=update)
    return results


def profile(arm: Arm, device: torch.device, times: int = PROFILES) -> dict[str, Any]:
    """Stages, device_us, launches and copies_to_host of one call, from a profiler.

    Every call is profiled alone, so that what restores its memory stays outside. Counts are means,
    times medians over the calls.
    """
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # A call may compute in threads of its own, which a profiler passes over unless told.
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    calls: list[tuple[dict[str, tuple[int, float]], float]] = []
    for _ in range(times + 1):
        arm.restore()
        synchronize(device)
        with (
            _quiet(),
            torch.profiler.profile(
                activities=activities, experimental_config=everywhere
            ) as profiler,
        ):
            arm.call()
            synchronize(device)
        calls.append(_on_gpu(profiler) if on_gpu else (_on_cpu(profiler), 0.0))
    calls = calls[1:]  # the first profile of a process pays for starting the profiler
    found = [stages for stages, _ in calls]
    names = {name for call in found for name in call}
    stages = [
        Stage(
            name=name,
            count=sum(call.get(name, (0, 0.0))[0] for call in found) / len(found),
            microseconds=median(call.get(name, (0, 0.0))[1] for call in found),
        )
        for name in names
    ]
    stages.sort(key=lambda stage: -stage.microseconds)
    # Operators of a CPU run one after the other, with other work between; kernels may overlap.
    busy = sum(stage.microseconds for stage in stages)
    if on_gpu:
        busy = median(spent for _, spent in calls)
    copies = [stage for stage in stages if stage.name.startswith(("Memcpy", "Memset"))]
    return {
        "stages": tuple(stages),
        "device_us": busy,
        "launches": sum(stage.count for stage in stages if stage not in copies),
        "copies_to_host": sum(stage.count for stage in copies if "DtoH" in stage.name),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's library writes to the process's stderr at every start."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _on_gpu(profiler: Any) -> tuple[dict[str, tuple[int, float]], float]:
    """Name -> (count, microseconds) of what ran on the device; microseconds in which any did."""
    found: dict[str, tuple[int, float]] = {}
    times: list[tuple[float, float]] = []
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            count, spent = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, spent + event.time_range.elapsed_us()
            times.append((event.time_range.start, event.time_range.end))
    return found, covered(times)


def covered(times: Iterable[tuple[float, float]]) -> float:
    """How much of the time line lies in any of the (start, end).

    >>> covered([(5, 9), (0, 2), (1, 4), (6, 7)])
    8.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(times):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _on_cpu(profiler: Any) -> dict[str, tuple[int, float]]:
    """Name -> (count, microseconds of its own) of operators."""
    return {row.key: (row.count, float(row.self_cpu_time_total)) for row in profiler.key_averages()}
