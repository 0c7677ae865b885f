"""What a report shows of traces: hit shares by budget, replays on a model, timed workloads."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.axes import Axes

from headstart.evidence.report.drawing import THEME, canvas, legend, look, name_rows, svg
from headstart.evidence.report.tables import Cell, Table, interval, number, table
from headstart.evidence.traffic.records import HitBits, HitShare, Replayed, Workload

GIB = 2**30
NO_HITS = "no hits"


def share_figure(found: Sequence[HitShare], name: str) -> Markup | None:
    """Hit share by budget, a panel for each grain, a line for each policy."""
    if not found:
        return None
    grains = sorted({one.grain for one in found})
    budgets = sorted({one.budget for one in found}, key=_size)
    policies = list(dict.fromkeys(one.policy for one in found))
    with canvas(1, len(grains), 3.2) as (figure, axes):
        for panel, grain in zip(axes, grains, strict=True):
            here = [one for one in found if one.grain == grain]
            for index, policy in enumerate(policies):
                _lines(panel, [one for one in here if one.policy == policy], budgets, index)
            ceiling = max(one.ceiling_tokens / one.tokens for one in found)
            panel.axhline(100 * ceiling, color=THEME["quiet"], linestyle="--", linewidth=1,
                          label="ceiling")  # fmt: skip
            panel.set_title(f"blocks of {grain:,} tokens", loc="left")
            panel.set_xticks(range(len(budgets)), [_words(budget) for budget in budgets])
            panel.set_ylim(0, 110 * ceiling)
            panel.set_xlabel("budget, GiB")
        axes[0].set_ylabel("prompt tokens that were hits, %")
        legend(figure, axes, len(policies) + 1)
        return svg(figure, name)


def _lines(
    panel: Axes, here: Sequence[HitShare], budgets: Sequence[int | None], index: int
) -> None:
    for text, style in (("synthetic", "-"), ("ids", ":")):
        points = {budgets.index(one.budget): 100 * one.share for one in here if one.text == text}
        if points:
            label = here[0].policy if text == "synthetic" else None
            places = sorted(points)
            panel.plot(places, [points[place] for place in places], linestyle=style,
                       markersize=4, label=label, **look(index))  # fmt: skip


def _size(budget: int | None) -> float:
    return float("inf") if budget is None else budget


def _words(budget: int | None) -> str:
    return "none" if budget is None else f"{budget / GIB:g}"


def served_figure(found: Sequence[Replayed], name: str) -> Markup | None:
    """Time to first token from a hit by the cold time, against how much of the prompt was hit."""
    hits = [[one for one in replay.served if one.hit] for replay in found]
    if not any(hits):
        return None
    with canvas(1, 1, 3.2) as (figure, (axes,)):
        for index, (replay, served) in enumerate(zip(found, hits, strict=True)):
            axes.plot(
                [100 * one.hit / one.prompt for one in served],
                [one.hit_seconds / one.cold_seconds for one in served],
                linestyle="none",
                markersize=4,
                label=f"{replay.model} on {replay.device}",
                **look(index),
            )
        axes.plot([0, 100], [1, 0], color=THEME["quiet"], linestyle="--", linewidth=1,
                  label="in proportion")  # fmt: skip
        axes.set_xlabel("prompt tokens that were hits, %")
        axes.set_ylabel("time to first token / cold")
        axes.set_ylim(bottom=0)
        legend(figure, [axes], len(found) + 1)
        return svg(figure, name)


def workload_figure(found: Sequence[Workload], name: str) -> Markup | None:
    """Time of all steps by kind of layer, grain by grain."""
    if not found:
        return None
    with canvas(1, 1, 1.0 + 0.3 * len(found)) as (figure, (axes,)):
        for index, one in enumerate(found):
            color = THEME["series-1"] if one.grain == 64 else THEME["series-2"]
            axes.barh(index, one.median_ms, color=color, height=0.6)
        name_rows(axes, [f"{_layer(one)}, {_grain(one.grain)}" for one in found])
        axes.set_xlabel("milliseconds of all steps")
        return svg(figure, name)


def _layer(one: Workload) -> str:
    """What is timed, and of which model."""
    return f"{one.model}: {one.kind.replace('_', ' ')}"


def _grain(grain: int) -> str:
    return f"{grain:,}" if grain else NO_HITS


def shares(found: Sequence[HitShare]) -> Table:
    """Every grain, policy and budget."""
    rows = [
        (
            one.text,
            one.grain,
            one.policy,
            _words(one.budget),
            f"{one.share:.2%}",
            f"{one.of_ceiling:.1%}",
            number(one.kept_bytes / GIB, ".2f"),
            one.evicted,
            one.requests,
            one.model,
        )
        for one in found
    ]
    columns = ("text", "grain", "policy", "budget GiB", "hit share", "of ceiling", "kept GiB",
               "evicted", "requests", "sizes of")  # fmt: skip
    return table("Hit shares", columns, rows)


def replays(found: Sequence[Replayed]) -> Table:
    """Every replay on a model."""
    rows = [
        (
            one.model,
            one.device,
            len(one.served),
            one.total("prompt"),
            f"1 / {one.shortened}",
            _words(one.budget),
            f"{one.share:.2%}",
            f"{one.of_ceiling:.1%}",
            *(
                Cell(f"{one.total(bad):,} of {one.total(all_):,}",
                     "bad" if one.total(bad) else "good")
                for bad, all_ in (("differing", "rows"), ("differing_logits", "logits"))
            ),
            number(one.total("cold_seconds"), ".1f"),
            number(one.total("hit_seconds"), ".1f"),
            f"{one.saved:.1%}",
        )
        for one in found
    ]  # fmt: skip
    columns = ("model", "device", "requests", "prompt tokens", "lengths", "budget GiB",
               "hit share", "of ceiling", "rows of operations that differ", "logits that differ",
               "cold s", "with hits s", "saved")  # fmt: skip
    return table("Replays on a model: hits against cold prefills", columns, rows)


def hit_bits(found: Sequence[HitBits]) -> Table:
    """Every kind of layer."""
    rows = [
        (
            one.model,
            one.kind.replace("_", " "),
            one.served,
            one.device,
            one.requests,
            one.hit_tokens,
            Cell(f"{one.differing:,} of {one.rows:,}", "bad" if one.differing else "good"),
        )
        for one in found
    ]
    columns = ("shape of", "layer", "implementation", "device", "requests", "tokens hit",
               "rows that differ")  # fmt: skip
    return table("Hits side by side in a scheduler's steps, against cold prefills", columns, rows)


def workloads(found: Sequence[Workload]) -> Table:
    """Every kind of layer and grain."""
    rows = [
        (
            one.model,
            one.kind.replace("_", " "),
            one.layers,
            one.served,
            one.device,
            _grain(one.grain),
            one.requests,
            one.steps,
            one.new_tokens,
            one.prefix_tokens,
            number(one.median_ms, ".2f"),
            interval(one.ratio),
            f"{one.saved:.1%}",
            one.clock,
        )
        for one in found
    ]
    columns = ("shape of", "layer", "layers", "implementation", "device", "grain", "requests",
               "steps", "new tokens", "on prefixes", "ms", "to grain 64 [95 %]", "saved",
               "clock")  # fmt: skip
    return table("Steps of a scheduler", columns, rows)
