"""Files that a command writes once its work is done: tried before, so that no work is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def expect_writable(
    path: Path | str, option: str = "json", sources: Iterable[Path | str] = ()
) -> None:
    """Raise ValueError, before the work is done, if a file cannot be written there.

    option: what the command calls the path. What the file holds stays as it is, and a file that is
    not there is not left behind. sources: files that the command reads, which it must not replace.

    >>> expect_writable("/", option="json")
    Traceback (most recent call last):
    ValueError: json: expected a file to write, got the folder /
    """
    try:
        place = Path(path).resolve()
        if place.is_dir():
            raise ValueError(f"{option}: expected a file to write, got the folder {path or '.'}")
        if not place.parent.is_dir():
            raise ValueError(f"{option}: no folder for {path}")
        if place in (Path(source).resolve() for source in sources):
            raise ValueError(f"{option}: {path} is read by this command, which would replace it")
        there = place.exists()
        if there and not place.is_file():
            return  # a pipe or a device: trying would already be writing
        place.open("ab").close()
        if not there:
            place.unlink()
    except OSError as error:
        raise ValueError(f"{option}: cannot write {path}: {error.strerror}") from error


def write(path: Path | str, text: str, option: str = "json") -> None:
    """Write a text file; ValueError where it cannot be written.

    A file that is there stays until the new one is complete: whoever is interrupted, or reads
    meanwhile, has one of the two. (Not in a folder that admits no new file.)
    """
    place = Path(path).resolve()
    try:
        if place.exists() and not (place.is_file() and os.access(place.parent, os.W_OK)):
            place.write_text(text, encoding="utf-8")
            return
        fresh = place.parent / f".headstart-{os.getpid()}"
        try:
            fresh.write_text(text, encoding="utf-8")
            if place.exists():
                shutil.copymode(place, fresh)
            fresh.replace(place)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: cannot write {path}: {error.strerror}") from error
