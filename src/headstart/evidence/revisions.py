"""Other revisions of the checkout that this package runs from, as folders to load them from."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def checkout() -> Path:
    """The root of the git checkout that this package lies in; ValueError where there is none."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        raise ValueError(f"revision: {root} is no git checkout")
    return root


def commit(name: str) -> str | None:
    """The commit that a revision names, or None if it names none (or there is no checkout)."""
    try:
        root = checkout()
    except ValueError:
        return None
    # A name that starts with a dash would be read as an option.
    if name.startswith("-"):
        return None
    found = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", name + "^{commit}"],
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or None if found.returncode == 0 else None


@contextmanager
def worktree(name: str) -> Iterator[Path]:
    """A folder with the sources of a revision, gone afterwards; ValueError for an unknown one."""
    found = commit(name)
    if found is None:
        raise ValueError(f"revision: git knows no {name!r} here")
    git = ["git", "-C", str(checkout()), "worktree"]
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        place = Path(folder) / "tree"
        _run([*git, "add", "--detach", "--quiet", str(place), found])
        try:
            yield place
        finally:
            _run([*git, "remove", "--force", str(place)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"revision: {' '.join(done.stderr.split())}")
