"""What a report shows of bundles: what was built and is held, and how soon first calls are done."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.evidence.bundles.records import Built, Checked, FirstCall
from headstart.evidence.report.reading import RunFile
from headstart.evidence.report.tables import Cell, Table, number, table


def built(found: Sequence[Built]) -> Table:
    """Every target that was compiled for."""
    rows = [
        (one.target, one.triton, ", ".join(one.models) or "all", one.programs, one.before,
         one.compiled, f"{one.seconds:.1f}", f"{one.compiling:.1f}", one.jobs,
         Cell("; ".join(one.failed), "bad"))
        for one in found
    ]  # fmt: skip
    columns = ("target", "Triton", "models", "programs", "there before", "compiled", "seconds",
               "of compilers", "processes", "does not compile")  # fmt: skip
    return table("Built", columns, rows)


def checked(found: Sequence[Checked]) -> Table:
    """Every target that a bundle was compared for."""
    rows = [
        (one.target, one.triton, ", ".join(one.models) or "all", one.reachable,
         Cell(f"{one.held:,}", "good" if one.held == one.reachable else "bad"), one.others,
         one.declined, Cell("; ".join(one.said), "bad"))
        for one in found
    ]  # fmt: skip
    columns = ("target", "Triton", "models", "reachable", "held", "others", "declined calls",
               "missing, stale or damaged")  # fmt: skip
    return table("Held", columns, rows)


def first_calls(found: Sequence[tuple[RunFile, FirstCall]]) -> Table:
    """Every first call, part by part."""
    rows = [
        (
            one.call,
            file.device(one.device),
            one.python,
            *(number(seconds, ".2f") for seconds in (one.torch, one.start, one.package)),
            Cell(one.failed or f"{one.first:.3f}", "good" if one.good else "bad"),
            number(1000 * one.second, ".2f"),
            one.loaded,
            one.compiled,
        )
        for file, one in found
    ]
    columns = ("call", "device", "Python", "import torch s", "start of the device s",
               "import headstart s", "first call s", "second ms", "programs loaded",
               "compiled")  # fmt: skip
    return table("First calls of fresh processes", columns, rows)
