"""Do two builds of a kernel have the same instructions, and if not, which differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Result = Mapping[str, Any]


def pairs(results: Iterable[Result], others: Iterable[Result]) -> list[tuple[Result, Result]]:
    """Results of the same operation, kernel and target; what only one side has is left out."""
    theirs = {(other["operation"], other["kernel"], other["target"]): other for other in others}
    found = []
    for result in results:
        key = (result["operation"], result["kernel"], result["target"])
        if key in theirs:
            found.append((result, theirs[key]))
    return found


def against_kernel(results: Iterable[Result], name: str) -> list[tuple[Result, Result]]:
    """Every other result beside that of the kernel called `name` on the same target."""
    results = list(results)
    theirs = {(r["operation"], r["target"]): r for r in results if r["kernel"] == name}
    return [
        (result, theirs[result["operation"], result["target"]])
        for result in results
        if result["kernel"] != name and (result["operation"], result["target"]) in theirs
    ]


def difference(result: Result, other: Result) -> str:
    """A sentence on how the instructions differ; "" where they are identical.

    >>> same = {"error": "", "fingerprint": "a", "opcodes": {"HMMA": 4}}
    >>> difference(same, same)
    ''
    >>> difference(same, {"error": "", "fingerprint": "b", "opcodes": {"HMMA": 2, "LDG": 1}})
    'HMMA 4, was 2; LDG 0, was 1'
    """
    for side, name in ((result, "this side"), (other, "the other side")):
        if side["error"]:
            return f"{name} does not compile: {side['error']}"
    if result["fingerprint"] == other["fingerprint"]:
        return ""
    ours, theirs = Counter(result["opcodes"]), Counter(other["opcodes"])
    changed = [op for op in sorted(ours | theirs) if ours[op] != theirs[op]]
    if not changed:
        return "same instructions in another order or on other operands"
    changed.sort(key=lambda op: -abs(ours[op] - theirs[op]))
    shown = "; ".join(f"{op} {ours[op]}, was {theirs[op]}" for op in changed[:6])
    return shown + ("; ..." if len(changed) > 6 else "")


def spill_differences(results: Iterable[Result], others: Iterable[Result]) -> list[str]:
    """A line for every kernel that another Triton version spills differently, or cannot build."""
    lines = []
    for result, other in pairs(results, others):
        where = f"{result['kernel']} on {result['target']}"
        versions = f"Triton {result['triton']} and {other['triton']}"
        if result["error"] or other["error"]:
            if bool(result["error"]) != bool(other["error"]):
                failing = result if result["error"] else other
                lines.append(f"{where}: only Triton {failing['triton']} fails: {failing['error']}")
            continue
        for kind in ("vector_spills", "scalar_spills"):
            if result[kind] != other[kind]:
                name = kind.replace("_", " ")
                lines.append(f"{where}: {name} {result[kind]} and {other[kind]} with {versions}")
    return lines
