"""Cases of softmax extend attention: their record, and inputs in every layout of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headstart.evidence.cases.record import SMALL, Case, Draws, Floor, small_heads, small_lengths

if TYPE_CHECKING:
    from headstart import ExtendPlan, KVCache

LAYOUTS = ("rows", "slots", "pages")
NOSINK = "-nosink"
SPARE = 7
"""Slots (or pages) of a cache that belong to nobody and hold NaN."""


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """A causal step of softmax attention over a packed batch.

    HQ, HK, D, DV: heads and head sizes (DV 0: D).
    lengths, prefixes: new and cached tokens of each sequence; prefixes () means none.
    window: keys a query sees, its own included; None: all.
    sinks: a learned logit per head in the denominator.
    layout: "rows" (prefixes in consecutive slots), "slots" (a shuffled index per token) or "pages"
        (a page table over shuffled pages).
    page_size: slots of a page with layout "pages".
    index_dtype: that of slots and page tables.
    new_in_cache: whether the new keys are read from the cache too.
    cache_dtype: that of cached keys and values; None: that of q.
    scale_per_head: fp8 scales per key head rather than one.
    mask: "" (causal) or "tree" (every new token sees the prefix and its ancestors).
    """

    op: ClassVar[str] = "extend_attention"

    HQ: int
    HK: int
    D: int
    DV: int = 0
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...] = ()
    window: int | None = None
    sinks: bool = False
    layout: str = "rows"
    page_size: int = 1
    index_dtype: str = "int32"
    new_in_cache: bool = False
    cache_dtype: str | None = None
    scale_per_head: bool = False
    mask: str = ""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {list(LAYOUTS)}, got {self.layout!r}")
        if self.mask not in ("", "tree"):
            raise ValueError(f"mask: expected '' or 'tree', got {self.mask!r}")
        if self.prefixes and len(self.prefixes) != len(self.lengths):
            raise ValueError(
                f"prefixes: expected one for each of {len(self.lengths)} sequences, "
                f"got {len(self.prefixes)}"
            )

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.lengths)

    @property
    def cached(self) -> tuple[int, ...]:
        """`prefixes`, zeros filled in."""
        return self.prefixes or (0,) * len(self.lengths)

    @property
    def value_size(self) -> int:
        """DV, or D where the record says 0."""
        return self.DV or self.D

    def small(self) -> AttentionCase:
        """HK / 8 at the same ratio, new and cached lengths to 1,199."""
        HK, HQ = small_heads(self.HK, self.HQ)
        return replace(
            self,
            id=self.id + SMALL,
            HQ=HQ,
            HK=HK,
            lengths=small_lengths(self.lengths),
            prefixes=small_lengths(self.prefixes),
        )

    def without_sinks(self) -> AttentionCase:
        """The sibling for arms that know no sinks."""
        return replace(self, id=self.id + NOSINK, sinks=False)

    def pairs(self) -> int:
        """(query, key) pairs inside causal order and window; a tree counts as causal."""
        total = 0
        for new, cached in zip(self.lengths, self.cached, strict=True):
            window = min(self.window or cached + new, cached + new)
            # Queries that see fewer keys than the window come first.
            short = min(max(window - cached, 0), new)
            total += short * cached + short * (short + 1) // 2 + (new - short) * window
        return total

    def floor(self) -> Floor:
        """q, o and every key and value in reach once; 2 (D + DV) operations a pair and head."""
        size = self.torch_dtype.itemsize
        kept = getattr(torch, self.cache_dtype).itemsize if self.cache_dtype else size
        sizes = self.D + self.value_size
        moved = self.tokens * self.HQ * sizes * size
        for new, cached in zip(self.lengths, self.cached, strict=True):
            reach = cached if self.window is None else min(cached, self.window - 1)
            new_size = kept if self.new_in_cache else size
            moved += self.HK * sizes * (new * new_size + (reach * kept if new else 0))
        return Floor(moved, 2 * self.HQ * sizes * self.pairs())

    def inputs(
        self, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of `headstart.extend_attention`; spare cache slots hold NaN.

        >>> from headstart.evidence import cases
        >>> inputs = cases.get("oss-512-on-8k-win-small").inputs(seed=1)
        >>> list(inputs["q"].shape), list(inputs["cache"].k.shape), inputs["window"]
        ([511, 8, 64], [1206, 1, 64], 128)
        """
        return self._arguments(Draws(seed, device), dtype or self.torch_dtype)

    def blank(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Arguments of the same shapes with undefined values, for `explain` and the like."""
        return self._arguments(Draws(0, device, blank=True), self.torch_dtype)

    def _arguments(self, draws: Draws, dtype: torch.dtype) -> dict[str, Any]:
        T, DV = self.tokens, self.value_size
        # Twice a unit normal: scores spread over about +-6, as peaked as trained heads are.
        q = 2 * draws.normal("q", T, self.HQ, self.D)
        call: dict[str, Any] = {"q": draws.place(q, dtype), "k": None, "v": None}
        if not self.new_in_cache:
            call["k"] = draws.place(draws.normal("k", T, self.HK, self.D), dtype)
            call["v"] = draws.place(draws.normal("v", T, self.HK, DV), dtype)
        call["plan"], rows = self._plan(draws)
        if rows is not None:
            call["cache"] = self._cache(draws, dtype, rows)
        if self.window is not None:
            call["window"] = self.window
        if self.sinks:
            call["sinks"] = draws.place(draws.normal("sinks", self.HQ))
        if self.mask:
            call["custom_mask"] = self._tree(draws)
        return call

    def _plan(self, draws: Draws) -> tuple[ExtendPlan, torch.Tensor | None]:
        """The plan, and a bool tensor that says which rows [S] of the cache are somebody's."""
        from headstart import ExtendPlan

        lengths, device = list(self.lengths), draws.device
        if self.layout == "rows":
            if not any(self.cached):
                return ExtendPlan.from_lengths(lengths, device=device), None
            count = sum(self.cached)
            plan = ExtendPlan.from_lengths(lengths, list(self.cached), device=device)
            return plan, torch.arange(count + SPARE) < count
        places = self._places(draws)
        if self.layout == "slots":
            count = sum(map(len, places))
            indices = torch.cat(places)
            rows = torch.zeros(count + SPARE, dtype=torch.bool)
            rows[indices] = True
            indptr = [0]
            for mine in places:
                indptr.append(indptr[-1] + len(mine))
            plan = ExtendPlan.from_slots(
                lengths,
                indptr,
                indices.to(device=device, dtype=getattr(torch, self.index_dtype)),
                new_in_cache=self.new_in_cache,
                device=device,
            )
            return plan, rows
        size = self.page_size
        pages = [mine[::size] // size for mine in places]
        table = torch.zeros(len(pages), max(map(len, pages), default=0))
        rows = torch.zeros((sum(map(len, pages)) + SPARE) * size, dtype=torch.bool)
        for n, mine in enumerate(pages):
            table[n, : len(mine)] = mine
            rows[places[n]] = True
        both = [new + cached for new, cached in zip(self.lengths, self.cached, strict=True)]
        plan = ExtendPlan.from_pages(
            lengths,
            both,
            table.to(device=device, dtype=getattr(torch, self.index_dtype)),
            size,
            new_in_cache=self.new_in_cache,
            device=device,
        )
        return plan, rows

    def cache_rows(self, seed: int = 0) -> list[torch.Tensor]:
        """For each sequence the rows of the cache, pages flattened, that hold its keys in order."""
        return self._places(Draws(seed, "cpu"))

    def _places(self, draws: Draws) -> list[torch.Tensor]:
        held = [
            cached + (new if self.new_in_cache else 0)
            for new, cached in zip(self.lengths, self.cached, strict=True)
        ]
        if self.layout == "rows":
            return list(torch.arange(sum(held)).split(held))
        if self.layout == "slots":
            return list(draws.permutation("slots", sum(held) + SPARE)[: sum(held)].split(held))
        size = self.page_size
        pages = [-(-length // size) for length in held]
        order = draws.permutation("pages", sum(pages) + SPARE)[: sum(pages)].split(pages)
        return [
            (mine[:, None] * size + torch.arange(size)).flatten()[:length]
            for mine, length in zip(order, held, strict=True)
        ]

    def _cache(self, draws: Draws, dtype: torch.dtype, rows: torch.Tensor) -> KVCache:
        from headstart import KVCache

        kept = getattr(torch, self.cache_dtype) if self.cache_dtype else dtype
        memory, scales = [], []
        for name, size in (("cached k", self.D), ("cached v", self.value_size)):
            values = draws.normal(name, len(rows), self.HK, size)
            if not draws.blank:
                values = values.masked_fill(~rows[:, None, None], torch.nan)
            if self.cache_dtype:
                scale = 0.02 * (1 + draws.uniform(name + " scale", self._scales()))
                values = values / scale.view(-1, 1)
                scales.append(draws.place(scale))
            values = draws.place(values, kept)
            if self.layout == "pages":
                values = values.view(-1, self.page_size, self.HK, size)
            memory.append(values)
        return KVCache(*memory, *scales)

    def _scales(self) -> int:
        return self.HK if self.scale_per_head else 1

    def _tree(self, draws: Draws) -> torch.Tensor:
        """Masks [new, prefix + new] of random trees, end to end: a token sees its ancestors."""
        masks = []
        for n, (new, cached) in enumerate(zip(self.lengths, self.cached, strict=True)):
            mask = torch.zeros(new, cached + new, dtype=torch.bool)
            mask[:, :cached] = True
            chance = torch.rand(new, generator=torch.Generator().manual_seed(n)).tolist()
            for token in range(new):
                if token:
                    mask[token] |= mask[int(chance[token] * token)]
                mask[token, cached + token] = True
            masks.append(mask.flatten())
        return torch.cat(masks).to(draws.device)
