"""Cases prepared side by side in processes of their own, then timed one after another.

Preparing is compiling and checking, which takes a core minutes; timing takes the device alone for
seconds. So every case of a batch is prepared at once, and once all are ready each is timed while
the others wait without touching the device. A case that hangs, or loses its device, costs itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from headstart.evidence.benching import CaseResult
from headstart.evidence.runs import Record

READY, GO = "ready", "go"
ARMS = 0.8
"""Share of a case's time in which its arms must be prepared; the rest is for what cannot be
interrupted, such as a compiler at work."""


HEARING = 5.0
"""Seconds in which a process that is ended may still clear away what it made."""


class Job(Record):
    """One case to prepare and time.

    first: the peer that is built first. until: when, in seconds since the epoch, what is not
    prepared is given up.
    """

    case: str
    arms: tuple[str, ...]
    device: str
    seed: int
    rounds: int
    clock: str
    groups: int | None
    noise_floor: bool
    first: int = 0
    until: float | None = None


class Lost(Exception):
    """A case that gave no result; the message says why."""


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    limit: float,
    progress: Callable[[str], None] = lambda words: None,
) -> Iterator[tuple[Job, CaseResult | Lost]]:
    """Every job with its result, as it is timed.

    workers: cases of a batch, each a process. limit: seconds to prepare a batch, and to time a
    case; what takes longer is ended and `Lost`.
    """
    for begin in range(0, len(jobs), workers):
        yield from _batch(jobs[begin : begin + workers], limit, progress)


def _batch(
    jobs: Sequence[Job], limit: float, progress: Callable[[str], None]
) -> Iterator[tuple[Job, CaseResult | Lost]]:
    with ExitStack() as stack:
        threads = max(1, (os.cpu_count() or 1) // len(jobs))
        pool = stack.enter_context(ThreadPoolExecutor(2 * len(jobs)))
        # Arms are given up a little earlier than their case, which is timed without them.
        until = time.time() + ARMS * limit
        jobs = [job.model_copy(update={"until": until}) for job in jobs]
        started = [stack.enter_context(_Worker(job, threads, pool)) for job in jobs]
        progress(f"preparing {len(jobs)} cases")
        wait([worker.said for worker in started], limit)
        # Whoever is late must not compile while others are timed.
        late = [worker for worker in started if not worker.said.done()]
        for worker in late:
            worker.end()
        for worker in started:
            progress(f"timing {worker.job.case}")
            if worker in late:
                yield worker.job, Lost(f"was not prepared within {limit:g} s: {worker.doing}")
            else:
                yield worker.job, worker.result(limit)


class _Worker:
    """A process that prepares a job, says so, and times it when it is told to."""

    def __init__(self, job: Job, threads: int, pool: ThreadPoolExecutor) -> None:
        self.job, self._pool = job, pool
        self.doing = "starting"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headstart.evidence.bench_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        assert self._process.stderr is not None
        self._complaints = pool.submit(self._process.stderr.read)
        self._tell(job.model_dump_json())
        self.said = pool.submit(self._listen)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *reason: object) -> None:
        self.end()

    def result(self, limit: float) -> CaseResult | Lost:
        """Let a worker that has said something time its case."""
        if self.said.result():
            self._tell(GO)
            answer = self._line()
            wait([answer], limit)
            if not answer.done():
                self.end()
                return Lost(f"was not timed within {limit:g} s")
            if answer.result():
                return CaseResult.model_validate_json(answer.result())
        lines = self._complaints.result().strip().splitlines()
        return Lost(lines[-1] if lines else f"ended with {self._process.wait()}")

    def end(self) -> None:
        """End the process, whatever it is at; it may clear away what it made, if it hears."""
        self._process.terminate()
        try:
            self._process.wait(HEARING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(words + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone: what it complained of tells more

    def _listen(self) -> bool:
        """Hear what the worker is at until it is ready; False if it ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                return True
            self.doing = line.strip()
        return False

    def _line(self) -> Future[str]:
        assert self._process.stdout is not None
        return self._pool.submit(self._process.stdout.readline)
