"""`headstart bench host`: how long a call keeps the host, arm by arm."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from headstart.cli.bench import ROUNDS, case_of, names_of
from headstart.cli.commands import Command, need
from headstart.cli.devices import device_of
from headstart.cli.options import device_option, json_option, options_of, seed_option
from headstart.cli.progress import progress_words

if TYPE_CHECKING:
    from headstart.evidence.host import HostResult


@click.command(cls=Command)
@click.argument("case_ids", metavar="CASE...", nargs=-1, required=True)
@click.option("--arms", default="headstart", show_default=True, metavar="A,B,...")
@click.option("--rounds", type=ROUNDS, default=60, show_default=True)
@device_option()
@seed_option("Of the inputs.")
@json_option
@click.pass_context
def host(
    ctx: click.Context,
    case_ids: tuple[str, ...],
    arms: str,
    rounds: int,
    device: str | None,
    seed: int,
    json_file: str | None,
) -> None:
    """Host time of steady calls on CASEs: in a row, on an idle device, after other work.

    Arms are those of `bench run`; their outputs are not checked here. Exits with 1 if one failed.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.evidence import runs
    from headstart.evidence.arms.sources import Sources
    from headstart.evidence.benching import DeviceLost
    from headstart.evidence.host import host_of_case

    if json_file is not None:
        runs.expect_writable(json_file)
    names, chosen, place = names_of(arms), [case_of(id) for id in case_ids], device_of(device)
    results: list[HostResult] = []
    with Sources(names) as sources:
        for case in chosen:
            try:
                found = host_of_case(
                    case,
                    names,
                    sources,
                    device=place,
                    seed=seed,
                    rounds=rounds,
                    progress=progress_words(case.id),
                )
            except DeviceLost as lost:
                print(f"headstart: {case.id}: {lost}", file=sys.stderr)
                ctx.exit(1)
            _print(found)
            results += found
            if json_file is not None:  # after every case: a run that is cut short is not lost
                runs.save(json_file, "host", results, options_of(ctx))
    ctx.exit(1 if any(one.status == "failed" for one in results) else 0)


def _print(found: list[HostResult]) -> None:
    from headstart.cli.printing import console, print_table
    from headstart.evidence.host import HostResult

    first = found[0]
    title = f"{first.case} on {first.device}, {first.rounds} rounds, {first.calls} calls in a row"
    print_table(HostResult.COLUMNS, [one.cells for one in found], title)
    for one in found:
        for words in (f"{one.status}, {one.sentence}" if one.sentence else "", one.note):
            if words:
                console().print(f"{one.arm}: {words}", markup=False)
    print()
