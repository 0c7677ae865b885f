"""Applies a mutant to a temporary copy of the package and lets a worker judge that copy.

Edits are refused outside of `headstart/ops`, and the truths are float64 oracles that use nothing of
it: the code that judges is the unedited one. Before any mutant, every check must pass on a copy
without an edit, else its kills would mean nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import headstart
from headstart.evidence.mutants.equivalent import expect_current, reason_of
from headstart.evidence.mutants.record import Found, Mutant, Verdict

PACKAGE = Path(headstart.__file__).parent
LEAST_LIMIT, SLOWER = 30.0, 10.0
"""A build hangs where a check takes more seconds than this, and than the unedited package so many
times over; on a CPU they are seconds of the processor, whatever else is busy there."""
WAITING = 10.0
"""So many times a limit in seconds of the processor a build may take by the clock."""
COMPILING = 120.0
"""`LEAST_LIMIT` on a device: an edited kernel is compiled in its check."""
FIRST_LIMIT = 600.0
"""Seconds of a check on the unedited package."""
STARTING = 600.0
"""Seconds in which a worker loads and unloads, beside its checks, on a machine busy with more."""
NOT_COPIED = ("checkpoints", "tables")
"""Folders that no check reads; only their code is copied."""


class DoesNotLoad(ValueError):
    """The edited copy cannot be imported: nobody could ship it, so it shows nothing."""


@dataclass(frozen=True)
class Outcome:
    """What a worker said: verdicts in order, and "hang" or "death" if that ended it."""

    verdicts: list[Verdict]
    ended: str | None
    words: str
    seconds: float


def expect_applies(mutant: Mutant, package: Path = PACKAGE) -> str:
    """The text of the edited file; ValueError where the edit does not apply."""
    file = package / "ops" / mutant.file
    if not file.resolve().is_relative_to((package / "ops").resolve()) or not file.is_file():
        raise ValueError(f"mutant {mutant.name}: ops has no file {mutant.file}")
    text = file.read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(
            f"mutant {mutant.name}: expected its old text once in ops/{mutant.file}, "
            f"found it {count} times: {mutant.old!r}"
        )
    if mutant.old == mutant.new:
        raise ValueError(f"mutant {mutant.name}: expected another text, got the same")
    return text.replace(mutant.old, mutant.new)


@contextmanager
def edited_copy(mutant: Mutant | None, package: Path = PACKAGE) -> Iterator[Path]:
    """A folder to put first on the path: the package with the mutant's edit, or without any."""
    with tempfile.TemporaryDirectory(prefix="headstart-mutant-") as folder:
        copy = Path(folder) / PACKAGE.name
        shutil.copytree(package, copy, ignore=_ignored)
        if mutant is not None:
            file = copy / "ops" / mutant.file
            file.write_text(expect_applies(mutant, copy))
            # Compiled files carry whole seconds: one of the same second would pass for new.
            for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                compiled.unlink()
        yield Path(folder)


def _ignored(folder: str, names: list[str]) -> list[str]:
    if Path(folder).name not in NOT_COPIED:
        return []
    return [name for name in names if not name.endswith((".py", "__pycache__"))]


