"""The gated delta rule of transformers, in PyTorch operations."""

from __future__ import annotations

import inspect

import torch

from headstart.evidence.arms import Arm, Unfit, peer
from headstart.evidence.arms.delta import plain, refuse_snapshots
from headstart.evidence.cases import Case


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """`torch_chunk_gated_delta_rule` on equal sequences, key heads repeated beforehand."""
    if case.op == "extend_attention":
        raise Unfit("runs attention through sdpa, flex or fa4, which are arms of their own")
    inputs = plain(case, device, seed)
    if inputs.case.per_channel:
        raise Unfit("has no decay per channel")
    if inputs.dense is None:
        raise Unfit("takes sequences of one length only")
    (rule,) = peer(
        "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"
    )
    # What newer versions wrap it in runs fla's kernel where fla is installed.
    rule = inspect.unwrap(rule)
    ratio = inputs.case.HV // inputs.case.H
    rows = (
        inputs.q.repeat_interleave(ratio, dim=1),
        inputs.k.repeat_interleave(ratio, dim=1),
        inputs.v,
        inputs.g,
        inputs.beta,
    )
    shaped = [row.view(*inputs.dense, *row.shape[1:]) for row in rows]
    options = {"initial_state": inputs.initial, "output_final_state": inputs.final}
    return Arm(
        "transformers",
        lambda: rule(*shaped, **options),
        lambda found: inputs.outputs(*found),
        note=refuse_snapshots(inputs.case, inputs.note),
    )
