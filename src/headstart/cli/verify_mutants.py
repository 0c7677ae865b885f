"""`headstart verify mutants`: do the gates fail on known-bad builds?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from headstart.cli.commands import need
from headstart.cli.verify import device_option, place, report_failures

if TYPE_CHECKING:
    from headstart.evidence.mutants import Found, Mutant

OPERATIONS = ("gated_delta_rule", "extend_attention", "convolution")


@click.command()
@click.argument("names", metavar="[MUTANT ...]", nargs=-1)
@click.option("--op", type=click.Choice(OPERATIONS), help="Only one operation.")
@click.option("--implementation", default="all", show_default=True, metavar="NAME|all")
@device_option
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True,
              help="Processes, a thread each.")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Show the mutants, run nothing.")
@click.option("--json", "json_file", metavar="FILE", help="Write what was found there.")
@click.pass_context
def mutants(
    ctx: click.Context,
    names: tuple[str, ...],
    op: str | None,
    implementation: str,
    device: str,
    jobs: int,
    only_list: bool,
    json_file: str | None,
) -> None:
    """Build known-bad copies of the package (by default all that are listed) and see checks fail.

    Exits with 1 if one survives.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.cli.prefill import progress_bar
    from headstart.evidence import runs
    from headstart.evidence.mutants import chosen, run_mutants
    from headstart.runtime.dispatch import NAMES

    if implementation != "all" and implementation not in NAMES:
        raise ValueError(
            f"implementation: expected all or one of {list(NAMES)}, got {implementation!r}"
        )
    if json_file is not None:
        runs.expect_writable(json_file)
    where = str(place(device))
    picked = chosen(op, implementation, device=where, names=names)
    if only_list:
        _print_list(picked)
        return
    done = 0
    with progress_bar("mutants", len(picked)) as show:

        def told(found: Found) -> None:
            nonlocal done
            done += 1
            show(done)

        found = run_mutants(picked, where, jobs=jobs, told=told)
    _print(found)
    if json_file is not None:
        options = {"op": op, "implementation": implementation}
        runs.save(json_file, "mutants", found, options)
    ctx.exit(report_failures(_failures(found)))


def _failures(found: Sequence[Found]) -> list[str]:
    return [
        f"mutants: {one.mutant} survives {one.checks} checks: {one.fault}"
        for one in found
        if one.killed_by is None
    ]


def _print_list(picked: Sequence[Mutant]) -> None:
    from headstart.cli.printing import print_table

    print_table(
        ("mutant", "operation", "implementation", "pitfall", "file", "fault"),
        [
            (one.name, one.op, one.implementation, one.pitfall or "-", one.file, one.fault)
            for one in picked
        ],
    )


def _print(found: Sequence[Found]) -> None:
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
    killed = [one for one in found if one.killed_by is not None]
    blind = sum(one.cosine_passes is True for one in killed)
    unasked = sum(one.cosine_passes is None for one in killed)
    console().print(
        f"\n{len(killed)} of {len(found)} killed; a cosine gate at 0.999 lets {blind} of them "
        f"live, and cannot see the {unasked} that only bits or transcripts show"
    )
