"""The `torch` implementation: the chunked form in PyTorch operations, tuned for the CPU.

It is exact there in the promise's sense: every product has one shape, with and without a cache. On
another device it runs too, without the promise of bits and without caches.
"""

from __future__ import annotations

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.chunk_scan import scan, scan_bytes
from headstart.ops.gated_delta_rule.spec import GatedDelta, GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import SequenceStep, sequence_steps
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.ops.gated_delta_rule.token_steps import advance, token_bytes
from headstart.runtime.dispatch import Implementation
from headstart.runtime.workspace import default_workspace

SHORT = 4
"""Sequences of at most so many tokens go token by token, where no bits are promised."""


def declines(call: GatedDeltaCall) -> str | None:
    """Why the decomposed path cannot run a call, or None."""
    if call.q.dtype == torch.float64:
        return "it computes in float32; float64 is for the reference."
    states = (call.state, call.snapshots)
    if any(isinstance(s, torch.Tensor) and s.dtype == torch.float64 for s in states):
        return "it keeps states in float32; float64 is for the reference."
    if call.device.type in ("cpu", "meta"):
        return None
    if any(isinstance(s, CacheSlots) for s in states):
        return f"a DeltaCache needs the promise of bits, which it does not keep on {call.device}."
    if call.reproducible:
        return f"it does not promise bits on {call.device}."
    return None


def run(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call."""
    steps = sequence_steps(call)
    stores = Stores.allocate(call, torch.float32)
    workspace = call.workspace or default_workspace(call.device)
    short, long = _split(call, steps)
    advance(call, short, stores, workspace)
    scan(call, long, stores, workspace)
    return stores.result


def run_token_by_token(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call token by token, whatever the lengths."""
    steps = sequence_steps(call)
    stores = Stores.allocate(call, torch.float32)
    workspace = call.workspace or default_workspace(call.device)
    advance(call, steps, stores, workspace)
    return stores.result


def workspace_bytes(call: GatedDeltaCall) -> int:
    """Scratch of `run`."""
    short, long = _split(call, _steps_from_shapes(call))
    return (token_bytes(call, short) if short else 0) + scan_bytes(call, long)


def token_workspace_bytes(call: GatedDeltaCall) -> int:
    """Scratch of `run_token_by_token`."""
    steps = _steps_from_shapes(call)
    return token_bytes(call, steps) if steps else 0


def _split(
    call: GatedDeltaCall, steps: list[SequenceStep]
) -> tuple[list[SequenceStep], list[SequenceStep]]:
    short = [
        step
        for step in steps
        if step.length <= SHORT and not step.snapshots and not call.reproducible
    ]
    taken = {step.n for step in short}
    return short, [step for step in steps if step.n not in taken]


def _steps_from_shapes(call: GatedDeltaCall) -> list[SequenceStep]:
    """Steps whose number and lengths are right, without a look at slots (there may be none)."""
    schedule = call.schedule
    return [
        SequenceStep(n, row, start, length, start, False, -1, -1, start + length, tuple(kept))
        for n, (row, start, length, kept) in enumerate(
            zip(
                schedule.offsets,
                schedule.starts,
                schedule.lengths,
                [
                    [(p, 0) for p in positions] if call.snapshots is not None else []
                    for positions in schedule.snapshot_positions
                ],
                strict=False,
            )
        )
    ]


IMPLEMENTATION = Implementation("torch", declines, run, workspace_bytes)
TOKEN_BY_TOKEN = Implementation("torch", declines, run_token_by_token, token_workspace_bytes)
