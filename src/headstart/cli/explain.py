"""`headstart explain CASE`: who would run a workload here, and why others would not."""

from __future__ import annotations

import click

from headstart.cli.commands import Command
from headstart.cli.devices import device_of


@click.command(cls=Command)
@click.argument("case_id", metavar="CASE")
@click.option("--device", help="Where the tensors would lie; by default cuda if there is one.")
def command(case_id: str, device: str | None) -> None:
    """Print for each implementation whether it accepts CASE, and a sentence."""
    import headstart
    from headstart.cli.printing import print_table
    from headstart.evidence import cases

    case = cases.get(case_id)
    if case.op == "model":
        raise ValueError(
            f"case: {case.id} is a whole model; its operations have cases of their own"
        )
    rows = headstart.explain(case.op, **case.blank(device_of(device)))
    print_table(("implementation", "accepted", "sentence"), rows)
