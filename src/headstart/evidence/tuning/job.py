"""The whole job: keys one after the other, and what was found kept as soon as it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from headstart.evidence import runs
from headstart.evidence.cases import SMALL, catalogue
from headstart.evidence.compiling import Progress
from headstart.evidence.tuning.points import Point, points_of, shortened
from headstart.evidence.tuning.results import Found, KeyResult, LeftOut
from headstart.evidence.tuning.sweep import Plan, compiled, rehearsed, sweep
from headstart.runtime.table_files import KERNELS, Key, Table, plain
from headstart.runtime.tables import device_of

NOT_REACHED = "not reached"
"""Why a key is left out: time was over, or the job was interrupted."""


@dataclass
class Kept:
    """Where what was found goes: a device's table, a run record, or neither.

    Both files are written anew after every key, each by one rename: whatever ends the job leaves
    the keys before it, and in the record what they are not all of.

    found: keys that were swept, and what was found of each. left_out: names of keys that were not,
    and of points that no kernel computes -> why.
    gain: regret up to which the rule's goes into the table although another is faster.
    """

    table: Table | None = None
    record: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    found: list[KeyResult] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    gain: float = 0.0

    def beside(self, key: Key) -> dict[Key, Any]:
        """What the table has of the key whose order of sums this one must share, if of any."""
        first = plain(key)
        if self.table is None or key == first or KERNELS[key.operation, key.kernel].sums is None:
            return {}
        return {row.key: row.configuration for row in self.table.rows if row.key == first}

    def add(self, found: Found, device: torch.device) -> None:
        """Keep a key."""
        import triton

        self.found.append(found.result(str(device)))
        self.left_out.pop(str(found.key), None)
        if self.table is not None:
            day = datetime.now(UTC).date().isoformat()
            self.table = self.table.changed([found.row(triton.__version__, day, self.gain)])
            self.table.write()
        if self.record is not None:
            beside = self.record.with_name(f".{self.record.name}.{os.getpid()}")
            left = [LeftOut(what=what, why=why) for what, why in self.left_out.items()]
            runs.save(beside, "tune", [*self.found, *left], self.options)
            beside.replace(self.record)


def table_at(path: Path, device: torch.device) -> Table:
    """The table in a file, or a new one for it; ValueError where it is another device's."""
    kind = device_of(device)
    if kind is None:
        raise ValueError(f"device: expected one that kernels run on, got {device}")
    if not path.exists():
        return Table(path, kind, ())
    table = Table.read(path)
    if table.device != kind:
        raise ValueError(f"output: expected a table for {kind}, {path} is for {table.device}")
    return table


def chosen_points(
    operation: str, patterns: Sequence[str], shares: Sequence[float] = (1.0,), dtype: str = ""
) -> list[Point]:
    """The calls of an operation in cases whose ids fit a pattern, each at these shares of lengths.

    Small siblings only where a pattern ends in "-small". dtype takes the place of the cases' own.
    Raises ValueError where no case has such a call.

    >>> len(chosen_points("extend_attention", ["oss-16k-*"], [1.0, 0.25]))
    16
    """
    found = []
    for case in catalogue():
        small = case.id.endswith(SMALL)
        fitting = [p for p in patterns if fnmatchcase(case.id, p) and p.endswith(SMALL) == small]
        for share in shares if fitting else ():
            one = case if share == 1 else shortened(case, share)
            if one is not None:
                one = replace(one, dtype=dtype) if dtype else one
                found += points_of(operation, one)
    if not found:
        raise ValueError(f"cases: no case of {operation} fits {', '.join(patterns)}")
    return found


def tune(
    planned: Plan,
    device: torch.device,
    keep: Kept,
    *,
    jobs: int = 1,
    seconds: float | None = None,
    progress: Progress = lambda words: None,
    count: Callable[[int], None] = lambda done: None,
    **options: Any,
) -> None:
    """Sweep the keys of a plan and keep what is found, and what is left out.

    seconds: after these no further key is begun. progress, count: told what is done, and after
    each key how many are. options: those of `sweep`.
    """
    began = time.monotonic()
    keep.left_out |= {**planned.left_out, **{str(key): NOT_REACHED for key in planned.keys}}
    with compiled(planned, device, jobs, progress):
        for done, (key, (rule, points)) in enumerate(planned.keys.items()):
            if seconds is not None and time.monotonic() - began >= seconds:
                return
            beside = keep.beside(key)
            if beside:
                rule = rehearsed(points[0], beside, device).asked[key]
            found = sweep(
                key, rule, points, device=device, beside=beside, progress=progress, **options
            )
            keep.add(found, device)
            count(done + 1)
