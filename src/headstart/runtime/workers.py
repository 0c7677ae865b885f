"""Pieces of work shared out over threads, each of which computes by itself.

PyTorch spreads every single operation over its threads. Where operations are small, waiting for one
another and fetching what another core has just written take longer than the arithmetic; a thread
that does a whole piece of work keeps to its core.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

Scratch = TypeVar("Scratch")
Piece = TypeVar("Piece")

MOST = 8
"""More threads would wait for the interpreter's lock more than they compute."""


def worker_count(device: torch.device, pieces: int) -> int:
    """How many threads share so many pieces of work: no more than PyTorch has.

    One where the device is no CPU, since another thread would have another stream. Tensors on
    "meta" stand for a CPU's.
    """
    if device.type not in ("cpu", "meta"):
        return 1
    return max(1, min(torch.get_num_threads(), MOST, pieces))


def share_out(
    work: Callable[[Scratch, Piece], None],
    pieces: Iterable[Piece],
    scratch: Sequence[Scratch],
    device: torch.device,
) -> None:
    """Call `work(own, piece)` for every piece, in a thread for each element `own` of `scratch`.

    Pieces begin in their order. After an exception no further piece begins, and it is raised when
    those that began have ended, an interrupt too. Where one thread is all there is, or no other can
    be started, it is the caller's. Gradients are never tracked.
    """
    left = deque(pieces)

    def take(own: Scratch) -> None:
        # The mode is a thread's own, and only inside it may results be written that were made
        # inside.
        with torch.inference_mode():
            while left:
                try:
                    piece = left.popleft()
                except IndexError:  # another thread has just taken the last one
                    return
                work(own, piece)

    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        take(scratch[0])
        return
    pool = _pool(os.getpid())
    if not pool.grow(len(scratch)):
        torch.set_num_threads(1)  # as a worker computes: products over several have other bits
        try:
            take(scratch[0])
        finally:
            torch.set_num_threads(threads)
        return
    _mine.settle()
    jobs: list[_Job] = []
    _mine.left, _mine.jobs = left, jobs
    try:
        for own in scratch:
            jobs.append(_Job(functools.partial(take, own), left))
            pool.jobs.put(jobs[-1])
        for job in jobs:
            job.ended.wait()
    finally:
        _mine.settle()
    for job in jobs:
        if job.error is not None:
            raise job.error


class _Job:
    """What one thread does of a call; whoever takes `claim` first decides whether it is done."""

    def __init__(self, run: Callable[[], None], left: deque[Any]) -> None:
        self._run, self._left = run, left
        self.claim, self.ended = threading.Lock(), threading.Event()
        self.error: BaseException | None = None

    def do(self) -> None:
        if self.claim.acquire(blocking=False):
            try:
                self._run()
            except BaseException as error:
                self._left.clear()
                self.error = error
            finally:
                self.ended.set()


class _Mine(threading.local):
    """The last call of a thread: its pieces left, and its jobs."""

    def __init__(self) -> None:
        self.left: deque[Any] = deque()
        self.jobs: list[_Job] = []

    def settle(self) -> None:
        """Return when no job runs any more, however often somebody interrupts: scratch is used
        again. What an interrupt between two lines leaves running, the next call waits for.
        """
        interrupt = None
        for job in self.jobs:
            while not (job.ended.is_set() or job.claim.acquire(blocking=False)):
                self.left.clear()
                try:
                    job.ended.wait()
                except KeyboardInterrupt as late:
                    interrupt = late
            job.ended.set()
        if interrupt is not None:
            raise interrupt


_mine = _Mine()


class _Pool:
    """Threads whose operations are not spread further. They end with the process, not before."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._count, self._lock = 0, threading.Lock()

    def grow(self, count: int) -> bool:
        """Have `count` threads if they can be had; whether there is one at least."""
        with self._lock:
            while self._count < count and self._started():
                self._count += 1
        return self._count > 0

    def _started(self) -> bool:
        threads, ready = torch.get_num_threads(), threading.Event()
        thread = threading.Thread(
            target=self._serve, args=(ready,), name=f"headstart-{self._count}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is about to end
            return False
        interrupt = None
        while not ready.is_set():
            try:
                ready.wait()
            except KeyboardInterrupt as early:
                interrupt = early
        # What a thread sets holds for itself and for threads begun later: give those their number
        # back.
        torch.set_num_threads(threads)
        if interrupt is not None:
            self._count += 1
            raise interrupt
        return True

    def _serve(self, ready: threading.Event) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # whose first call takes the number that was last set by anyone
        ready.set()
        while True:
            self.jobs.get().do()


@functools.cache
def _pool(process: int) -> _Pool:
    """The threads of a process; a forked one has to start its own."""
    return _Pool()
