"""Softmax attention on vLLM's pages: [pages, HK, page size, 2 D], keys before values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from headstart import ExtendPlan, KVCache
from headstart.integrations.vllm.counting import STATISTICS, call
from headstart.runtime.checks import host_ints

Ints = Sequence[int] | torch.Tensor


def pages(kv_cache: torch.Tensor) -> KVCache:
    """vLLM's pages [pages, HK, page size, 2 D], any strides, as a cache of headstart: two views.

    >>> pages(torch.zeros(3, 2, 16, 128)).k.shape
    torch.Size([3, 16, 2, 64])
    """
    k, v = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return KVCache(k, v)


def write(
    kind: str, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store the new keys and values [T, HK, D] of a layer; slots [T or fewer], -1: not stored."""
    count = len(slots)
    call(kind, "write_kv", k[:count], v[:count], pages(kv_cache), slots)


@dataclass(frozen=True)
class PagedStep:
    """Which tokens a step of the engine brings to the softmax layers that share a block table.

    The keys of a step are in the pages before its queries are answered.
    """

    plan: ExtendPlan

    @classmethod
    def of(
        cls, query_start: Ints, seq_lens: Ints, block_table: torch.Tensor, page_size: int
    ) -> PagedStep:
        """Of R requests: query_start [R + 1], a running sum, and seq_lens [R], new tokens included.

        block_table [R or more, pages], int32. Lengths that lie on a device are read back, once.

        >>> step = PagedStep.of([0, 3, 4], [3, 17], torch.tensor([[5, 0], [2, 9]]), 16)
        >>> step.plan.lengths, step.plan.prefix
        ([3, 1], [0, 16])
        """
        starts = host_ints("query_start", query_start)
        lengths = [end - start for start, end in pairwise(starts)]
        plan = ExtendPlan.from_pages(
            lengths, seq_lens, block_table[: len(lengths)], page_size, new_in_cache=True
        )
        return cls(plan)

    def attend(
        self,
        kind: str,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None,
        softcap: float | None,
        reproducible: bool,
    ) -> None:
        """Fill out [T or more, HQ, D] with the attention of q, the same; rows past T become 0.

        A window counts keys, the query's own included, as vLLM's does.
        """
        call(
            kind,
            "extend_attention",
            q,
            None,
            None,
            plan=self.plan,
            cache=pages(kv_cache),
            scale=scale,
            window=window,
            sinks=sinks,
            softcap=softcap,
            reproducible=reproducible,
            out=out,
        )
        STATISTICS.served[kind] += 1
