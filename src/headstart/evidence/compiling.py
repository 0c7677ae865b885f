"""What calls on a GPU are about to launch, compiled by several processes before they are made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headstart.runtime.bundle import Bundle
from headstart.runtime.bundle_build import build
from headstart.runtime.bundle_launch import BUNDLE
from headstart.runtime.bundle_programs import Program

Progress = Callable[[str], None]
"""Called with what is being done."""


@contextmanager
def compiled(
    programs: Mapping[str, Program], jobs: int, progress: Progress = lambda words: None
) -> Iterator[None]:
    """While this lasts, launches find these programs, compiled by `jobs` processes.

    One that does not compile is told where it is launched.
    """
    with tempfile.TemporaryDirectory(prefix="headstart-programs-") as folder:
        build(
            Bundle(Path(folder)),
            list(programs.values()),
            jobs,
            lambda done, count, name: progress(f"compiled {done} of {count}: {name}"),
        )
        before = os.environ.get(BUNDLE)
        os.environ[BUNDLE] = folder
        try:
            yield
        finally:
            os.environ.pop(BUNDLE)
            if before is not None:
                os.environ[BUNDLE] = before
