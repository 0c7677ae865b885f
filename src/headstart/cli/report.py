"""`headstart report`: run records as one page, or as the README's table."""

from __future__ import annotations

from pathlib import Path

import click

from headstart.cli.commands import need


@click.command()
@click.argument("run_files", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "-o", "--output", metavar="FILE", help="Where the page goes; report.html if left out."
)
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

    for path in filter(None, (output, into)):
        if not Path(path).resolve().parent.is_dir():
            raise ValueError(f"report: no folder for {path}")
    files = report.read_runs(run_files)
    if not as_markdown:
        _write(Path(output or "report.html"), report.page(files))
    elif into is None:
        print(report.markdown(files))
    else:
        document = Path(into)
        try:
            text = document.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"into: cannot read {into}: {error}") from error
        _write(document, report.fill_block(text, report.markdown(files)))
        print(f"{into}: results of {len(files)} runs" if files else f"{into}: {report.NOTHING}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"report: cannot write {path}: {error.strerror}") from error
