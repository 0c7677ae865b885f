"""The tile bounds of extend attention against the literal mask, by brute force.

A query block must visit every key tile that holds a key one of its rows sees (else the result is
wrong), and should visit no other (else time is lost). For every point of a grid of tilings,
windows, prefixes and lengths, every query block and both parts, the literal mask is drawn key by
key, its tiles are marked, and the ranges of `ops/extend_attention/tiles.py` are held against them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.runs import Record
from headstart.evidence.workers import spread
from headstart.ops.extend_attention import tiles

TILINGS = ((64, 64), (64, 128), (128, 128), (32, 64), (16, 64), (32, 32), (128, 64), (128, 32))
"""(query rows, keys) of a tile."""
WINDOWS = (
    None, 1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 191, 192, 255, 256, 257, 1023, 4096,
)  # fmt: skip
PREFIXES = (0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 255, 257, 384)
LENGTHS = (1, 2, 15, 16, 31, 64, 65, 129, 192, 257)


@dataclass(frozen=True)
class Rules:
    """What moves the bounds besides sizes.

    key_start: position of the first prefix key.
    gap: positions between the last prefix key and the first query.
    lifted: "" (causal everywhere), "new" (a custom mask over the new keys, which may look ahead) or
        "all" (causal=False, or a custom mask over all keys).
    absolute: whether tiles are counted from absolute position 0 or from the first key of a part.
    """

    name: str
    key_start: int = 0
    gap: int = 0
    lifted: str = ""
    absolute: bool = False


RULES = (
    Rules("causal"),
    Rules("trimmed prefix, tiles at absolute positions", key_start=37, absolute=True),
    Rules("queries after a gap", key_start=5, gap=70),
    Rules("custom mask over the new keys", lifted="new"),
    Rules("not causal", lifted="all"),
)


class Count(Record):
    """What the brute force found under one set of rules.

    blocks: query blocks times parts. visited: tiles that the bounds say to visit.
    lost: tiles with a visible key outside the bounds: wrong results.
    idle: tiles inside the bounds without a visible key: wasted time.
    lower, upper: witnesses of tightness: blocks whose first (last) tile holds a visible key, where
        the bound cuts off tiles of the part below (above) it.
    unmasked: tiles said to need no mask that the literal mask does not fill, or the reverse.
    """

    rules: str
    blocks: int
    visited: int
    lost: int
    idle: int
    lower: int
    upper: int
    unmasked: int

    @property
    def violations(self) -> int:
        """Tiles that break a bound."""
        return self.lost + self.idle + self.unmasked


class Saving(Record):
    """Key tiles that a case's query blocks visit, with and without the bounds."""

    case: str
    tiling: tuple[int, int]
    before: int
    after: int

    @property
    def saved(self) -> float:
        """The share of tiles saved."""
        return 1 - self.after / self.before if self.before else 0.0


def brute_force(
    tilings: Sequence[tuple[int, int]] = TILINGS,
    windows: Sequence[int | None] = WINDOWS,
    prefixes: Sequence[int] = PREFIXES,
    lengths: Sequence[int] = LENGTHS,
    rules: Sequence[Rules] = RULES,
    *,
    processes: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Count]:
    """Count violations and witnesses over the whole grid, a slice of it in each process.

    progress: told how many slices, of `slices(windows, rules)`, are done.

    >>> (count,) = brute_force([(16, 16)], [20], [0, 33], [40], [Rules("causal")])
    >>> count.violations, count.lower > 0, count.upper > 0
    (0, True, True)
    """
    work = [
        (rule, window, tilings, prefixes, lengths)
        for rule, window in itertools.product(rules, windows)
    ]
    totals = {rule.name: np.zeros(len(_NAMES), dtype=np.int64) for rule in rules}
    results = spread((partial(_slice, part) for part in work), processes)
    for done, ((rule, *_), counted) in enumerate(zip(work, results, strict=True), start=1):
        totals[rule.name] += counted
        progress(done)
    return [
        Count(rules=name, **dict(zip(_NAMES, map(int, total), strict=True)))
        for name, total in totals.items()
    ]


def slices(windows: Sequence[int | None] = WINDOWS, rules: Sequence[Rules] = RULES) -> int:
    """Into how many parts `brute_force` cuts its grid."""
    return len(windows) * len(rules)


def _slice(
    work: tuple[Rules, int | None, Sequence[tuple[int, int]], Sequence[int], Sequence[int]],
) -> np.ndarray:
    rule, window, tilings, prefixes, lengths = work
    total = np.zeros(len(_NAMES), dtype=np.int64)
    for prefix, length in itertools.product(prefixes, lengths):
        for part, seen, start, first_query in _masks(rule, window, prefix, length):
            edges = _edges(seen)
            for tiling in tilings:
                total += _held(rule, part, edges, start, first_query, window, tiling)
    return total


_NAMES = ("blocks", "visited", "lost", "idle", "lower", "upper", "unmasked")


