"""How far a command is: on a terminal's standard error, and nowhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 1.0
"""Seconds after which a run shows a progress bar."""
CLEAR = "\r\x1b[K"
"""Empties a terminal's line."""


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is told how much of `total` is done, once a run has taken over a second."""
    from rich.progress import Progress

    from headstart.cli.printing import console

    bar = Progress(console=console(stderr=True), transient=True)
    task = bar.add_task(title, total=total)
    began = time.monotonic()
    shown = False

    def show(done: int) -> None:
        nonlocal shown
        bar.update(task, completed=done)
        if not shown and sys.stderr.isatty() and time.monotonic() - began > PATIENCE:
            shown = True
            bar.start()

    try:
        yield show
    finally:
        if shown:
            bar.stop()


def progress_words(title: str) -> Callable[[str], None]:
    """A line that is told what is being done; whatever is printed next takes its place."""
    if not sys.stderr.isatty():
        return lambda words: None

    def show(words: str) -> None:
        print(f"{CLEAR}{title}: {words}\r", end="", file=sys.stderr, flush=True)

    return show


@contextmanager
def progress_count(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A line that is told how many of how many are done, and the name of one."""
    show = progress_words(title)
    try:
        yield lambda done, count, name: show(f"{done} of {count}, {name}")
    finally:
        if sys.stderr.isatty():
            print(CLEAR, end="", file=sys.stderr)
