"""Tables and JSON on standard output."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from headstart.evidence.stages import Stage

UNBOUNDED = 10_000
NUMBER = re.compile(r"-|-?inf( x)?|nan|[+-]?[\d,.]*\d(e[+-]?\d+)?(%| x|/\d+)?")


def console(*, stderr: bool = False) -> Console:
    """A console that wraps at the terminal's width, and not at all in a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNBOUNDED
    return Console(file=stream, width=width, highlight=False, soft_wrap=width is not None)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """A plain table; columns whose cells are all numbers are aligned to the right.

    A number is one of Python's, or a text such as "1.50", "3.1e-04", "78%", "663 x" or "38/60";
    "-" stands for none.
    """
    rows = [tuple(row) for row in rows]
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for index, name in enumerate(columns):
        numbers = bool(rows) and all(NUMBER.fullmatch(str(row[index])) for row in rows)
        table.add_column(
            name, justify="right" if numbers else "left", no_wrap=index == 0, overflow="fold"
        )
    for row in rows:
        table.add_row(*(cell_text(cell) for cell in row))
    console().print(table)


def print_stages(stages: Iterable[Stage], of: float | None, title: str) -> None:
    """What kernels (operators on a CPU) took, and their share of so many microseconds."""
    rows = [(name[:90], *rest) for name, *rest in (stage.cells(of) for stage in stages)]
    print_table(("kernel or operator", "times", "us", "share"), rows, title)


def cell_text(cell: object) -> str:
    """Numbers with thousands marked, everything else as it is, markup escaped."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return str(cell).replace("[", r"\[")


def print_json(data: Any) -> None:
    """Indented JSON, and nothing else."""
    print(json.dumps(data, indent=2))


def binary_size(count: float) -> str:
    """Bytes in the unit that reads best.

    >>> binary_size(5), binary_size(3 * 2**20), binary_size(1.5 * 2**30)
    ('5 B', '3.0 MiB', '1.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
