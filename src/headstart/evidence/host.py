"""How long a call keeps the host: in a row, alone on an idle device, and after other work.

Nothing is compared and no output is checked, which is what `benching` does. Arms run one after the
other: in turn, each would find the other's code in the host's caches instead of its own.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import quantiles
from typing import Any, ClassVar

import numpy as np
import torch

from headstart.evidence.arms import PEERS, Arm, named
from headstart.evidence.arms.sources import Sources
from headstart.evidence.benching import Entry
from headstart.evidence.cases import Case
from headstart.evidence.cases.record import Draws
from headstart.evidence.runs import Record
from headstart.evidence.timing import described, host_and_wall, synchronize, warm
from headstart.runtime.launcher import installed

ROUNDS = 60
CALLS = 50
"""In a row: a GPU queues a thousand launches or so; a full queue stops the host."""
MEASURED = "measured"


class Spread(Record):
    """Microseconds of calls: their median between their quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Spread:
        """Of two times or more.

        >>> Spread.of([0.001, 0.002, 0.005]).median
        2.0
        """
        low, median, high = quantiles((1000 * ms for ms in milliseconds), method="inclusive")
        return cls(low=low, median=median, high=high)


class HostResult(Record):
    """One arm on one case.

    status: "measured", "missing", "declined" or "failed"; sentence: why it was not measured.
    served: implementation that ran. note: what differs from the case as it stands.
    rounds: of each time. calls: of a round in a row.
    launches: of Triton's kernels in a call; None for peers and where no such kernel runs.
    in_row: a call of `calls` that do not wait for the device, with nothing restored between them
        but on a CPU.
    idle_host, idle_wall: a call on an idle device, until it returned and until its work was done.
    cold_host, cold_wall: the same after unrelated work on the host.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "arm", "launches", "in a row us", "idle host us", "idle wall us", "cold host us",
        "cold wall us",
    )  # fmt: skip

    case: str
    arm: str
    device: str
    status: str
    sentence: str = ""
    served: str = ""
    note: str = ""
    rounds: int
    calls: int = CALLS
    launches: int | None = None
    in_row: Spread | None = None
    idle_host: Spread | None = None
    idle_wall: Spread | None = None
    cold_host: Spread | None = None
    cold_wall: Spread | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """In words, medians of the times; "-" for what there is not."""
        times = self.in_row, self.idle_host, self.idle_wall, self.cold_host, self.cold_wall
        return (
            named(self.arm, self.served),
            "-" if self.launches is None else str(self.launches),
            *("-" if one is None else f"{one.median:.1f}" for one in times),
        )


def host_of_case(
    case: Case,
    names: Sequence[str],
    sources: Sources,
    *,
    device: torch.device,
    seed: int = 0,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda words: None,
) -> list[HostResult]:
    """Measure the arms called `names` on a case, one after the other.

    rounds: at least two. Raises `benching.DeviceLost` where an arm costs the process its device.
    """
    found = []
    with torch.inference_mode(), Draws.once():
        for name in names:
            entry = Entry(name)
            progress(f"building {name}")
            build = partial(sources.build, name, case, device, seed)
            entry.arm = entry.attempt("building", device, build)
            update: dict[str, Any] | None = None
            if entry.arm is not None:
                progress(f"timing {name}")
                measure = partial(_measured, entry.arm, device, rounds)
                update = entry.attempt("timing", device, measure)
            update = update or {"status": entry.status, "sentence": entry.sentence}
            found.append(
                HostResult(
                    case=case.id, arm=name, device=described(device), rounds=rounds, **update
                )
            )
    return found


def _measured(arm: Arm, device: torch.device, rounds: int) -> dict[str, Any]:
    warm(arm)
    other = OtherWork()
    gc.collect()
    gc.disable()
    try:
        row = [in_a_row(arm, device) for _ in range(rounds)]
        idle = [host_and_wall(arm, device) for _ in range(rounds)]
        cold = [host_and_wall(arm, device, other) for _ in range(rounds)]
    finally:
        gc.enable()
    return {
        "status": MEASURED,
        "served": arm.served,
        "note": arm.note,
        "launches": None if arm.name.partition("@")[0] in PEERS else launches(arm),
        "in_row": Spread.of(row),
        "idle_host": Spread.of([host for host, _ in idle]),
        "idle_wall": Spread.of([wall for _, wall in idle]),
        "cold_host": Spread.of([host for host, _ in cold]),
        "cold_wall": Spread.of([wall for _, wall in cold]),
    }


def in_a_row(arm: Arm, device: torch.device) -> float:
    """Milliseconds until a call returns, of CALLS that begin on an idle device.

    A CPU has computed when a call returns, which then may not be made again on what it changed:
    there memory is restored between calls, outside of the time.
    """
    if device.type == "cpu":
        return sum(host_and_wall(arm, device)[0] for _ in range(CALLS)) / CALLS
    call = arm.call
    synchronize(device)
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1000 * (time.perf_counter() - began) / CALLS


def launches(arm: Arm) -> int | None:
    """Triton's kernels that a call launches; None where that is none.

    Triton tells its hooks; a call that repeats a recorded program goes the long way for them.
    """
    if not installed():
        return None
    from triton import knobs

    told = 0

    def count(metadata: Any) -> None:
        nonlocal told
        told += 1

    hooks = knobs.runtime.launch_enter_hook
    hooks.add(count)
    try:
        arm.restore()
        arm.call()
    finally:
        hooks.remove(count)
    return told or None


class OtherWork:
    """What a server does between two calls: it takes a core's caches and branch predictors.

    Of one thread, the one that calls: work spread over cores would leave most of its caches alone.
    """

    def __init__(self) -> None:
        self._memory = np.zeros(1 << 20)  # 8 MiB
        self._text = json.dumps([{"a": i, "b": [str(i)] * 3} for i in range(200)])

    def __call__(self) -> None:
        """Do some."""
        self._memory += 1
        json.loads(self._text)
        sorted(self._text)
