"""What a report shows of whole models: time to first token by arm, and by kind of layer."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.evidence.arms import named
from headstart.evidence.models.records import ModelResult
from headstart.evidence.report.tables import Cell, Table, interval, number, table


def times(found: Sequence[ModelResult]) -> Table:
    """Every arm of every model."""
    rows = [
        (
            described(one),
            one.device,
            one.prompt_tokens,
            "whole" if one.step is None else one.step,
            named(arm.arm, arm.served),
            arm.status if arm.status == "timed" else Cell(f"{arm.status}: {arm.sentence}"),
            number(arm.median_ms, ".2f"),
            interval(arm.ratio),
            number(arm.bound, ".3f"),
            number(arm.cold_ms, ",.0f"),
            number(None if arm.peak_bytes is None else arm.peak_bytes / 2**30, ".2f"),
            number(arm.difference, ".2e"),
        )
        for one in found
        for arm in one.arms
    ]
    columns = ("model", "device", "prompt", "step", "arm", "status", "TTFT ms",
               "to the first arm [95 %]", "bound", "cold ms", "peak GiB",
               "difference")  # fmt: skip
    return table("Time to first token", columns, rows)


def split(found: Sequence[ModelResult]) -> Table:
    """Milliseconds of each timed arm by kind of layer."""
    kinds = list(dict.fromkeys(k for one in found for arm in one.arms for k in arm.split_ms))
    rows = [
        (described(one), one.prompt_tokens, "whole" if one.step is None else one.step, arm.arm,
         *(number(arm.split_ms.get(kind), ".2f") for kind in kinds))
        for one in found
        for arm in one.arms
        if arm.status == "timed"
    ]  # fmt: skip
    columns = ("model", "prompt", "step", "arm", *(kind.replace("_", " ") for kind in kinds))
    return table("Milliseconds by kind of layer", columns, rows)


def described(one: ModelResult) -> str:
    """A model with what was cut of it."""
    return f"{one.model}, {one.cut}" if one.cut else one.model
