"""What a mutant is, and what became of one."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.evidence.runs import Record


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A known-bad build: one edit of a source file under `headstart/ops`.

    name: lower-case words joined by hyphens. fault: what is wrong then, in a sentence.
    op, implementation: what is run. pitfall: the line of the list of shipped faults that it
        re-injects, None for a fault of another kind.
    file: below headstart/ops. old: text that occurs there exactly once; new: what takes its place.
    checks: names of `checks.CHECKS`, the cheapest that reveals it first.
    device_only: why no run on a CPU shows it, "" if one does.
    generated: whether nobody thought of it.
    """

    name: str
    fault: str
    op: str
    implementation: str
    file: str
    old: str
    new: str
    checks: tuple[str, ...]
    pitfall: int | None = None
    device_only: str = ""
    generated: bool = False


class Verdict(Record):
    """What one check says of a build.

    failure: why the build is wrong, None if it is right here. excess: its largest figure in units
    of the tolerance (infinite for a crash, or bits that differ). cosine_passes: what a gate on the
    cosine alone says of the same outputs; None where no cosine is taken.
    """

    check: str
    failure: str | None = None
    excess: float = 0.0
    cosine_passes: bool | None = None
    declined: bool = False
    seconds: float = 0.0


class Found(Record):
    """What became of one mutant.

    generated: whether it was drawn rather than listed.
    killed_by: the check, "hang" or "death" of the process; None for a survivor.
    equivalent: why a survivor computes the same, where that is known.
    excess, cosine_passes: of the check that killed it. checks: how many it took.
    """

    mutant: str
    fault: str
    op: str
    implementation: str
    device: str
    pitfall: int | None
    file: str
    old: str
    new: str
    generated: bool = False
    killed_by: str | None = None
    equivalent: str | None = None
    failure: str | None = None
    excess: float = 0.0
    cosine_passes: bool | None = None
    checks: int = 0
    seconds: float = 0.0
