"""Generated mutants that compute the same as the package, each with the reason.

An entry is tied to its edit, word for word: one that no longer applies is an error, as is one that
a check kills after all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headstart.evidence.mutants.record import Mutant


@dataclass(frozen=True)
class Equivalent:
    """An edit of a file below headstart/ops, as `Mutant` has it, and why no result changes."""

    file: str
    old: str
    new: str
    reason: str


EQUIVALENTS = (
    Equivalent(
        file="convolution/decomposed.py",
        old="        if end - begin <= past:",
        new="        if end + begin <= past:",
        reason="A sequence of at most width - 1 rows gives an empty stretch, or rows of a longer "
        "one that are computed in vain: `_heads` writes all of its rows afterwards.",
    ),
    Equivalent(
        file="gated_delta_rule/chunk_scan.py",
        old="            count + 1 < len(run.step.chunks) or run.step.fold >= "
        "self._ends(run, count)",
        new="            count + 1 <= len(run.step.chunks) or run.step.fold >= "
        "self._ends(run, count)",
        reason="The state after the last chunk of a sequence is computed although nobody reads it: "
        "what is written is the state at `fold`, which `_pass` waits for.",
    ),
    Equivalent(
        file="gated_delta_rule/chunk_scan.py",
        old="        begin, stop = -(-step.start // CHUNK) - first, step.end // CHUNK - first",
        new="        begin, stop = -(-step.start // CHUNK) + first, step.end // CHUNK - first",
        reason="Fewer chunks count as whole, or none: the others are gathered one by one, as "
        "those with a tail are, to the same values.",
    ),
    Equivalent(
        file="gated_delta_rule/chunk_products.py",
        old='        self.always_careful = device.type != "cpu"',
        new='        self.always_careful = device.type == "cpu"',
        reason="On a CPU, where drawn builds run, the careful form then always runs: it gives what "
        "the other gives, whose place it takes only for values that are not finite.",
    ),
    Equivalent(
        file="gated_delta_rule/cache.py",
        old='        if states.device.type == "cpu" or (checking() and '
        'states.device.type != "meta"):',
        new='        if states.device.type == "cpu" or (checking() or '
        'states.device.type != "meta"):',
        reason="On a CPU, where drawn builds run, the first condition decides.",
    ),
)


def reason_of(mutant: Mutant) -> str | None:
    """Why a mutant computes the same, or None if nobody says so."""
    edit = (mutant.file, mutant.old, mutant.new)
    for known in EQUIVALENTS:
        if (known.file, known.old, known.new) == edit:
            return known.reason
    return None


def expect_current(ops: Path) -> None:
    """Raise ValueError for an explanation whose edit no longer applies below `ops`."""
    for known in EQUIVALENTS:
        file = ops / known.file
        if not file.is_file() or file.read_text().count(known.old) != 1:
            raise ValueError(
                f"mutants: an explanation is stale: ops/{known.file} does not hold {known.old!r} "
                f"once any more; see {Path(__file__).name}"
            )
