"""One call as launches: `prepare` and `scan` over one span of chunks after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDelta, GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import sequence_steps
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.ops.gated_delta_rule.triton.channel import (
    channel_configuration,
    prepare_channels_kernel,
)
from headstart.ops.gated_delta_rule.triton.decays import decays_kernel
from headstart.ops.gated_delta_rule.triton.prepare import prepare_kernel
from headstart.ops.gated_delta_rule.triton.scan import scan_kernel
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import Implementation
from headstart.runtime.workspace import Workspace, default_workspace

SCRATCH = 96 * 2**20
"""Bytes of scratch that a span of chunks may take."""

DECAY_HEADS = 8
"""Value heads that one program of `decays` takes; two share a warp."""

INTERPRETED = triton.knobs.runtime.interpret


def padded(size: int) -> int:
    """Columns of a tile of `size` channels: a power of two, at least 64.

    Triton 3.6 reads outside shared memory in some products over rows of less than 128 bytes.
    """
    return max(64, triton.next_power_of_2(size))


@dataclass(frozen=True)
class Config:
    """How the kernels are built for (K, V, dtype).

    BV: columns of V that one program of `scan` holds; BC: columns that `prepare` takes at a time,
    rows of 128 bytes; their warps, and the stages of the scan.
    """

    BV: int
    BC: int
    prepare_warps: int
    scan_warps: int
    stages: int


def configuration(K: int, V: int, dtype: torch.dtype) -> Config:
    """The one configuration of a kind of call; it never depends on lengths or on the batch."""
    wide = dtype == torch.float32 or K > 128
    return Config(
        BV=64,
        BC=128 // dtype.itemsize,
        prepare_warps=4,
        scan_warps=4,
        stages=1 if wide else 3,
    )


def declines(call: GatedDeltaCall) -> str | None:
    """Why these kernels cannot run a call, or None."""
    _, _, K, V = call.sizes
    if call.q.dtype == torch.float64:
        return "it computes in float32; float64 is for the reference."
    states = (call.state, call.snapshots)
    if any(isinstance(s, torch.Tensor) and s.dtype == torch.float64 for s in states):
        return "it keeps states in float32; float64 is for the reference."
    if call.device.type == "cpu":
        if not INTERPRETED:
            return "tensors on a CPU need Triton's interpreter (TRITON_INTERPRET=1)."
        if call.q.dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 products wrongly."
    if not (16 <= K <= 256 and 16 <= V <= 256):
        return f"K and V must lie in [16, 256], got {K} and {V}."
    return None


@dataclass(frozen=True, eq=False)
class Scratch:
    """Names, shapes and dtypes of the tiles of one span."""

    call: GatedDeltaCall
    items: int

    @cached_property
    def tiles(self) -> bool:
        """Whether normalised, gathered tiles of q and k are kept.

        Without them the scan copies rows of q in bulk, which takes aligned rows.
        """
        q = self.call.q
        aligned = all(stride * q.element_size() % 16 == 0 for stride in q.stride()[:2])
        aligned = aligned and q.data_ptr() % 16 == 0 and q.shape[0] > 0
        return self.call.qk_l2norm or isinstance(self.call.state, CacheSlots) or not aligned

    @cached_property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Per item, except `base` and `carry`."""
        H, HV, K, V = self.call.sizes
        I, N, C, f = self.items, self.call.schedule.slot_count(self.call.schedule.N, 0), CHUNK, torch.float32
        kind = self.call.q.dtype
        BK, BV = padded(K), padded(V)
        shapes = {
            "W": ((I * HV * C, BK), kind),
            "U": ((I * HV * C, BV), kind),
            "P": ((I * HV * C, C), kind),
            "from_start": ((I, HV, C), f),
        }
        cached = isinstance(self.call.state, CacheSlots)
        if self.call.per_channel:
            # Tiles of q and k carry their value head's decay; a tail takes k as it was.
            shapes |= {name: ((I * HV * C, BK), kind) for name in ("q_tiles", "k_tiles")}
            shapes["whole_decay"] = ((I, HV, BK), f)
            if cached:
                shapes["keys"] = ((I * H * C, BK), kind)
                shapes["log_decays"] = ((I * HV * C, BK), f)
                shapes["strengths"] = ((I, HV, C), f)
                shapes["base"] = ((N, HV), torch.int32)
            return shapes
        shapes |= {name: ((I, HV, C), f) for name in ("to_end", "strengths")}
        shapes["sums"] = ((I, 2, HV, C), f)
        shapes["clean"] = ((I, HV), torch.int32)
        if self.tiles:
            shapes |= {name: ((I * H * C, BK), kind) for name in ("q_tiles", "k_tiles")}
        if cached:
            shapes["log_decays"] = ((I, HV, C), f)
            shapes["base"] = ((N, HV), torch.int32)
        return shapes

    def bytes(self) -> int:
        """All of them."""
        return sum(_bytes(*shape) for shape in self.shapes.values())


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


