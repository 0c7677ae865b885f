"""PyTorch's scaled_dot_product_attention, on a GPU with cuDNN's kernel."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from headstart.evidence.arms import Arm, Unfit
from headstart.evidence.arms.attention import dense_attention
from headstart.evidence.cases import Case


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """One call for all sequences, which must be equally long and without prefix."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    inputs = dense_attention(case, device, seed)
    inputs.refuse(sinks=True, mask=True, window=True)
    if any(inputs.case.cached) or len(set(inputs.case.lengths)) != 1:
        raise Unfit("this arm takes sequences of one length without a prefix")
    count, length = len(inputs.case.lengths), inputs.case.lengths[0]
    q, k, v = (
        rows.view(count, length, *rows.shape[1:]).transpose(1, 2)
        for rows in (inputs.q, inputs.k, inputs.v)
    )
    on_gpu = device.type == "cuda"

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu else nullcontext():
            return scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=inputs.case.HQ != inputs.case.HK
            )

    return Arm(
        "sdpa",
        call,
        lambda o: {"o": o.transpose(1, 2).flatten(0, 1)},
        note="cuDNN" if on_gpu else "",
    )
