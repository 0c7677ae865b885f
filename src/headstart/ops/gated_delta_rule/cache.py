"""The state of sequences under the promise: canonical state, tail and convolution history.

A slot remembers of a sequence
  P        its state position, a multiple of 64, and the state after exactly P tokens;
  the tail its rows from P to its end: k (normalised), v, log decay, beta, in a ring over position;
  history  the last inputs of the short convolution, in a ring over position.
The output of a token is a row of its chunk's product: a function of the state before the chunk and
of the tail rows up to it, never of the steps that brought them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import torch

from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.runtime.checks import (
    FLOATS,
    INT32_MAX,
    all_in_memory,
    checking,
    expect_device,
    expect_dtype,
    expect_finite,
    expect_flag,
    expect_in_memory,
    expect_int,
    expect_no_gradients,
    expect_own_memory,
    expect_place,
    expect_shape,
    host_ints,
    shown,
)
from headstart.runtime.launcher import frozen_ints

MAX_DRAFT_TOKENS = 64
STORED = (*FLOATS, torch.float64)
"""Dtypes of what a cache stores."""
_kinds: dict[tuple, object] = {}
"""What stands for the sizes and strides of a cache, the same for caches that are alike."""


class DeltaCache:
    """Slots for the sequences of one layer; all slots start empty.

    Parameters
    ----------
    slots: number of slots S.
    H, HV, K, V: heads and head sizes of the gated delta rule (those of this rank).
    per_channel: whether the log decay is per channel [HV, K] (KDA) or per head.
    conv_channels, conv_width: channels and width of the short convolution; 0 channels: none.
    dtype: that of q, k, v and of the history: float32, bfloat16 or float16 (the `reference`
        implementation also takes float64, and then keeps its states in it).
    draft_tokens: most tokens of a step with drafts, 0 to 64.
    device: where the memory lies.
    tensors: the caller's memory in the layout of `.tensors`, whose slot stride is free; it is
        taken as it is, so fresh memory must be zero-filled or `reset`.

    Attributes
    ----------
    tensors: name -> tensor [slots, ...]:
        state [S, HV, K, V] float32, position and end [S, HV] int32 (P and the end of the tail),
        tail_k [S, H, R, K], tail_v [S, HV, R, V] in dtype, tail_decay [S, HV, R] or [S, HV, R, K]
        and tail_beta [S, HV, R] float32 (R = 64 + 2 draft_tokens rows, row = position modulo R);
        with a convolution history [S, width - 1 + draft_tokens, channels] in dtype (row =
        position modulo its length), history_first and history_end [S, 1] int32 (the oldest input
        that no later one has overwritten, and the end).
    bytes_per_slot: memory of one slot in bytes.

    A state at position 0 reads as zeros, whatever the memory holds.

    >>> cache = DeltaCache(4, H=1, HV=2, K=16, V=16, dtype=torch.float32, device="cpu")
    >>> cache.bytes_per_slot
    22032
    """

    def __init__(
        self,
        slots: int,
        *,
        H: int,
        HV: int,
        K: int,
        V: int,
        per_channel: bool = False,
        conv_channels: int = 0,
        conv_width: int = 4,
        dtype: torch.dtype,
        draft_tokens: int = 16,
        device: torch.device | str,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        for name, value in (("slots", slots), ("H", H), ("HV", HV), ("K", K), ("V", V)):
            expect_int(name, value, 1, INT32_MAX)
        if HV % H:
            raise ValueError(f"HV: expected a multiple of H = {H}, got {HV}")
        if not isinstance(dtype, torch.dtype) or dtype not in STORED:
            raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {shown(dtype)}")
        expect_int("draft_tokens", draft_tokens, 0, MAX_DRAFT_TOKENS)
        expect_int("conv_channels", conv_channels, 0, INT32_MAX)
        expect_int("conv_width", conv_width, 2, INT32_MAX)
        expect_flag("per_channel", per_channel)
        self.slots, self.H, self.HV, self.K, self.V = slots, H, HV, K, V
        self.per_channel, self.dtype, self.draft_tokens = per_channel, dtype, draft_tokens
        self.conv_channels, self.conv_width = conv_channels, conv_width
        self.device = expect_place("device", device)
        self._seen: tuple[tuple[torch.Tensor, ...], object] = (), None
        layout = self._layout()
        if tensors is None:
            # Plain tensors even when made under inference mode: the cache outlives it.
            with torch.inference_mode(False):
                self.tensors = {
                    name: torch.zeros(shape, dtype=kind, device=self.device)
                    for name, (_, shape, kind) in layout.items()
                }
            self.device = self.tensors["state"].device  # "cuda" has become "cuda:0"
            return
        if not isinstance(tensors, Mapping):
            raise ValueError(f"tensors: expected tensors by name, got {shown(tensors)}")
        if set(tensors) != set(layout):
            raise ValueError(f"tensors: expected {sorted(layout)}, got {sorted(map(str, tensors))}")
        for name, (words, shape, kind) in layout.items():
            expect_shape(f"tensors[{name!r}]", tensors[name], words, shape)
            expect_dtype(f"tensors[{name!r}]", tensors[name], (kind,))
            expect_device(f"tensors[{name!r}]", tensors[name], self.device, "the cache")
            expect_in_memory(f"tensors[{name!r}]", tensors[name])
        given = {f"tensors[{name!r}]": tensor for name, tensor in tensors.items()}
        expect_no_gradients("DeltaCache", **given)
        while given:
            name, tensor = given.popitem()
            expect_own_memory(name, tensor, **given)
        self.tensors = dict(tensors)
        self.device = self.tensors["state"].device

    def _layout(self) -> dict[str, tuple[str, tuple[int, ...], torch.dtype]]:
        S, H, HV, K, V, R = self.slots, self.H, self.HV, self.K, self.V, self.tail_rows
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        decay = ("[S, HV, R, K]", (S, HV, R, K)) if self.per_channel else ("[S, HV, R]", (S, HV, R))
        layout = {
            "state": ("[S, HV, K, V]", (S, HV, K, V), wide),
            "position": ("[S, HV]", (S, HV), torch.int32),
            "end": ("[S, HV]", (S, HV), torch.int32),
            "tail_k": ("[S, H, R, K]", (S, H, R, K), self.dtype),
            "tail_v": ("[S, HV, R, V]", (S, HV, R, V), self.dtype),
            "tail_decay": (*decay, wide),
            "tail_beta": ("[S, HV, R]", (S, HV, R), wide),
        }
        if self.conv_channels:
            rows, channels = self.history_rows, self.conv_channels
            layout["history"] = ("[S, rows, channels]", (S, rows, channels), self.dtype)
            layout["history_first"] = ("[S, 1]", (S, 1), torch.int32)
            layout["history_end"] = ("[S, 1]", (S, 1), torch.int32)
        return layout

    @property
    def sizes(self) -> list[int]:
        """Every number that the constructor took, in its order: what `holding` takes."""
        return [
            self.slots, self.H, self.HV, self.K, self.V, int(self.per_channel),
            self.conv_channels, self.conv_width, self.draft_tokens,
        ]  # fmt: skip

    @classmethod
    def holding(
        cls, sizes: Sequence[int], dtype: torch.dtype, tensors: dict[str, torch.Tensor]
    ) -> DeltaCache:
        """A cache of these `sizes` over some tensors of another: nothing is checked or made.

        >>> cache = DeltaCache(4, H=1, HV=2, K=16, V=16, dtype=torch.float32, device="cpu")
        >>> part = {"state": cache.tensors["state"]}
        >>> DeltaCache.holding(cache.sizes, cache.dtype, part)
        DeltaCache(4, H=1, HV=2, K=16, V=16, dtype=torch.float32, device='cpu')
        """
        cache = cls.__new__(cls)
        cache.slots, cache.H, cache.HV, cache.K, cache.V, per_channel, *more = sizes
        cache.conv_channels, cache.conv_width, cache.draft_tokens = more
        cache.per_channel, cache.dtype, cache.tensors = bool(per_channel), dtype, tensors
        cache.device = next(iter(tensors.values())).device
        cache._seen = (), None
        return cache

    @property
    def kind(self) -> object:
        """What signatures hold of a cache, beside addresses: see `runtime/steady.py`."""
        held, kind = self._seen
        tensors = self.tensors.values()
        if not all(map(is_, held, tensors)) or len(held) != len(tensors):
            sizes = self.H, self.HV, self.K, self.V, self.conv_channels, self.conv_width
            more = self.slots, self.per_channel, self.dtype, self.draft_tokens, self.device
            laid = [
                (name, x.shape, x.stride(), x.dtype, x.is_neg()) for name, x in self.tensors.items()
            ]
            kind = _kinds.setdefault((*sizes, *more, *laid), object())
            self._seen = tuple(tensors), kind
        return kind

    @property
    def tail_rows(self) -> int:
        """R, rows of the tail's ring."""
        return CHUNK + 2 * self.draft_tokens

    @property
    def history_rows(self) -> int:
        """Inputs that the history's ring keeps."""
        return self.conv_width - 1 + self.draft_tokens

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one slot in bytes."""
        return sum(tensor[0].numel() * tensor.dtype.itemsize for tensor in self.tensors.values())

    def at(self, slots: Sequence[int] | torch.Tensor) -> CacheSlots:
        """These slots, one for each sequence; -1 reads as empty and writes nothing.

        A list is copied here, and to the device once: what is returned may serve many steps.
        """
        return CacheSlots(self, slots)

    def expect_in_memory(self) -> None:
        """Raise ValueError unless the values lie where kernels look for them."""
        for name, tensor in self.tensors.items():
            expect_in_memory(f"the cache's {name}", tensor)

    def reset(self, slots: Sequence[int] | torch.Tensor) -> None:
        """Make slots empty."""
        index = self._index("slots", slots)
        for name in ("position", "end", "history_first", "history_end"):
            if name in self.tensors:
                self.tensors[name][index] = 0

    def copy(self, src: Sequence[int] | torch.Tensor, dst: Sequence[int] | torch.Tensor) -> None:
        """Copy all of the slots `src` to the slots `dst`, pair by pair."""
        source, target = self._index("src", src), self._index("dst", dst, distinct=True)
        if len(source) != len(target):
            raise ValueError(f"dst: expected {len(source)} slots, got {len(target)}")
        for tensor in self.tensors.values():
            tensor[target] = tensor[source]

    def export(
        self, slots: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Positions [N] int64, states [N, HV, K, V] and histories [N, width - 1, channels] at P.

        Tails are not part of it. A history whose inputs have left the ring comes back as NaN,
        which `load` refuses; without a convolution histories is None.
        """
        index = self._index("slots", slots)
        positions = self.tensors["position"][index, 0].long()
        states = self.tensors["state"][index]
        states = torch.where(positions.view(-1, 1, 1, 1) == 0, 0.0, states)
        if not self.conv_channels:
            return positions, states, None
        return positions, states, self._histories(index, positions)

    def _histories(self, index: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        before = torch.arange(1 - self.conv_width, 0, device=self.device)
        at = positions[:, None] + before  # [N, width - 1]
        histories = self.tensors["history"][index[:, None], at % self.history_rows]
        first, end = (self.tensors[f"history_{name}"][index] for name in ("first", "end"))
        gone = (at < first) | (at >= end)  # [N, width - 1]
        histories = torch.where(gone[..., None], torch.nan, histories)
        return torch.where((at < 0)[..., None], 0.0, histories)

    def load(
        self,
        slots: Sequence[int] | torch.Tensor,
        positions: Sequence[int] | torch.Tensor,
        states: torch.Tensor,
        histories: torch.Tensor | None = None,
    ) -> None:
        """Fill slots with states [N, HV, K, V] after `positions` [N] tokens, tails empty.

        states, histories: finite, any float dtype, on any device (they are copied and converted).
        histories [N, width - 1, channels], oldest first, are the convolution inputs before each
        position; required where the cache has a convolution. A state at position 0 is empty,
        whatever it holds. States on a device are looked at under HEADSTART_CHECK=1.
        """
        index = self._index("slots", slots, distinct=True)
        places = host_ints("positions", positions, f"multiples of {CHUNK}", 0, INT32_MAX)
        count = len(index)
        if len(places) != count:
            raise ValueError(f"positions: expected {count} positions, got {len(places)}")
        for place in places:
            if place % CHUNK:
                raise ValueError(f"positions: expected multiples of {CHUNK}, got {place}")
        expect_shape("states", states, "[N, HV, K, V]", (count, self.HV, self.K, self.V))
        expect_dtype("states", states, STORED)
        expect_no_gradients("DeltaCache.load", states=states, histories=histories)
        states, histories = all_in_memory(states=states, histories=histories)
        if states.device.type == "cpu" or (checking() and states.device.type != "meta"):
            full = torch.tensor(places, device=states.device).view(-1, 1, 1, 1) > 0
            wide = self.tensors["state"].dtype
            expect_finite("states", torch.where(full, states, 0).to(wide))
        if self.conv_channels:
            if histories is None:
                raise ValueError(
                    "histories: expected a tensor, since the cache has a convolution, got None"
                )
            shape = (count, self.conv_width - 1, self.conv_channels)
            expect_shape("histories", histories, "[N, width - 1, channels]", shape)
            expect_dtype("histories", histories, STORED)
            if histories.device.type != "meta":
                expect_finite("histories", histories.to(self.dtype))
        elif histories is not None:
            raise ValueError(
                "histories: expected None, since the cache has no convolution, "
                f"got {shown(histories)}"
            )
        place = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.tensors["state"][index] = states.to(self.tensors["state"])
        self.tensors["position"][index] = place[:, None].to(torch.int32)
        self.tensors["end"][index] = place[:, None].to(torch.int32)
        if histories is not None:
            at = place[:, None] + torch.arange(1 - self.conv_width, 0, device=self.device)
            ring = self.tensors["history"]
            ring[index[:, None], at % self.history_rows] = histories.to(ring)
            self.tensors["history_first"][index] = at[:, :1].clamp(min=0).to(torch.int32)
            self.tensors["history_end"][index] = place[:, None].to(torch.int32)

    def _index(
        self, name: str, slots: Sequence[int] | torch.Tensor, *, distinct: bool = False
    ) -> torch.Tensor:
        """Slots as indices on the device, checked where the host knows them."""
        if not all(map(torch.Tensor.data_ptr, self.tensors.values())):
            self.expect_in_memory()  # which says of which
        found = host_ints(name, slots)
        for slot in found:
            if not 0 <= slot < self.slots:
                raise ValueError(f"{name}: expected slots in [0, {self.slots}), got {slot}")
        if distinct and len(set(found)) != len(found):
            raise ValueError(f"{name}: expected distinct slots, got {shown(found)}")
        return torch.tensor(found, dtype=torch.int64, device=self.device)

    def __repr__(self) -> str:
        return (
            f"DeltaCache({self.slots}, H={self.H}, HV={self.HV}, K={self.K}, V={self.V}, "
            f"dtype={self.dtype}, device={str(self.device)!r})"
        )


@dataclass(frozen=True, eq=False)
class CacheSlots:
    """Slots of a cache, as an argument of a call (made by `DeltaCache.at`)."""

    cache: DeltaCache
    slots: Sequence[int] | torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", frozen_ints(self.slots))
