"""`headstart cases`: the workloads as data."""

from __future__ import annotations

from typing import Any

import click

from headstart.cli.commands import Group

OPERATIONS = ("gated_delta_rule", "extend_attention", "causal_conv1d", "model")


@click.group(cls=Group)
def command() -> None:
    """List the workloads, or show one."""


@command.command("list")
@click.option("--op", type=click.Choice(OPERATIONS), help="Only those of one operation.")
@click.option("--small", is_flag=True, help="The -small sibling of every case too.")
@click.option("--json", "as_json", is_flag=True, help="All records, small siblings included.")
def list_cases(op: str | None, small: bool, as_json: bool) -> None:
    """Print id, sizes and reason of every case."""
    from headstart.cli.printing import console, print_json, print_table
    from headstart.evidence import cases

    if as_json:
        print_json([_complete(case) for case in cases.catalogue(op)])
        return
    found = cases.catalogue(op, small=small)
    print_table(
        ("id", "operation", "sizes", "tokens", "why"),
        [(case.id, case.op, _sizes(case), case.tokens, case.why) for case in found],
    )
    if not small and op != "model":
        console().print("\nEvery case of an operation has a -small sibling.")


@command.command()
@click.argument("case_id", metavar="CASE")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(case_id: str, as_json: bool) -> None:
    """Print everything one case says."""
    from headstart.cli.printing import print_json, print_table
    from headstart.evidence import cases

    record = _complete(cases.get(case_id))
    if as_json:
        print_json(record)
        return
    print_table(("field", "value"), [(name, _value(value)) for name, value in record.items()])


def _complete(case: Any) -> dict[str, Any]:
    """The record with its floor, where it has one."""
    record = case.record()
    if case.op != "model":
        floor = case.floor()
        record |= {"floor_bytes": floor.bytes, "floor_operations": floor.operations}
    return record


def _value(value: object) -> object:
    if isinstance(value, tuple):
        return _lengths(value) or "-"
    return "-" if value in ("", None) else value


def _sizes(case: Any) -> str:
    if case.op == "gated_delta_rule":
        return f"H {case.H} HV {case.HV} K {case.K} V {case.V}"
    if case.op == "extend_attention":
        window = f" window {case.window}" if case.window else ""
        return f"HQ {case.HQ} HK {case.HK} D {case.D}{window}"
    if case.op == "causal_conv1d":
        return f"channels {case.channels} width {case.width}"
    return f"{case.layers} layers"


def _lengths(values: tuple) -> str:
    """Runs of equal values as 'value x count'.

    >>> _lengths((1, 1, 1, 2048))
    '1 x 3, 2048'
    """
    runs: list[tuple[object, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return ", ".join(f"{value} x {count}" if count > 1 else f"{value}" for value, count in runs)
