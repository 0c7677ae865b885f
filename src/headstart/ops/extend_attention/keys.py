"""Reading keys and values of one sequence, from the cache, from the new rows, or across both.

A sequence's keys are numbered 0, 1, ... over its prefix and then its new tokens. Only rows asked
for are touched: what unused slots hold can never reach a result.
"""

from __future__ import annotations

import torch

from headstart.ops.extend_attention import locate
from headstart.ops.extend_attention.kv_cache import FP8, KVCache
from headstart.ops.extend_attention.spec import ExtendCall

Slots = range | torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor]


def cached_rows(store: torch.Tensor, slots: Slots) -> torch.Tensor:
    """Rows [count, HK, D] of a cache tensor, a view where consecutive slots allow one."""
    if store.dtype == FP8 and not isinstance(slots, range):
        return cached_rows(store.view(torch.uint8), slots).view(FP8)
    if store.dim() == 3:
        if isinstance(slots, range):
            return store[slots.start : slots.stop]
        return store.index_select(0, slots)
    page_size = store.shape[1]
    if isinstance(slots, range):
        page, row = divmod(slots.start, page_size)
        if not slots or row + len(slots) <= page_size:
            return store[page, row : row + len(slots)] if slots else store[:0, 0]
        listed = torch.arange(slots.start, slots.stop, device=store.device)
        return cached_rows(store, listed)
    wide = slots.long()
    return store[wide // page_size, wide % page_size]


def read(call: ExtendCall, n: int, begin: int, end: int) -> list[tuple[torch.Tensor, ...]]:
    """Keys and values [begin, end) of sequence n as stored: pieces (k, v, k_scale?, v_scale?)."""
    pieces: list[tuple[torch.Tensor, ...]] = []
    plan, cache = call.plan, call.cache
    border = plan.cached(n)
    if begin < border and cache is not None and plan.slots is not None:
        pieces.append(_cached(cache, plan.slots, n, begin, min(end, border)))
    if end > border and call.k is not None and call.v is not None:
        first = plan.offsets[n] - border
        rows = slice(first + max(begin, border), first + end)
        pieces.append((call.k[rows], call.v[rows]))
    return pieces


def _cached(cache: KVCache, place: locate.Slots, n: int, begin: int, end: int) -> Pair:
    """Keys and values [begin, end) of sequence n from a cache."""
    if isinstance(place, locate.Paged) and cache.k.dim() == 4 and end - begin >= place.page_size:
        # Whole pages are copied several times faster than their rows one by one.
        pages, first = place.pages(n, begin, end), begin % place.page_size
        k, v = (_whole_pages(store, pages).flatten(0, 1) for store in (cache.k, cache.v))
        return k[first : first + end - begin], v[first : first + end - begin]
    slots = place.find(n, begin, end)
    return cached_rows(cache.k, slots), cached_rows(cache.v, slots)


def _whole_pages(store: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Pages [count, page size, HK, D] of a cache tensor, copied."""
    if store.dtype == FP8:
        return _whole_pages(store.view(torch.uint8), pages).view(FP8)
    return store.index_select(0, pages)


def view(call: ExtendCall, n: int, begin: int, end: int, dtype: torch.dtype) -> Pair | None:
    """Keys and values [begin, end) of sequence n without a copy, or None if that cannot be."""
    plan, cache = call.plan, call.cache
    border = plan.cached(n)
    if begin < border:
        usable = (
            end <= border
            and cache is not None
            and plan.slots is not None
            and cache.k.dtype == dtype
            and cache.k.stride(-1) == 1
            and cache.v.stride(-1) == 1
        )
        if not usable or cache is None or plan.slots is None:
            return None
        slots = plan.slots.find(n, begin, end)
        if not isinstance(slots, range):
            return None
        if cache.k.dim() == 4 and slots.start % cache.page_size + len(slots) > cache.page_size:
            return None
    elif call.k is None or call.k.dtype != dtype:
        return None
    ((k, v),) = read(call, n, begin, end)
    return k, v


def load(
    call: ExtendCall, n: int, begin: int, end: int, k_out: torch.Tensor, v_out: torch.Tensor
) -> None:
    """Copy keys and values [begin, end) of sequence n, dequantised, into [end - begin, HK, .]."""
    at = 0
    for k, v in read(call, n, begin, end):
        rows = slice(at, at + k.shape[0])
        _dequantise(k, k_out[rows], call.cache.k_scale if call.cache and k.dtype == FP8 else None)
        _dequantise(v, v_out[rows], call.cache.v_scale if call.cache and v.dtype == FP8 else None)
        at += k.shape[0]


def _dequantise(
    stored: torch.Tensor, out: torch.Tensor, scale: float | torch.Tensor | None
) -> None:
    out.copy_(stored)
    if scale is not None:
        out.mul_(scale.view(-1, 1) if isinstance(scale, torch.Tensor) else scale)
