"""The reproducible route: every product has one shape, every tile one place on the absolute grid.

Query tiles of R rows and key tiles of N keys are anchored at position 0; a key tile is the block in
which keys are reduced, blocks are merged from left to right. Rows that a step does not bring and
keys that do not exist are zeros under a mask. Products go in batches of exactly ITEMS (head, query
tile) pairs, so neither the step nor the batch nor the number of heads changes a shape; the other
operations are elementwise, or reduce a row of N scores at a time. A masked row gets p = 0 and
exp(m - m') = 1: its bits stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headstart.ops.extend_attention.keys import load
from headstart.ops.extend_attention.merging import add_sinks
from headstart.ops.extend_attention.scratch import Layout
from headstart.ops.extend_attention.spec import ExtendCall
from headstart.ops.extend_attention.tiles import key_tiles, unmasked_tiles

ITEMS = 8
"""Extent of every batched product."""

SPAN = 1024
"""Query positions that share a pass over the keys (bounds the scratch, changes no bits)."""

Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tiling:
    """Rows of a query tile and keys of a key tile; fixed for (D, DV, dtype, window or not)."""

    R: int
    N: int


@dataclass(frozen=True)
class Run:
    """Keys at positions start, start + 1, ...: keys number, number + 1, ... of the sequence."""

    start: int
    length: int
    number: int
    causal: bool
    covered: bool
    """Whether the custom mask covers them."""


def tiling(call: ExtendCall) -> Tiling:
    """Narrow query tiles keep decoding cheap; narrow key tiles keep windows tight."""
    return Tiling(R=32, N=256 if call.window is None else 128)


def declines(call: ExtendCall) -> str | None:
    """Why this route cannot keep the promise for a call, or None."""
    plan, cache = call.plan, call.cache
    reads_both = plan.needs_cache and not plan.new_in_cache
    if reads_both and cache is not None and cache.k.dtype != call.q.dtype:
        return (
            "a cache of another dtype holds other values than the new keys have; reproducible "
            "needs the new keys in the cache too (new_in_cache=True)."
        )
    if plan.key_positions is not None and any(plan.prefix):
        return "reproducible reduces runs of consecutive positions; it takes no key_positions."
    for n in range(plan.N):
        if plan.prefix[n] and plan.key_start[n] + plan.prefix[n] > plan.query_start[n]:
            return "reproducible needs a prefix that ends before the first new token."
    return None


def layout(call: ExtendCall, n: int) -> Layout:
    """Scratch for sequence n."""
    R, N = tiling(call).R, tiling(call).N
    first, last = _query_tiles(call, n, R)
    tiles = min(SPAN // R, last - first + 1)
    items = -(-tiles * call.HQ // ITEMS) * ITEMS
    shapes: dict[str, tuple[int, ...]] = {
        "rows": (tiles * R * call.HQ * max(call.D, call.DV),),
        "q": (items, R, call.D),
        "acc": (items, R, call.DV),
        "m": (items, R, 1),
        "l": (items, R, 1),
        "s": (ITEMS, R, N),
        "pv": (ITEMS, R, call.DV),
        "k": (call.HK, N, call.D),
        "v": (call.HK, N, call.DV),
        "k_items": (ITEMS, N, call.D),
        "v_items": (ITEMS, N, call.DV),
    }
    return {f"fixed.{name}": (shape, torch.float32) for name, shape in shapes.items()}


def run(
    call: ExtendCall, n: int, buffers: Buffers, out: torch.Tensor, out_lse: torch.Tensor
) -> None:
    """Compute sequence n into out [length, HQ, DV] and out_lse [length, HQ]."""
    shape = tiling(call)
    first, last = _query_tiles(call, n, shape.R)
    buffers = {name.removeprefix("fixed."): buffer for name, buffer in buffers.items()}
    for begin in range(first, last + 1, SPAN // shape.R):
        tiles = range(begin, min(begin + SPAN // shape.R, last + 1))
        _Span(call, n, shape, tiles, buffers).run(out, out_lse)


def _query_tiles(call: ExtendCall, n: int, R: int) -> tuple[int, int]:
    start = call.plan.query_start[n]
    return start // R, (start + call.plan.lengths[n] - 1) // R


class _Span:
    """Query tiles `tiles` of sequence n, in one pass over their keys.

    Item i is head i % HQ of query tile i // HQ; items past the last tile are padding.
    """

    def __init__(
        self, call: ExtendCall, n: int, shape: Tiling, tiles: range, buffers: Buffers
    ) -> None:
        self.call, self.n, self.shape, self.tiles, self.buffers = call, n, shape, tiles, buffers
        HQ, plan = call.HQ, call.plan
        self.groups = -(-len(tiles) * HQ // ITEMS)
        self.key_head = [
            i % HQ // (HQ // call.HK) if i < len(tiles) * HQ else 0
            for i in range(self.groups * ITEMS)
        ]
        # The rows of this span that the step brings, as positions on the grid of the span.
        self.origin = tiles.start * shape.R
        start = plan.query_start[n]
        self.begin = max(start, self.origin) - self.origin
        self.end = min(start + plan.lengths[n], tiles.stop * shape.R) - self.origin
        self.row = self.origin - start
        """Row of the sequence at position 0 of the span (below 0 where the step starts later)."""
        self.runs = _runs(call, n)
        self.mask = call.mask(n)

    def run(self, out: torch.Tensor, out_lse: torch.Tensor) -> None:
        """Compute the span's rows of out [length, HQ, DV] and out_lse [length, HQ]."""
        self._load_queries()
        for name, value in (("acc", 0.0), ("l", 0.0), ("m", -torch.inf)):
            self._state(name).fill_(value)
        visits = [self._visits(tile) for tile in self.tiles]
        lowest = min((found.start for found in visits if found), default=0)
        highest = max((found.stop for found in visits if found), default=0)
        for key_tile in range(lowest, highest):
            visitors = [t for t, found in enumerate(visits) if key_tile in found]
            if visitors:
                self._visit(key_tile, visitors[0], visitors[-1] + 1)
        self._store(out, out_lse)

    def _state(self, name: str) -> torch.Tensor:
        return self.buffers[name][: self.groups * ITEMS]

    def _rows(self, width: int) -> torch.Tensor:
        count = len(self.tiles) * self.shape.R
        size = count * self.call.HQ * width
        return self.buffers["rows"][:size].view(count, self.call.HQ, width)

    def _by_item(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, HQ, X] as [tiles, HQ, R, X]."""
        return rows.unflatten(0, (len(self.tiles), self.shape.R)).transpose(1, 2)

    def _load_queries(self) -> None:
        call = self.call
        rows = self._rows(call.D).zero_()
        first = call.plan.offsets[self.n] + self.row
        rows[self.begin : self.end].copy_(call.q[first + self.begin : first + self.end])
        q = self._state("q").zero_()
        items = len(self.tiles) * call.HQ
        q[:items].unflatten(0, (len(self.tiles), call.HQ)).copy_(self._by_item(rows))
        q.mul_(call.scale)

    def _visits(self, query_tile: int) -> range:
        """Key tiles of a query tile, as if the step brought all of its rows."""
        R, N = self.shape.R, self.shape.N
        first, last = query_tile * R, query_tile * R + R - 1
        found = [
            key_tiles(
                first,
                last,
                run.start,
                run.length,
                tile=N,
                window=self.call.window,
                causal=run.causal,
            )
            for run in self.runs
        ]
        found = [tiles for tiles in found if tiles]
        if not found:
            return range(0)
        return range(min(t.start for t in found), max(t.stop for t in found))

    def _visit(self, key_tile: int, first: int, end: int) -> None:
        """Take the keys of one tile into query tiles [first, end) of the span."""
        self._load_keys(key_tile)
        HQ = self.call.HQ
        groups = range(first * HQ // ITEMS, -(-end * HQ // ITEMS))
        hidden = self._hidden(key_tile, groups)
        for group in groups:
            self._update(group, hidden)

    def _load_keys(self, key_tile: int) -> None:
        N = self.shape.N
        k, v = (self.buffers[name].transpose(0, 1) for name in ("k", "v"))
        filled = 0
        for run in self.runs:
            lower = max(run.start, key_tile * N)
            upper = min(run.start + run.length, (key_tile + 1) * N)
            if lower >= upper:
                continue
            at, stop = lower - key_tile * N, upper - key_tile * N
            k[filled:at], v[filled:at] = 0, 0
            number = run.number + lower - run.start
            load(self.call, self.n, number, number + upper - lower, k[at:stop], v[at:stop])
            filled = stop
        k[filled:], v[filled:] = 0, 0

    def _hidden(self, key_tile: int, groups: range) -> dict[int, torch.Tensor] | None:
        """Per query tile of the groups, the keys that its rows do not see: bool [R, N].

        Entry len(self.tiles) is for padding. None: every row sees every key.
        """
        R, N, call = self.shape.R, self.shape.N, self.call
        first = groups.start * ITEMS // call.HQ
        last = (groups.stop * ITEMS - 1) // call.HQ
        if last < len(self.tiles) and self._clear(key_tile, first, last):
            return None
        last = min(last, len(self.tiles))
        hidden = torch.ones(last + 1 - first, R, N, dtype=torch.bool)
        begin = max(self.begin, first * R)
        end = min(self.end, (last + 1) * R)
        own = torch.arange(self.origin + begin, self.origin + end)[:, None]
        for run in self.runs:
            lower = max(run.start, key_tile * N)
            upper = min(run.start + run.length, (key_tile + 1) * N)
            if lower >= upper or begin >= end:
                continue
            position = torch.arange(lower, upper)
            rows = hidden.view(-1, N)[begin - first * R : end - first * R]
            target = rows[:, lower - key_tile * N : upper - key_tile * N]
            if run.covered and self.mask is not None:
                column = run.number + lower - run.start
                column -= call.plan.prefix[self.n] if call.plan.mask_covers == "new" else 0
                seen = self.mask[self.row + begin : self.row + end]
                target.copy_(seen[:, column : column + upper - lower]).logical_not_()
            elif call.causal:
                target.copy_(position > own)
            else:
                target.fill_(False)
            if call.window is not None:
                target |= position <= own - call.window
        return dict(enumerate(hidden, start=first))

    def _clear(self, key_tile: int, first: int, last: int) -> bool:
        """Whether all rows of query tiles first to last of the span see all keys of the tile."""
        R, N = self.shape.R, self.shape.N
        return any(
            not run.covered
            and key_tile
            in unmasked_tiles(
                self.origin + first * R,
                self.origin + (last + 1) * R - 1,
                run.start,
                run.length,
                tile=N,
                window=self.call.window,
                causal=run.causal,
            )
            for run in self.runs
        )

    def _update(self, group: int, hidden: dict[int, torch.Tensor] | None) -> None:
        """One block of keys into one batch of items."""
        items = slice(group * ITEMS, (group + 1) * ITEMS)
        q, acc = self._state("q")[items], self._state("acc")[items]
        m, l = self._state("m")[items], self._state("l")[items]  # noqa: E741
        s, pv = self.buffers["s"], self.buffers["pv"]
        k, v = self._of_items("k", items), self._of_items("v", items)
        torch.bmm(q, k.transpose(1, 2), out=s)
        if self.call.softcap is not None:
            s.div_(self.call.softcap).tanh_().mul_(self.call.softcap)
        if hidden is not None:
            tiles = [
                min(i // self.call.HQ, len(self.tiles)) for i in range(items.start, items.stop)
            ]
            for tile in dict.fromkeys(tiles):
                at = slice(tiles.index(tile), tiles.index(tile) + tiles.count(tile))
                s[at].masked_fill_(hidden[tile], -torch.inf)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
        s.sub_(safe).exp_()
        decay = torch.exp(m - safe)
        torch.bmm(s, v, out=pv)
        acc.mul_(decay).add_(pv)
        l.mul_(decay).add_(s.sum(-1, keepdim=True))
        m.copy_(m_new)

    def _of_items(self, name: str, items: slice) -> torch.Tensor:
        """The keys or values of each item's head: [ITEMS, N, .]."""
        heads = self.key_head[items]
        rows = self.buffers[name]
        if min(heads) == max(heads):
            return rows[heads[0]].expand(ITEMS, -1, -1)
        return torch.index_select(rows, 0, torch.tensor(heads), out=self.buffers[f"{name}_items"])

    def _store(self, out: torch.Tensor, out_lse: torch.Tensor) -> None:
        call, count = self.call, len(self.tiles)
        acc, m, l = self._state("acc"), self._state("m"), self._state("l")  # noqa: E741
        empty = l == 0
        lse = m.add_(torch.log(l.masked_fill(empty, 1.0)))
        acc.div_(l.masked_fill_(empty, 1.0))
        if call.sinks is not None:
            heads = torch.arange(lse.shape[0]) % call.HQ
            lse, share = add_sinks(lse, call.sinks[heads].view(-1, 1, 1))
            acc.mul_(share)
        taken = slice(self.row + self.begin, self.row + self.end)
        for state, width, target in ((acc, call.DV, out), (lse, 1, out_lse.unsqueeze(-1))):
            rows = self._rows(width)
            items = state[: count * call.HQ].unflatten(0, (count, call.HQ))
            self._by_item(rows).copy_(items)
            target[taken].copy_(rows[self.begin : self.end])


def _runs(call: ExtendCall, n: int) -> list[Run]:
    """The part's keys as runs of positions, in order."""
    plan, masked = call.plan, call.custom_mask is not None
    prefix, length = plan.prefix[n], plan.lengths[n]
    covered = masked and plan.mask_covers == "all"
    runs = []
    if call.part != "extend" and prefix:
        causal = call.causal and not covered
        runs.append(Run(plan.key_start[n], prefix, 0, causal, covered))
    if call.part != "prefix":
        causal = call.causal and not masked
        runs.append(Run(plan.query_start[n], length, prefix, causal, masked))
    return runs
