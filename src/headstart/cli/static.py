"""`headstart static`: what a compiler makes of every kernel, for eight targets, without a GPU."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstart.cli.commands import Command, need
from headstart.cli.options import json_option, options_of
from headstart.cli.progress import progress_count

if TYPE_CHECKING:
    from headstart.evidence.static.parts import Part

COLUMNS = (
    "kernel",
    "target",
    "registers",
    "vector spills",
    "scalar spills",
    "shared",
    "blocks",
    "matrix",
    "loads",
    "instructions",
    "",
)


@click.command(cls=Command)
@click.option("--kernel", "pattern", default="*", metavar="PATTERN", help="Only names that fit.")
@click.option(
    "--target", "targets", multiple=True, metavar="T", help="cuda:90, gfx942, ...; by default all."
)
@click.option(
    "--part", "share", default="1/1", metavar="I/N", help="One share of N; by default all."
)
@click.option(
    "--diff",
    "other",
    metavar="OTHER",
    help="Compare instructions: with a run's JSON, a git revision, or another kernel's name.",
)
@click.option(
    "--triton-python",
    "pythons",
    multiple=True,
    metavar="PATH",
    help="Another interpreter with another Triton, compared with this one's.",
)
@click.option(
    "--place",
    "places",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="List kernels from here instead of the registered places.",
)
@click.option(
    "--report-budgets", is_flag=True, help="Print broken budgets, but do not exit with 1 for them."
)
@click.option("--list", "only_list", is_flag=True, help="Show the kernels, compile nothing.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    pattern: str,
    targets: tuple[str, ...],
    share: str,
    other: str | None,
    pythons: tuple[str, ...],
    places: tuple[str, ...],
    report_budgets: bool,
    only_list: bool,
    json_file: str | None,
) -> None:
    """Cross-compile kernels; print registers, spills, shared memory and instructions.

    Exits with 1 when a budget is broken, or --diff finds a differing instruction. Budgets are this
    interpreter's; with another's Triton a kernel must compile, fit and not spill much more.
    """
    need("evidence", "pydantic")
    from headstart.cli.printing import console, print_table
    from headstart.evidence import runs
    from headstart.evidence.static import diff
    from headstart.evidence.static.budgets import failures, spilled_more
    from headstart.evidence.static.collect import collect_each, kernels, resolve_targets
    from headstart.evidence.static.parts import Part

    if json_file is not None:
        runs.expect_writable(json_file, sources=[] if other is None else [other])
    for place in places:
        if place.count(":") != 1 or not all(place.split(":")):
            raise ValueError(f"place: expected MODULE:FUNCTION, got {place!r}")
    for python in pythons:
        if shutil.which(python) is None:
            raise ValueError(f"triton-python: cannot start {python}")
    asked = {place: place for place in places} or None
    chosen = resolve_targets(targets)
    part = Part.parse(share)
    within = "" if part.count == 1 else f", in part {part}"
    where = f"{', '.join(chosen)}{within}"
    nothing = f"kernel: nothing registered fits {pattern!r} on {where} (--list shows)"
    if only_list:
        if json_file is not None:
            raise ValueError("json: --list compiles nothing that could be written")
        if not (found := kernels(chosen, pattern=pattern, part=part, places=asked)):
            raise ValueError(nothing)
        print_table(("operation", "kernel", "target"), found)
        return
    with (
        progress_count("static") as progress,
        _other_side(other, asked, chosen, pattern, part) as compare,
    ):
        results, *by_python = collect_each(
            [sys.executable, *pythons],
            chosen,
            pattern=pattern,
            part=part,
            places=asked,
            progress=progress,
        )
        compared = compare(results)
    if not results:
        raise ValueError(nothing)

    everything = [*results, *(result for group in by_python for result in group)]
    if json_file is not None:
        runs.save(json_file, "static", everything, options_of(ctx))
    for title, group in ((f"Triton {g[0]['triton']}", g) for g in (results, *by_python) if g):
        print_table(COLUMNS, [_row(result) for result in group], title=title if pythons else "")
    if part.count > 1:
        console().print(f"part {part}: {len(results)} kernels")

    failed, forgiven = False, 0
    for result in results:
        fatal = failures(result) if report_budgets else result["broken"]
        failed |= bool(fatal)
        forgiven += len(result["broken"]) > len(fatal)
        _print_broken(result, result["broken"])
    for group in by_python:
        found = [(theirs, sentence) for theirs in group for sentence in failures(theirs)]
        found += [
            (theirs, sentence)
            for ours, theirs in diff.pairs(results, group)
            if (sentence := spilled_more(ours, theirs))
        ]
        failed |= bool(found)
        for theirs, sentence in found:
            _print_broken(theirs, [sentence])
        rows = diff.spill_differences(results, group)
        versions = [f"Triton {side[0]['triton']}" for side in (results, group)]
        if rows:
            print_table(("kernel", "target", "differs", *versions), rows)
        console().print(f"{len(rows)} differences between Triton versions in spills")
    if forgiven:
        console().print(f"{forgiven} kernels break a budget, which --report-budgets lets pass")
    if compared is not None:
        failed |= _print_differences(compared)
    ctx.exit(1 if failed else 0)


def _print_broken(result: Mapping[str, Any], sentences: list[str]) -> None:
    from headstart.cli.printing import console

    for sentence in sentences:
        console().print(
            f"BROKEN {result['kernel']} on {result['target']} (Triton {result['triton']}): "
            f"{sentence}",
            markup=False,
        )


Comparison = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]


@contextmanager
def _other_side(
    other: str | None,
    places: dict[str, str] | None,
    targets: list[str],
    pattern: str,
    part: Part,
) -> Iterator[Any]:
    """A function from results to pairs to compare (None: nothing is), for any kind of OTHER."""
    from headstart.evidence import revisions, runs
    from headstart.evidence.static import diff
    from headstart.evidence.static.collect import collect

    if other is None:
        yield lambda results: None
    elif Path(other).is_file():
        others = runs.load(other, kind="static").results
        yield lambda results: diff.pairs(results, others)
    elif revisions.commit(other) is not None:
        with revisions.worktree(other) as folder:
            source = folder / "src"
            others = collect(targets, pattern=pattern, part=part, places=places, source=source)
            yield lambda results: diff.pairs(results, others)
    else:

        def same_target(results: list[dict[str, Any]]) -> Comparison:
            one = collect(targets, pattern=other, places=places)
            if not one:
                raise ValueError(
                    f"diff: {other!r} is no file, no git revision and no registered kernel"
                )
            return diff.against_kernel([*results, *one], other)

        yield same_target


def _print_differences(compared: Comparison) -> bool:
    """Print what differs; whether anything does."""
    from headstart.cli.printing import console
    from headstart.evidence.static import diff

    if not compared:
        raise ValueError("diff: no kernel stands on both sides")
    differing = 0
    for result, other in compared:
        sentence = diff.difference(result, other)
        beside = f" beside {other['kernel']}" if other["kernel"] != result["kernel"] else ""
        differing += bool(sentence)
        console().print(
            f"{'DIFFERS' if sentence else 'identical'} {result['kernel']}{beside} "
            f"on {result['target']}" + (f": {sentence}" if sentence else ""),
            markup=False,
        )
    console().print(f"{len(compared) - differing} of {len(compared)} identical")
    return differing > 0


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    if result["error"]:
        return (result["kernel"], result["target"], *["-"] * 8, "FAILS")
    scalar = result["scalar_spills"]
    return (
        result["kernel"],
        result["target"],
        result["registers"],
        result["vector_spills"],
        "-" if scalar is None else scalar,
        result["shared"],
        result["resident_blocks"],
        _counts(_shortened(result["matrix"])),
        _counts(result["loads"]),
        result["instructions"],
        "BROKEN" if result["broken"] else "ok",
    )


def _shortened(matrix: dict[str, int]) -> dict[str, int]:
    """Matrix instructions by family: HGMMA, v_mfma, v_wmma."""
    families: dict[str, int] = {}
    for opcode, count in matrix.items():
        family = "_".join(opcode.split(".")[0].split("_")[:2])
        families[family] = families.get(family, 0) + count
    return families


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "none"
