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
    """While this lasts, launches find these programs, and those of HEADSTART_BUNDLE beside them.

    Those that it lacks are compiled by `jobs` processes; one that does not compile is told where it
    is launched. Raises ValueError where HEADSTART_BUNDLE names no directory, or what it holds is
    damaged.
    """
    before = os.environ.get(BUNDLE)
    with tempfile.TemporaryDirectory(prefix="headstart-programs-") as folder:
        if before:
            _show(Bundle(Path(before)), Path(folder))
        build(
            Bundle(Path(folder)),
            list(programs.values()),
            jobs,
            lambda done, count, name: progress(f"compiled {done} of {count}: {name}"),
        )
        os.environ[BUNDLE] = folder
        try:
            yield
        finally:
            os.environ.pop(BUNDLE)
            if before is not None:
                os.environ[BUNDLE] = before


def _show(bundle: Bundle, folder: Path) -> None:
    """Let what a bundle holds be found in a folder too: programs, and what launches them."""
    bundle.folders()  # says so where there is no such directory
    for held in bundle.path.glob("*/[!.]*-*"):
        there = folder / held.parent.name
        there.mkdir(exist_ok=True)
        (there / held.name).symlink_to(held.absolute())
