"""Folders of a bundle: written whole or not at all, and read with errors that name the file."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path


def place(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Make a folder of these files by one rename; False if another builder was first.

    Raises ValueError where it cannot be written; then nothing is left of it.
    """
    building = folder.parent / f".building-{uuid.uuid4().hex}"
    try:
        building.mkdir(parents=True)
        for name, data in files.items():
            (building / name).write_bytes(data)
        os.rename(building, folder)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise ValueError(f"bundle: cannot write {folder}: {error.strerror}") from error
    return True


def read(file: Path) -> bytes:
    """What a file holds; ValueError where it cannot be read."""
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise spoiled(file, f"cannot be read: {error.strerror}") from None
    except OSError as error:
        raise ValueError(f"bundle: {file} cannot be read: {error.strerror}") from None


def spoiled(file: Path, what: str) -> ValueError:
    """The error that names a file whose folder is of no use, says why, and what helps."""
    return ValueError(f"bundle: {file} {what}; delete the folder and build it again")


def damaged(file: Path, field: str, expected: object, got: object) -> ValueError:
    """The error that names a file that is not what it was, and what is wrong with it."""
    return spoiled(file, f"is damaged: {field}: expected {expected}, got {got}")
