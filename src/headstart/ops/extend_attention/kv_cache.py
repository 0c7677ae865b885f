"""Keys and values of tokens already computed, addressed by slot."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from headstart.runtime.checks import (
    FLOATS,
    dtype_name,
    expect_device,
    expect_dtype,
    expect_in_memory,
    expect_number,
    expect_shape,
    expect_tensor,
    in_float32,
    shown,
)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite e4m3 value; larger ones saturate."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """The cache of one attention layer. It owns nothing: the tensors stay the caller's.

    Parameters
    ----------
    k: [S, HK, D], or [pages, page_size, HK, D] where slot s is row s % page_size of page
        s // page_size. Any strides. float32, bfloat16, float16, or float8_e4m3fn.
    v: the same with DV in place of D, of the same dtype.
    k_scale, v_scale: required for float8 and forbidden otherwise: the stored value times the scale
        is the key. A float, or a float32 tensor [1] or [HK] on the cache's device (never read by
        the host).

    Slots that a plan does not name may hold anything. So may slots of `from_slots` and whole pages
    of `from_pages` whose keys every window has left, unless the plan has `key_positions`. Others of
    such keys, in prefixes of `from_lengths` and `from_padded` and in pages that hold keys still
    seen, are read by kernels with the tiles they lie in: there finite values change nothing, a NaN
    may. Under `key_positions` that holds of every slot, on a CPU too.

    Raises ValueError if shapes, dtypes, devices or scales do not fit.

    >>> cache = KVCache(torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 64))
    >>> cache.slots, cache.page_size
    (64, 16)
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None

    def __post_init__(self) -> None:
        expect_tensor("cache.k", self.k)
        expect_tensor("cache.v", self.v)
        if self.k.dim() not in (3, 4):
            raise ValueError(
                "cache.k: expected [S, HK, D] or [pages, page_size, HK, D], "
                f"got {list(self.k.shape)}"
            )
        if min(self.k.shape[-2:]) < 1 or (self.k.dim() == 4 and self.k.shape[1] < 1):
            raise ValueError(
                f"cache.k: expected at least one head, channel and row of a page, "
                f"got {list(self.k.shape)}"
            )
        words = "[S, HK, DV]" if self.k.dim() == 3 else "[pages, page_size, HK, DV]"
        expect_shape("cache.v", self.v, words, (*self.k.shape[:-1], None))
        expect_dtype("cache.k", self.k, (*FLOATS, FP8, torch.float64))
        expect_dtype("cache.v", self.v, (self.k.dtype,))
        expect_device("cache.v", self.v, self.k.device, "cache.k")
        self._expect_scale("k_scale", self.k_scale)
        self._expect_scale("v_scale", self.v_scale)

    def _expect_scale(self, name: str, scale: float | torch.Tensor | None) -> None:
        if not self.quantised:
            if scale is not None:
                raise ValueError(
                    f"{name}: expected None for a cache of {dtype_name(self.k.dtype)}, "
                    f"got {shown(scale)}"
                )
            return
        if scale is None:
            raise ValueError(f"{name}: expected a float, [1] or [HK] for a float8 cache, got None")
        if isinstance(scale, torch.Tensor):
            if tuple(scale.shape) not in ((1,), (self.HK,)):
                raise ValueError(f"{name}: expected [1] or [{self.HK}], got {list(scale.shape)}")
            expect_dtype(name, scale, (torch.float32,))
            expect_device(name, scale, self.k.device, "cache.k")
        else:
            words = "a finite scale > 0 of float32"
            expect_number(name, scale, words, lambda scale: scale > 0 and in_float32(scale))

    @functools.cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that a kernel reads: k, v, and scales that are tensors."""
        held = self.k, self.v, self.k_scale, self.v_scale
        return tuple(x for x in held if isinstance(x, torch.Tensor))

    @functools.cached_property
    def facts(self) -> tuple[Any, ...]:
        """What signatures hold of a cache, beside its tensors: see `runtime/steady.py`."""
        scales = self.k_scale, self.v_scale
        return tuple(None if isinstance(x, torch.Tensor) else (x,) for x in scales)

    def expect_in_memory(self) -> None:
        """Raise ValueError unless the values lie where kernels look for them."""
        named = {
            "cache.k": self.k, "cache.v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale
        }  # fmt: skip
        for name, held in named.items():
            if isinstance(held, torch.Tensor):
                expect_in_memory(name, held)

    @property
    def quantised(self) -> bool:
        """Whether the cache stores float8 values with scales."""
        return self.k.dtype == FP8

    @property
    def page_size(self) -> int:
        """Rows of a page; 1 without pages."""
        return self.k.shape[1] if self.k.dim() == 4 else 1

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.k.shape[0] * self.page_size

    @property
    def HK(self) -> int:  # noqa: N802
        """Key and value heads."""
        return self.k.shape[-2]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.k.device


def page_strides(store: torch.Tensor, page: int) -> tuple[int, int]:
    """Elements from a page of `page` rows to the next and from a row to the next.

    >>> page_strides(torch.zeros(4, 2, 16, 64).transpose(1, 2), 16)
    (2048, 64)
    """
    if store.dim() == 4:
        return store.stride(0), store.stride(1)
    return page * store.stride(0), store.stride(0)
