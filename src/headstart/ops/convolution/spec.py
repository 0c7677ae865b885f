"""The arguments of the convolution and the gated norm, checked once for every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule, floor_chunk
from headstart.ops.gated_delta_rule.shared_checks import (
    expect_draft_lengths,
    expect_no_races,
    expect_positions,
    expect_same_memory,
    expect_updates,
    host_slots,
    pool_slots,
    schedule_of,
    share_slots,
    snapshot_slots,
)
from headstart.runtime.checks import (
    FLOATS,
    all_in_memory,
    checking,
    dtype_name,
    expect_choice,
    expect_device,
    expect_dtype,
    expect_finite,
    expect_flag,
    expect_last_contiguous,
    expect_no_gradients,
    expect_number,
    expect_own_memory,
    expect_shape,
    expect_tensor,
    in_memory,
    shown,
)

DTYPES = (*FLOATS, torch.float64)
CONVOLUTION_ACTIVATIONS = ("silu", None)
GATE_ACTIVATIONS = ("silu", "sigmoid")


class Convolution(NamedTuple):
    """y like x, new histories [N, width - 1, channels] or None, snapshots [M, ...] or None."""

    y: torch.Tensor
    state: torch.Tensor | None
    snapshots: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class ConvolutionCall:
    """A checked call of `causal_conv1d`."""

    x: torch.Tensor
    """Packed [T, channels]."""
    weight: torch.Tensor
    bias: torch.Tensor | None
    shape: tuple[int, ...]
    """Shape of y as the caller sees it: [T, channels] or [B, L, channels]."""
    schedule: Schedule
    state: torch.Tensor | Pool | CacheSlots | None
    read_slots: list[int] | None
    write_slots: list[int] | None
    snapshots: torch.dtype | Pool | CacheSlots | None
    snapshot_slots: list[int] | None
    return_state: bool
    activation: str | None
    out: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.x.device

    @property
    def channels(self) -> int:
        """Channels of x."""
        return self.x.shape[1]

    @property
    def width(self) -> int:
        """Inputs that one output sees."""
        return self.weight.shape[1]

    @property
    def changed(self) -> tuple[torch.Tensor, ...]:
        """Where snapshots go, apart from all else that a call is given, unless states lie there."""
        kept = _memory(self.snapshots)
        return () if kept is None or kept is _memory(self.state) else (kept,)

    @property
    def written(self) -> tuple[int, int, int]:
        """Rows of y, new histories and snapshots that kernels write: all of them."""
        step = self.schedule
        return self.x.shape[0], step.slot_count(step.N, 0), step.slot_count(step.M, 2)


@dataclass(frozen=True, eq=False)
class GatedNormCall:
    """A checked call of `rms_norm_gated`."""

    x: torch.Tensor
    weight: torch.Tensor
    gate: torch.Tensor
    eps: float
    activation: str

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.x.device

    @property
    def written(self) -> tuple[int]:
        """Rows of the result that kernels write: all of them."""
        return (self.x.shape[0],)


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    schedule: Schedule | Sequence[int] | None,
    state: torch.Tensor | Pool | CacheSlots | None,
    snapshots: torch.dtype | Pool | CacheSlots | None,
    return_state: bool,
    activation: str | None,
    out: torch.Tensor | None,
) -> ConvolutionCall:
    """Check the arguments of `causal_conv1d`; raises ValueError naming the first wrong one."""
    shape = tuple(expect_tensor("x", x).shape)
    if len(shape) not in (2, 3) or shape[-1] < 1:
        raise ValueError(f"x: expected [T, channels] or [B, L, channels], got {list(shape)}")
    expect_dtype("x", x, DTYPES)
    expect_last_contiguous("x", x)
    _expect_parameters(x, weight, bias)
    expect_no_gradients(
        "causal_conv1d",
        x=x,
        weight=weight,
        bias=bias,
        state=_memory(state),
        snapshots=_memory(snapshots),
        out=out,
    )
    expect_choice("activation", activation, CONVOLUTION_ACTIVATIONS)
    expect_positions(schedule, state)
    x, weight, bias = all_in_memory(x=x, weight=weight, bias=bias)
    packed, schedule = _packed(x, schedule)
    tokens = packed.shape[0]
    if tokens < schedule.T:
        raise ValueError(f"schedule: expected at most T = {tokens} tokens, got {schedule.T}")
    width = weight.shape[1]
    read, write = _state_slots(state, schedule, x, width)
    if isinstance(state, torch.Tensor):
        state = in_memory("state", state)
    expect_updates(state, schedule, expect_flag("return_state", return_state))
    kept = _snapshot_slots(snapshots, schedule, x, width, isinstance(state, CacheSlots))
    shared = share_slots(_memory(state), _memory(snapshots), isinstance(state, torch.Tensor))
    expect_no_races("state", write, read, kept if shared else None)
    expect_no_races("snapshots", None, None, kept)
    if out is not None:
        expect_shape("out", out, "the shape of x", shape)
        expect_dtype("out", out, (x.dtype,))
        expect_device("out", out, x.device, "x")
        expect_last_contiguous("out", out)
        places = {"state": _memory(state), "snapshots": _memory(snapshots)}
        expect_own_memory("out", out, x=x, weight=weight, bias=bias, **places)
    if checking() and x.device.type != "meta":
        for name, tensor in (("x", packed[: schedule.T]), ("weight", weight), ("bias", bias)):
            if tensor is not None:
                expect_finite(name, tensor)
    return ConvolutionCall(
        x=packed,
        weight=weight,
        bias=bias,
        shape=shape,
        schedule=schedule,
        state=state,
        read_slots=read,
        write_slots=write,
        snapshots=snapshots,
        snapshot_slots=kept,
        return_state=return_state,
        activation=activation,
        out=out,
    )


def bind_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, activation: str
) -> GatedNormCall:
    """Check the arguments of `rms_norm_gated`; raises ValueError naming the first wrong one."""
    shape = tuple(expect_tensor("x", x).shape)
    if not shape or shape[-1] < 1:
        raise ValueError(f"x: expected [..., D], got {list(shape)}")
    expect_dtype("x", x, DTYPES)
    expect_shape("weight", weight, "[D]", shape[-1:])
    expect_shape("gate", gate, "the shape of x", shape)
    for name, tensor in (("weight", weight), ("gate", gate)):
        expect_dtype(name, tensor, DTYPES)
        expect_device(name, tensor, x.device, "x")
    expect_no_gradients("rms_norm_gated", x=x, weight=weight, gate=gate)
    x, weight, gate = all_in_memory(x=x, weight=weight, gate=gate)
    eps = expect_number("eps", eps, "a finite number >= 0", lambda eps: eps >= 0)
    expect_choice("activation", activation, GATE_ACTIVATIONS)
    return GatedNormCall(x=x, weight=weight, gate=gate, eps=eps, activation=activation)


def three_dimensions(tensor: torch.Tensor) -> torch.Tensor:
    """[..., D] as three dimensions, a view wherever the strides of the first ones allow it."""
    if tensor.dim() < 3:
        return tensor.view(-1, 1, tensor.shape[-1]) if tensor.dim() == 1 else tensor[:, None]
    return tensor.flatten(0, -3)


def _expect_parameters(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    channels = x.shape[-1]
    expect_shape("weight", weight, "[channels, width]", (channels, None))
    if weight.shape[1] < 2:
        raise ValueError(f"weight: expected a width of at least 2, got {list(weight.shape)}")
    given = {"weight": weight}
    if bias is not None:
        expect_shape("bias", bias, "[channels]", (channels,))
        given["bias"] = bias
    for name, tensor in given.items():
        expect_dtype(name, tensor, DTYPES)
        expect_device(name, tensor, x.device, "x")


def _packed(
    x: torch.Tensor, schedule: Schedule | Sequence[int] | None
) -> tuple[torch.Tensor, Schedule]:
    """x as [T, channels], and the schedule (one built here if none was given)."""
    if x.dim() == 3:
        if schedule is not None:
            raise ValueError(
                "schedule: expected None with x [B, L, channels], or x packed, "
                f"got {shown(schedule)}"
            )
        return x.flatten(0, 1), Schedule([x.shape[1]] * x.shape[0], device=x.device)
    return x, schedule_of(schedule, x.shape[0], x.device)


def _memory(place: object) -> torch.Tensor | None:
    """The tensor of histories behind a state or snapshot argument."""
    if isinstance(place, CacheSlots):
        return place.cache.tensors.get("history")
    if isinstance(place, Pool):
        return place.tensor
    return place if isinstance(place, torch.Tensor) else None


def _state_slots(
    state: torch.Tensor | Pool | CacheSlots | None, schedule: Schedule, x: torch.Tensor, width: int
) -> tuple[list[int] | None, list[int] | None]:
    """Slots that are read and written, as lists where the host knows them."""
    count, entries = schedule.N, schedule.slot_count(schedule.N, 0)
    if state is None:
        return None, None
    if isinstance(state, torch.Tensor):
        shape = (entries, width - 1, x.shape[-1])
        expect_shape("state", state, "[N, width - 1, channels]", shape)
        expect_dtype("state", state, (x.dtype,))
        expect_device("state", state, x.device, "x")
        return None, None
    if isinstance(state, CacheSlots):
        _expect_cache("state", state, x, width)
        expect_draft_lengths(schedule, state.cache.draft_tokens)
        cache = state.cache
        slots = host_slots("state", state.slots, count, entries, cache.slots, cache.device)
        return slots, slots
    if not isinstance(state, Pool):
        raise ValueError(
            f"state: expected None, a tensor, a Pool or cache.at(slots), got {type(state).__name__}"
        )
    _expect_pool("state", state, x, width)
    return pool_slots(state, count, entries)


def _snapshot_slots(
    snapshots: torch.dtype | Pool | CacheSlots | None,
    schedule: Schedule,
    x: torch.Tensor,
    width: int,
    cached: bool,
) -> list[int] | None:
    if snapshots is None:
        return None
    for start, positions in zip(schedule.starts, schedule.snapshot_positions, strict=True):
        if not cached and positions and positions[0] < start:
            raise ValueError(
                f"snapshot_positions: position {floor_chunk(start)} lies before the plain history "
                f"at {start}; only a DeltaCache still has it"
            )
    if isinstance(snapshots, torch.dtype):
        if snapshots != x.dtype:
            raise ValueError(
                f"snapshots: expected the dtype of x, {dtype_name(x.dtype)}, "
                f"got {dtype_name(snapshots)}"
            )
        return None
    if isinstance(snapshots, Pool):
        _expect_pool("snapshots", snapshots, x, width)
    elif isinstance(snapshots, CacheSlots):
        _expect_cache("snapshots", snapshots, x, width)
    else:
        raise ValueError(
            "snapshots: expected None, the dtype of x, a Pool or cache.at(slots), "
            f"got {shown(snapshots)}"
        )
    return snapshot_slots(snapshots, schedule)


def _expect_cache(name: str, at: CacheSlots, x: torch.Tensor, width: int) -> None:
    """Raise unless the cache has this convolution, and x's dtype and device."""
    cache = at.cache
    if not cache.conv_channels:
        raise ValueError(f"{name}: expected a cache with a convolution, got conv_channels 0")
    found = (cache.conv_channels, cache.conv_width)
    if found != (x.shape[-1], width):
        raise ValueError(
            f"{name}: expected a cache with [conv_channels, conv_width] = "
            f"{[x.shape[-1], width]}, got {list(found)}"
        )
    expect_same_memory(name, at, x, "x")


def _expect_pool(name: str, pool: Pool, x: torch.Tensor, width: int) -> None:
    """Raise unless the pool holds histories of this convolution on x's device."""
    shape = (None, width - 1, x.shape[-1])
    expect_shape(name, pool.tensor, "[S, width - 1, channels]", shape)
    expect_dtype(name, pool.tensor, (x.dtype,))
    expect_device(name, pool.tensor, x.device, "x")
    expect_own_memory(name, pool.tensor)
    if pool.layout != "kv":
        raise ValueError(f"{name}: expected a Pool without a layout, got layout {pool.layout!r}")
