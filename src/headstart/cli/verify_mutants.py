"""`headstart verify mutants`: do the gates fail on known-bad builds?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from headstart.cli.commands import Command, need
from headstart.cli.devices import device_of
from headstart.cli.options import device_option, json_option, options_of, seed_option
from headstart.cli.progress import progress_bar
from headstart.cli.verify import report_failures

if TYPE_CHECKING:
    from headstart.evidence.mutants import Found, Mutant

OPERATIONS = ("gated_delta_rule", "extend_attention", "convolution")
GENERATED = 40
LEAST_KILLED = 0.9
"""Share of the generated mutants that must be killed, explained ones counted as alive."""


@click.command(cls=Command)
@click.argument("names", metavar="[MUTANT ...]", nargs=-1)
@click.option("--op", type=click.Choice(OPERATIONS), help="Only one operation.")
@click.option("--implementation", default="all", show_default=True, metavar="NAME|all")
@device_option("cpu")
@click.option("--generated", type=click.IntRange(min=0), metavar="N",
              help=f"Draw so many more; default: {GENERATED} of what runs on a CPU as it is, none "
              "beside a MUTANT.")  # fmt: skip
@seed_option("Of the generated ones.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True,
              help="Processes, a thread each.")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Show the mutants, run nothing.")
@json_option
@click.pass_context
def mutants(
    ctx: click.Context,
    names: tuple[str, ...],
    op: str | None,
    implementation: str,
    device: str,
    generated: int | None,
    seed: int,
    jobs: int,
    only_list: bool,
    json_file: str | None,
) -> None:
    """Build known-bad copies of the package (by default all that are listed) and see checks fail.

    Exits with 1 if a listed one survives, or a generated one that nobody has explained.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.evidence import runs
    from headstart.evidence.mutants import chosen, drawn, run_mutants, waiting
    from headstart.runtime.dispatch import NAMES

    if implementation != "all" and implementation not in NAMES:
        raise ValueError(
            f"implementation: expected all or one of {list(NAMES)}, got {implementation!r}"
        )
    if json_file is not None:
        if only_list:
            raise ValueError("json: --list runs nothing that could be written")
        runs.expect_writable(json_file)
    where = str(device_of(device))
    picked = chosen(op, implementation, device=where, names=names)
    if generated is None:
        usual = implementation in ("all", "torch") and where == "cpu" and not names
        generated = GENERATED if usual else 0
    spare = iter(())
    if generated:
        more, spare = drawn(generated, op, implementation, device=where, seed=seed)
        picked += more
    if only_list:
        _print_list(picked)
        return
    options = options_of(ctx) | {"generated": generated}
    began = time.perf_counter()
    ended: list[Found] = []
    doubts: list[str] = []
    with progress_bar("mutants", len(picked)) as show:

        def told(found: Found) -> None:
            ended.append(found)
            show(len(ended))
            if json_file is not None:  # after each: a run that is cut short is not lost
                runs.save(json_file, "mutants", ended, options)

        found = run_mutants(picked, where, jobs=jobs, spare=spare, told=told, doubted=doubts.append)
    _print(found, time.perf_counter() - began)
    if where == "cpu" and not names:
        _print_waiting(waiting(op, implementation))
    if json_file is not None:
        runs.save(json_file, "mutants", found, options)
    ctx.exit(report_failures([*doubts, *_failures(found)]))


def _failures(found: Sequence[Found]) -> list[str]:
    sentences = []
    for one in found:
        if one.killed_by is None and one.equivalent is None:
            words = f"mutants: {one.mutant} survives {one.checks} checks: {one.fault}"
            sentences.append(words + (f" (ops/{one.file})" if one.generated else ""))
        elif one.killed_by is not None and one.equivalent is not None:
            sentences.append(
                f"mutants: {one.mutant} is explained as equivalent, yet {one.killed_by!r} kills it:"
                f" {one.fault} (ops/{one.file})"
            )
    drawn = [one for one in found if one.generated]
    killed = sum(one.killed_by is not None for one in drawn)
    if killed < LEAST_KILLED * len(drawn):
        sentences.append(
            f"mutants: {killed} of {len(drawn)} generated ones are killed, expected "
            f"{LEAST_KILLED:.0%}"
        )
    return sentences


def _print_list(picked: Sequence[Mutant]) -> None:
    from headstart.cli.printing import print_table

    print_table(
        ("mutant", "operation", "implementation", "pitfall", "file", "fault"),
        [
            (one.name, one.op, one.implementation, one.pitfall or "-", one.file, one.fault)
            for one in picked
        ],
    )


def _print(found: Sequence[Found], seconds: float) -> None:
    from headstart.cli.printing import console, print_table

    print_table(
        (
            "mutant",
            "operation",
            "implementation",
            "pitfall",
            "killed by",
            "of tolerance",
            "cosine gate",
            "seconds",
        ),
        [
            (
                one.mutant,
                one.op,
                one.implementation,
                one.pitfall or "-",
                one.killed_by or "SURVIVES",
                "-" if one.killed_by is None else f"{one.excess:.3g} x",
                {None: "not asked", True: "lets it live", False: "fails"}[one.cosine_passes],
                f"{one.seconds:.1f}",
            )
            for one in found
        ],
    )
    console().print()
    _print_totals(found)
    killed = [one for one in found if one.killed_by is not None]
    blind = sum(one.cosine_passes is True for one in killed)
    unasked = sum(one.cosine_passes is None for one in killed)
    console().print(
        f"\n{len(killed)} of {len(found)} killed in {seconds:.0f} s; a cosine gate at 0.999 lets "
        f"{blind} of them live, and cannot see the {unasked} that only bits or transcripts show"
    )
    drawn = [one for one in found if one.generated]
    if drawn:
        killed = sum(one.killed_by is not None for one in drawn)
        explained = sum(one.killed_by is None and one.equivalent is not None for one in drawn)
        console().print(
            f"generated: {killed} of {len(drawn)} killed ({killed / len(drawn):.1%}), "
            f"{explained} explained as equivalent"
        )
    for one in drawn:
        if one.killed_by is None:
            console().print(f"  {one.mutant} (ops/{one.file}), {one.fault}")
            console().print(f"    {one.equivalent or 'NOT EXPLAINED'}")


def _print_totals(found: Sequence[Found]) -> None:
    from headstart.cli.printing import print_table

    parts: dict[tuple[str, str, str], list[Found]] = {}
    for one in found:
        kind = "generated" if one.generated else "listed"
        parts.setdefault((one.op, one.implementation, kind), []).append(one)
    print_table(
        ("operation", "implementation", "mutants", "of", "killed", "a cosine gate lets live"),
        [
            (
                *part,
                len(mine),
                sum(one.killed_by is not None for one in mine),
                sum(one.killed_by is not None and one.cosine_passes is True for one in mine),
            )
            for part, mine in parts.items()
        ],
    )


def _print_waiting(mutants: Sequence[Mutant]) -> None:
    from headstart.cli.printing import console

    if mutants:
        console().print(
            f"\n{len(mutants)} more wait for a device: "
            "headstart verify mutants --implementation triton --device cuda"
        )
    for mutant in mutants:
        console().print(f"  {mutant.name}: {mutant.device_only}")
