"""The short causal convolution and the gated norm in float64."""

from __future__ import annotations

import torch


def convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs [L, channels] of one sequence, float64.

    inputs: [L, channels]; weight: [channels, width]; before: the width - 1 inputs before the first,
    zeros if None.

    >>> x = torch.tensor([[1.0], [2.0]])
    >>> convolve(x, torch.tensor([[10.0, 1.0]]), activation=None).flatten().tolist()
    [1.0, 12.0]
    """
    inputs, weight = inputs.double(), weight.double()
    if before is None:
        before = inputs.new_zeros(weight.shape[1] - 1, inputs.shape[1])
    padded = torch.cat([before.to(inputs), inputs])
    taps = [weight[:, w] * padded[w : w + len(inputs)] for w in range(weight.shape[1])]
    outputs = torch.stack(taps).sum(0)
    if bias is not None:
        outputs = outputs + bias.double()
    return outputs / (1 + (-outputs).exp()) if activation == "silu" else outputs


def history(
    inputs: torch.Tensor, position: int, width: int, before: torch.Tensor | None = None
) -> torch.Tensor:
    """The inputs [width - 1, channels] before `position`; `before` the first of them, or zeros."""
    if before is None:
        before = inputs.new_zeros(width - 1, inputs.shape[1])
    padded = torch.cat([before.to(inputs), inputs])
    return padded[position : position + width - 1]


def gated_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """x rsqrt(mean(x^2) + eps) weight silu(gate) over the last axis, float64."""
    x, gate = x.double(), gate.double()
    normal = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()
    return normal * gate / (1 + (-gate).exp())
