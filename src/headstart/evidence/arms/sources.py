"""Arms by the names that a benchmark is given: implementations, peers, revisions, other cases.

NAME is an implementation of headstart or a peer, REVISION or REVISION:IMPLEMENTATION another state
of the checkout, "unbounded" or "unbounded:reproducible" attention's kernels without their bounds,
and ANY@CASE the same on another case than the one that is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import headstart
from headstart.evidence import arms, cases, revisions
from headstart.evidence.arms import Arm, Unfit, ours, unbounded
from headstart.evidence.arms.copies import as_it_is, loaded_copy
from headstart.evidence.cases import Case

SOURCE = Path(headstart.__file__).parent
NOISE = "noise floor"


class Sources:
    """Copies of the package that arms of other revisions, and the noise floor, run from."""

    def __init__(self, names: Sequence[str]) -> None:
        self._stack = ExitStack()
        self._packages: dict[str, str] = {}
        for name in names:
            arm, at, other = name.partition("@")
            revision, colon, implementation = arm.partition(":")
            known = revision == unbounded.NAME or arm in arms.ARMS
            if not known and revisions.commit(revision) is None:
                raise ValueError(
                    f"arm: expected one of {[*arms.ARMS, unbounded.NAME]} or a git revision, "
                    f"got {arm!r}"
                )
            legal = unbounded.KINDS if revision == unbounded.NAME else arms.OURS
            if colon and implementation not in legal:
                raise ValueError(
                    f"arm: expected one of {list(legal)} after {revision}:, got {arm!r}"
                )
            if at:
                cases.get(other)

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()

    def build(self, name: str, case: Case, device: torch.device, seed: int) -> Arm:
        """An arm by name; on the case's sibling without sinks where it knows none."""
        return self._on_its_case(name, case, device, seed, self._build)

    def build_second(self, name: str, case: Case, device: torch.device, seed: int) -> Arm:
        """The same arm once more, sharing as little with the first as can be."""
        arm = self._on_its_case(name, case, device, seed, self._build_again)
        arm.name = NOISE
        return arm

    def _on_its_case(
        self, name: str, case: Case, device: torch.device, seed: int, build: Callable[..., Arm]
    ) -> Arm:
        what, at, other = name.partition("@")
        mine: Any = cases.get(other) if at else case
        try:
            arm = build(what, mine, device, seed)
            words = f"on {other}" if at else ""
        except Unfit as reason:
            if not getattr(mine, "sinks", False) or "sinks" not in str(reason):
                raise
            mine = mine.without_sinks()
            arm = build(what, mine, device, seed)
            words = f"on {mine.id}" if at else "the case without sinks"
        arm.name = name
        arm.note = "; ".join(filter(None, (words, arm.note)))
        arm.case = None if mine is case else mine
        return arm

    def _build(self, name: str, case: Case, device: torch.device, seed: int) -> Arm:
        if name in arms.ARMS:
            return arms.build(name, case, device, seed)
        revision, _, implementation = name.partition(":")
        if revision == unbounded.NAME:
            return self._unbounded(implementation, case, device, seed)
        package = self._revision(revision)
        return ours.build(implementation or "headstart", case, device, seed, package=package)

    def _build_again(self, name: str, case: Case, device: torch.device, seed: int) -> Arm:
        if name in arms.PEERS:
            arm = arms.build(name, case, device, seed)
            arm.note = f"{name} on memory of its own"
            return arm
        revision, _, implementation = name.partition(":")
        if name in arms.OURS:
            package = self._copy("headstart_again", SOURCE)
            arm = ours.build(name, case, device, seed, package=package)
        elif revision == unbounded.NAME:
            arm = self._unbounded(implementation, case, device, seed, again="_again")
        else:
            package = self._revision(revision, again="_again")
            arm = ours.build(implementation or "headstart", case, device, seed, package=package)
        arm.note = f"{name}, separately loaded and compiled"
        return arm

    def _unbounded(
        self, kind: str, case: Case, device: torch.device, seed: int, again: str = ""
    ) -> Arm:
        package = self._copy(f"headstart_unbounded{again}", SOURCE, unbounded.without_bounds)
        return unbounded.build(package, kind or unbounded.KINDS[0], case, device, seed)

    def _revision(self, name: str, again: str = "") -> str:
        found = revisions.commit(name)
        package = f"headstart_{found}{again}"
        if package not in self._packages:
            folder = self._stack.enter_context(revisions.worktree(name))
            self._copy(package, folder / "src" / "headstart")
        return self._packages[package]

    def _copy(
        self, package: str, source: Path, edited: Callable[[str, str], str] = as_it_is
    ) -> str:
        if package not in self._packages:
            copied = loaded_copy(source, package, edited)
            self._packages[package] = self._stack.enter_context(copied)
        return self._packages[package]