def judge(
    mutant: Mutant | None,
    checks: Sequence[str],
    implementation: str,
    device: str,
    *,
    package: Path = PACKAGE,
    everything: bool = False,
    limits: Mapping[str, float] | None = None,
) -> Outcome:
    """Let a worker run checks on an edited copy of `package`.

    everything: past failures too. limits: seconds of each check, else `FIRST_LIMIT`.
    Raises DoesNotLoad.
    """
    seconds = [FIRST_LIMIT if limits is None else limits[name] for name in checks]
    job: dict[str, Any] = {
        "implementation": implementation,
        "device": device,
        "checks": list(checks),
        "processor": seconds if device == "cpu" else [0.0] * len(checks),
        "clock": [WAITING * one for one in seconds] if device == "cpu" else seconds,
        "all": everything,
    }
    began = time.perf_counter()
    with edited_copy(mutant, package) as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if implementation == "triton" and device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        worker = subprocess.Popen(
            [sys.executable, "-m", "headstart.evidence.mutants.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        ended = None
        try:
            said, complaints = worker.communicate(json.dumps(job), sum(job["clock"]) + STARTING)
        except subprocess.TimeoutExpired:
            worker.kill()
            said, complaints = worker.communicate()
            ended = "hang"
        if worker.returncode and ended is None:
            ended = "hang" if -worker.returncode in (signal.SIGPROF, signal.SIGALRM) else "death"
        place, *lines = said.splitlines() or [""]
        if not place:
            name = "the unedited package" if mutant is None else mutant.name
            words = f"{ended} after {time.perf_counter() - began:.0f} s"
            raise DoesNotLoad(
                f"mutants: {name} does not load: {complaints.strip()[-300:] or words}"
            )
        if Path(place).resolve() != (folder / PACKAGE.name).resolve():
            raise ValueError(f"mutants: the worker loaded {place}, not the copy in {folder}")
    verdicts = [Verdict.model_validate_json(line) for line in lines]
    words = complaints.strip().splitlines()[-1] if complaints.strip() else f"{ended}"
    return Outcome(verdicts, ended, words, time.perf_counter() - began)


def run_mutant(
    mutant: Mutant,
    device: str = "cpu",
    *,
    package: Path = PACKAGE,
    limits: Mapping[str, float] | None = None,
) -> Found:
    """Apply one mutant to a copy of `package` and see which check kills it."""
    expect_applies(mutant, package)
    outcome = judge(
        mutant, mutant.checks, mutant.implementation, device, package=package, limits=limits
    )
    found = Found(
        mutant=mutant.name,
        fault=mutant.fault,
        op=mutant.op,
        implementation=mutant.implementation,
        device=device,
        pitfall=mutant.pitfall,
        file=mutant.file,
        old=mutant.old,
        new=mutant.new,
        generated=mutant.generated,
        equivalent=reason_of(mutant),
        checks=len(outcome.verdicts) + (outcome.ended is not None),
        seconds=outcome.seconds,
    )
    last = outcome.verdicts[-1] if outcome.verdicts else None
    if last is not None and last.failure is not None:
        return found.model_copy(
            update={
                "killed_by": last.check,
                "failure": last.failure,
                "excess": last.excess,
                "cosine_passes": last.cosine_passes,
            }
        )
    if outcome.ended is not None:
        during = mutant.checks[len(outcome.verdicts)]
        return found.model_copy(
            update={
                "killed_by": outcome.ended,
                "failure": f"{during}: {outcome.words}",
                "excess": float("inf"),
                "cosine_passes": False,
            }
        )
    return found


def sound_checks(
    mutants: Sequence[Mutant],
    device: str,
    jobs: int,
    package: Path = PACKAGE,
) -> tuple[dict[tuple[str, str], float], list[str]]:
    """Seconds of each (implementation, check) that the unedited package passes; what it fails.

    Checks of what the implementation declines are left out: they say nothing.
    """
    wanted: dict[str, list[str]] = {}
    for mutant in mutants:
        mine = wanted.setdefault(mutant.implementation, [])
        mine += [name for name in mutant.checks if name not in mine]
    parts = [(name, checks[part::jobs]) for name, checks in wanted.items() for part in range(jobs)]
    parts = [(name, checks) for name, checks in parts if checks]

    def judged(part: tuple[str, list[str]]) -> tuple[str, list[Verdict], list[str]]:
        name, checks = part
        outcome = judge(None, checks, name, device, package=package, everything=True)
        failures = [
            f"mutants: the unedited package fails {verdict.check!r} under {name}: {verdict.failure}"
            for verdict in outcome.verdicts
            if verdict.failure is not None and not verdict.declined
        ]
        if unsaid := checks[len(outcome.verdicts) :]:
            words = f"{', '.join(unsaid)}: {outcome.words}"
            failures.append(f"mutants: the unedited package under {name} ends in {words}")
        passed = [verdict for verdict in outcome.verdicts if verdict.failure is None]
        return name, passed, failures

    seconds: dict[tuple[str, str], float] = {}
    failures: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        for name, passed, sentences in pool.map(judged, parts):
            seconds |= {(name, verdict.check): verdict.seconds for verdict in passed}
            failures += sentences
    return seconds, failures


def run_mutants(
    mutants: Sequence[Mutant],
    device: str = "cpu",
    *,
    jobs: int = 2,
    spare: Iterator[Mutant] | None = None,
    told: Callable[[Found], None] = lambda found: None,
    doubted: Callable[[str], None] | None = None,
) -> list[Found]:
    """What becomes of every mutant, in order; `told` hears of each as it ends.

    jobs: worker processes at a time, each with one thread. spare: generated mutants for those that
    do not load. doubted: hears of each check that the unedited package fails, which no mutant is
    asked then, and of each mutant that is left out: no check is left for it, or it does not load.
    Raises ValueError before any work where an edit or an explanation does not apply, and for each
    of the above that nobody hears of.
    """
    # One copy for the whole run: nobody's edit of the package reaches into it.
    with edited_copy(None) as folder:
        package = folder / PACKAGE.name
        for mutant in mutants:
            expect_applies(mutant, package)
        expect_current(package / "ops")
        seconds, failures = sound_checks(mutants, device, jobs, package)
        lock = threading.Lock()

        def doubt(reason: Exception) -> None:
            if doubted is None:
                raise reason
            with lock:
                doubted(str(reason))

        for failure in failures:
            doubt(ValueError(failure))
        least = LEAST_LIMIT if device == "cpu" else COMPILING

        def run(drawn: Mutant) -> Found | None:
            mine = {
                check: seconds[drawn.implementation, check]
                for check in drawn.checks
                if (drawn.implementation, check) in seconds
            }
            if not mine and failures:
                if not drawn.generated:
                    doubt(ValueError(f"mutants: no sound check is left for {drawn.name}"))
                return None
            if not mine:
                raise ValueError(
                    f"mutants: {drawn.name}: {drawn.implementation} declines each of its checks"
                )
            limits = {check: max(least, SLOWER * time) for check, time in mine.items()}
            # Nobody said which check reveals a drawn one: the cheapest are asked first.
            order = sorted(mine, key=mine.__getitem__) if drawn.generated else mine
            mutant = replace(drawn, checks=tuple(order))
            try:
                found = run_mutant(mutant, device, package=package, limits=limits)
            except DoesNotLoad as reason:
                with lock:
                    # Of the same checks, which have shown themselves sound.
                    others = spare if spare is not None and drawn.generated else ()
                    other = next((one for one in others if one.checks == drawn.checks), None)
                if other is not None:
                    return run(other)
                doubt(reason)
                return None
            with lock:
                told(found)
            return found

        with ThreadPoolExecutor(jobs) as pool:
            return [found for found in pool.map(run, mutants) if found is not None]
