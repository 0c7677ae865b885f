"""`headstart env`: what this installation and this machine offer."""

from __future__ import annotations

import click

from headstart.cli.commands import Command


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """Print versions, devices, implementations, tables and HEADSTART_* variables."""
    from headstart.cli.printing import print_json, print_table
    from headstart.evidence.environment import environment

    found = environment()
    if as_json:
        print_json(found)
        return
    for title, rows in found.items():
        print_table((title, ""), rows.items() or [("none", "")])
        print()
