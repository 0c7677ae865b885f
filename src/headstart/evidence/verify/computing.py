"""One case under one implementation, with outputs and all fresh memory poisoned first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

import headstart
from headstart.evidence.cases import Case
from headstart.evidence.cases.convolution import BLOCK, ConvolutionCase
from headstart.evidence.cases.delta_block import DeltaBlockCase, rule_arguments
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.gated_delta_rule import DeltaCase
from headstart.evidence.poison import poison, poisoned_memory, unwritten

MOST_MERGED = 2048
"""New tokens up to which the partials of a case are computed and merged too."""


@dataclass
class Output:
    """One output [rows, heads, vector]; rows that still hold poison or were not ours to write."""

    values: torch.Tensor
    unwritten: int = 0
    trespassed: int = 0


@dataclass
class Computed:
    """Outputs by name, and what had to be left out."""

    outputs: dict[str, Output] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, values: torch.Tensor, *, heads: int = 1) -> None:
        """Keep [rows, *rest] as [rows, heads, vector], counting rows that nobody wrote."""
        size = math.prod(values.shape[1:]) // heads
        rows = values.reshape(len(values), heads, size)
        left = int(unwritten(values.contiguous()).flatten(1).any(1).sum())
        self.outputs[name] = Output(rows, left)


def compute(
    case: Case,
    implementation: str,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Computed:
    """Run a case. Raises `Declined` where the implementation cannot run it."""
    with torch.inference_mode():
        if isinstance(case, DeltaBlockCase):
            return _block(case, implementation, seed, device, dtype)
        if isinstance(case, DeltaCase):
            return _delta(case, implementation, seed, device, dtype)
        if isinstance(case, AttentionCase):
            return _attention(case, implementation, seed, device, dtype)
        if isinstance(case, ConvolutionCase):
            return _convolution(case, implementation, seed, device, dtype)
    raise ValueError(f"case: {case.id} is a whole model; `headstart prefill --compare` verifies it")


def _convolution(
    case: ConvolutionCase,
    implementation: str,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> Computed:
    call = case.inputs(seed, device, dtype)
    with poisoned_memory():
        out = poison(torch.empty_like(call["x"]))
        found = headstart.causal_conv1d(**call, out=out, implementation=implementation)
    computed = Computed()
    computed.add("convolution", found.y, heads=case.channels // BLOCK)
    return computed


def _delta(
    case: DeltaCase,
    implementation: str,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> Computed:
    steps = case.steps(seed, device, dtype)
    pool = steps[-1].get("state")
    before = pool.tensor.clone() if isinstance(pool, headstart.Pool) else None
    found: Any = None
    with poisoned_memory():
        for step in steps:
            out = poison(torch.empty_like(step["v"]))
            found = headstart.gated_delta_rule(**step, out=out, implementation=implementation)
    computed = Computed()
    computed.add("o", found.o, heads=case.HV)
    _states(case, computed, found, steps[-1], before)
    return computed


def _states(
    case: DeltaCase,
    computed: Computed,
    found: Any,
    step: dict[str, Any],
    before: torch.Tensor | None,
) -> None:
    """States after the call, wherever the case keeps them, and snapshots."""
    state = step.get("state")
    if found.state is not None:
        computed.add("state", found.state, heads=case.HV)
    elif before is not None:
        assert isinstance(state, headstart.Pool)
        assert state.read_slots is not None
        mine = [int(slot) for slot in state.read_slots]
        computed.add("state", state.tensor[mine], heads=case.HV)
        others = torch.ones(len(before), dtype=torch.bool, device=before.device)
        others[mine] = False
        changed = (state.tensor != before)[others].flatten(1).any(1)
        computed.outputs["state"].trespassed = int(changed.sum())
    elif state is not None:
        computed.add("state", state.cache.export(state.slots)[1], heads=case.HV)
    if found.snapshots is not None:
        computed.add("snapshots", found.snapshots, heads=case.HV)


def _block(
    case: DeltaBlockCase,
    implementation: str,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> Computed:
    (block,) = case.steps(seed, device, dtype)
    state = block["state"]
    with poisoned_memory():
        mixed = headstart.causal_conv1d(
            block["mixed"],
            block["weight"],
            schedule=block["schedule"],
            state=state,
            out=poison(torch.empty_like(block["mixed"])),
            implementation=implementation,
        ).y
        arguments = rule_arguments(block, mixed)
        found = headstart.gated_delta_rule(
            **arguments,
            out=poison(torch.empty_like(arguments["v"], memory_format=torch.contiguous_format)),
            implementation=implementation,
        )
        normed = headstart.rms_norm_gated(
            found.o, block["norm"], block["z"], implementation=implementation
        )
    computed = Computed()
    computed.add("convolution", mixed, heads=case.channels // case.K)
    computed.add("o", found.o, heads=case.HV)
    computed.add("norm", normed, heads=case.HV)
    _states(case, computed, found, block, None)
    computed.add("history", _last_inputs(case, state))
    return computed


def _last_inputs(case: DeltaBlockCase, state: Any) -> torch.Tensor:
    """The last width - 1 inputs [N, width - 1, channels] of each sequence, out of the ring."""
    ring = state.cache.tensors["history"]  # [S, rows, channels], position modulo rows
    kept = []
    for slot, start, length in zip(state.slots, case.positions, case.lengths, strict=True):
        end = start + length
        rows = [at % ring.shape[1] for at in range(end - case.conv_width + 1, end)]
        kept.append(ring[slot, rows])
    return torch.stack(kept)


def _attention(
    case: AttentionCase,
    implementation: str,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> Computed:
    arguments = case.inputs(seed, device, dtype)
    q = arguments["q"]
    shape = (*q.shape[:2], case.value_size)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    def fresh(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        o = poison(torch.empty(shape, dtype=kind, device=q.device))
        return o, poison(torch.empty(shape[:2], dtype=wide, device=q.device))

    computed = Computed()
    with poisoned_memory():
        o, lse = headstart.extend_attention(
            **arguments, return_lse=True, out=fresh(q.dtype), implementation=implementation
        )
        computed.add("o", o, heads=case.HQ)
        computed.add("LSE", lse[..., None], heads=case.HQ)
        if any(case.cached) and 0 < case.tokens <= MOST_MERGED:
            sinks = arguments.pop("sinks", None)
            try:
                parts = [
                    headstart.extend_attention(
                        **arguments, part=part, out=fresh(wide), implementation=implementation
                    )
                    for part in ("prefix", "extend")
                ]
                o, lse = headstart.merge_attention(
                    parts,  # type: ignore[arg-type]
                    sinks,
                    out=fresh(wide),
                    implementation=implementation,
                )
            except headstart.Declined as reason:
                computed.notes.append(f"no partials: {reason}")
                return computed
            computed.add("merged o", o, heads=case.HQ)
            computed.add("merged LSE", lse[..., None], heads=case.HQ)
    return computed
