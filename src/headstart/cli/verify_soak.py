"""`headstart verify soak`: minutes of short sequences, and what is left of the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headstart.cli.commands import Command, need
from headstart.cli.devices import device_of
from headstart.cli.options import (
    Seconds,
    cores,
    device_option,
    json_option,
    options_of,
    seed_option,
)
from headstart.cli.progress import progress_bar
from headstart.cli.verify import implementations, report_failures

if TYPE_CHECKING:
    from headstart.evidence.verify.soak import Sample


@click.command(cls=Command)
@click.option("--implementation", default="torch", show_default=True, metavar="NAME|all")
@device_option("cpu")
@click.option("--seconds", type=Seconds(0), default=600, show_default=True, metavar="N",
              help="Of each implementation, from the first laps on.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1, 64), default=4, show_default=True,
              help="Each with a stream, caches and scratch of its own.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N",
              help="Compilers, before the first laps on a GPU; one a core.")  # fmt: skip
@seed_option("Of the laps.")
@json_option
@click.pass_context
def soak(
    ctx: click.Context,
    implementation: str,
    device: str,
    seconds: float,
    threads: int,
    jobs: int | None,
    seed: int,
    json_file: str | None,
) -> None:
    """Bring random batches of short sequences from several threads, and watch bits and memory.

    Exits with 1 if a bit differs, a thread hangs, or memory is lost.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.cli.printing import print_table
    from headstart.evidence import runs
    from headstart.evidence.verify.soak import soak as run

    if json_file is not None:
        runs.expect_writable(json_file)
    where, found = device_of(device), []
    jobs = jobs or cores()
    for name in implementations("gated_delta_rule", implementation):
        with progress_bar(f"soak of {name}", int(seconds)) as show:

            def told(sample: Sample, show: Any = show) -> None:
                show(min(int(sample.seconds), int(seconds)))

            one = run(name, device=where, seconds=seconds, threads=threads, jobs=jobs, seed=seed,
                      told=told)  # fmt: skip
            found.append(one)
        if json_file is not None:  # after each: a run that is cut short is not lost
            runs.save(json_file, "soak", found, options_of(ctx))
    columns = ("implementation", "seconds", "laps", "sequences", "calls", "compared",
               "host MiB", "device MiB", "scratch MiB", "")  # fmt: skip
    print_table(columns, [one.cells for one in found])
    ctx.exit(report_failures(f"{one.implementation}: {words}"
                             for one in found for words in one.failures))  # fmt: skip
