"""`headstart verify tiles`: the tile bounds of extend attention against the literal mask."""

from __future__ import annotations

import click

from headstart.cli.commands import Command, need
from headstart.cli.options import cores, json_option, options_of
from headstart.cli.progress import progress_bar


@click.command(cls=Command)
@click.option("--tiling", default="64x64", show_default=True, metavar="ROWSxKEYS",
              help="For the predicted saving of each case.")  # fmt: skip
@json_option
@click.pass_context
def tiles(ctx: click.Context, tiling: str, json_file: str | None) -> None:
    """Draw the literal mask for 8 tilings x 20 windows x 17 prefixes x 10 lengths, key by key.

    Both bounds and both parts are held against it: no tile with a visible key may be left out, none
    without one visited. Exits with 1 on a violation.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.cli.printing import console, print_table
    from headstart.cli.verify import report_failures
    from headstart.evidence import cases, runs
    from headstart.evidence.cases.extend_attention import AttentionCase
    from headstart.evidence.tile_bounds import brute_force, saving, slices

    if json_file is not None:
        runs.expect_writable(json_file)
    shape = _tiling(tiling)
    with progress_bar("verify tiles", slices()) as show:
        counts = brute_force(processes=cores(), progress=show)
    print_table(
        (
            "rules",
            "blocks",
            "tiles visited",
            "left out",
            "for nothing",
            "wrongly unmasked",
            "witnesses below",
            "witnesses above",
        ),
        [
            (
                count.rules,
                count.blocks,
                count.visited,
                count.lost,
                count.idle,
                count.unmasked,
                count.lower,
                count.upper,
            )
            for count in counts
        ],
    )
    violations = sum(count.violations for count in counts)
    witnesses = sum(count.lower + count.upper for count in counts)
    console().print(f"\n{violations:,} violating tiles, {witnesses:,} witnesses of tightness\n")
    found = cases.catalogue("extend_attention", small=False)
    savings = [
        saving(case, shape)
        for case in found
        if isinstance(case, AttentionCase) and not case.id.endswith("-nosink")
    ]
    print_table(
        ("case", "key tiles", "within bounds", "predicted saving"),
        [(one.case, one.before, one.after, f"{one.saved:.1%}") for one in savings],
    )
    if json_file is not None:
        runs.save(json_file, "tiles", [*counts, *savings], options_of(ctx))
    ctx.exit(
        report_failures(
            f"{count.rules}: {count.lost} tiles left out, {count.idle} visited for nothing, "
            f"{count.unmasked} wrongly unmasked"
            for count in counts
            if count.violations
        )
    )


def _tiling(text: str) -> tuple[int, int]:
    rows, _, keys = text.partition("x")
    if not (rows.isdecimal() and keys.isdecimal() and int(rows) and int(keys)):
        raise ValueError(f"tiling: expected ROWSxKEYS such as 64x128, got {text!r}")
    return int(rows), int(keys)
