"""`headstart verify bits` and `headstart verify transcript`: the promises, one command each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headstart.cli.commands import Command, need
from headstart.cli.devices import device_of
from headstart.cli.options import cores, device_option, json_option, options_of, seed_option
from headstart.cli.progress import progress_bar
from headstart.cli.verify import OPERATIONS, expect_some, implementations, report_failures

if TYPE_CHECKING:
    from headstart.evidence.verify.bits import Bits
    from headstart.evidence.verify.transcript import Transcript


@click.command(cls=Command)
@click.option("--op", type=click.Choice(OPERATIONS), help="Only one operation.")
@click.option("--implementation", default="all", show_default=True, metavar="NAME|all")
@device_option("cpu")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that share the checks, or compile for a GPU first; one a core.",
)
@json_option
@click.pass_context
def bits(
    ctx: click.Context,
    op: str | None,
    implementation: str,
    device: str,
    jobs: int | None,
    json_file: str | None,
) -> None:
    """Compare bits: splits, hits, batches, heads, drafts and pages against a cold prefill.

    Exits with 1 if one bit differs.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.cli.printing import console, print_table
    from headstart.evidence import runs
    from headstart.evidence.verify.bits import CHECKS, verify_bits

    if json_file is not None:
        runs.expect_writable(json_file)
    where, jobs = device_of(device), jobs or cores()
    found: list[Bits] = []
    for operation in [op] if op else OPERATIONS:
        _, forms, checks = CHECKS[operation]
        for name in implementations(operation, implementation):
            before = len(found)
            with progress_bar(f"{operation} {name}", len(forms) * len(checks)) as show:

                def told(one: Bits, show: Any = show, before: int = before) -> None:
                    found.append(one)
                    show(len(found) - before)
                    if json_file is not None:  # after each: a run that is cut short is not lost
                        runs.save(json_file, "bits", found, options_of(ctx))

                verify_bits(operation, name, device=where, jobs=jobs, told=told)
    expect_some([one.declined for one in found])
    print_table(
        ("operation", "implementation", "check", "form", "compared", "differing", ""),
        [
            (
                one.op,
                one.implementation,
                one.check,
                one.form,
                one.compared,
                one.differing,
                "pass" if one.passed else f"FAIL: {one.where}",
            )
            for one in found
            if one.declined is None
        ],
    )
    left = {(one.op, one.implementation, one.declined): None for one in found if one.declined}
    if left:
        print()
        print_table(("operation", "implementation", "left out"), left)
    compared, differing = (sum(getattr(one, name) for one in found)
                           for name in ("compared", "differing"))  # fmt: skip
    console().print(f"\n{compared:,} tensors compared, {differing:,} with another bit")
    ctx.exit(
        report_failures(
            f"{one.op}: {one.implementation}: {one.check}, {one.form}: {one.differing} of "
            f"{one.compared} tensors differ, the first: {one.where}"
            for one in found
            if not one.passed
        )
    )


@click.command(cls=Command)
@click.option("--implementation", default="torch", show_default=True, metavar="NAME|all")
@device_option("cpu")
@click.option("--count", type=click.IntRange(1, 100_000), default=12, show_default=True,
              help="Transcripts.")  # fmt: skip
@click.option("--turns", type=click.IntRange(min=1), default=40, show_default=True,
              help="Random events of each.")  # fmt: skip
@seed_option("Of the first transcript.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True,
              help="Processes, a thread each.")  # fmt: skip
@click.option("--convolution/--no-convolution", default=True, help="Keep its histories too.")
@json_option
@click.pass_context
def transcript(
    ctx: click.Context,
    implementation: str,
    device: str,
    count: int,
    turns: int,
    seed: int,
    jobs: int,
    convolution: bool,
    json_file: str | None,
) -> None:
    """Replay random transcripts of an engine in float64: state, history, output and bits.

    They step, decode, verify k drafts and accept j, keep and evict snapshots, reuse slots, restore,
    preempt, move out and in, and cancel. Exits with 1 if one is not as the replay says.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.cli.printing import print_table
    from headstart.evidence import runs
    from headstart.evidence.verify.transcript import verify_transcripts

    if json_file is not None:
        runs.expect_writable(json_file)
    where = device_of(device)
    found: list[Transcript] = []
    declined = []
    for name in implementations("gated_delta_rule", implementation):
        before = len(found)
        with progress_bar(f"transcripts of {name}", count) as show:

            def told(one: Transcript, show: Any = show, before: int = before) -> None:
                found.append(one)
                show(len(found) - before)
                if json_file is not None:  # after each: a run that is cut short is not lost
                    runs.save(json_file, "transcript", found, options_of(ctx))

            _, left = verify_transcripts(
                name,
                seed,
                count,
                processes=jobs,
                convolution=convolution,
                turns=turns,
                device=where,
                told=told,
            )
        declined += [(name, form, reason) for form, reason in left.items()]
    if not found:
        expect_some([reason for _, _, reason in declined])
    events = sorted({event for one in found for event in one.events})
    print_table(
        ("implementation", "form", "seed", "rows", "of tolerance", ""),
        [
            (
                one.implementation,
                one.form,
                one.seed,
                one.rows,
                f"{one.excess:.0%}",
                f"FAIL: {one.failure}" if one.failure else "pass",
            )
            for one in found
        ],
    )
    print()
    print_table(
        ("event", "times"), [(e, sum(one.events.get(e, 0) for one in found)) for e in events]
    )
    if declined:
        print()
        print_table(("implementation", "form", "left out"), declined)
    ctx.exit(
        report_failures(
            f"transcript {one.seed} ({one.form}): {one.implementation}: {one.failure}"
            for one in found
            if one.failure
        )
    )
