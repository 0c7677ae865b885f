"""One call as launches: gates, what needs no state, and a serial scan, span after span.

Kernels name their arguments alike, so a call collects them once, by name, and every launch takes
those that its kernel names. Each is imported where it is launched: Triton reads the source of every
function with its module, which a first call that launches another would wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.cutting import Cut
from headstart.ops.gated_delta_rule.passes.config import (
    DECAY_HEADS,
    INTERPRETED_AS,
    chained,
    heads_together,
    prepare_configuration,
)
from headstart.ops.gated_delta_rule.passes.scratch import Plan
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.runtime import launcher, tables
from headstart.runtime.launcher import (
    current,
    device_ints,
    padded,
    precision,
    processors,
    reads_descriptors,
    target_of,
)
from headstart.runtime.tables import Key
from headstart.runtime.workspace import default_workspace

Given = dict[str, Any]
C = TypeVar("C")


def launch(
    call: GatedDeltaCall,
    stores: Stores,
    plan: Plan,
    scan: Callable[[Given, int], None],
    prepare: Callable[[Given, int], None] | None = None,
) -> None:
    """Launch the passes of every span: decays, prepare, maps and their join for segments, scan.

    scan: launches the last one, scan(given, pieces). prepare: launches another in place of the
    portable one, prepare(given, items).
    """
    with current(call.device):
        given = _arguments(call, stores, plan) | state_arguments(call, stores)
        given["CHAINED"] = chained(target_of(call.device, INTERPRETED_AS))
        cut = plan.cut
        pieces = plan.facts.sequences if cut.segments == 1 else cut.segments
        about = cut.pieces(plan.facts.sequences, plan.facts.chunks)
        for i, (first, last) in enumerate(plan.spans):
            row = i * cut.rows(plan.facts.sequences)
            given |= {"first_item": first, "items_there": last - first}
            if last > first:
                _before_state(given, last - first, prepare or _prepare)
            if cut.maps:
                own = {"MAPS": True, "first_piece": row + cut.segments, "pieces_about": cut.maps}
                scan(given | own, cut.maps)
                _join(given, cut)
            scan(given | {"MAPS": False, "first_piece": row, "pieces_about": about}, pieces)


def _before_state(given: Given, items: int, prepare: Callable[[Given, int], None]) -> None:
    from headstart.ops.gated_delta_rule.passes.decays import decays_kernel

    if not given["PER_CHANNEL"]:
        start(decays_kernel, (-(-given["HV"] // DECAY_HEADS), items), given, DECAY_HEADS // 2)
    prepare(given, items)


def _prepare_channels(given: Given, items: int) -> None:
    from headstart.ops.gated_delta_rule.passes.channel import (
        channel_configuration,
        prepare_channels_kernel,
    )

    q = given["q"]
    target = target_of(q.device, INTERPRETED_AS)
    rule = partial(channel_configuration, q.dtype, target.backend, target.warp_size)
    blocks = configured("prepare_channels", given, rule)
    start(
        prepare_channels_kernel, (given["HV"], items), given | {"BC": blocks.BC}, blocks.warps
    )  # fmt: skip


def _prepare(given: Given, items: int) -> None:
    if given["PER_CHANNEL"]:
        _prepare_channels(given, items)
        return
    from headstart.ops.gated_delta_rule.passes.prepare import prepare_kernel

    q, H, HV = given["q"], given["H"], given["HV"]
    target = target_of(q.device, INTERPRETED_AS)
    config = configured("prepare", given, partial(prepare_configuration, q.dtype, target))
    together = heads_together(H, HV, items, processors(q.device))
    own = {
        "BC": min(config.BC, given["BK"], given["BV"]), "together": together,
        "DESCRIBED": reads_descriptors(target),
    }  # fmt: skip
    if reads_descriptors(target):
        own |= {name: described(given[name], CHUNK) for name in ("T", "P")}
    start(prepare_kernel, (HV // together, items), given | own, config.warps)


def _join(given: Given, cut: Cut) -> None:
    """Where segments begin, from what their maps are."""
    from headstart.ops.gated_delta_rule.passes.join import JOIN_WARPS, join_kernel, joining

    if cut.segments > 2:
        target = target_of(given["q"].device, INTERPRETED_AS)
        own = {
            "first": cut.under_way, "factors": cut.under_way + cut.segments - 1,
            "maps": cut.segments - 2,
            **joining(given["K"], given["V"], given["q"].dtype, target),
        }  # fmt: skip
        start(join_kernel, (-(-given["V"] // own["BV"]), given["HV"]), given | own, JOIN_WARPS)


def configured(
    kernel: str, given: Given, rule: Callable[[], C], switches: tuple[str, ...] = ()
) -> C:
    """A pass's configuration: of the device's table, else the rule's."""
    q = given["q"]
    key = Key("gated_delta_rule", kernel, (given["K"], given["V"]), q.dtype, switches=switches)
    return tables.configuration(key, q.device, rule)


