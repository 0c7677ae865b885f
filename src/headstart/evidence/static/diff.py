"""Do two builds of a kernel have the same instructions, and if not, which differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Result = Mapping[str, Any]
Row = tuple[str, str, str, str, str]


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


def spill_differences(results: Iterable[Result], others: Iterable[Result]) -> list[Row]:
    """A row for every kernel that another Triton spills differently, or only one of them compiles.

    Kernel, target, what differs, and what it is with each of the two: words in how many
    instructions.
    """
    rows: list[Row] = []
    for result, other in pairs(results, others):
        where = result["kernel"], result["target"]
        if result["error"] or other["error"]:
            if bool(result["error"]) != bool(other["error"]):
                ways = result["error"] or "yes", other["error"] or "yes"
                rows.append((*where, "compiles", *ways))
            continue
        for kind in ("vector_spills", "scalar_spills"):
            if result[kind] != other[kind]:
                ours, theirs = (f"{x[kind]} in {x['instructions']:,}" for x in (result, other))
                rows.append((*where, kind.replace("_", " "), ours, theirs))
    return rows
