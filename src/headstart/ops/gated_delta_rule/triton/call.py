"""One call as launches: gates, what needs no state, and the serial scan, span after span.

Kernels name their arguments alike, so a call collects them once, by name, and every launch takes
those that its kernel names.
"""

from __future__ import annotations

from typing import Any

import torch
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
from headstart.ops.gated_delta_rule.triton.config import (
    DECAY_HEADS,
    Config,
    backend_of,
    configuration,
    padded,
    precision,
)
from headstart.ops.gated_delta_rule.triton.decays import decays_kernel
from headstart.ops.gated_delta_rule.triton.prepare import prepare_kernel
from headstart.ops.gated_delta_rule.triton.scan import scan_kernel
from headstart.ops.gated_delta_rule.triton.scratch import Plan
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import Implementation
from headstart.runtime.launcher import current, declines_tensors, device_ints
from headstart.runtime.workspace import Workspace, default_workspace


def declines(call: GatedDeltaCall) -> str | None:
    """Why these kernels cannot run a call, or None."""
    if sentence := declines_tensors(call.device, call.q.dtype):
        return sentence
    states = (call.state, call.snapshots)
    if any(isinstance(s, torch.Tensor) and s.dtype == torch.float64 for s in states):
        return "it keeps states in float32; float64 is for the reference."
    if call.device.type == "cpu" and any(_stored(s) == torch.bfloat16 for s in states):
        return "Triton's interpreter truncates what it stores in bfloat16."
    _, _, K, V = call.sizes
    if not (16 <= K <= 256 and 16 <= V <= 256):
        return f"K and V must lie in [16, 256], got {K} and {V}."
    return None


def _stored(place: object) -> torch.dtype | None:
    """Dtype in which states or snapshots are kept there."""
    if isinstance(place, Pool):
        return place.tensor.dtype
    if isinstance(place, torch.Tensor):
        return place.dtype
    return place if isinstance(place, torch.dtype) else None


def workspace_bytes(call: GatedDeltaCall) -> int:
    """Scratch of `run`, exactly."""
    return Plan.of(call).bytes


