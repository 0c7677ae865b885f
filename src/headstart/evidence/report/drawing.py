"""How figures look: colours that follow the page's theme, axes with plain numbers, text as text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

WIDTH = 10.0
"""Inches of every figure: a page scales all of them alike."""

THEME = {
    "ink": "#010203",
    "quiet": "#010204",
    "grid": "#010205",
    "paper": "#010206",
    "good": "#010207",
    "bad": "#010208",
    **{f"series-{index}": f"#0102{0x10 + index:02x}" for index in range(1, 8)},
}
"""Variable of the page's style sheet -> the colour that stands for it while a figure is drawn."""

SERIES = [THEME[f"series-{index}"] for index in range(1, 8)]
MARKERS = "osD^vPX<>h"


def look(index: int) -> dict[str, Any]:
    """Colour and marker of the series at a place; the two repeat at different lengths."""
    return {"color": SERIES[index % len(SERIES)], "marker": MARKERS[index % len(MARKERS)]}


@contextmanager
def canvas(rows: int, columns: int, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of WIDTH x `height` inches and its axes, row by row."""
    style: Any = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9.0,
        "axes.titlesize": 9.0,
        "axes.labelsize": 9.0,
        "text.color": THEME["ink"],
        "axes.labelcolor": THEME["ink"],
        "axes.titlecolor": THEME["ink"],
        "axes.edgecolor": THEME["quiet"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": THEME["grid"],
        "grid.linewidth": 0.7,
        "xtick.color": THEME["quiet"],
        "ytick.color": THEME["quiet"],
        "xtick.labelcolor": THEME["ink"],
        "ytick.labelcolor": THEME["ink"],
        "hatch.color": THEME["quiet"],
        "legend.frameon": False,
        "legend.labelcolor": THEME["ink"],
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, list(axes.flat)


def svg(figure: Figure, name: str) -> Markup:
    """The figure as an `svg` element that takes its colours from the page.

    name: makes ids inside it differ from those of the page's other figures; said aloud by readers.
    """
    sink = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # The page decides the size; the view box keeps the shape.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1)
    for variable, color in THEME.items():
        text = text.replace(color, f"var(--{variable})")
    return Markup(text)


def value_axis(axes: Axes, which: str, values: Sequence[float], *, around: float = 1.0) -> None:
    """Plain numbers along an axis: logarithmic where the values span more than a factor of 4.

    around: a value that is to be in sight.
    """
    shown = [value for value in (*values, around) if isfinite(value) and value > 0]
    low, high = min(shown), max(shown)
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    if high / low > 4:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        span = high / low
        fine, coarse = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0)
        axis.set_major_locator(
            LogLocator(subs=fine if span < 12 else coarse if span < 2000 else (1.0,))
        )
        axis.set_minor_locator(NullLocator())
        set_limits(low / 1.25, high * 1.25)
    else:
        margin = max(0.08 * (high - low), 0.01 * high)
        axis.set_major_locator(MaxNLocator(7))
        set_limits(low - margin, high + margin)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Numbers of tokens along x, logarithmic, a tick for each (none on top of another)."""
    axes.set_xscale("log", base=2)
    ticks: list[int] = []
    for length in sorted(set(lengths)):
        if not ticks or length / ticks[-1] > 1.3:
            ticks.append(length)
    axes.set_xticks(ticks, [token_words(length) for length in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def token_words(count: int) -> str:
    """A number of tokens in few letters.

    >>> token_words(8192), token_words(18778), token_words(511), token_words(1 << 20)
    ('8k', '18.3k', '511', '1M')
    """
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if count >= unit:
            return f"{count / unit:.1f}".removesuffix(".0") + letter
    return str(count)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names down the left side, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    for index in range(1, len(names)):
        axes.axhline(index - 0.5, color=THEME["grid"], linewidth=0.5)


def legend(figure: Figure, axes: Sequence[Axes], count: int) -> None:
    """One legend above all axes, an entry for each label."""
    entries: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(), entries.keys(), loc="outside upper left", ncols=min(max(count, 1), 6)
    )
