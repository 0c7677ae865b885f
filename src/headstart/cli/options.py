"""Options that several commands have."""

from __future__ import annotations

import math
import os
from typing import Any

import click

DTYPES = ("float32", "bfloat16", "float16")
"""Of a model's weights and activations."""


class Seconds(click.FloatRange):
    """Seconds of at least `least` and within what clocks take; not NaN, which click finds in every
    range."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=1e8)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or a mistake of the caller's."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail("nan is no number of seconds.", param, ctx)
        return found


def seed_option(of: str) -> Any:
    """The option --seed: any seed that torch takes, with room for those counted on from it."""
    kind = click.IntRange(0, 2**62)
    return click.option("--seed", type=kind, default=0, show_default=True, help=of)


def device_option(default: str | None = None) -> Any:
    """The option --device, by default a GPU if there is one (`devices.device_of`)."""
    if default is None:
        words = "Where to run; by default cuda if there is one."
        return click.option("--device", metavar="DEVICE", help=words)
    return click.option(
        "--device", default=default, show_default=True, metavar="DEVICE", help="Where to run."
    )


json_option: Any = click.option(
    "--json", "json_file", metavar="FILE", help="Write all that is found there."
)
"""The option --json: where a run record goes."""


def options_of(ctx: click.Context) -> dict[str, Any]:
    """How a command was called; where its record goes is no matter of the record."""
    return {name: value for name, value in ctx.params.items() if name != "json_file"}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
