"""The Hopper scan after the passes that both GPU implementations share."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headstart.ops.gated_delta_rule.hopper.scan import scan_kernel
from headstart.ops.gated_delta_rule.passes.launch import Given, launch
from headstart.ops.gated_delta_rule.passes.scratch import Plan, aligned_rows
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDelta, GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import sequence_steps
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import Implementation
from headstart.runtime.launcher import start

SIZES = (128, 128)
"""The one (K, V) that the scan is written for."""
COLUMNS = 64
"""Columns of V that one program holds: rows of the smallest product of a warp group."""
STAGES = 3
"""Chunks in shared memory: what 227 KiB hold."""
REGISTERS = 255
"""A thread may take what eight warps leave it; the copying warp gives its own away."""
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def declines(call: GatedDeltaCall) -> str | None:
    """Why the kernel cannot run a call, or None."""
    if call.device.type not in ("cuda", "meta"):
        return f"it runs on NVIDIA Hopper alone, not on {call.device.type}."
    if call.device.type == "cuda" and not _hopper(call.device):
        return "it runs on NVIDIA Hopper (compute capability 9.0) alone."
    if call.q.dtype not in DTYPES:
        return "it takes bfloat16 and float16."
    if call.sizes[2:] != SIZES:
        return f"K and V must be {SIZES}, got {call.sizes[2:]}."
    if call.per_channel:
        return "it takes one decay a head."
    states = (call.state, call.snapshots)
    if any(isinstance(s, torch.Tensor) and s.dtype == torch.float64 for s in states):
        return "it keeps states in float32; float64 is for the reference."
    return None


@functools.cache
def _hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def workspace_bytes(call: GatedDeltaCall) -> int:
    """Scratch of `run`, exactly."""
    return Plan.of(call, edges=True).bytes


def run(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call."""
    if checking():
        sequence_steps(call)  # raises where a start is not legal in its slot
    # Rows that cannot be copied in bulk are copied once more rather than declined: who serves a
    # cache, and so its bits, must not depend on strides.
    call = replace(call, q=_aligned(call.q), k=_aligned(call.k), v=_aligned(call.v))
    stores = Stores.allocate(call, torch.float32)
    plan = Plan.of(call, edges=True)
    if plan.facts.sequences:
        o = stores.o if aligned_rows(stores.o) else _packed(stores.o)
        launch(call, replace(stores, o=o), plan, _scan)
        if o is not stores.o:
            tokens = call.schedule.T
            stores.o[:tokens].copy_(o[:tokens])
    return stores.result


def _packed(o: torch.Tensor) -> torch.Tensor:
    return torch.empty(o.shape, dtype=o.dtype, device=o.device)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if aligned_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _scan(given: Given, sequences: int) -> None:
    K, V, HV = given["K"], given["V"], given["HV"]
    T, tiles = given["T"], given["TILES"]
    # A call without tokens may still fold a tail: then nothing is read from q, k and v.
    q, k, v, o = (given[name] if given["q"].shape[0] else T for name in ("q", "k", "v", "o"))
    own: dict[str, Any] = {
        "T": _described(T, CHUNK), "P": _described(given["P"], CHUNK),
        "q": _described(given["q_tiles"] if tiles else q, K),
        "k": _described(given["k_tiles"] if tiles else k, K),
        "v_rows": _described(v, COLUMNS), "o_rows": _described(o, COLUMNS),
        "k_edges": _described(T if tiles else given["k_edges"], K),
        "v_edges": _described(given["v_edges"] if given["CACHED"] else T, COLUMNS),
        "BV": COLUMNS, "STAGES": STAGES,
    }  # fmt: skip
    grid = (V // COLUMNS, HV, sequences)
    start(scan_kernel, grid, given | own, num_warps=4, maxnreg=REGISTERS)


def _described(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """A descriptor of tiles of 64 rows of x [rows, ...]; a head begins at its stride in a row."""
    width = sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:], strict=True)) + 1
    block = [CHUNK, columns]
    return TensorDescriptor(
        x, [x.shape[0], width], [x.stride(0), 1], block, _layout(*block, x.dtype)
    )


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


IMPLEMENTATION = Implementation("hopper", declines, run, workspace_bytes)
