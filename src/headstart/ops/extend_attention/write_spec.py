"""The arguments of write_kv, checked once for every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.spec import DTYPES
from headstart.runtime.checks import (
    all_in_memory,
    checking,
    expect_device,
    expect_dtype,
    expect_no_gradients,
    expect_own_memory,
    expect_shape,
    expect_tensor,
    host_ints,
    in_memory,
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
    held = {"cache.k": cache.k, "cache.v": cache.v}
    expect_no_gradients("write_kv", k=k, v=v, **held)
    k, v = all_in_memory(k=k, v=v)
    cache.expect_in_memory()
    expect_own_memory("cache.k", cache.k, k=k, v=v, **{"cache.v": cache.v})
    expect_own_memory("cache.v", cache.v, k=k, v=v)
    if isinstance(slots, torch.Tensor):
        expect_shape("slots", slots, "[T]", (T,))
        expect_dtype("slots", slots, (torch.int32, torch.int64))
        expect_device("slots", slots, cache.device, "cache")
        slots = in_memory("slots", slots)
        if slots.device.type == "cpu" or (checking() and slots.device.type != "meta"):
            _expect_slots(slots, cache.slots)
    else:
        listed = host_ints("slots", slots)
        if len(listed) != T:
            raise ValueError(f"slots: expected one for each of {T} tokens, got {len(listed)}")
        host = torch.tensor(listed, dtype=torch.int64, device="cpu")
        _expect_slots(host, cache.slots)
        slots = host.to(cache.device)
    return WriteCall(k, v, cache, slots)


def _expect_slots(slots: torch.Tensor, limit: int) -> None:
    written, times = slots[slots >= 0].unique(return_counts=True)
    if written.numel() and int(written[-1]) >= limit:
        raise ValueError(f"slots: expected slots below {limit}, got {int(written[-1])}")
    if bool((times > 1).any()):
        twice = int(written[times > 1][0])
        raise ValueError(
            f"slots: expected every slot to be written once, got slot {twice} twice or more"
        )
