"""Inputs of an attention case with all keys of a sequence side by side, as most peers take them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from headstart.evidence.arms import Unfit
from headstart.evidence.cases import Case
from headstart.evidence.cases.extend_attention import AttentionCase


@dataclass
class DenseAttention:
    """q [T, HQ, D]; k, v [J, HK, D | DV]: each sequence's prefix, then its new keys."""

    case: AttentionCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    note: str

    @property
    def key_lengths(self) -> list[int]:
        """Prefix and new tokens of each sequence."""
        return [new + old for new, old in zip(self.case.lengths, self.case.cached, strict=True)]

    @property
    def query_borders(self) -> torch.Tensor:
        """Borders of the sequences among the queries, int32."""
        return self._borders(self.case.lengths)

    @property
    def key_borders(self) -> torch.Tensor:
        """Borders of the sequences among the keys, int32."""
        return self._borders(self.key_lengths)

    def _borders(self, lengths: Any) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.q.device)

    def refuse(self, *, sinks: bool = False, mask: bool = False, window: bool = False) -> None:
        """Raise `Unfit` where the case has a feature that the peer lacks."""
        if sinks and self.case.sinks:
            raise Unfit("knows no sinks")
        if mask and self.case.mask:
            raise Unfit("takes no custom mask here")
        if window and self.case.window is not None:
            raise Unfit("knows no window")


def dense_attention(case: Case, device: torch.device, seed: int) -> DenseAttention:
    """The inputs of a case, gathered out of its cache; `Unfit` for other operations."""
    if not isinstance(case, AttentionCase):
        raise Unfit(f"computes softmax attention, not {case.op}")
    if case.cache_dtype is not None:
        raise Unfit("reads keys in the dtype of the queries only")
    call = case.inputs(seed, device)
    stored, note = call.get("cache"), ""
    k, v = call["k"], call["v"]
    if stored is not None:
        note = "keys side by side instead of in a cache"
        held = [rows.to(device) for rows in case.cache_rows(seed)]
        gathered = []
        for memory, new in ((stored.k, k), (stored.v, v)):
            flat = memory.reshape(-1, *memory.shape[-2:])
            fresh = [None] * len(held) if new is None else new.split(list(case.lengths))
            parts = []
            for rows, own in zip(held, fresh, strict=True):
                parts.append(flat[rows])
                if own is not None:
                    parts.append(own)
            gathered.append(torch.cat(parts).contiguous())
        k, v = gathered
    return DenseAttention(case, call["q"], k, v, call.get("sinks"), note)
