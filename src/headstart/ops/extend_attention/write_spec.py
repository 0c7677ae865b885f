"""The arguments of write_kv, checked once for every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.spec import DTYPES
from headstart.runtime.checks import (
    checking,
    expect_device,
    expect_dtype,
    expect_no_gradients,
    expect_shape,
    expect_tensor,
    host_ints,
)


@dataclass(frozen=True, eq=False)
class WriteCall:
    """A checked call: rows [T, HK, D] and [T, HK, DV], and one slot for each."""

    k: torch.Tensor
    v: torch.Tensor
    cache: KVCache
    slots: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.k.device


def bind(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, slots: Sequence[int] | torch.Tensor
) -> WriteCall:
    """Check the arguments; raises ValueError naming the first wrong one."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache: expected a KVCache, got {type(cache).__name__}")
    expect_tensor("k", k)
    T = k.shape[0] if k.dim() else 0
    for name, tensor, store, words in (
        ("k", k, cache.k, "[T, HK, D]"),
        ("v", v, cache.v, "[T, HK, DV]"),
    ):
        expect_shape(name, tensor, words, (T, cache.HK, store.shape[-1]))
        expect_dtype(name, tensor, DTYPES)
        expect_device(name, tensor, cache.device, "cache")
    expect_no_gradients("write_kv", k=k, v=v)
    if isinstance(slots, torch.Tensor):
        expect_shape("slots", slots, "[T]", (T,))
        expect_dtype("slots", slots, (torch.int32, torch.int64))
        expect_device("slots", slots, cache.device, "cache")
        if slots.device.type == "cpu" and T and int(slots.max()) >= cache.slots:
            raise ValueError(f"slots: expected slots below {cache.slots}, got {int(slots.max())}")
    else:
        listed = host_ints("slots", slots)
        if len(listed) != T:
            raise ValueError(f"slots: expected one for each of {T} tokens, got {len(listed)}")
        _expect_slots(listed, cache.slots)
        slots = torch.tensor(listed, dtype=torch.int64, device=cache.device)
    if checking() and k.device.type != "meta":
        _expect_slots(slots.tolist(), cache.slots)
    return WriteCall(k, v, cache, slots)


def _expect_slots(slots: list[int], limit: int) -> None:
    written = [slot for slot in slots if slot >= 0]
    if written and max(written) >= limit:
        raise ValueError(f"slots: expected slots below {limit}, got {max(written)}")
    if len(set(written)) != len(written):
        raise ValueError("slots: expected every slot to be written once, got one twice")