@dataclass(frozen=True, eq=False)
class Plan:
    """The spans of a call."""

    call: GatedDeltaCall
    table: Any
    items: int
    span: int

    @staticmethod
    def of(call: GatedDeltaCall) -> Plan:
        """Spans of equal size, as few as the scratch allows."""
        cached = isinstance(call.state, CacheSlots)
        drafting = cached and call.state.cache.draft_tokens > 0
        table = call.schedule.chunk_table(cached, drafting)
        one = Scratch(call, 1).bytes()
        most = max(1, SCRATCH // one)
        spans = max(1, -(-table.count // most))
        return Plan(call, table, table.count, max(1, -(-table.count // spans)))

    @property
    def scratch(self) -> Scratch:
        """Tiles of one span."""
        return Scratch(self.call, self.span)

    @property
    def carries(self) -> bool:
        """Whether a state goes from span to span."""
        return self.span < self.items

    @property
    def bytes(self) -> int:
        """Scratch of the call."""
        _, HV, K, V = self.call.sizes
        return self.scratch.bytes() + (2 * HV * K * V * 4 if self.carries else 0)


def workspace_bytes(call: GatedDeltaCall) -> int:
    """Scratch of `run`, exactly."""
    return Plan.of(call).bytes


def _device_slots(slots: Any, device: torch.device) -> torch.Tensor | None:
    if slots is None or isinstance(slots, torch.Tensor):
        return slots
    return torch.tensor(slots, dtype=torch.int32, device=device)


def run(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call."""
    if checking():
        sequence_steps(call)  # raises where a start is not legal in its slot
    stores = Stores.allocate(call, torch.float32)
    plan = Plan.of(call)
    workspace = call.workspace or default_workspace(call.device)
    launch(call, stores, plan, workspace)
    return stores.result


def launch(call: GatedDeltaCall, stores: Stores, plan: Plan, workspace: Workspace) -> None:
    """Queue all launches of the call on the current stream."""
    H, HV, K, V = call.sizes
    N = call.schedule.slot_count(call.schedule.N, 0)
    if N == 0:
        return
    config = configuration(K, V, call.q.dtype)
    scratch = {
        name: workspace.buffer(name, shape, dtype)
        for name, (shape, dtype) in plan.scratch.shapes.items()
    }
    nothing = call.q
    tile = scratch.get
    q, k, v, g, beta = call.q, call.k, call.v, call.g, call.beta
    carry = nothing
    if plan.carries:
        carry = workspace.buffer("carry", (2, HV, K, V), torch.float32)
    gate = call.gate
    kind = "bounded" if gate.kind == "raw" and gate.lower_bound is not None else gate.kind

    cached = isinstance(call.state, CacheSlots)
    old = new = None
    read = write = present = None
    old_strides = new_strides = (0, 0, 0, 0)
    cache = call.state.cache.tensors if cached else {}
    if cached:
        old = new = cache["state"]
        read = write = _device_slots(call.state.slots, call.device)
        old_strides = new_strides = old.stride()
    elif isinstance(call.state, torch.Tensor):
        old, old_strides = call.state, call.state.stride()
    elif isinstance(call.state, Pool):
        pool = call.state
        old = new = pool.tensor
        old_strides = new_strides = _kv_strides(pool)
        read = _device_slots(pool.read_slots, call.device)
        write = read if pool.write_slots is None else _device_slots(pool.write_slots, call.device)
        if pool.read_slots is None:
            old = None
        elif pool.present is not None:
            present = torch.as_tensor(pool.present, device=call.device)
    if stores.state is not None:
        new, new_strides = stores.state, stores.state.stride()
    kept, kept_strides, kept_slots, kept_cache = None, (0, 0, 0, 0), None, {}
    if stores.snapshots is not None:
        kept, kept_strides = stores.snapshots, stores.snapshots.stride()
    elif isinstance(call.snapshots, Pool):
        kept, kept_strides = call.snapshots.tensor, _kv_strides(call.snapshots)
        kept_slots = _device_slots(call.snapshots.write_slots, call.device)
    elif isinstance(call.snapshots, CacheSlots):
        kept_cache = call.snapshots.cache.tensors
        kept, kept_strides = kept_cache["state"], kept_cache["state"].stride()
        kept_slots = _device_slots(call.snapshots.slots, call.device)

    def own(tensor: torch.Tensor | None) -> torch.Tensor:
        return nothing if tensor is None else tensor

    def stride(tensor: torch.Tensor | None, axis: int) -> int:
        return 0 if tensor is None else tensor.stride(axis)

    tails = [cache.get(name) for name in ("tail_k", "tail_v", "tail_decay", "tail_beta")]
    tail_strides = [stride(tail, axis) for tail in tails for axis in (0, 1)]
    tail_rows = call.state.cache.tail_rows if cached else 1
    BK, BV = padded(K), config.BV
    precise = precision(q.dtype, call.device)
    sequences, items = plan.table.sequences, plan.table.items
    tiles = plan.scratch.tiles or call.per_channel
    described = {
        name: TensorDescriptor.from_tensor(scratch[name.split()[0]], [CHUNK, columns])
        for name, columns in (
            ("W", BK), ("U", BV), ("P", CHUNK), ("W part", config.BC), ("U part", config.BC),
        )  # fmt: skip
    }
    if tiles:
        queries, keys = (
            TensorDescriptor.from_tensor(scratch[name], [CHUNK, BK])
            for name in ("q_tiles", "k_tiles")
        )
    else:
        queries, keys = TensorDescriptor.from_tensor(q, [CHUNK, 1, BK]), k

    for parity, first in enumerate(range(0, max(1, plan.items), plan.span)):
        last = min(plan.items, first + plan.span)
        if last > first and call.per_channel:
            blocks = channel_configuration(q.dtype, *_target(call.device))
            prepare_channels_kernel[(HV, last - first)](
                q, k, v, own(g), own(beta), own(gate.a_log), own(gate.dt_bias),
                sequences, items, own(read), own(cache.get("position")),
                *(own(tail) for tail in tails),
                scratch["W"], scratch["U"], scratch["P"],
                scratch["q_tiles"], scratch["k_tiles"],
                scratch["from_start"], scratch["whole_decay"], own(tile("keys")),
                own(tile("log_decays")), own(tile("strengths")), own(tile("base")),
                first, call.scale, gate.lower_bound or 0.0,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                stride(g, 0), stride(g, 1), stride(g, 2), stride(beta, 0), stride(beta, 1),
                stride(gate.dt_bias, 0), stride(gate.dt_bias, 1),
                stride(cache.get("position"), 0), *tail_strides, tail_rows,
                H=H, HV=HV, K=K, V=V, BK=BK, BV=padded(V),
                BC=blocks.BC, GATE=kind, BETA=gate.beta, HAS_G=g is not None,
                HAS_BETA=beta is not None, HAS_BIAS=gate.dt_bias is not None,
                NORMALISE=call.qk_l2norm, CACHED=cached, PRECISION=precise,
                num_warps=blocks.warps, enable_fp_fusion=False,
            )
        elif last > first:
            decays_kernel[(triton.cdiv(HV, DECAY_HEADS), last - first)](
                own(g), own(beta), own(gate.a_log), own(gate.dt_bias), sequences, items, own(read),
                own(cache.get("position")), own(cache.get("tail_decay")),
                own(cache.get("tail_beta")), scratch["sums"], scratch["from_start"],
                scratch["to_end"], scratch["strengths"], scratch["clean"],
                own(tile("log_decays")), own(tile("base")), first, gate.lower_bound or 0.0,
                stride(g, 0), stride(g, 1), stride(beta, 0), stride(beta, 1),
                stride(cache.get("position"), 0), *tail_strides[4:], tail_rows,
                HV=HV, BH=DECAY_HEADS, GATE=kind, BETA=gate.beta, HAS_G=g is not None,
                HAS_BETA=beta is not None, HAS_BIAS=gate.dt_bias is not None, CACHED=cached,
                num_warps=DECAY_HEADS // 2, enable_fp_fusion=False,
            )
            prepare_kernel[(HV, last - first)](
                q, k, v, sequences, items, own(read), own(tails[0]), own(tails[1]),
                described["W part"], described["U part"], described["P"],
                own(tile("q_tiles")), own(tile("k_tiles")), scratch["sums"],
                scratch["from_start"], scratch["strengths"], scratch["clean"], own(tile("base")),
                first, call.scale,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                *tail_strides[:4], tail_rows,
                H=H, HV=HV, K=K, V=V, BK=BK, BV=padded(V), BC=config.BC, NORMALISE=call.qk_l2norm,
                CACHED=cached, TILES=tiles, PRECISION=precise, num_warps=config.prepare_warps,
                enable_fp_fusion=False,
            )
        scan_kernel[(triton.cdiv(V, BV), HV, N)](
            queries, keys, v, stores.o,
            described["W"], described["U"], described["P"],
            own(tile("keys" if call.per_channel else "k_tiles")),
            scratch["from_start"], own(tile("to_end")), own(tile("whole_decay")),
            own(tile("log_decays")), own(tile("strengths")), own(tile("base")), carry,
            sequences, items, own(old), own(read), own(present), own(new), own(write),
            own(kept), own(kept_slots), own(kept_cache.get("position")), own(kept_cache.get("end")),
            own(cache.get("position")), own(cache.get("end")), *(own(tail) for tail in tails),
            first, last, parity % 2, call.scale,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            stores.o.stride(0), stores.o.stride(1),
            *old_strides, *new_strides, *kept_strides, stride(kept_cache.get("position"), 0),
            stride(cache.get("position"), 0), *tail_strides, tail_rows,
            H=H, HV=HV, K=K, V=V, BK=BK, BV=BV, HAS_STATE=old is not None,
            HAS_READ=read is not None, HAS_PRESENT=present is not None,
            HAS_NEW=new is not None and not cached, HAS_WRITE=write is not None,
            HAS_SNAPSHOTS=kept is not None, HAS_SNAPSHOT_SLOTS=kept_slots is not None,
            SNAPSHOTS_CACHED=bool(kept_cache), CACHED=cached, TILES=tiles,
            PER_CHANNEL=call.per_channel, PRECISION=precise,
            STAGES=config.stages, num_warps=config.scan_warps, enable_fp_fusion=False,
        )


def _kv_strides(pool: Pool) -> tuple[int, ...]:
    n, h, a, b = pool.tensor.stride()
    return (n, h, a, b) if pool.layout == "kv" else (n, h, b, a)


def _target(device: torch.device) -> tuple[str, int]:
    """Backend and lanes of a warp; those of NVIDIA in the interpreter."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "hip", torch.cuda.get_device_properties(device).warp_size
    return "cuda", 32


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """How float32 operands are multiplied; for 16-bit ones a name that every target accepts."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return "tf32x3" if dtype == torch.float32 and nvidia else "ieee"


IMPLEMENTATION = Implementation("triton", declines, run, workspace_bytes)
