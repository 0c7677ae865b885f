"""One case under several arms: all correct first, then launched in turn, then compared in pairs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from headstart.evidence.arms import PEERS, Arm, MissingPeer, Unfit
from headstart.evidence.arms.sources import NOISE, Sources
from headstart.evidence.cases import Case
from headstart.evidence.cases.record import Draws
from headstart.evidence.checking import MAIN, Accuracy, Truths, check, load_truths
from headstart.evidence.paired import Ratio, compare, orders
from headstart.evidence.runs import Record
from headstart.evidence.timing import (
    Ceilings,
    described,
    host_and_wall,
    make_clock,
    measure_ceilings,
    synchronize,
    warm,
)

Progress = Callable[[str], None]
ROUNDS = 60
HOST_ROUNDS = 24
REPLAY_TOLERANCE = 1e-2


class ArmResult(Record):
    """What became of an arm.

    status: "timed", "missing" (not installed), "declined" (does not run this case), "wrong" (its
        output is; not timed) or "failed" (raised). sentence: why, where it was not timed.
    served: implementation that ran. note: what differs from the case as it stands.
    accuracy: of each output that was checked.
    device_ms: a launch of each round, on the device (on a CPU: wall time).
    host_ms, wall_ms: medians of a call on an idle device: until it returned, until it was done.
    median_ms: of device_ms. floor_share: the case's floor over median_ms.
    ratio: to the first timed arm, paired by round; None for that arm itself. wall_ratio: the same
        of wall times; None on a CPU too.
    """

    arm: str
    status: str
    sentence: str = ""
    served: str = ""
    note: str = ""
    accuracy: tuple[Accuracy, ...] = ()
    device_ms: tuple[float, ...] = ()
    host_ms: float | None = None
    wall_ms: float | None = None
    median_ms: float | None = None
    floor_share: float | None = None
    ratio: Ratio | None = None
    wall_ratio: Ratio | None = None

    @property
    def error(self) -> Accuracy | None:
        """The figures of what the case is about; None where they were not taken."""
        return next((one for one in self.accuracy if one.output in MAIN), None)


class CaseResult(Record):
    """A case under all arms asked for, in the order asked for; the noise floor comes second.

    clock: "graph", "events" or "wall"; clock_note: why no graph was replayed. flushed: what was
        done so that a launch finds nothing of the last one.
    floor_bytes, floor_operations: as the case counts them; floor_ms: at the ceilings' rates.
    """

    case: str
    op: str
    device: str
    dtype: str
    tokens: int
    seed: int
    rounds: int
    clock: str = ""
    clock_note: str = ""
    flushed: str = ""
    floor_bytes: int
    floor_operations: int
    floor_ms: float
    ceilings: Ceilings
    arms: tuple[ArmResult, ...]


class DeviceLost(Exception):
    """No call on a device works any more in this process; the message says what came before."""


class TooLate(BaseException):
    """The time to prepare an arm is over; no handler of a peer's catches it."""


