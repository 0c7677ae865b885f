"""Keys and values of the softmax layers in pages of 64 tokens, shared by caches with one prefix."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from headstart import ExtendPlan, KVCache
from headstart.integrations.transformers.uncompiled import uncompiled
from headstart.ops.gated_delta_rule.schedule import CHUNK

if TYPE_CHECKING:
    from headstart.integrations.transformers.forward import Forward

PAGE = CHUNK
"""Tokens of a page: a kept prefix ends on a page's border."""


class PagePool:
    """The memory of pages, layer by layer, and how many tables hold each page.

    All layers use the same pages of a sequence; memory grows as pages are taken.
    """

    def __init__(self) -> None:
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._holders: list[int] = []
        self._free: list[int] = []

    def memory(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> KVCache:
        """The pages of a layer, made for keys and values like these [B, HK, L, D] at first use."""
        if layer not in self._memory:
            count = len(self._holders)
            # Plain tensors even under inference mode: the pages may be used outside it.
            with torch.inference_mode(False):
                self._memory[layer] = (
                    k.new_zeros(count, PAGE, k.shape[1], k.shape[3]),
                    v.new_zeros(count, PAGE, v.shape[1], v.shape[3]),
                )
        return self.cache(layer)

    def cache(self, layer: int) -> KVCache:
        """The pages of a layer as an argument of `extend_attention`."""
        return KVCache(*self._memory[layer])

    def take(self, count: int) -> list[int]:
        """Pages with one holder each."""
        if len(self._free) < count:
            have = len(self._holders)
            more = max(count, have // 2)
            for layer, pair in self._memory.items():
                with torch.inference_mode(False):
                    k, v = (torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in pair)
                self._memory[layer] = (k, v)
            self._free += range(have, have + more)
            self._holders += [0] * more
        taken, self._free = self._free[:count], self._free[count:]
        self.share(taken)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One holder more for each page."""
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder less; a page that nobody holds is free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether more than one table holds the page."""
        return self._holders[page] > 1

    def copy(self, source: int, target: int) -> None:
        """Copy a page in every layer."""
        for pair in self._memory.values():
            for x in pair:
                x[target] = x[source]

    @property
    def bytes(self) -> int:
        """Memory of all pages."""
        return self.page_bytes * len(self._holders)

    @property
    def page_bytes(self) -> int:
        """Memory of one page in all layers."""
        each = (x for pair in self._memory.values() for x in pair)
        return sum(x.shape[1:].numel() * x.dtype.itemsize for x in each)


class Pages:
    """The pages of one cache: a table for each sequence, and the forward under way.

    Attributes
    ----------
    forward, plan, slots: facts of the forward under way (None between forwards): the plan of its
        softmax layers, and the slots of its new tokens.
    """

    def __init__(self, pool: PagePool | None = None) -> None:
        self.pool = pool or PagePool()
        self.table: list[list[int]] = []
        self.forward: Forward | None = None
        self.plan: ExtendPlan | None = None
        self.slots: torch.Tensor | None = None
        weakref.finalize(self, _give_back, self.pool, self.table)

    def begin(self, forward: Forward) -> None:
        """A forward begins: pages for its new tokens, none of them in another table."""
        if not self.table:
            self.table += [[] for _ in range(forward.batch)]
        for pages, start, end in zip(self.table, forward.starts, forward.ends, strict=True):
            for place in range(start // PAGE, min(len(pages), -(-end // PAGE))):
                if self.pool.is_shared(pages[place]):
                    self._replace(pages, place, copy=place * PAGE < start)
            pages += self.pool.take(max(-(-end // PAGE) - len(pages), 0))
        columns = max(len(pages) for pages in self.table)
        rows = [pages + [0] * (columns - len(pages)) for pages in self.table]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        slots = []
        for pages, start, end in zip(table, forward.starts, forward.ends, strict=True):
            tokens = torch.arange(start, end, device="cpu")
            slots.append(pages[tokens // PAGE] * PAGE + tokens % PAGE)
        device = forward.device
        self.slots = torch.cat(slots).to(device)
        self.plan = ExtendPlan.from_pages(
            forward.lengths, forward.ends, table.to(device), PAGE, new_in_cache=True
        )
        self.forward = forward

    def end(self) -> None:
        """The forward is over."""
        self.forward = self.plan = self.slots = None

    def _replace(self, pages: list[int], place: int, *, copy: bool) -> None:
        """A page of its own for a table, in place of one that others hold too."""
        (fresh,) = self.pool.take(1)
        if copy:
            self.pool.copy(pages[place], fresh)
        self.pool.give_back([pages[place]])
        pages[place] = fresh

    def restored(self, row: int, position: int) -> Pages:
        """A table of one sequence that shares the pages of the first `position` tokens."""
        twin = Pages(self.pool)
        if position:
            shared = self.table[row][: position // PAGE]
            self.pool.share(shared)
            twin.table.append(list(shared))
        return twin

    def select(self, rows: Sequence[int]) -> None:
        """Sequence n gets the pages that sequence rows[n] had."""
        chosen = [list(self.table[row]) for row in rows]
        for pages in chosen:
            self.pool.share(pages)
        self.reset()
        self.table += chosen

    def reset(self) -> None:
        """Give all pages back."""
        _give_back(self.pool, self.table)
        self.table.clear()


def _give_back(pool: PagePool, table: list[list[int]]) -> None:
    for pages in table:
        pool.give_back(pages)


class PagedLayer(CacheLayerMixin):
    """A softmax layer of a `HybridCache`: all keys in pages, whatever the window.

    Attributes
    ----------
    lengths: tokens of each sequence, [] before the first step.
    seen: rows of each sequence, padding included.
    whole: False from the first operation of a step to its last; an error may leave it so.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, pages: Pages) -> None:
        super().__init__()
        self.pages = pages
        self.lengths: list[int] = []
        self.seen = 0
        self.whole = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory is made by the pool."""

    @uncompiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the new keys [B, HK, L, D] and return them alone; attention writes them."""
        if self.pages.forward is None:
            raise ValueError("past_key_values: a HybridCache needs enable(model)")
        self.lengths, self.whole = self.pages.forward.ends, False
        self.seen += key_states.shape[2]
        return key_states, value_states

    def restored(self, pages: Pages, position: int) -> PagedLayer:
        """A layer of one sequence that stands at `position`."""
        layer = PagedLayer(pages)
        layer.seen, layer.lengths = position, [position] if position else []
        return layer

    def get_seq_length(self) -> int:
        """Rows seen of each sequence, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows that a mask would cover, and the first of them."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Pages grow without a limit."""
        return -1

    def reset(self) -> None:
        """Forget all tokens (the pages are the cache's to give back)."""
        self.seen, self.lengths, self.whole = 0, [], True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens of every sequence."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected minus the number to remove, got {tokens_to_remove}"
            )
        least = min(self.lengths, default=0)
        if -tokens_to_remove > least:
            raise ValueError(f"tokens_to_remove: expected at most {least}, got {-tokens_to_remove}")
        self.seen += tokens_to_remove
        self.lengths = [length + tokens_to_remove for length in self.lengths]

    def select(self, rows: Sequence[int]) -> None:
        """Sequence n becomes what sequence rows[n] was."""
        self.lengths = [self.lengths[row] for row in rows] if self.lengths else []
