"""Known-bad builds that nobody thought of: edits drawn from the computing lines of an operation.

Modules are drawn from in proportion to their edits, and of each the kinds of edits in turn, or
constants would crowd out the rest. The same seed and sources give the same list. Each build is
judged by all checks of its operation, of which listed mutants name single ones.
"""

from __future__ import annotations

import ast
import functools
import random
from collections.abc import Iterator
from itertools import count, zip_longest
from operator import itemgetter
from pathlib import Path

import headstart
from headstart.evidence.mutants.checks import GENERAL
from headstart.evidence.mutants.edits import KINDS, Edit, edits
from headstart.evidence.mutants.record import Mutant

OPS = Path(headstart.__file__).parent / "ops"
SOURCES: dict[tuple[str, str], tuple[str, ...]] = {
    ("gated_delta_rule", "torch"): (
        "activations.py",
        *(f"gated_delta_rule/{name}.py" for name in (
            "chunk_products", "chunk_scan", "steps", "stores", "token_steps", "decomposed", "gate",
            "cache",
        )),
    ),
    ("extend_attention", "torch"): tuple(
        f"extend_attention/{name}.py" for name in (
            "band", "flash", "fixed_tiles", "tiled", "merging", "tiles", "keys", "locate",
            "decomposed", "writing",
        )
    ),
    ("convolution", "torch"): ("convolution/decomposed.py", "convolution/histories.py"),
    ("gated_delta_rule", "triton"): (
        "gated_delta_rule/chunk_table.py", "gated_delta_rule/passes", "gated_delta_rule/triton",
    ),
    ("extend_attention", "triton"): (
        "extend_attention/tile_table.py", "extend_attention/triton",
    ),
    ("convolution", "triton"): ("convolution/triton",),
}  # fmt: skip
"""(operation, implementation) -> its modules below ops, and folders of modules."""
NO_KERNELS = ("__init__.py", "static.py", "scratch.py", "config.py")
"""Modules of a folder that compute nothing: sizes, configurations and lists of them."""


def modules(op: str, implementation: str, ops: Path = OPS) -> list[str]:
    """The modules whose lines are edited."""
    found = []
    for name in SOURCES[op, implementation]:
        place = ops / name
        inside = sorted(place.glob("*.py")) if place.is_dir() else [place]
        found += [str(path.relative_to(ops)) for path in inside if path.name not in NO_KERNELS]
    return found


def generated(
    op: str | None = None,
    implementation: str = "all",
    *,
    seed: int = 0,
    ops: Path = OPS,
) -> Iterator[Mutant]:
    """Mutants in the order in which they are drawn, until no edit is left.

    Raises ValueError where the operation or the implementation has no sources.
    """
    draws: list[tuple[float, tuple[str, str], str, str, Edit]] = []
    for owner in SOURCES:
        if op in (None, owner[0]) and implementation in ("all", owner[1]):
            for file in modules(*owner, ops):
                # One generator a module: a change in one draws no other edits of the rest.
                text, at = (ops / file).read_text(), random.Random(f"{seed} {file}")
                mine = _shuffled(edits(text), at)
                for i, edit in enumerate(mine):
                    draws.append(((i + at.random()) / len(mine), owner, file, text, edit))
    if not draws:
        raise ValueError(
            f"generated: no sources for op {op or 'any'}, implementation {implementation}"
        )
    numbers = count()
    for _, owner, file, text, edit in sorted(draws, key=itemgetter(0)):
        if _changes(text, edit):
            yield _mutant(owner, file, text, edit, next(numbers), GENERAL[owner])


def _shuffled(found: list[Edit], at: random.Random) -> list[Edit]:
    """Edits in a drawn order, their kinds in turn while there are any of each."""
    kinds = [[edit for edit in found if edit.kind == kind] for kind in KINDS]
    for mine in kinds:
        at.shuffle(mine)
    return [edit for row in zip_longest(*kinds) for edit in row if edit is not None]


def _changes(text: str, edit: Edit) -> bool:
    """Whether the edited text is a program, and another one."""
    try:
        return _tree(edit.apply(text)) != _kept_tree(text)
    except SyntaxError:
        return False


def _tree(text: str) -> str:
    return ast.dump(ast.parse(text))


_kept_tree = functools.cache(_tree)


def _mutant(
    owner: tuple[str, str], file: str, text: str, edit: Edit, number: int, checks: tuple[str, ...]
) -> Mutant:
    """An edit as lines that occur once in the file, and what takes their place."""
    first = text.rfind("\n", 0, edit.begin) + 1
    end = text.index("\n", edit.end)
    while text.count(text[first:end]) > 1:
        first = text.rfind("\n", 0, first - 1) + 1
    new = text[first : edit.begin] + edit.new + text[edit.end : end]
    line = text.count("\n", 0, edit.begin) + 1
    words = f"{text[edit.begin : edit.end]!r} became {edit.new!r} in line {line}"
    return Mutant(
        name=f"generated-{number}",
        fault=f"{words}: {text.splitlines()[line - 1].strip()}",
        op=owner[0],
        implementation=owner[1],
        file=file,
        old=text[first:end],
        new=new,
        checks=checks,
        generated=True,
    )
