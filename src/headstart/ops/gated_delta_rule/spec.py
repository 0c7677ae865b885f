"""The arguments of the gated delta rule, checked once for every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.gate import Gate
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import CHUNK, Schedule, floor_chunk
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
    packs,
    shown,
)
from headstart.runtime.workspace import Workspace

STATE_DTYPES = (*FLOATS, torch.float64)


class GatedDelta(NamedTuple):
    """Outputs o [T, HV, V], new states [N, HV, K, V] or None, snapshots [M, HV, K, V] or None."""

    o: torch.Tensor
    state: torch.Tensor | None
    snapshots: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class GatedDeltaCall:
    """A checked call; packed views q, k [T, H, K], v [T, HV, V], g [T, HV] or [T, HV, K]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    shape: tuple[int, ...]
    """Shape of o as the caller sees it: [T, HV, V] or [B, L, HV, V]."""
    schedule: Schedule
    state: torch.Tensor | Pool | CacheSlots | None
    read_slots: list[int] | None
    write_slots: list[int] | None
    gate: Gate
    snapshots: torch.dtype | Pool | CacheSlots | None
    snapshot_slots: list[int] | None
    return_state: bool
    scale: float
    qk_l2norm: bool
    reproducible: bool
    workspace: Workspace | None
    out: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.q.device

    @property
    def per_channel(self) -> bool:
        """Whether the log decay is per channel."""
        if self.g is None and isinstance(self.state, CacheSlots):
            return self.state.cache.per_channel
        return self.g is not None and self.g.dim() == 3

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, HV, K, V."""
        return self.k.shape[1], self.v.shape[1], self.k.shape[2], self.v.shape[2]

    @property
    def changed(self) -> tuple[torch.Tensor, ...]:
        """Where snapshots go, apart from all else that a call is given, unless states lie there."""
        kept = _memory(self.snapshots)
        return () if kept is None or kept is _memory(self.state) else (kept,)

    @property
    def written(self) -> tuple[int, int, int]:
        """Rows of o, new states and snapshots that are computed; those past them are zeros."""
        schedule = self.schedule
        if schedule.capacity is not None:
            return schedule.T, 0, 0
        return schedule.T, schedule.N, schedule.M


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    schedule: Schedule | Sequence[int] | None,
    state: torch.Tensor | Pool | CacheSlots | None,
    gate: Gate,
    snapshots: torch.dtype | Pool | CacheSlots | None,
    return_state: bool,
    scale: float | None,
    qk_l2norm: bool,
    reproducible: bool | None,
    workspace: Workspace | None,
    out: torch.Tensor | None,
) -> GatedDeltaCall:
    """Check the arguments of `gated_delta_rule`; raises ValueError naming the first wrong one."""
    expect_positions(schedule, state)
    shape, (q, k, v, g, beta), schedule = _packed(q, k, v, g, beta, schedule)
    expect_no_gradients("gated_delta_rule", q=q, k=k, v=v, g=g, beta=beta)
    _expect_no_other_gradients(state, gate, snapshots, out)
    q, k, v, g, beta = all_in_memory(q=q, k=k, v=v, g=g, beta=beta)
    T, H, K = q.shape
    HV, V = v.shape[1:]
    if schedule.T > T:
        raise ValueError(f"schedule: expected at most T = {T} tokens, got {schedule.T}")
    gate = _gate(gate, g, HV, K, q.device)
    cached = isinstance(state, CacheSlots)
    expect_flag("return_state", return_state)
    expect_flag("qk_l2norm", qk_l2norm)
    if reproducible is None:
        reproducible = cached
    elif not expect_flag("reproducible", reproducible) and cached:
        raise ValueError(
            "reproducible: expected True with a DeltaCache, which implies it, got False"
        )
    read, write = _state_slots(state, schedule, (H, HV, K, V), q, g)
    if isinstance(state, torch.Tensor):
        state = in_memory("state", state)
    expect_updates(state, schedule, return_state)
    kept = _snapshot_slots(snapshots, schedule, (H, HV, K, V), q, cached)
    shared = share_slots(_memory(state), _memory(snapshots), isinstance(state, torch.Tensor))
    expect_no_races("state", write, read, kept if shared else None)
    expect_no_races("snapshots", None, None, kept)
    if out is not None:
        expect_shape("out", out, "the shape of o", shape)
        expect_dtype("out", out, (q.dtype,))
        expect_device("out", out, q.device, "q")
        expect_last_contiguous("out", out)
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        if isinstance(state, CacheSlots):
            inputs |= {f"the cache's {name}": held for name, held in state.cache.tensors.items()}
        elif state is not None:
            inputs["state"] = state.tensor if isinstance(state, Pool) else state
        if isinstance(snapshots, Pool):
            inputs["snapshots"] = snapshots.tensor
        elif isinstance(snapshots, CacheSlots):
            held = snapshots.cache.tensors
            inputs |= {f"the snapshots' {name}": tensor for name, tensor in held.items()}
        rows = out.flatten(0, 1) if out.dim() == 4 and packs(out) else out
        expect_own_memory("out", rows, **inputs)
    if workspace is not None and not isinstance(workspace, Workspace):
        raise ValueError(f"workspace: expected a Workspace, got {type(workspace).__name__}")
    if scale is not None:
        scale = expect_number("scale", scale, "None or a finite number")
    if workspace is not None and workspace.device.type != q.device.type:
        raise ValueError(f"workspace: expected device {q.device}, got {workspace.device}")
    if checking() and q.device.type != "meta":
        _check_values(q, k, v, g, beta, gate, schedule)
    return GatedDeltaCall(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        shape=shape,
        schedule=schedule,
        state=state,
        read_slots=read,
        write_slots=write,
        gate=gate,
        snapshots=snapshots,
        snapshot_slots=kept,
        return_state=return_state,
        scale=K**-0.5 if scale is None else scale,
        qk_l2norm=qk_l2norm,
        reproducible=reproducible,
        workspace=workspace,
        out=out,
    )


def _memory(place: object) -> torch.Tensor | None:
    """The tensor of states behind a state or snapshot argument."""
    if isinstance(place, CacheSlots):
        return place.cache.tensors["state"]
    if isinstance(place, Pool):
        return place.tensor
    return place if isinstance(place, torch.Tensor) else None


def _expect_no_other_gradients(
    state: object, gate: object, snapshots: object, out: torch.Tensor | None
) -> None:
    """Gradients of arguments that are no plain inputs: parameters of the gate above all."""
    found: dict[str, torch.Tensor | None] = {"out": out}
    for name, place in (("state", state), ("snapshots", snapshots)):
        if isinstance(place, torch.Tensor):
            found[name] = place
        elif isinstance(place, Pool) and isinstance(place.tensor, torch.Tensor):
            found[name] = place.tensor
    if isinstance(gate, Gate):
        found |= {"a_log": gate.a_log, "dt_bias": gate.dt_bias}
    expect_no_gradients("gated_delta_rule", **found)


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    schedule: Schedule | Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple, Schedule]:
    """The shape of o, the packed tensors, and the schedule (one built here if none was given)."""
    given = {"q": q, "k": k, "v": v}
    optional = {name: tensor for name, tensor in (("g", g), ("beta", beta)) if tensor is not None}
    for name, tensor in {**given, **optional}.items():
        expect_tensor(name, tensor)
    if q.dim() not in (3, 4):
        raise ValueError(f"q: expected [T, H, K] or [B, L, H, K], got {list(q.shape)}")
    lead = q.shape[:-2]
    words = "T, " if len(lead) == 1 else "B, L, "
    expect_dtype("q", q, STATE_DTYPES)
    expect_shape("k", k, f"[{words}H, K]", q.shape)
    expect_shape("v", v, f"[{words}HV, V]", (*lead, None, None))
    H, K, HV = q.shape[-2], q.shape[-1], v.shape[-2]
    if H < 1 or K < 1 or v.shape[-1] < 1:
        raise ValueError(
            f"q: expected at least one head and one channel, got {list(q.shape)}, v {list(v.shape)}"
        )
    if HV < 1 or HV % H:
        raise ValueError(f"v: expected HV a multiple of H = {H}, got {HV}")
    for name in ("k", "v"):
        expect_dtype(name, given[name], (q.dtype,))
    for name, tensor in given.items():
        expect_last_contiguous(name, tensor)
    if g is not None:
        channels = (K,) if g.dim() == q.dim() else ()
        expect_shape("g", g, f"[{words}HV{', K' * len(channels)}]", (*lead, HV, *channels))
    if beta is not None:
        expect_shape("beta", beta, f"[{words}HV]", (*lead, HV))
    for name, tensor in {**given, **optional}.items():
        expect_device(name, tensor, q.device, "q")
    for name, tensor in optional.items():
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name}: expected a float dtype, got {dtype_name(tensor.dtype)}")
    shape = (*lead, HV, v.shape[-1])
    if len(lead) == 2:
        if schedule is not None:
            raise ValueError(
                "schedule: expected None with [B, L, ...] inputs, or packed inputs, "
                f"got {shown(schedule)}"
            )
        schedule = Schedule([lead[1]] * lead[0], device=q.device)
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        g, beta = (None if tensor is None else tensor.flatten(0, 1) for tensor in (g, beta))
    else:
        schedule = schedule_of(schedule, lead[0], q.device)
    return shape, (q, k, v, g, beta), schedule


def _gate(gate: Gate, g: torch.Tensor | None, HV: int, K: int, device: torch.device) -> Gate:
    """The gate, its parameters checked and in memory."""
    if not isinstance(gate, Gate):
        raise ValueError(f"gate: expected a Gate such as Gate.log(), got {shown(gate)}")
    if gate.kind != "raw":
        return gate
    if g is None:
        raise ValueError("g: expected a tensor with Gate.raw, got None")
    expect_shape("a_log", expect_tensor("a_log", gate.a_log), "[HV]", (HV,))
    expect_dtype("a_log", gate.a_log, STATE_DTYPES)  # type: ignore[arg-type]
    expect_device("a_log", gate.a_log, device, "q")  # type: ignore[arg-type]
    if gate.dt_bias is not None:
        channels = (K,) if g.dim() == 3 else ()
        words = "[HV, K]" if channels else "[HV]"
        expect_shape("dt_bias", gate.dt_bias, words, (HV, *channels))
        expect_dtype("dt_bias", gate.dt_bias, STATE_DTYPES)
        expect_device("dt_bias", gate.dt_bias, device, "q")
    # Kernels take a step of one element from head to head.
    a_log = in_memory("a_log", gate.a_log).contiguous()
    dt_bias = None if gate.dt_bias is None else in_memory("dt_bias", gate.dt_bias).contiguous()
    return replace(gate, a_log=a_log, dt_bias=dt_bias)


def _state_slots(
    state: torch.Tensor | Pool | CacheSlots | None,
    schedule: Schedule,
    sizes: tuple[int, int, int, int],
    q: torch.Tensor,
    g: torch.Tensor | None,
) -> tuple[list[int] | None, list[int] | None]:
    """Slots that are read and written, as lists where the host knows them."""
    _, HV, K, V = sizes
    count, entries = schedule.N, schedule.slot_count(schedule.N, 0)
    if state is None:
        return None, None
    if isinstance(state, torch.Tensor):
        expect_shape("state", state, "[N, HV, K, V]", (entries, HV, K, V))
        expect_dtype("state", state, STATE_DTYPES)
        expect_device("state", state, q.device, "q")
        return None, None
    if isinstance(state, CacheSlots):
        expect_cache("state", state, sizes, q)
        per_channel = g is not None and g.dim() == 3
        if g is not None and per_channel != state.cache.per_channel:
            words = "per channel" if state.cache.per_channel else "per head"
            raise ValueError(f"g: expected a decay {words}, as the cache has, got {list(g.shape)}")
        expect_draft_lengths(schedule, state.cache.draft_tokens)
        cache = state.cache
        slots = host_slots("state", state.slots, count, entries, cache.slots, cache.device)
        return slots, slots
    if isinstance(state, Pool):
        expect_pool("state", state, sizes, q)
        return pool_slots(state, count, entries)
    raise ValueError(
        f"state: expected None, a tensor, a Pool or cache.at(slots), got {type(state).__name__}"
    )


def _snapshot_slots(
    snapshots: torch.dtype | Pool | CacheSlots | None,
    schedule: Schedule,
    sizes: tuple[int, int, int, int],
    q: torch.Tensor,
    cached: bool,
) -> list[int] | None:
    if snapshots is None:
        return None
    for start, positions in zip(schedule.starts, schedule.snapshot_positions, strict=True):
        if not cached and positions and positions[0] <= start and start % CHUNK:
            raise ValueError(
                f"snapshot_positions: position {floor_chunk(start)} lies before the plain state "
                f"at {start}; only a DeltaCache still has it"
            )
    if isinstance(snapshots, torch.dtype):
        if snapshots not in STATE_DTYPES:
            raise ValueError(f"snapshots: expected a float dtype, got {dtype_name(snapshots)}")
        return None
    if isinstance(snapshots, Pool):
        expect_pool("snapshots", snapshots, sizes, q)
    elif isinstance(snapshots, CacheSlots):
        expect_cache("snapshots", snapshots, sizes, q)
    else:
        raise ValueError(
            f"snapshots: expected None, a dtype, a Pool or cache.at(slots), got {shown(snapshots)}"
        )
    return snapshot_slots(snapshots, schedule)


def expect_cache(
    name: str, at: CacheSlots, sizes: tuple[int, int, int, int], q: torch.Tensor
) -> None:
    """Raise unless the cache has these head counts, head sizes, and q's dtype and device."""
    cache = at.cache
    found = (cache.H, cache.HV, cache.K, cache.V)
    if found != sizes:
        raise ValueError(
            f"{name}: expected a cache with [H, HV, K, V] = {list(sizes)}, got {list(found)}"
        )
    expect_same_memory(name, at, q, "q")


