"""The portable scan after the passes that both GPU implementations share."""

from __future__ import annotations

from functools import partial

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from headstart.ops.gated_delta_rule.passes.config import INTERPRETED_AS
from headstart.ops.gated_delta_rule.passes.launch import (
    Given,
    configured,
    described,
    launch,
    start,
)
from headstart.ops.gated_delta_rule.passes.scratch import Plan
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDelta, GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import sequence_steps
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.ops.gated_delta_rule.triton.scan import ScanConfig, scan_configuration, scan_kernel
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import Implementation
from headstart.runtime.launcher import declines_tensors, reads_descriptors, target_of


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
    return _plan(call).bytes


def _plan(call: GatedDeltaCall) -> Plan:
    _, HV, K, V = call.sizes
    config = _configuration({"q": call.q, "K": K, "V": V}, call.per_channel)
    return Plan.of(call, programs=-(-V // config.BV) * HV)


def _configuration(given: Given, per_channel: bool) -> ScanConfig:
    target = target_of(given["q"].device, INTERPRETED_AS)
    rule = partial(scan_configuration, given["K"], given["q"].dtype, target)
    return configured("scan", given, rule, ("channels",) if per_channel else ())


def run(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call."""
    if checking():
        sequence_steps(call)  # raises where a start is not legal in its slot
    stores = Stores.allocate(call, torch.float32)
    plan = _plan(call)
    if plan.facts.sequences:
        launch(call, stores, plan, _scan)
    return stores.result


def _scan(given: Given, pieces: int) -> None:
    V, BK, q = given["V"], given["BK"], given["q"]
    copied = reads_descriptors(target_of(q.device, INTERPRETED_AS))
    config = _configuration(given, given["PER_CHANNEL"])
    tiles = {"T": CHUNK, "P": CHUNK}
    own = {"T": given["T"], "P": given["P"]}
    if given["TILES"]:
        tiles |= {"q": BK, "k": BK, "v_tiles": config.BV}
        own |= {"q": given["q_tiles"], "k": given["k_tiles"], "v_tiles": given["v_tiles"]}
    if given["PER_CHANNEL"]:
        # A tail takes k as it was.
        tiles |= {"k_starts": BK}
        own |= {"k_starts": given["k_starts"], "k_tiles": given["keys"]}
    if copied:
        own |= {name: described(own[name], columns) for name, columns in tiles.items()}
        if not given["TILES"]:
            own["q"] = TensorDescriptor.from_tensor(q, [CHUNK, 1, BK])
            own["v_tiles"] = TensorDescriptor.from_tensor(given["v"], [CHUNK, 1, config.BV])
    own |= {"BV": config.BV, "WIDTH": given["BV"], "STAGES": config.stages}
    own |= {"DESCRIBED": copied}
    blocks = -(-V // config.BV)
    start(scan_kernel, (blocks, given["HV"], pieces), given | own, config.warps)


IMPLEMENTATION = Implementation("triton", declines, run, workspace_bytes)