def _masks(
    rule: Rules, window: int | None, prefix: int, length: int
) -> Iterator[tuple[str, np.ndarray, int, int]]:
    """(part, literal mask [length, keys], position of key 0, position of row 0) of each part."""
    query = rule.key_start + prefix + rule.gap
    own = (query + np.arange(length))[:, None]
    parts = (("prefix", rule.key_start, prefix), ("new", query, length))
    for part, start, count in parts:
        # Without keys there is nothing to see; a mask over the new keys changes those alone.
        if not count or (part == "prefix" and rule.lifted == "new"):
            continue
        position = (start + np.arange(count))[None]
        seen = np.ones((length, count), dtype=bool)
        if not _lifted(rule, part):
            seen &= position <= own
        if window is not None:
            seen &= position > own - window
        yield part, seen, start, query


def _lifted(rule: Rules, part: str) -> bool:
    return rule.lifted == "all" or (rule.lifted == "new" and part == "new")


def _edges(seen: np.ndarray) -> np.ndarray:
    """Running counts [length + 1, keys + 1] of visible pairs, for counts in any rectangle."""
    counts = np.zeros((seen.shape[0] + 1, seen.shape[1] + 1), dtype=np.int64)
    counts[1:, 1:] = seen.cumsum(0).cumsum(1)
    return counts


def _held(
    rule: Rules,
    part: str,
    edges: np.ndarray,
    start: int,
    first_query: int,
    window: int | None,
    tiling: tuple[int, int],
) -> np.ndarray:
    """The counts of `Count`, over the query blocks of one part."""
    rows, keys = tiling
    length, count = edges.shape[0] - 1, edges.shape[1] - 1
    anchor = 0 if rule.absolute else start
    numbers, low, high = _tiles_of(start - anchor, count, keys)
    tops, bottoms = _blocks_of(length, rows)
    # Visible pairs of each block in each tile [blocks, tiles].
    inside = edges[bottoms] - edges[tops]
    pairs = inside[:, high] - inside[:, low]
    visible = pairs > 0
    full = pairs == (bottoms - tops)[:, None] * keys
    options = {
        "tile": keys, "window": window, "causal": not _lifted(rule, part), "anchor": anchor,
    }  # fmt: skip
    bounds, clear = [], []
    for top, bottom in zip(tops.tolist(), bottoms.tolist(), strict=True):
        if part == "prefix":
            found = tiles.prefix_tiles(
                top, bottom - 1, query_start=first_query, key_start=start, prefix=count, **options
            )
        else:
            found = tiles.new_tiles(
                top, bottom - 1, query_start=first_query, length=count, **options
            )
        bounds.append((found.start, found.stop))
        found = tiles.unmasked_tiles(
            first_query + top, first_query + bottom - 1, start, count, **options
        )
        clear.append((found.start, found.stop))
    first, stop = np.array(bounds).T[:, :, None]
    visited = (numbers >= first) & (numbers < stop)
    fills, ends = np.array(clear).T[:, :, None]
    visits = int(visited.sum())
    # Bounds beyond the part's own tiles visit nothing that exists: they count as idle.
    outside = int((stop - first).sum()) - visits
    # A block whose first (last) visited tile holds a visible key, below (above) which others lie.
    below = (visible & (numbers == first) & (first > numbers[:1])).sum()
    above = (visible & (numbers == stop - 1) & (stop <= numbers[-1:])).sum()
    return np.array(
        (
            len(tops),
            visits,
            (visible & ~visited).sum(),
            (visited & ~visible).sum() + outside,
            below,
            above,
            (full != ((numbers >= fills) & (numbers < ends))).sum(),
        )
    )


@cache
def _tiles_of(offset: int, count: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of the tiles that hold `count` keys from `offset` on, and the keys each begins and
    ends at, counted from the first key."""
    numbers = np.arange(offset // keys, -(-(offset + count) // keys) if count else offset // keys)
    low = np.maximum(numbers * keys - offset, 0)
    return numbers, low, np.minimum((numbers + 1) * keys - offset, count)


@cache
def _blocks_of(length: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """First row of each query block, and the row after its last."""
    tops = np.arange(0, length, rows)
    return tops, np.minimum(tops + rows, length)


def saving(case: AttentionCase, tiling: tuple[int, int]) -> Saving:
    """Tiles of a case per head: every key of the sequence against both bounds of both parts.

    >>> from headstart.evidence import cases
    >>> saving(cases.get("oss-512-on-8k-win"), (64, 64))
    Saving(case='oss-512-on-8k-win', tiling=(64, 64), before=1088, after=24)
    """
    rows, keys = tiling
    before = after = 0
    for new, cached in zip(case.lengths, case.cached, strict=True):
        blocks = -(-new // rows)
        before += blocks * (-(-cached // keys) + -(-new // keys))
        for block in range(blocks):
            top, last = block * rows, min((block + 1) * rows, new) - 1
            lifted = bool(case.mask)
            after += len(
                tiles.prefix_tiles(
                    top, last, query_start=cached, key_start=0, prefix=cached, tile=keys,
                    window=case.window, causal=not lifted,
                )
            ) + len(
                tiles.new_tiles(
                    top, last, query_start=cached, length=new, tile=keys, window=case.window,
                    causal=not lifted, anchor=cached,
                )
            )  # fmt: skip
    return Saving(case=case.id, tiling=tiling, before=before, after=after)
