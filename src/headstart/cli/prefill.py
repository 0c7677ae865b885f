"""`headstart prefill`."""

import click


@click.command()
def command() -> None:
    """Prefill a prompt."""
