"""What every case has: an id, a reason, sizes, seeded inputs, a floor and a `-small` sibling."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch

SMALL = "-small"
SHORT = 192
"""Sequences up to this length stay as they are in a small sibling."""
SMALL_LENGTH = 1199
SMALL_HEADS = 8


class Floor(NamedTuple):
    """What a call cannot do without.

    bytes: every input read once and every output written once.
    operations: multiplications and additions of the cheapest known form.
    """

    bytes: int
    operations: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload under a stable id.

    id: lower-case words joined by hyphens; siblings add a suffix.
    why: what the case shows that others do not.
    dtype: that of q, k, v (or of the layer's inputs).
    """

    op: ClassVar[str]

    id: str
    why: str
    dtype: str = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch spells it."""
        return getattr(torch, self.dtype)

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        raise NotImplementedError

    def small(self) -> Self:
        """The sibling that any machine runs within seconds."""
        raise NotImplementedError

    def floor(self) -> Floor:
        """Bytes and operations that no implementation can avoid."""
        raise NotImplementedError

    def inputs(
        self, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of the operation, drawn from `seed` on the CPU and moved to `device`.

        dtype takes the place of the case's own.
        """
        raise NotImplementedError

    def blank(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The same arguments with undefined values: for `explain` and `workspace_bytes`."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """The case as plain data, for JSON."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"id": data.pop("id"), "op": self.op} | data | {"tokens": self.tokens}


def small_heads(groups: int, heads: int) -> tuple[int, int]:
    """An eighth of the shared heads, at least one, the ratio kept.

    >>> small_heads(16, 32), small_heads(2, 8), small_heads(1, 5)
    ((2, 4), (1, 4), (1, 5))
    """
    fewer = max(1, groups // SMALL_HEADS)
    return fewer, fewer * (heads // groups)


def small_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths above 192 shrink together until the longest fits 1,199, at least 3 chunks and odd.

    >>> small_lengths([8192, 2048, 64, 1])
    (1199, 299, 64, 1)
    >>> small_lengths([512])
    (511,)
    """
    longest = max(lengths, default=0)

    def shrink(length: int) -> int:
        if length <= SHORT:
            return length
        if longest > SMALL_LENGTH:
            length = max(length * SMALL_LENGTH // longest, SHORT + 1)
        return length if length % 2 else length - 1

    return tuple(shrink(length) for length in lengths)


def drawn_lengths(seed: int, count: int, least: int, most: int) -> tuple[int, ...]:
    """`count` integers drawn evenly from least..most.

    >>> len(drawn_lengths(1, 3, 5, 9)), set(drawn_lengths(1, 99, 5, 9)) == {5, 6, 7, 8, 9}
    (3, True)
    """
    values = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return tuple(least + int(value * (most - least + 1)) for value in values.tolist())


def drawn_parts(seed: int, count: int, total: int) -> tuple[int, ...]:
    """`count` positive integers that sum to `total`, cut at random places.

    >>> sum(drawn_parts(3, 7, 1000))
    1000
    """
    generator = torch.Generator().manual_seed(seed)
    cuts = sorted((torch.randperm(total - 1, generator=generator)[: count - 1] + 1).tolist())
    return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True))


class Draws:
    """Seeded random tensors by name, so that one more draw moves no other.

    A blank set of draws works on meta tensors and places undefined memory instead.
    """

    _kept: ClassVar[dict[tuple, torch.Tensor] | None] = None

    def __init__(self, seed: int, device: torch.device | str, *, blank: bool = False) -> None:
        self.seed, self.device, self.blank = seed, torch.device(device), blank

    @classmethod
    @contextmanager
    def once(cls) -> Iterator[None]:
        """While this lasts, draw each tensor once and hand out the same one again.

        For whoever builds one case many times: drawing takes seconds where lengths are real ones.
        """
        before, cls._kept = cls._kept, {}
        try:
            yield
        finally:
            cls._kept = before

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))

    def _drawn(
        self, draw: Callable[..., torch.Tensor], name: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if self.blank:
            return torch.empty(shape, device="meta")
        kept = self._kept if self._kept is not None else {}
        key = (draw.__name__, self.seed, name, shape)
        if key not in kept:
            kept[key] = draw(shape, generator=self._generator(name))
        return kept[key]

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        """Standard normal, float32; read only."""
        return self._drawn(torch.randn, name, shape)

    def uniform(self, name: str, *shape: int) -> torch.Tensor:
        """Uniform in [0, 1), float32; read only."""
        return self._drawn(torch.rand, name, shape)

    def filled(self, value: float, *shape: int) -> torch.Tensor:
        """One value everywhere, float32."""
        return torch.full(shape, value, device="meta" if self.blank else "cpu")

    def permutation(self, name: str, count: int) -> torch.Tensor:
        """0 .. count - 1 in random order, int64, never blank."""
        return torch.randperm(count, generator=self._generator(name))

    def place(self, tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor in `dtype` on the device of the call, in memory of its own."""
        if self.blank:
            return torch.empty(tensor.shape, dtype=dtype, device=self.device)
        return tensor.to(device=self.device, dtype=dtype, copy=self._kept is not None)
