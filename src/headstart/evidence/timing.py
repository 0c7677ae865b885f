"""Clocks: how long a launch keeps the device, how long a call keeps the host, and the ceilings.

On a GPU a launch is timed between two events, after the L2 was filled with other lines and while a
sleeping kernel keeps the device busy until the host has queued the whole launch: what is measured
is the device, not how fast the host feeds it. Where every arm can be captured, a launch replays a
captured graph; else it is a call. Host time and wall time of a call are measured apart from it, on
an idle device. On a CPU all three are one: the wall time of a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from headstart.evidence.arms import Arm
from headstart.evidence.runs import Record

WARM_UPS = 3
CLOCKS = ("auto", "graph", "events")
CYCLES_PER_MILLISECOND = 2_000_000
"""Of a clock at least as fast as any device's, so that a sleep is never too short."""
GRAPH_SLEEP = 0.1
"""Milliseconds of sleep that hide the launch of a graph."""
MOST_SLEEP = 20.0


class Ceilings(Record):
    """What the device reaches at best, measured in the same run.

    copy_rate: bytes read and written a second by a large copy.
    matmul_rate: operations a second of a large matrix product in the case's dtype (on a CPU: or in
        float32, whichever is faster).
    """

    copy_rate: float
    matmul_rate: float

    def floor(self, moved: int, operations: int) -> float:
        """Milliseconds that no implementation can beat: the slower of memory and arithmetic."""
        return 1000 * max(moved / self.copy_rate, operations / self.matmul_rate)


class Clock(Protocol):
    """Times launches of arms; `name` and `flushed` go into the record."""

    name: str
    flushed: str

    def round(self, arms: Sequence[Arm]) -> list[float]:
        """Milliseconds of one launch of each arm, in the order given."""
        ...


class HostClock:
    """Wall time of calls on a CPU."""

    name = "wall"
    flushed = "nothing"

    def round(self, arms: Sequence[Arm]) -> list[float]:
        """Milliseconds of one call of each arm, in the order given."""
        return [self._launch(arm) for arm in arms]

    def _launch(self, arm: Arm) -> float:
        arm.restore()
        began = time.perf_counter()
        arm.call()
        return 1000 * (time.perf_counter() - began)


class DeviceClock:
    """Events around single launches on a GPU.

    host: milliseconds that a call of each arm keeps the host, by id(arm): the sleep that hides it.
    graphs: captured graph of each arm by id(arm), or None: launches are calls.
    """

    flushed = "L2, by reading other memory"

    def __init__(
        self, device: torch.device, host: dict[int, float], graphs: dict[int, Any] | None
    ) -> None:
        self.name = "events" if graphs is None else "graph"
        self._graphs = graphs
        self._host = host
        size = torch.cuda.get_device_properties(device).L2_cache_size or 64 << 20
        self._other = torch.zeros(4 * size // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)
        self._device = device

    def round(self, arms: Sequence[Arm]) -> list[float]:
        """Milliseconds of one launch of each arm, in the order given."""
        events = [self._launch(arm) for arm in arms]
        torch.cuda.synchronize(self._device)
        return [began.elapsed_time(ended) for began, ended in events]

    def _launch(self, arm: Arm) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        arm.restore()
        # Reading leaves clean lines: nothing of it is written back inside the timed region.
        torch.sum(self._other, dim=0, out=self._sum)
        if self._graphs is None:
            sleep = min(2 * self._host[id(arm)] + GRAPH_SLEEP, MOST_SLEEP)
        else:
            sleep = GRAPH_SLEEP
        torch.cuda._sleep(int(sleep * CYCLES_PER_MILLISECOND))
        began.record()
        if self._graphs is None:
            arm.call()
        else:
            self._graphs[id(arm)].replay()
        ended.record()
        return began, ended


def warm(arm: Arm) -> None:
    """Compile and settle whatever an arm compiles and settles at first."""
    for _ in range(WARM_UPS):
        arm.restore()
        arm.call()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def described(device: torch.device) -> str:
    """A device as records name it: a GPU with its kind.

    >>> described(torch.device("cpu"))
    'cpu'
    """
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def host_and_wall(
    arm: Arm, device: torch.device, before: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """Milliseconds until a call returns, and until its work is done, on an idle device.

    before: what the host does in between.
    """
    arm.restore()
    synchronize(device)
    before()
    began = time.perf_counter()
    arm.call()
    returned = time.perf_counter()
    synchronize(device)
    return 1000 * (returned - began), 1000 * (time.perf_counter() - began)


class GraphCapture:
    """A call captured in a graph; `result` is what the call returned, rewritten by each replay."""

    def __init__(self, arm: Arm) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        # Scratch that belongs to a stream must exist before the capture, outside of its pool.
        with torch.cuda.stream(stream):
            warm(arm)
            arm.restore()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, stream=stream):
            self.result = arm.call()
        torch.cuda.synchronize()

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()


def make_clock(
    arms: Sequence[Arm], device: torch.device, kind: str = "auto"
) -> tuple[Clock, dict[int, Any], str]:
    """A clock for these arms, their graphs by id(arm) if it replays any, and why it does not.

    arms: warm already.
    kind: "graph" and "events" are strict on a GPU; "auto" replays graphs if all arms can be
        captured, so that all are measured in one way. A CPU has one clock.
    Raises ValueError where a strict "graph" cannot be had.
    """
    if kind not in CLOCKS:
        raise ValueError(f"clock: expected one of {list(CLOCKS)}, got {kind!r}")
    if device.type != "cuda":
        if kind == "graph":
            raise ValueError("clock: graph needs a GPU")
        return HostClock(), {}, ""
    host = {id(arm): min(host_and_wall(arm, device)[0] for _ in range(3)) for arm in arms}
    if kind == "events":
        return DeviceClock(device, host, None), {}, ""
    graphs: dict[int, Any] = {}
    for arm in arms:
        try:
            graphs[id(arm)] = GraphCapture(arm)
        except Exception as error:  # a peer raises whatever it likes when it is captured
            words = (str(error).strip().splitlines() or [""])[0][:160]
            reason = f"{arm.name} cannot be captured: {type(error).__name__}: {words}"
            if kind == "graph":
                raise ValueError(f"clock: {reason}") from error
            torch.cuda.synchronize(device)
            return DeviceClock(device, host, None), {}, reason
    return DeviceClock(device, host, graphs), graphs, ""


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Best rates of a large copy and of a large matrix product, over several tries."""
    on_gpu = device.type == "cuda"
    count = (1 << 29) if on_gpu else (1 << 26)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = _best(lambda: target.copy_(source), device)
    side = 8192 if on_gpu else 768
    # A CPU may multiply float32 faster than the case's dtype; then that is the ceiling.
    kinds = {dtype} if on_gpu else {dtype, torch.float32}
    rates = []
    for kind in kinds:
        a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
        product = torch.empty(side, side, dtype=kind, device=device)
        multiplied = _best(lambda a=a, b=b, out=product: torch.mm(a, b, out=out), device)
        rates.append(2 * side**3 / multiplied)
    return Ceilings(copy_rate=2 * count / copied, matmul_rate=max(rates))


def _best(run: Callable[[], Any], device: torch.device, tries: int = 7) -> float:
    """Seconds of the fastest of several runs, after one that does not count."""
    run()
    found = []
    for _ in range(tries):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            torch.cuda._sleep(int(GRAPH_SLEEP * CYCLES_PER_MILLISECOND))
            began.record()
            run()
            ended.record()
            torch.cuda.synchronize(device)
            found.append(began.elapsed_time(ended) / 1000)
        else:
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return min(found)
