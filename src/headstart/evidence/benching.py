"""One case under several arms: all correct first, then launched in turn, then compared in pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import headstart
from headstart.evidence import arms, revisions
from headstart.evidence.arms import Arm, MissingPeer, Unfit, ours
from headstart.evidence.arms.copies import loaded_copy
from headstart.evidence.cases import Case
from headstart.evidence.cases.record import Draws
from headstart.evidence.checking import Accuracy, Truths, check, load_truths
from headstart.evidence.paired import Ratio, compare, orders
from headstart.evidence.runs import Record
from headstart.evidence.timing import (
    Ceilings,
    host_and_wall,
    make_clock,
    measure_ceilings,
    synchronize,
    warm,
)

ROUNDS = 60
HOST_ROUNDS = 24
SOURCE = Path(headstart.__file__).parent
NOISE = "noise floor"
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
    ratio: to the first timed arm, paired by round; None for that arm itself.
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


class Sources:
    """Copies of the package that arms of other revisions, and the noise floor, run from."""

    def __init__(self, names: Sequence[str]) -> None:
        self._stack = ExitStack()
        self._packages: dict[str, str] = {}
        for name in names:
            if name not in arms.ARMS and revisions.commit(name.partition(":")[0]) is None:
                raise ValueError(
                    f"arm: expected one of {list(arms.ARMS)} or a git revision, got {name!r}"
                )

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()

    def build(self, name: str, case: Case, device: torch.device, seed: int) -> Arm:
        """An arm by name, or of a revision: "main~5", "main~5:torch"."""
        if name in arms.ARMS:
            return arms.build(name, case, device, seed)
        revision, _, implementation = name.partition(":")
        arm = ours.build(
            implementation or "headstart", case, device, seed, package=self._revision(revision)
        )
        arm.name = name
        return arm

    def build_second(self, name: str, case: Case, device: torch.device, seed: int) -> Arm:
        """The same arm once more, sharing as little with the first as can be."""
        if name in arms.OURS:
            package = self._copy("headstart_again", SOURCE)
            arm = ours.build(name, case, device, seed, package=package)
            arm.note = f"{name}, separately loaded and compiled"
        elif name in arms.PEERS:
            arm = arms.build(name, case, device, seed)
            arm.note = f"{name} on memory of its own"
        else:
            revision, _, implementation = name.partition(":")
            package = self._revision(revision, again="_again")
            arm = ours.build(implementation or "headstart", case, device, seed, package=package)
            arm.note = f"{name}, separately loaded and compiled"
        arm.name = NOISE
        return arm

    def _revision(self, name: str, again: str = "") -> str:
        found = revisions.commit(name)
        package = f"headstart_{found}{again}"
        if package not in self._packages:
            folder = self._stack.enter_context(revisions.worktree(name))
            self._copy(package, folder / "src" / "headstart")
        return package

    def _copy(self, package: str, source: Path) -> str:
        if package not in self._packages:
            self._packages[package] = self._stack.enter_context(loaded_copy(source, package))
        return package


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
    progress: Callable[[str], None] = lambda words: None,
) -> CaseResult:
    """Run one case under the arms called `names`, the first one entered twice.

    groups: groups of heads that the outputs are checked in; None: all.
    Raises `DeviceLost` where an arm's fault is the process's end, such as a wild address.
    """
    if case.op == "model":
        raise ValueError(f"case: {case.id} is a whole model; bench runs the operations' cases")
    if len(set(names)) != len(names):
        raise ValueError(f"arms: each once, got {', '.join(names)}")
    torch_device = torch.device(device)
    floor = case.floor()
    with torch.inference_mode(), Draws.once():
        progress("ceilings")
        ceilings = ceilings or measure_ceilings(torch_device, case.torch_dtype)
        entries = _entries(case, names, sources, torch_device, seed, noise_floor, progress)
        progress("reference")
        _check(case, entries, seed, torch_device, groups, progress)
        try:
            clock_name, clock_note, flushed, times, calls = _time(
                [entry for entry in entries if entry.arm is not None],
                torch_device,
                rounds,
                clock,
                progress,
            )
        except RuntimeError as error:
            expect_alive(torch_device, "timing", error)
            raise
    floor_ms = ceilings.floor(floor.bytes, floor.operations)
    base = next((times[e.name] for e in entries if e.name in times), None)
    return CaseResult(
        case=case.id,
        op=case.op,
        device=_described(torch_device),
        dtype=case.dtype,
        tokens=case.tokens,
        seed=seed,
        rounds=rounds,
        clock=clock_name,
        clock_note=clock_note,
        flushed=flushed,
        floor_bytes=floor.bytes,
        floor_operations=floor.operations,
        floor_ms=floor_ms,
        ceilings=ceilings,
        arms=tuple(
            _result(entry, times.get(entry.name), calls.get(entry.name), base, floor_ms)
            for entry in entries
        ),
    )


def _entries(
    case: Case,
    names: Sequence[str],
    sources: Sources,
    device: torch.device,
    seed: int,
    noise_floor: bool,
    progress: Callable[[str], None],
) -> list[Entry]:
    entries = []
    for index, name in enumerate(names):
        progress(f"building {name}")
        entry = Entry(name)
        entry.arm = entry.attempt(
            "building", device, lambda name=name: _with_sibling(case, name, sources, device, seed)
        )
        entries.append(entry)
        if index == 0 and noise_floor and entry.arm is not None:
            again = Entry(NOISE)
            again.arm = again.attempt(
                "building",
                device,
                lambda name=name: sources.build_second(name, case, device, seed),
            )
            entries.append(again)
    return entries


def _with_sibling(case: Case, name: str, sources: Sources, device: torch.device, seed: int) -> Arm:
    """The arm on the case, or on its sibling without sinks where the arm knows none."""
    try:
        return sources.build(name, case, device, seed)
    except Unfit as reason:
        if not getattr(case, "sinks", False) or "sinks" not in str(reason):
            raise
    sibling: Any = case.without_sinks()  # type: ignore[attr-defined]
    arm = sources.build(name, sibling, device, seed)
    arm.note = "; ".join(filter(None, ("the case without sinks", arm.note)))
    arm.kept.append(sibling)
    return arm


def _check(
    case: Case,
    entries: list[Entry],
    seed: int,
    device: torch.device,
    groups: int | None,
    progress: Callable[[str], None],
) -> None:
    references: dict[str, Truths] = {}
    for entry in entries:
        arm = entry.arm
        if arm is None:
            continue
        progress(f"checking {entry.name}")
        mine = next((kept for kept in arm.kept if isinstance(kept, Case)), case)
        if mine.id not in references:
            references[mine.id] = load_truths(mine, seed, device, groups)

        def accuracy(arm: Arm = arm, mine: Case = mine) -> list[Accuracy]:
            arm.restore()
            found = arm.call()
            synchronize(device)
            return check(arm, mine, arm.outputs(found), references[mine.id])

        entry.accuracy = entry.attempt("checking", device, accuracy) or []
        if failures := [failure for one in entry.accuracy for failure in one.failures]:
            entry.fail("wrong", "; ".join(failures))


def _time(
    entries: list[Entry],
    device: torch.device,
    rounds: int,
    kind: str,
    progress: Callable[[str], None],
) -> tuple[str, str, str, dict[str, list[float]], dict[str, tuple[float, float]]]:
    """Clock, its note, what was flushed; launches by arm; medians of host and wall by arm."""
    progress("warming up")
    for entry in entries:
        if entry.arm is not None:
            entry.attempt("warming up", device, partial(_settle, entry.arm, device))
    settled = [entry.arm for entry in entries if entry.arm is not None]
    if not settled:
        return "", "", "", {}, {}
    clock, graphs, note = make_clock(settled, device, kind)
    _check_replays(entries, graphs)
    running = [(entry.name, entry.arm) for entry in entries if entry.arm is not None]
    times: dict[str, list[float]] = {name: [] for name, _ in running}
    for index, order in enumerate(orders(len(running), rounds)):
        progress(f"round {index + 1} of {rounds}")
        found = clock.round([running[at][1] for at in order])
        for at, milliseconds in zip(order, found, strict=True):
            times[running[at][0]].append(milliseconds)
    calls = {}
    if device.type == "cuda":
        both: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in running}
        for order in orders(len(running), min(rounds, HOST_ROUNDS)):
            for at in order:
                name, arm = running[at]
                both[name].append(host_and_wall(arm, device))
        calls = {
            name: (median(host for host, _ in pairs), median(wall for _, wall in pairs))
            for name, pairs in both.items()
        }
    return clock.name, note, clock.flushed, times, calls


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
    entry: Entry,
    times: list[float] | None,
    calls: tuple[float, float] | None,
    base: list[float] | None,
    floor_ms: float,
) -> ArmResult:
    arm = entry.arm
    if arm is None or times is None or base is None:
        return ArmResult(
            arm=entry.name,
            status=entry.status,
            sentence=entry.sentence,
            accuracy=tuple(entry.accuracy),
        )
    middle = median(times)
    return ArmResult(
        arm=entry.name,
        status="timed",
        served=arm.served,
        note=arm.note,
        accuracy=tuple(entry.accuracy),
        device_ms=tuple(times),
        host_ms=calls[0] if calls else None,
        wall_ms=calls[1] if calls else None,
        median_ms=middle,
        floor_share=floor_ms / middle,
        ratio=None if times is base else compare(times, base),
    )


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)
