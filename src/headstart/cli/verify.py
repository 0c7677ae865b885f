"""`headstart verify`: whether an implementation is right, figure by figure."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from headstart.cli import options
from headstart.cli.commands import Command, Group, need
from headstart.cli.devices import device_of
from headstart.cli.options import cores, device_option, json_option, options_of, seed_option
from headstart.cli.progress import progress_bar

if TYPE_CHECKING:
    from headstart.evidence.cases import Case
    from headstart.evidence.verify import Verification

OPERATIONS = ("gated_delta_rule", "extend_attention", "causal_conv1d")
AGAINST = ("reference", "onnxruntime", "transformers", "fla", "flashinfer", "sdpa")
DTYPES = (*options.DTYPES, "float64")
PARTS = {
    "bits": "headstart.cli.verify_promises",
    "soak": "headstart.cli.verify_soak",
    "transcript": "headstart.cli.verify_promises",
    "tiles": "headstart.cli.verify_tiles",
    "mutants": "headstart.cli.verify_mutants",
}
"""Subcommand -> the module that has it, as an attribute of the same name."""
STEPS = 1000
"""Of a progress bar."""
FEW = 12
"""Up to so many verifications are shown output by output."""


class Parts(Group):
    """Subcommands by name; anything else is a case for `cases`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the subcommands."""
        return list(PARTS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand called `cmd_name`, or None."""
        if cmd_name == cases.name:
            return cases
        if cmd_name not in PARTS:
            return None
        return getattr(importlib.import_module(PARTS[cmd_name]), cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Send everything that names no subcommand to `cases`."""
        first = args[0] if args else ""
        if first not in PARTS and first not in ctx.help_option_names:
            args = ["cases", *args]
        return super().parse_args(ctx, args)


@click.group(cls=Parts, subcommand_metavar="[CASE ... | PART] [OPTIONS]")
def command() -> None:
    """Verify cases (by default every -small one) against float64, or one of the promises.

    `headstart verify cases --help` lists the options for cases.
    """


def implementations(op: str, name: str) -> list[str]:
    """The implementations of an operation that `name` stands for."""
    from headstart.runtime.dispatch import NAMES, operations

    if name == "all":
        return list(operations()[op].places)
    if name not in NAMES:
        raise ValueError(f"implementation: expected all or one of {list(NAMES)}, got {name!r}")
    return [name]


@click.command("cases", cls=Command)
@click.argument("case_ids", metavar="[CASE ...]", nargs=-1)
@click.option("--op", type=click.Choice(OPERATIONS), help="Only cases of one operation.")
@click.option("--implementation", default="all", show_default=True, metavar="NAME|all")
@click.option("--against", type=click.Choice(AGAINST), default="reference", show_default=True)
@device_option("cpu")
@click.option("--dtype", type=click.Choice(DTYPES), help="In place of the cases' own.")
@seed_option("Of the inputs.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Compute N times; every time must give the same bits.")  # fmt: skip
@click.option("--cache/--no-cache", default=True, help="Keep float64 truths on disk (the default).")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; default: cores of a CPU run.")
@click.option("--outputs", is_flag=True, help="Show every output, however many cases there are.")
@json_option
@click.pass_context
def cases(
    ctx: click.Context,
    case_ids: tuple[str, ...],
    op: str | None,
    implementation: str,
    against: str,
    device: str,
    dtype: str | None,
    seed: int,
    repeats: int,
    cache: bool,
    jobs: int | None,
    outputs: bool,
    json_file: str | None,
) -> None:
    """Compare every output of CASE (by default of all -small cases) with the truth.

    Exits with 1 if a figure exceeds its tolerance.
    """
    need("evidence", "pydantic", "numpy")
    import torch

    from headstart.evidence import runs
    from headstart.evidence.verify import verify_many

    if json_file is not None:
        runs.expect_writable(json_file)
    chosen = _chosen(case_ids, op)
    work = [(case, name) for case in chosen for name in implementations(case.op, implementation)]
    where = device_of(device)
    kind = None if dtype is None else getattr(torch, dtype)
    if jobs is None:
        jobs = cores() if where.type == "cpu" else 1
    found: list[Verification] = []

    def told(one: Verification) -> None:
        found.append(one)
        if json_file is not None:  # after each: a run that is cut short is not lost
            runs.save(json_file, "verify", found, options_of(ctx))

    with progress_bar("verify", STEPS) as show:
        verify_many(
            work,
            processes=jobs,
            against=against,
            seed=seed,
            device=where,
            dtype=kind,
            repeats=repeats,
            kept=cache,
            progress=lambda share: show(int(share * STEPS)),
            told=told,
        )
    expect_some([one.declined for one in found])
    ran = [one for one in found if one.declined is None]
    _print(found, outputs or len(ran) <= FEW)
    ctx.exit(report_failures(f"{one.case}: {one.implementation}: {words}"
                             for one in ran for words in one.failures))  # fmt: skip


def expect_some(declined: Sequence[str | None]) -> None:
    """Raise ValueError, with every reason, where each of these was declined."""
    reasons = list(dict.fromkeys(sentence for sentence in declined if sentence is not None))
    if declined and None not in declined:
        more = f"; and {len(reasons) - FEW} other reasons" if len(reasons) > FEW else ""
        raise ValueError(f"nothing was verified: {'; '.join(reasons[:FEW])}{more}")


def report_failures(sentences: Any) -> int:
    """Print a line for each failure on standard error; the exit code."""
    found = list(sentences)
    for sentence in found:
        print(f"headstart: {sentence}", file=sys.stderr)
    return 1 if found else 0


def _chosen(case_ids: Sequence[str], op: str | None) -> list[Case]:
    from headstart.evidence import cases as catalogue

    if not case_ids:
        found = [case for case in catalogue.catalogue(op) if case.id.endswith(catalogue.SMALL)]
        return [case for case in found if case.op != "model"]
    found = [catalogue.get(id) for id in case_ids]
    for case in found:
        if case.op == "model":
            raise ValueError(
                f"case: {case.id} is a whole model; `headstart prefill --compare` verifies it"
            )
        if op not in (None, case.op):
            raise ValueError(f"case: {case.id} is a case of {case.op}, not of {op}")
    return found


def _print(found: list[Verification], by_output: bool) -> None:
    from headstart.cli.printing import console, print_table

    if by_output:
        print_table(
            (
                "case",
                "implementation",
                "output",
                "1 - cosine",
                "relative L2",
                "last half",
                "worst row",
                "at (row, head)",
                "NaN",
                "unwritten",
                "of tolerance",
                "",
            ),
            [
                (
                    one.case,
                    one.implementation,
                    output.output,
                    f"{1 - output.cosine:.1e}",
                    f"{output.relative:.1e}",
                    "-" if output.last_half is None else f"{output.last_half:.1e}",
                    f"{output.row_error:.1e}",
                    f"({output.row}, {output.head})",
                    str(output.nan),
                    str(output.unwritten),
                    f"{output.excess:.0%}",
                    "pass" if output.passed else "FAIL",
                )
                for one in found
                for output in one.outputs
            ],
        )
    else:
        print_table(
            ("case", "implementation", "outputs", "of tolerance", "seconds", ""),
            [
                (
                    one.case,
                    one.implementation,
                    " ".join(output.output.replace(" ", "-") for output in one.outputs),
                    f"{one.excess:.0%}",
                    f"{one.seconds:.1f}",
                    "pass" if one.passed else "FAIL",
                )
                for one in found
                if one.declined is None
            ],
        )
    declined = [one for one in found if one.declined is not None]
    left: dict[tuple[str, str], list[str]] = {}
    for one in found:
        for note in (*one.notes, *([one.declined] if one.declined is not None else [])):
            left.setdefault((one.implementation, note), []).append(one.case)
    if left:
        print()
        print_table(
            ("case", "implementation", "left out"),
            [
                (f"{cases[0]} and {len(cases) - 1} more" if cases[1:] else cases[0], *what)
                for what, cases in left.items()
            ],
        )
    failed = [one for one in found if not one.passed]
    passed = len(found) - len(declined) - len(failed)
    words = f"\n{passed} passed, {len(failed)} failed, {len(declined)} declined"
    if failed:
        blind = sum(one.cosine_passes for one in failed)
        words += f"; a cosine gate would have let {blind} of {len(failed)} failures pass"
    console().print(words)
