"""FlashQLA's TileLang kernels."""

from __future__ import annotations

import torch

from headstart.evidence.arms import Arm, Unfit, peer
from headstart.evidence.arms.delta import plain, refuse_snapshots
from headstart.evidence.cases import Case


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """`flash_qla.chunk_gated_delta_rule`."""
    inputs = plain(case, device, seed)
    if inputs.case.per_channel:
        raise Unfit("has no decay per channel")
    if (inputs.case.K, inputs.case.V) != (128, 128):
        raise Unfit("takes head sizes of 128 only")
    (rule,) = peer("flash_qla", "chunk_gated_delta_rule")
    rows = [inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta]
    options = {"initial_state": inputs.initial, "output_final_state": inputs.final}
    if inputs.dense is not None:
        rows = [row.view(*inputs.dense, *row.shape[1:]) for row in rows]
    else:
        rows = [row[None] for row in rows]
        options["cu_seqlens"] = inputs.cu_seqlens.int()
    return Arm(
        "flashqla",
        lambda: rule(*rows, **options),
        lambda found: inputs.outputs(*found),
        note=refuse_snapshots(inputs.case, inputs.note),
    )
