"""Pieces of work shared out over threads, each of which computes by itself.

PyTorch spreads every single operation over its threads. Where operations are small, waiting for one
another and fetching what another core has just written take longer than the arithmetic; a thread
that does a whole piece of work keeps to its core.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

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
    those that began have ended. Where one thread is all there is, it is the caller's.
    """
    left = deque(pieces)

    def take(own: Scratch) -> None:
        while left:
            try:
                piece = left.popleft()
            except IndexError:  # another thread has just taken the last one
                return
            work(own, piece)

    if device.type != "cpu" or torch.get_num_threads() == 1:
        take(scratch[0])
        return
    running = [_pool(os.getpid()).submit(_without_gradients, take, own) for own in scratch]
    try:
        wait(running, return_when=FIRST_EXCEPTION)
    finally:
        left.clear()
        wait(running)
    for one in running:
        one.result()


def _without_gradients(take: Callable[[Scratch], None], own: Scratch) -> None:
    # The mode is a thread's own, and only inside it may results be written that were made inside.
    with torch.inference_mode():
        take(own)


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads whose operations are not spread further; a forked `process` has to start its own."""
    count = min(MOST, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, "headstart", _compute_alone)
    started = threading.Barrier(count + 1)
    for _ in range(count):
        pool.submit(started.wait)
    started.wait()
    # What a thread sets holds for itself and for threads begun later: give those their number back.
    torch.set_num_threads(torch.get_num_threads())
    return pool


def _compute_alone() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # a thread's first look takes the number that was last set by anyone