def start(kernel: Any, grid: tuple[int, ...], given: Given, num_warps: int) -> None:
    """Launch a kernel with the arguments it names.

    Without contraction into fused multiply-adds: a value that one path reads from memory and
    another forms in registers must give the same bits.
    """
    early = {"launch_pdl": True} if "CHAINED" in kernel.arg_names and given["CHAINED"] else {}
    launcher.start(kernel, grid, given, num_warps=num_warps, enable_fp_fusion=False, **early)


def described(rows: torch.Tensor, columns: int) -> Any:
    """A descriptor of tiles of 64 rows."""
    return TensorDescriptor.from_tensor(rows, [CHUNK, columns])


def _arguments(call: GatedDeltaCall, stores: Stores, plan: Plan) -> Given:
    """What the step and the scratch of a chunked call consist of."""
    workspace = call.workspace or default_workspace(call.device)
    scratch = {
        name: workspace.buffer(name, shape, dtype) for name, (shape, dtype) in plan.shapes.items()
    }
    names = (
        "T", "P", "q_tiles", "k_tiles", "k_norms", "q_reads", "k_starts", "v_tiles", "keys",
        "clean", "from_start", "to_end", "whole_decay", "sums", "strengths", "log_decays",
        "base", "carry",
    )  # fmt: skip
    # A call of one piece runs the programs of one of several: what it lacks is of a like type.
    scratch.setdefault("carry", scratch["from_start"])
    return step_arguments(call, stores.o) | {
        "sequences": plan.table.sequences, "items": plan.table.items, "pieces": plan.table.pieces,
        "N": plan.facts.sequences, "SEGMENTS": plan.cut.segments, "TILES": plan.facts.tiles,
        "BH": DECAY_HEADS,
        **{name: scratch.get(name, call.q) for name in names},
    }  # fmt: skip


def step_arguments(call: GatedDeltaCall, o: torch.Tensor) -> Given:
    """Tensors of a step, their strides, and what is fixed for the call."""
    H, HV, K, V = call.sizes
    q, k, v, g, beta, gate = call.q, call.k, call.v, call.g, call.beta, call.gate
    bounded = gate.kind == "raw" and gate.lower_bound is not None
    return {
        "q": q, "k": k, "v": v, "o": o, "g": _some(g, q), "beta": _some(beta, q),
        "a_log": _some(gate.a_log, q), "dt_bias": _some(gate.dt_bias, q),
        "scale": call.scale, "lower_bound": gate.lower_bound or 0.0,
        "q_token": q.stride(0), "q_head": q.stride(1),
        "k_token": k.stride(0), "k_head": k.stride(1),
        "v_token": v.stride(0), "v_head": v.stride(1),
        "o_token": o.stride(0), "o_head": o.stride(1),
        "g_token": _stride(g, 0), "g_head": _stride(g, 1), "g_channel": _stride(g, 2),
        "beta_token": _stride(beta, 0), "beta_head": _stride(beta, 1),
        "bias_head": _stride(gate.dt_bias, 0), "bias_channel": _stride(gate.dt_bias, 1),
        "H": H, "HV": HV, "K": K, "V": V, "BK": padded(K), "BV": padded(V),
        "GATE": "bounded" if bounded else gate.kind, "BETA": gate.beta,
        "HAS_G": g is not None, "HAS_BETA": beta is not None,
        "HAS_BIAS": gate.dt_bias is not None, "NORMALISE": call.qk_l2norm,
        "PER_CHANNEL": call.per_channel,
        "PRECISION": precision(q.dtype, target_of(call.device).backend),
    }  # fmt: skip


def state_arguments(call: GatedDeltaCall, stores: Stores) -> Given:
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