def expect_pool(name: str, pool: Pool, sizes: tuple[int, int, int, int], q: torch.Tensor) -> None:
    """Raise unless the pool holds states of these sizes on q's device."""
    _, HV, K, V = sizes
    tensor = expect_tensor(name, pool.tensor)
    if pool.layout == "kv":
        expect_shape(name, tensor, "[S, HV, K, V]", (None, HV, K, V))
    else:
        expect_shape(name, tensor, "[S, HV, V, K]", (None, HV, V, K))
    expect_dtype(name, tensor, STATE_DTYPES)
    expect_device(name, tensor, q.device, "q")
    expect_own_memory(name, tensor)


def _check_values(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    gate: Gate,
    schedule: Schedule,
) -> None:
    """The checks of HEADSTART_CHECK=1 that look at values."""
    rows = slice(0, schedule.T)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("beta", beta)):
        if tensor is not None:
            expect_finite(name, tensor[rows])
    if g is None:
        return
    decay = g[rows]
    if gate.kind == "log" and not bool((decay <= 0).all()):
        raise ValueError("g: expected a log decay <= 0, got values above 0 or NaN")
    if gate.kind == "linear" and not bool(((decay >= 0) & (decay <= 1)).all()):
        raise ValueError("g: expected a decay in [0, 1], got values outside or NaN")
    if gate.kind == "raw":
        expect_finite("g", decay)
