"""FlashAttention 4 in CuTe."""

from __future__ import annotations

import torch

from headstart.evidence.arms import Arm, peer
from headstart.evidence.arms.attention import dense_attention
from headstart.evidence.cases import Case


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """`flash_attn_varlen_func` with exact maxima."""
    inputs = dense_attention(case, device, seed)
    inputs.refuse(mask=True)
    (attend,) = peer("flash_attn.cute", "flash_attn_varlen_func")
    window = inputs.case.window
    options = {
        "cu_seqlens_q": inputs.query_borders,
        "cu_seqlens_k": inputs.key_borders,
        "max_seqlen_q": max(inputs.case.lengths, default=0),
        "max_seqlen_k": max(inputs.key_lengths, default=0),
        "causal": True,
        # Both sides inclusive: W keys are W - 1 to the left and the query's own.
        "window_size": (None, None) if window is None else (window - 1, 0),
    }
    if inputs.sinks is not None:
        options["learnable_sink"] = inputs.sinks
    return Arm(
        "fa4",
        lambda: attend(inputs.q, inputs.k, inputs.v, **options),
        lambda found: {"o": found[0] if isinstance(found, tuple) else found},
        note=inputs.note,
    )
