"""Starts the compiling process, as often as crashes of the compiler ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import headstart
from headstart.evidence.static.budgets import broken
from headstart.evidence.static.parts import Part
from headstart.runtime.static import STATIC, TARGETS

SOURCE = Path(headstart.__file__).parents[1]
POLL = 0.05
WHOLE = Part(1, 1)

Progress = Callable[[int, int, str], None]


def resolve_targets(names: tuple[str, ...]) -> list[str]:
    """Full names of targets, each once; the part after the colon is enough. None: all.

    >>> resolve_targets(("90", "hip:gfx950"))
    ['cuda:90', 'hip:gfx950']
    """
    if not names:
        return list(TARGETS)
    short = {name.split(":")[1]: name for name in TARGETS}
    for name in names:
        if name not in TARGETS and name not in short:
            raise ValueError(f"target: expected one of {list(TARGETS)}, got {name!r}")
    return list(dict.fromkeys(short.get(name, name) for name in names))


def collect(
    targets: list[str],
    *,
    pattern: str = "*",
    part: Part = WHOLE,
    places: dict[str, str] | None = None,
    python: str = sys.executable,
    source: Path = SOURCE,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[dict[str, Any]]:
    """Results of every configuration at `places` whose name fits `pattern`, on every target.

    part: which share of them.
    python: the interpreter whose Triton compiles; it needs torch and triton.
    source: the folder that holds the package `headstart` to compile.
    progress: called with (done, all, kernel on target).
    stop: ends it with a RuntimeError once set.
    A kernel that kills the compiler is a result with an error; the others are compiled after it.
    Raises ValueError where the listing itself fails.
    """
    request = _request(targets, pattern, part, places)
    results: list[dict[str, Any]] = []
    total = None
    with tempfile.TemporaryDirectory() as folder:
        while total is None or len(results) < total:
            lines, last, code, words = _run_once(
                Path(folder),
                request | {"skip": len(results)},
                python,
                source,
                progress,
                stop,
            )
            if not lines:
                raise ValueError(f"static: {python} listed no kernels: {words}")
            total = len(lines[0]["kernels"])
            results += [line["result"] for line in lines if line["event"] == "end"]
            if len(results) < total:
                if last is None or last["event"] != "begin":
                    raise ValueError(f"static: the compiling process ended with {code}: {words}")
                crash = f"the compiler died (exit {code}): {words}"
                results.append(last["result"] | {"error": crash})
    for result in results:
        result["broken"] = broken(result["target"], result)
    return results


def collect_each(
    pythons: list[str],
    targets: list[str],
    *,
    pattern: str = "*",
    part: Part = WHOLE,
    places: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> list[list[dict[str, Any]]]:
    """What `collect` gives for each of these interpreters, all at the same time."""
    stop = threading.Event()
    shown = _summed(progress, len(pythons))
    with ThreadPoolExecutor(len(pythons)) as pool:
        try:
            running = [
                pool.submit(
                    collect, targets, pattern=pattern, part=part, places=places,
                    python=python, progress=shown(index), stop=stop,
                )
                for index, python in enumerate(pythons)
            ]  # fmt: skip
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            # One that failed, or an interrupt, ends the others, which the pool waits for.
            stop.set()
    failed = next((one for one in running if isinstance(one.exception(), ValueError)), None)
    return [one.result() for one in ([failed] if failed else running)]


def _summed(progress: Progress | None, count: int) -> Callable[[int], Progress | None]:
    """For each of `count` runs what to tell of it, so that `progress` hears of all together."""
    if progress is None:
        return lambda index: None
    heard = [(0, 0)] * count

    def of(index: int) -> Progress:
        def show(done: int, total: int, name: str) -> None:
            heard[index] = (done, total)
            progress(sum(d for d, _ in heard), sum(t for _, t in heard), name)

        return show

    return of


def kernels(
    targets: list[str],
    *,
    pattern: str = "*",
    part: Part = WHOLE,
    places: dict[str, str] | None = None,
) -> list[tuple[str, str, str]]:
    """(operation, kernel, target) of what `collect` would compile."""
    with tempfile.TemporaryDirectory() as folder:
        # All are skipped.
        request = _request(targets, pattern, part, places) | {"skip": sys.maxsize}
        lines, _, _, words = _run_once(Path(folder), request, sys.executable, SOURCE)
    if not lines:
        raise ValueError(f"static: {sys.executable} listed no kernels: {words}")
    return [tuple(kernel) for kernel in lines[0]["kernels"]]


def _request(
    targets: list[str], pattern: str, part: Part, places: dict[str, str] | None
) -> dict[str, Any]:
    strict = places is not None
    return {
        "places": places if strict else STATIC,
        "strict": strict,
        "targets": targets,
        "pattern": pattern,
        "part": str(part),
    }


def _run_once(
    folder: Path,
    request: dict[str, Any],
    python: str,
    source: Path,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None, int, str]:
    """Lines that one compiling process wrote, the last of them, its exit code and last words."""
    asked, answered = folder / "request.json", folder / f"results-{request['skip']}.jsonl"
    asked.write_text(json.dumps(request))
    answered.touch()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(source), environment.get("PYTHONPATH")))
    )
    errors = folder / "errors"
    command = [python, "-m", "headstart.evidence.static.worker", str(asked), str(answered)]
    lines: list[dict[str, Any]] = []
    with open(errors, "w") as sink, open(answered) as reading:
        try:
            process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
        except OSError as error:
            raise ValueError(f"triton-python: cannot start {python}: {error.strerror}") from error
        try:
            running = True
            partial = ""
            while running:
                if stop is not None and stop.is_set():
                    raise RuntimeError("static: stopped")
                running = process.poll() is None
                partial += reading.read()
                *whole, partial = partial.split("\n")
                for text in whole:
                    line = json.loads(text)
                    lines.append(line)
                    if progress is not None and line["event"] == "begin":
                        result = line["result"]
                        name = f"{result['kernel']} on {result['target']}"
                        progress(line["index"], len(lines[0]["kernels"]), name)
                if running:
                    time.sleep(POLL)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = errors.read_text().strip().splitlines()
    return lines, (lines[-1] if lines else None), process.returncode, (said[-1] if said else "")
