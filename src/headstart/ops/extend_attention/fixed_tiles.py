"""The reproducible route: every product has one shape, every tile one place on the absolute grid.

Query tiles of R rows and key tiles of N keys are anchored at position 0; a key tile is the block in
which keys are reduced, blocks are merged from left to right. Rows that a step does not bring and
keys that do not exist are zeros under a mask. The CPU's fused kernel takes one block for any number
of (query tile, head) pairs, each of them in products of its own: [R, D] @ [D, N], then
[R, N] @ [N, D]. It has no softcap; with one the block is computed by hand, for exactly ITEMS pairs
at once. So neither the step nor the batch nor the number of heads changes a shape. A block in which
a row sees no key is (0, -inf) there, and leaves the row's bits when it is merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch

from headstart.ops.extend_attention.flash import finish
from headstart.ops.extend_attention.keys import load
from headstart.ops.extend_attention.merging import log_add
from headstart.ops.extend_attention.scratch import Layout
from headstart.ops.extend_attention.spec import ExtendCall
from headstart.ops.extend_attention.tiles import key_tiles, unmasked_tiles

ITEMS = 8
"""(query tile, head) pairs of a block computed by hand."""

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
    return Tiling(R=8, N=512) if call.window is None else Tiling(R=32, N=128)


def layout(call: ExtendCall, n: int) -> Layout:
    """Scratch for sequence n."""
    R, N = tiling(call).R, tiling(call).N
    first, last = _query_tiles(call, n, R)
    tiles, width = min(SPAN // R, last - first + 1), _width(call)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (tiles, call.HQ, R, width),
        "o": (tiles, R, call.HQ, width),
        "lse": (tiles, R, call.HQ),
        "k": (call.HK, N, width),
        "v": (call.HK, N, width),
    }
    if call.softcap is not None:
        shapes |= {
            "s": (ITEMS, R, N),
            "q_items": (ITEMS, R, width),
            "k_items": (ITEMS, N, width),
            "v_items": (ITEMS, N, width),
        }
    return {f"fixed.{name}": (shape, torch.float32) for name, shape in shapes.items()}


def _width(call: ExtendCall) -> int:
    """D and DV padded to whole vectors, so that every row starts at such an address."""
    return -(-max(call.D, call.DV) // 16) * 16


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
    """Query tiles `tiles` of sequence n, in one pass over their keys."""

    def __init__(
        self, call: ExtendCall, n: int, shape: Tiling, tiles: range, buffers: Buffers
    ) -> None:
        self.call, self.n, self.shape, self.tiles, self.buffers = call, n, shape, tiles, buffers
        plan = call.plan
        # The rows of this span that the step brings, as positions on the grid of the span.
        self.origin = tiles.start * shape.R
        start = plan.query_start[n]
        self.begin = max(start, self.origin) - self.origin
        self.end = min(start + plan.lengths[n], tiles.stop * shape.R) - self.origin
        self.row = self.origin - start
        """Row of the sequence at position 0 of the span (below 0 where the step starts later)."""
        self.lowest = 0 if call.window is None else self.origin + self.begin - call.window + 1
        """Position below which no row sees a key: whose slots may be another sequence's by now."""
        self.runs = _runs(call, n)
        self.mask = call.mask(n)
        self.q, self.o, self.lse = (buffers[name][: len(tiles)] for name in ("q", "o", "lse"))

    def run(self, out: torch.Tensor, out_lse: torch.Tensor) -> None:
        """Compute the span's rows of out [length, HQ, DV] and out_lse [length, HQ]."""
        self._load_queries()
        self.o.zero_()
        self.lse.fill_(-torch.inf)
        visits = [self._visits(tile) for tile in self.tiles]
        lowest = min((found.start for found in visits if found), default=0)
        highest = max((found.stop for found in visits if found), default=0)
        for key_tile in range(lowest, highest):
            visitors = [t for t, found in enumerate(visits) if key_tile in found]
            if visitors:
                self._load_keys(key_tile)
                clear = [(self._clear(key_tile, tile), tile) for tile in visitors]
                for unmasked, found in groupby(clear, itemgetter(0)):
                    self._visit(key_tile, [tile for _, tile in found], unmasked)
        taken = slice(self.row + self.begin, self.row + self.end)
        o = self.o.flatten(0, 1)[self.begin : self.end, :, : self.call.DV]
        lse = self.lse.flatten(0, 1)[self.begin : self.end]
        finish(self.call, o, lse, out[taken], out_lse[taken])

    def _load_queries(self) -> None:
        call = self.call
        rows = self.o.zero_().flatten(0, 1)[self.begin : self.end, :, : call.D]
        first = call.plan.offsets[self.n] + self.row
        rows.copy_(call.q[first + self.begin : first + self.end])
        torch.mul(self.o.transpose(1, 2), call.scale, out=self.q)

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

    def _visit(self, key_tile: int, visitors: list[int], unmasked: bool) -> None:
        """Merge the block of keys into neighbouring query tiles of the span."""
        tiles = slice(visitors[0], visitors[-1] + 1)
        hidden = None if unmasked else self._hidden(key_tile, tiles)
        q, cap = self.q[tiles], self.call.softcap
        o_block, lse_block = self._fused(q, hidden) if cap is None else self._capped(q, hidden, cap)
        if hidden is not None:
            lse_block.masked_fill_(hidden.all(-1)[..., None], -torch.inf)
        o, lse = self.o[tiles], self.lse[tiles]
        joined, share, share_block = log_add(lse, lse_block)
        o.mul_(share[..., None]).add_(o_block.mul_(share_block[..., None]))
        lse.copy_(joined)

    def _fused(
        self, q: torch.Tensor, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block by the CPU's kernel: o [tiles, R, HQ, .] and LSE [tiles, R, HQ].

        A single pair would go without the kernel's own loop over threads, and the library might
        then share its products among them: it goes twice.
        """
        count = len(q)
        if count * q.shape[1] == 1:
            q = q.expand(2, -1, -1, -1)
        k, v = (self.buffers[name].expand(len(q), -1, -1, -1) for name in ("k", "v"))
        mask = None
        if hidden is not None:
            mask = torch.zeros_like(hidden, dtype=torch.float32)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None]
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=1.0
        )
        return o[:count].transpose(1, 2), lse[:count].transpose(1, 2)

    def _capped(
        self, q: torch.Tensor, hidden: torch.Tensor | None, cap: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by hand, with the softcap on the scores."""
        call, b = self.call, self.buffers
        pairs = q.flatten(0, 1)
        o = torch.empty_like(pairs)
        lse = o.new_empty(o.shape[:2])
        for first in range(0, len(pairs), ITEMS):
            # The last pair fills the batch up.
            pair = torch.arange(first, first + ITEMS, device=pairs.device)
            pair.clamp_(max=len(pairs) - 1)
            head = pair % call.HQ // (call.HQ // call.HK)
            k = torch.index_select(b["k"], 0, head, out=b["k_items"])
            v = torch.index_select(b["v"], 0, head, out=b["v_items"])
            torch.index_select(pairs, 0, pair, out=b["q_items"])
            s = torch.bmm(b["q_items"], k.mT, out=b["s"])
            s.div_(cap).tanh_().mul_(cap)
            if hidden is not None:
                s.masked_fill_(hidden[pair // call.HQ], -torch.inf)
            m = s.amax(-1, keepdim=True)
            m.masked_fill_(m == -torch.inf, 0.0)
            total = s.sub_(m).exp_().sum(-1, keepdim=True)
            total.masked_fill_(total == 0, 1.0)
            own = slice(first, min(first + ITEMS, len(pairs)))
            o[own] = torch.bmm(s, v).div_(total)[: own.stop - first]
            lse[own] = m.add_(total.log_())[: own.stop - first, :, 0]
        o, lse = (x.unflatten(0, (len(q), call.HQ)) for x in (o, lse))
        return o.transpose(1, 2), lse.transpose(1, 2)

    def _load_keys(self, key_tile: int) -> None:
        N = self.shape.N
        wide = (self.buffers["k"].transpose(0, 1), self.buffers["v"].transpose(0, 1))
        (k, v), filled = wide, 0
        k, v = k[..., : self.call.D], v[..., : self.call.DV]
        for x, own in zip(wide, (self.call.D, self.call.DV), strict=True):
            x[..., own:] = 0
        for run, lower, upper in self._pieces(key_tile):
            at, stop = lower - key_tile * N, upper - key_tile * N
            k[filled:at], v[filled:at] = 0, 0
            number = run.number + lower - run.start
            load(self.call, self.n, number, number + upper - lower, k[at:stop], v[at:stop])
            filled = stop
        k[filled:], v[filled:] = 0, 0

    def _pieces(self, key_tile: int) -> Iterator[tuple[Run, int, int]]:
        """The runs with keys in the tile, and the positions of the first and past the last of them.

        Without those that a window hides from all rows.
        """
        N = self.shape.N
        for run in self.runs:
            lower = max(run.start, key_tile * N, self.lowest)
            upper = min(run.start + run.length, (key_tile + 1) * N)
            if lower < upper:
                yield run, lower, upper

    def _hidden(self, key_tile: int, tiles: slice) -> torch.Tensor:
        """The keys that the rows of some query tiles do not see: bool [tiles, R, N]."""
        R, N, call = self.shape.R, self.shape.N, self.call
        first = tiles.start * R
        hidden = self.q.new_ones(tiles.stop - tiles.start, R, N, dtype=torch.bool)
        begin, end = max(self.begin, first), min(self.end, tiles.stop * R)
        rows = hidden.view(-1, N)[begin - first : end - first]
        own = torch.arange(self.origin + begin, self.origin + end, device=hidden.device)
        own = own[:, None]  # positions of rows
        for run, lower, upper in self._pieces(key_tile):
            position = torch.arange(lower, upper, device=hidden.device)
            target = rows[:, lower - key_tile * N : upper - key_tile * N]
            if run.covered and self.mask is not None:
                column = run.number + lower - run.start
                column -= call.plan.prefix[self.n] if call.plan.mask_covers == "new" else 0
                seen = self.mask[self.row + begin : self.row + end]
                torch.logical_not(seen[:, column : column + upper - lower], out=target)
            elif call.causal:
                torch.gt(position, own, out=target)
            else:
                target.fill_(False)
            if call.window is not None:
                target |= position <= own - call.window
        return hidden

    def _clear(self, key_tile: int, tile: int) -> bool:
        """Whether all rows of a query tile of the span see all keys of the key tile."""
        R, first = self.shape.R, self.origin + tile * self.shape.R
        return any(
            not run.covered
            and key_tile
            in unmasked_tiles(
                first,
                first + R - 1,
                run.start,
                run.length,
                tile=self.shape.N,
                window=self.call.window,
                causal=run.causal,
            )
            for run in self.runs
        )


def _runs(call: ExtendCall, n: int) -> list[Run]:
    """The part's keys as runs of positions, in order; prefix and new keys are one if they can."""
    plan, masked = call.plan, call.custom_mask is not None
    prefix, length = plan.prefix[n], plan.lengths[n]
    key_start, query_start = plan.key_start[n], plan.query_start[n]
    if call.part == "all" and not masked and key_start + prefix == query_start:
        return [Run(key_start, prefix + length, 0, call.causal, False)]
    covered = masked and plan.mask_covers == "all"
    runs = []
    if call.part != "extend" and prefix:
        causal = call.causal and not covered
        runs.append(Run(key_start, prefix, 0, causal, covered))
    if call.part != "prefix":
        causal = call.causal and not masked
        runs.append(Run(query_start, length, prefix, causal, masked))
    return runs
