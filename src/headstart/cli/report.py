"""`headstart report`: run records as one page, or as the README's table."""

from __future__ import annotations

from pathlib import Path

import click

from headstart.cli.commands import Command, need

PAGE = "report.html"
"""Where the page goes if nobody says."""


@click.command(cls=Command)
@click.argument("run_files", metavar="RUN...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="FILE", help=f"Where the page goes; {PAGE} if left out.")
@click.option(
    "--markdown", "as_markdown", is_flag=True, help="Print the tables of results instead."
)
@click.option(
    "--into",
    metavar="FILE",
    help="With --markdown: put the tables between the marks of this document instead.",
)
def command(
    run_files: tuple[str, ...], output: str | None, as_markdown: bool, into: str | None
) -> None:
    """Show RUNs: files that --json wrote, or folders of them.

    The page needs nothing beside it and asks the network for nothing. It shows times against
    prompt length, ratios with intervals, distances to the floor, errors, bits, mutants, kernels
    and environments, as far as the runs hold them.
    """
    need("evidence", "pydantic", "numpy", "matplotlib", "jinja2")
    if into is not None and not as_markdown:
        raise ValueError("into: goes with --markdown")
    if output is not None and as_markdown:
        raise ValueError("output: --markdown prints, and --into names a document")
    from headstart.evidence import report
    from headstart.evidence.files import expect_writable, write

    page = PAGE if output is None else output
    if not as_markdown:
        expect_writable(page, "output", sources=report.run_paths(run_files))
    elif into is not None:
        expect_writable(into, "into")
    files = report.read_runs(run_files)
    if not as_markdown:
        write(page, report.page(files), "output")
    elif into is None:
        print(report.markdown(files))
    else:
        document = Path(into)
        try:
            text = document.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"into: cannot read {into}: {error}") from error
        write(document, report.fill_block(text, report.markdown(files)), "into")
        print(f"{into}: results of {len(files)} runs" if files else f"{into}: {report.NOTHING}")
