"""`headstart tune`: the fastest configuration of each kernel, as rows of a device's table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from headstart.evidence.tuning.results import KeyResult

OPERATIONS = ("extend_attention", "gated_delta_rule", "causal_conv1d", "rms_norm_gated")


@click.command(cls=Command)
@click.option("--op", "operation", type=click.Choice(OPERATIONS), required=True)
@click.option("--cases", "patterns", multiple=True, default=("*",), metavar="PATTERN",
              help="Ids of `headstart cases list`; small ones by patterns in -small.")  # fmt: skip
@device_option()
@click.option("--dtype", default="", metavar="DTYPE", help="In place of the cases' own.")
@click.option("--shares", default="1", show_default=True, metavar="S,...",
              help="Of the cases' lengths: 1,0.25 shows whether the ranking moves.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=3), default=20, show_default=True)
@click.option("--walks", type=click.IntRange(min=1), default=1, show_default=True,
              help="Steps from the rule's towards the fastest.")  # fmt: skip
@click.option("--gain", type=click.FloatRange(min=0), default=0.0, metavar="SHARE",
              help="Regret up to which a row is the rule's: 0.05.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compilers; one a core.")
@click.option("--seconds", type=Seconds(0), metavar="N",
              help="Begin no further key after these.")  # fmt: skip
@seed_option("Of the inputs.")
@click.option("-o", "--output", metavar="TABLE", help="Written, or its rows replaced by key.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    operation: str,
    patterns: tuple[str, ...],
    device: str | None,
    dtype: str,
    shares: str,
    rounds: int,
    walks: int,
    gain: float,
    jobs: int | None,
    seconds: float | None,
    seed: int,
    output: str | None,
    json_file: str | None,
) -> None:
    """Time configurations of the kernels that an operation's cases launch, and rank them.

    Both files are written after each key, so an interrupted run keeps what it measured.
    """
    need("evidence", "pydantic", "numpy")

    from headstart.cli.verify import DTYPES
    from headstart.evidence.benching import DeviceLost
    from headstart.evidence.files import expect_writable
    from headstart.evidence.tuning.job import Kept, chosen_points, table_at, tune
    from headstart.evidence.tuning.sweep import plan
    from headstart.runtime.declined import Declined
    from headstart.runtime.launcher import declines_tensors

    if math.isnan(gain):
        raise ValueError("gain: expected a number, got nan")
    if dtype and dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {list(DTYPES)}, got {dtype!r}")
    if output is not None:
        expect_writable(output, "output")
    if json_file is not None:
        expect_writable(json_file, sources=[] if output is None else [output])
    where = device_of(device)
    points = chosen_points(operation, patterns, _shares(shares), dtype)
    if sentence := declines_tensors(where, points[0].case.torch_dtype):
        raise Declined(f"tune on {where}: {sentence}")
    keep = Kept(options=options_of(ctx) | {"device": str(where)}, gain=gain)
    if output is not None:
        keep.table = table_at(Path(output), where)
    if json_file is not None:
        keep.record = Path(json_file)
    planned = plan(points, where)
    if not planned.keys and not planned.left_out:
        raise ValueError(f"cases: {', '.join(patterns)} launch nothing that is configured")
    lost = ""
    with progress_bar(f"tune {operation}", len(planned.keys)) as show:
        try:
            tune(
                planned, where, keep, jobs=jobs or cores(), seconds=seconds,
                count=show, seed=seed, rounds=rounds, walks=walks,
            )  # fmt: skip
        except DeviceLost as reason:
            lost = str(reason)
        finally:  # interrupted too: what was measured is shown
            _print(keep.found)
            for what, why in keep.left_out.items():
                click.echo(f"left out: {what}: {why}")
    if lost:
        click.echo(lost)
    ctx.exit(1 if lost else 0)


def _shares(words: str) -> list[float]:
    try:
        found = [float(word) for word in words.split(",")]
    except ValueError:
        found = []
    if not all(0 < share <= 1 for share in found) or len(set(found)) != len(found) or not found:
        raise ValueError(
            f"shares: expected numbers in (0, 1], each once, with commas between, got {words!r}"
        )
    return found


def _print(found: Sequence[KeyResult]) -> None:
    from headstart.cli.printing import print_table
    from headstart.evidence.tuning.results import WITHIN, KeyResult, changes, worst

    if not found:
        return
    print_table(KeyResult.COLUMNS, [one.cells for one in found])
    for one in found:
        for point in one.points:
            if point.moved:
                words = changes(one.chosen, point.fastest)
                click.echo(f"moved: {one.key}: on {point.point} {words} is faster by "
                           f"{point.chosen_regret:.1%}")  # fmt: skip
        for trial in one.trials:
            if trial.refused:
                words = changes(one.rule, trial.configuration)
                click.echo(f"out: {one.key}: {words}: {trial.refused}")
    most = worst(point for one in found for point in one.points)
    click.echo(f"rule's regret on the worst point: {most:.1%} ({WITHIN:.0%} is asked for)")
