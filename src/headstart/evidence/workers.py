"""Calls shared out among processes, in order; Ctrl-C ends all of them without a word of theirs."""

from __future__ import annotations

import multiprocessing
import operator
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

R = TypeVar("R")
_INTERRUPT = {signal.SIGINT}


def spread(calls: Iterable[Callable[[], R]], processes: int) -> Iterator[R]:
    """What each call gives, in order.

    processes: how many share the calls, each with one thread; 1 makes them here, as they are asked
        for.
    Raises ValueError where a process is ended by others, as where memory runs out.

    >>> from functools import partial
    >>> list(spread([partial(max, n, 1) for n in range(3)], processes=1))
    [1, 1, 2]
    """
    if processes == 1:
        for call in calls:
            yield call()
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin)
    try:
        # Inherited: a process that is interrupted while it imports would print where it was.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
        try:
            found: Iterator[Any] = pool.map(operator.call, calls)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from found
    except BrokenProcessPool as error:
        raise ValueError(
            f"jobs: one of {processes} processes was ended from outside, as where memory runs out; "
            "fewer take less"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    import torch

    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as who started all may have asked
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)