@contextmanager
def giving_up(until: float | None) -> Iterator[None]:
    """Raise `TooLate` in the block once `time.time` passes `until`."""
    if until is None:
        yield
        return
    left = until - time.time()
    if left <= 0:
        raise TooLate

    def stop(*signal_and_frame: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Entry:
    """An arm that was asked for: built, or with the reason why it could not be."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arm: Arm | None = None
        self.status, self.sentence = "", ""
        self.accuracy: list[Accuracy] = []

    def attempt(self, doing: str, device: torch.device, step: Callable[[], Any]) -> Any:
        """What `step` gives, or None: then what kept it from working is the arm's status."""
        try:
            return step()
        except MissingPeer as missing:
            self.fail("missing", str(missing))
        except (Unfit, NotImplementedError) as reason:
            self.fail("declined", str(reason))
        except Exception as error:  # peers raise whatever they like; it is their result
            expect_alive(device, f"{doing} {self.name}", error)
            self.fail("failed", f"{type(error).__name__}: {error}")
        return None

    def fail(self, status: str, sentence: str) -> None:
        """Note why the arm is not timed."""
        self.arm = None
        self.status, self.sentence = status, " ".join(sentence.split())[:400]


class Prepared:
    """A case whose arms are built, compiled and checked: what is left to do is to time them."""

    def __init__(
        self,
        case: Case,
        names: Sequence[str],
        sources: Sources,
        *,
        device: torch.device,
        seed: int = 0,
        groups: int | None = 2,
        noise_floor: bool = True,
        first: int = 0,
        until: float | None = None,
        progress: Progress = lambda words: None,
    ) -> None:
        """Build and check the arms called `names`, the first one entered twice.

        groups: groups of heads that the outputs are checked in; None: all.
        first: which peer is built first; those after it follow, then those before it. Arms of
            this package come before all peers.
        until: when, by `time.time`, an arm that is not prepared is given up ("failed"), and those
            after it with it; None: never. For the main thread of a process alone.
        Raises `DeviceLost` where an arm's fault is the process's end, such as a wild address.
        """
        if case.op == "model":
            raise ValueError(f"case: {case.id} is a whole model; bench runs the operations' cases")
        if len(set(names)) != len(names):
            raise ValueError(f"arms: each once, got {', '.join(names)}")
        self.case, self.seed, self.device = case, seed, device
        self._doing = ""
        makers = [(name, partial(sources.build, name)) for name in names]
        if noise_floor:
            makers.insert(1, (NOISE, partial(sources.build_second, names[0])))
        self.entries = [Entry(name) for name, _ in makers]
        references: dict[str, Truths] = {}
        mine = [at for at, (name, _) in enumerate(makers) if name.partition("@")[0] not in PEERS]
        peers = [at for at in range(len(makers)) if at not in mine]
        first %= len(peers) or 1
        with torch.inference_mode(), Draws.once():
            for at in mine + peers[first:] + peers[:first]:
                entry = self.entries[at]
                self._doing = "nothing more"
                try:
                    with giving_up(until):
                        self._prepare(entry, makers[at][1], references, groups, progress)
                except TooLate:
                    entry.fail("failed", f"was not prepared in time, at {self._doing}")
        # Without the first arm there is nothing that a second one of it would show.
        if noise_floor and self.entries[0].arm is None:
            del self.entries[1]

    def _prepare(
        self,
        entry: Entry,
        make: Callable[..., Arm],
        references: dict[str, Truths],
        groups: int | None,
        progress: Progress,
    ) -> None:
        self._doing = "building"
        progress(f"building {entry.name}")
        arm = entry.arm = entry.attempt(
            "building", self.device, lambda: make(self.case, self.device, self.seed)
        )
        if arm is None:
            return
        progress(f"checking {entry.name}")
        mine = arm.case or self.case
        self._doing = "the reference"
        if mine.id not in references:
            references[mine.id] = load_truths(mine, self.seed, self.device, groups)

        def accuracy() -> list[Accuracy]:
            arm.restore()
            found = arm.call()
            synchronize(self.device)
            return check(arm, mine, arm.outputs(found), references[mine.id])

        self._doing = "checking"
        entry.accuracy = entry.attempt("checking", self.device, accuracy) or []
        if failures := [failure for one in entry.accuracy for failure in one.failures]:
            entry.fail("wrong", "; ".join(failures))
        elif entry.arm is not None:
            beyond = [words for one in entry.accuracy for words in one.beyond_ours]
            arm.note = "; ".join(filter(None, (arm.note, *beyond)))
            self._doing = "warming up"
            entry.attempt("warming up", self.device, partial(_settle, arm, self.device))

    def time(
        self,
        rounds: int = ROUNDS,
        clock: str = "auto",
        ceilings: Ceilings | None = None,
        progress: Progress = lambda words: None,
    ) -> CaseResult:
        """Launch the arms in turn and compare them.

        ceilings: measured here where they are not given.
        Raises `DeviceLost` as preparing does.
        """
        case, device = self.case, self.device
        with torch.inference_mode():
            progress("ceilings")
            ceilings = ceilings or measure_ceilings(device, case.torch_dtype)
            try:
                timed = _time(self.entries, device, rounds, clock, progress)
            except RuntimeError as error:
                expect_alive(device, "timing", error)
                raise
        floor = case.floor()
        base = next((e.name for e in self.entries if e.name in timed.launches), None)
        return CaseResult(
            case=case.id,
            op=case.op,
            device=described(device),
            dtype=case.dtype,
            tokens=case.tokens,
            seed=self.seed,
            rounds=rounds,
            clock=timed.clock,
            clock_note=timed.note,
            flushed=timed.flushed,
            floor_bytes=floor.bytes,
            floor_operations=floor.operations,
            floor_ms=ceilings.floor(*floor),
            ceilings=ceilings,
            arms=tuple(_result(entry, timed, base, case, ceilings) for entry in self.entries),
        )


def bench_case(
    case: Case,
    names: Sequence[str],
    sources: Sources,
    *,
    device: torch.device,
    seed: int = 0,
    rounds: int = ROUNDS,
    clock: str = "auto",
    groups: int | None = 2,
    noise_floor: bool = True,
    ceilings: Ceilings | None = None,
    progress: Progress = lambda words: None,
) -> CaseResult:
    """Run one case under the arms called `names`: `Prepared`, then its `time`."""
    prepared = Prepared(
        case, names, sources, device=torch.device(device), seed=seed, groups=groups,
        noise_floor=noise_floor, progress=progress,
    )  # fmt: skip
    return prepared.time(rounds, clock, ceilings, progress)


@dataclass
class Timed:
    """What the clocks said of arms, by name.

    launches: milliseconds on the device, round by round. calls: (host, wall) milliseconds of calls
    on an idle device, round by round; none on a CPU.
    """

    clock: str = ""
    note: str = ""
    flushed: str = ""
    launches: dict[str, list[float]] = field(default_factory=dict)
    calls: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def _time(
    entries: list[Entry], device: torch.device, rounds: int, kind: str, progress: Progress
) -> Timed:
    settled = [entry.arm for entry in entries if entry.arm is not None]
    if not settled:
        return Timed()
    progress("making the clock")
    clock, graphs, note = make_clock(settled, device, kind)
    _check_replays(entries, graphs)
    running = [(entry.name, entry.arm) for entry in entries if entry.arm is not None]
    timed = Timed(clock.name, note, clock.flushed, {name: [] for name, _ in running})
    for index, order in enumerate(orders(len(running), rounds)):
        progress(f"round {index + 1} of {rounds}")
        found = clock.round([running[at][1] for at in order])
        for at, milliseconds in zip(order, found, strict=True):
            timed.launches[running[at][0]].append(milliseconds)
    if device.type == "cuda":
        timed.calls = {name: [] for name, _ in running}
        for order in orders(len(running), min(rounds, HOST_ROUNDS)):
            for at in order:
                name, arm = running[at]
                timed.calls[name].append(host_and_wall(arm, device))
    return timed


def _settle(arm: Arm, device: torch.device) -> None:
    warm(arm)
    synchronize(device)


def expect_alive(device: torch.device, doing: str, error: Exception) -> None:
    """Raise `DeviceLost` where an error has cost the process its device."""
    try:
        synchronize(device)
    except Exception:  # whatever failed first is what every later call says
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DeviceLost(f"{device} was lost while {doing}: {words}") from error


def _check_replays(entries: list[Entry], graphs: dict[int, Any]) -> None:
    """A graph that does not give what its call gave is wrong, however fast it is."""
    for entry in entries:
        arm = entry.arm
        if arm is None or id(arm) not in graphs:
            continue
        arm.restore()
        expected = {name: values.clone() for name, values in arm.outputs(arm.call()).items()}
        arm.restore()
        graphs[id(arm)].replay()
        for name, values in arm.outputs(graphs[id(arm)].result).items():
            wanted = expected[name].double()
            error = (values.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
            if not float(error) <= REPLAY_TOLERANCE:
                entry.fail("wrong", f"{name}: a replayed graph is off by {float(error):.3g}")
                break


def _result(
    entry: Entry, timed: Timed, base: str | None, case: Case, ceilings: Ceilings
) -> ArmResult:
    arm, times = entry.arm, timed.launches.get(entry.name)
    if arm is None or times is None or base is None:
        return ArmResult(
            arm=entry.name,
            status=entry.status,
            sentence=entry.sentence,
            accuracy=tuple(entry.accuracy),
        )
    middle = median(times)
    calls = timed.calls.get(entry.name, [])
    hosts, walls = [host for host, _ in calls], [wall for _, wall in calls]
    return ArmResult(
        arm=entry.name,
        status="timed",
        served=arm.served,
        note=arm.note,
        accuracy=tuple(entry.accuracy),
        device_ms=tuple(times),
        host_ms=median(hosts) if hosts else None,
        wall_ms=median(walls) if walls else None,
        median_ms=middle,
        floor_share=ceilings.floor(*(arm.case or case).floor()) / middle,
        ratio=None if entry.name == base else compare(times, timed.launches[base]),
        wall_ratio=None
        if entry.name == base or not walls
        else compare(walls, [wall for _, wall in timed.calls[base]]),
    )
