"""flash-linear-attention's own Triton kernels, whatever other backends are installed."""

from __future__ import annotations

import os

import torch

from headstart.evidence.arms import Arm, peer
from headstart.evidence.arms.delta import plain, refuse_snapshots
from headstart.evidence.cases import Case

BACKENDS = ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG")
"""Variables that fla reads at every call: left alone it would run other libraries' kernels."""


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """`chunk_gated_delta_rule`, the recurrent form for decodes, or `chunk_kda`."""
    os.environ.update(dict.fromkeys(BACKENDS, "0"))
    inputs = plain(case, device, seed)
    if inputs.case.per_channel:
        (rule,) = peer("fla.ops.kda", "chunk_kda")
    elif inputs.decoding:
        (rule,) = peer("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    else:
        (rule,) = peer("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    rows = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    options = {"initial_state": inputs.initial, "output_final_state": inputs.final}
    if inputs.dense is not None:
        shaped = [row.view(*inputs.dense, *row.shape[1:]) for row in rows]
    else:
        shaped = [row[None] for row in rows]
        options["cu_seqlens"] = inputs.cu_seqlens
        options["cu_seqlens_cpu"] = inputs.cu_seqlens.cpu()
    q, k, v, g, beta = shaped
    return Arm(
        "fla",
        lambda: rule(q=q, k=k, v=v, g=g, beta=beta, **options),
        lambda found: inputs.outputs(*found),
        note=refuse_snapshots(inputs.case, inputs.note),
    )