def run(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call."""
    if checking():
        sequence_steps(call)  # raises where a start is not legal in its slot
    stores = Stores.allocate(call, torch.float32)
    if call.schedule.slot_count(call.schedule.N, 0):
        with current(call.device):
            _launch(call, stores, Plan.of(call), call.workspace or default_workspace(call.device))
    return stores.result


def _launch(call: GatedDeltaCall, stores: Stores, plan: Plan, workspace: Workspace) -> None:
    _, HV, K, V = call.sizes
    config = configuration(K, V, call.q.dtype)
    given = _arguments(call, stores, plan, workspace, config)
    given |= _states(call, stores)
    N = call.schedule.slot_count(call.schedule.N, 0)
    for parity, (first, last) in enumerate(plan.spans):
        given |= {"first_item": first, "last_item": last, "parity": parity % 2}
        items = last - first
        if items and call.per_channel:
            blocks = channel_configuration(call.q.dtype, *backend_of(call.device))
            own = {"W": given["W_tiles"], "U": given["U_tiles"], "P": given["P_tiles"]}
            _start(
                prepare_channels_kernel,
                (HV, items),
                given | own | {"BV": padded(V), "BC": blocks.BC},
                blocks.warps,
            )
        elif items:
            _start(decays_kernel, (-(-HV // DECAY_HEADS), items), given, DECAY_HEADS // 2)
            own = {"W": given["W_part"], "U": given["U_part"], "BV": padded(V)}
            _start(prepare_kernel, (HV, items), given | own, config.prepare_warps)
        _start(
            scan_kernel,
            (-(-V // config.BV), HV, N),
            given | _scanned(given),
            config.scan_warps,
        )


def _start(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], num_warps: int) -> None:
    """Launch a kernel with the arguments it names.

    Without contraction into fused multiply-adds: a value that one path reads from memory and
    another forms in registers must give the same bits.
    """
    arguments = {name: given[name] for name in kernel.arg_names}
    kernel[grid](**arguments, num_warps=num_warps, enable_fp_fusion=False)


def _arguments(
    call: GatedDeltaCall, stores: Stores, plan: Plan, workspace: Workspace, config: Config
) -> dict[str, Any]:
    """Tensors of the step and of the scratch, strides, and what is fixed for the call."""
    H, HV, K, V = call.sizes
    q, k, v, g, beta, o = call.q, call.k, call.v, call.g, call.beta, stores.o
    scratch = {
        name: workspace.buffer(name, shape, dtype) for name, (shape, dtype) in plan.shapes.items()
    }
    gate, dtype = call.gate, q.dtype
    bounded = gate.kind == "raw" and gate.lower_bound is not None
    BK = padded(K)
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "o": o, "g": _some(g, q), "beta": _some(beta, q),
        "a_log": _some(gate.a_log, q), "dt_bias": _some(gate.dt_bias, q),
        "sequences": plan.table.sequences, "items": plan.table.items,
        "scale": call.scale, "lower_bound": gate.lower_bound or 0.0,
        "q_token": q.stride(0), "q_head": q.stride(1),
        "k_token": k.stride(0), "k_head": k.stride(1),
        "v_token": v.stride(0), "v_head": v.stride(1),
        "o_token": o.stride(0), "o_head": o.stride(1),
        "g_token": _stride(g, 0), "g_head": _stride(g, 1), "g_channel": _stride(g, 2),
        "beta_token": _stride(beta, 0), "beta_head": _stride(beta, 1),
        "bias_head": _stride(gate.dt_bias, 0), "bias_channel": _stride(gate.dt_bias, 1),
        "H": H, "HV": HV, "K": K, "V": V, "BK": BK, "BV": config.BV, "BC": config.BC,
        "BH": DECAY_HEADS, "STAGES": config.stages,
        "GATE": "bounded" if bounded else gate.kind, "BETA": gate.beta,
        "HAS_G": g is not None, "HAS_BETA": beta is not None,
        "HAS_BIAS": gate.dt_bias is not None, "NORMALISE": call.qk_l2norm,
        "PER_CHANNEL": call.per_channel, "TILES": plan.tiles,
        "PRECISION": precision(dtype, backend_of(call.device)[0]),
    }  # fmt: skip
    for name in (
        "from_start", "to_end", "whole_decay", "sums", "strengths", "log_decays", "base", "carry",
        "q_tiles", "k_tiles", "keys",
    ):  # fmt: skip
        given[name] = scratch.get(name, q)
    given |= {"clean_rows": scratch.get("clean", scratch["from_start"])}
    given |= {"clean": given["clean_rows"], "whole": given["whole_decay"]}
    for name, columns in (("W", BK), ("U", config.BV), ("P", CHUNK)):
        tensor = scratch[name]
        given[f"{name}_tiles"] = tensor
        given[name] = TensorDescriptor.from_tensor(tensor, [CHUNK, columns])
        given[f"{name}_part"] = TensorDescriptor.from_tensor(tensor, [CHUNK, config.BC])
    if plan.tiles:
        given["q_scanned"], given["k_scanned"] = (
            TensorDescriptor.from_tensor(scratch[name], [CHUNK, BK])
            for name in ("q_tiles", "k_tiles")
        )
    else:
        given["q_scanned"] = TensorDescriptor.from_tensor(q, [CHUNK, 1, BK])
        given["k_scanned"] = k
    return given


def _scanned(given: dict[str, Any]) -> dict[str, Any]:
    """What `scan` reads q and k from; a tail takes k as it was."""
    keys = "keys" if given["PER_CHANNEL"] else "k_tiles"
    return {"q": given["q_scanned"], "k": given["k_scanned"], "k_tiles": given[keys]}


def _states(call: GatedDeltaCall, stores: Stores) -> dict[str, Any]:
    """Where states and snapshots are read and written, and the cache's tails."""
    q, state = call.q, call.state
    cache = state.cache.tensors if isinstance(state, CacheSlots) else {}
    old = new = read = write = present = None
    old_strides = new_strides = (0, 0, 0, 0)
    if isinstance(state, CacheSlots):
        old = new = cache["state"]
        old_strides = new_strides = old.stride()
        read = write = device_ints(state.slots, call.device)
    elif isinstance(state, torch.Tensor):
        old, old_strides = state, state.stride()
    elif isinstance(state, Pool):
        new, new_strides = state.tensor, _kv_strides(state)
        if state.read_slots is not None:
            old, old_strides = new, new_strides
            read = device_ints(state.read_slots, call.device)
            if state.present is not None:
                present = device_ints(state.present, call.device)
        slots = state.write_slots
        write = read if slots is None else device_ints(slots, call.device)
    if stores.state is not None:
        new, new_strides = stores.state, stores.state.stride()
    kept, kept_slots, kept_strides, kept_cache = stores.snapshots, None, (0, 0, 0, 0), {}
    if kept is not None:
        kept_strides = kept.stride()
    elif isinstance(call.snapshots, Pool):
        assert call.snapshots.write_slots is not None
        kept, kept_strides = call.snapshots.tensor, _kv_strides(call.snapshots)
        kept_slots = device_ints(call.snapshots.write_slots, call.device)
    elif isinstance(call.snapshots, CacheSlots):
        kept_cache = call.snapshots.cache.tensors
        kept, kept_strides = kept_cache["state"], kept_cache["state"].stride()
        kept_slots = device_ints(call.snapshots.slots, call.device)
    given = {
        "old_state": _some(old, q), "read_slots": _some(read, q), "slots": _some(read, q),
        "present": _some(present, q), "new_state": _some(new, q), "write_slots": _some(write, q),
        "snapshots": _some(kept, q), "snapshot_slots": _some(kept_slots, q),
        "snapshot_position": _some(kept_cache.get("position"), q),
        "snapshot_end": _some(kept_cache.get("end"), q),
        "snap_position": _stride(kept_cache.get("position"), 0),
        "position": _some(cache.get("position"), q), "tail_end": _some(cache.get("end"), q),
        "position_slot": _stride(cache.get("position"), 0),
        "tail_rows": state.cache.tail_rows if isinstance(state, CacheSlots) else 1,
        "CACHED": bool(cache), "HAS_STATE": old is not None, "HAS_READ": read is not None,
        "HAS_PRESENT": present is not None, "HAS_NEW": new is not None and not cache,
        "HAS_WRITE": write is not None, "HAS_SNAPSHOTS": kept is not None,
        "HAS_SNAPSHOT_SLOTS": kept_slots is not None, "SNAPSHOTS_CACHED": bool(kept_cache),
    }  # fmt: skip
    for name in ("tail_k", "tail_v", "tail_decay", "tail_beta"):
        tail = cache.get(name)
        given |= {
            name: _some(tail, q),
            f"{name}_slot": _stride(tail, 0),
            f"{name}_head": _stride(tail, 1),
        }
    for prefix, strides in (("old", old_strides), ("new", new_strides), ("snap", kept_strides)):
        given |= {f"{prefix}_{axis}": strides[i] for i, axis in enumerate("nhkv")}
    return given


def _some(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer for an argument that a kernel does not read."""
    return other if tensor is None else tensor


def _stride(tensor: torch.Tensor | None, axis: int) -> int:
    return 0 if tensor is None or tensor.dim() <= axis else tensor.stride(axis)


def _kv_strides(pool: Pool) -> tuple[int, ...]:
    n, h, a, b = pool.tensor.stride()
    return (n, h, a, b) if pool.layout == "kv" else (n, h, b, a)


IMPLEMENTATION = Implementation("triton", declines, run, workspace_bytes)
