"""Activations whose bits do not depend on what lies beside an element.

PyTorch computes sigmoid, silu and softplus of a whole vector and of the rest of a row by different
code, so the last bit of a token's value would depend on its place in memory. exp and log1p agree in
both, and so do these compositions.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """1 / (1 + exp(-x)); `out` receives it and is not x.

    >>> sigmoid(torch.tensor([0.0, -200.0])).tolist()
    [0.5, 0.0]
    """
    return torch.neg(x, out=out).exp_().add_(1.0).reciprocal_()


def silu(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / (1 + exp(-x)); `out` receives it and is not x.

    >>> silu(torch.tensor([0.0])).tolist()
    [0.0]
    """
    divisor = torch.neg(x, out=out).exp_().add_(1.0)
    return torch.div(x, divisor, out=divisor)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), which neither overflows nor loses digits.

    >>> softplus(torch.tensor([1000.0, -1000.0])).tolist()
    [1000.0, 0.0]
    """
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


ACTIVATIONS = {"silu": silu, "sigmoid": sigmoid}
