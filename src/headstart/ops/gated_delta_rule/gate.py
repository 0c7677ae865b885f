"""How the arguments g and beta are to be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headstart.ops.activations import sigmoid, softplus
from headstart.runtime.checks import expect_choice, expect_number

KINDS = ("log", "linear", "raw")
BETAS = ("value", "logit", "logit2")


@dataclass(frozen=True, eq=False)
class Gate:
    """What g and beta hold; made by `Gate.log`, `Gate.linear` or `Gate.raw`.

    The log decay of a token is g itself ("log"), log(g) ("linear"), or from a projection x = g
    ("raw") -exp(a_log) softplus(x + dt_bias) [Gated Delta Networks, arXiv 2412.06464, after Mamba
    2], with a lower_bound lower_bound * sigmoid(exp(a_log) (x + dt_bias)) [Kimi Linear, arXiv
    2510.26692]. beta is a "value" in [0, 1] (or [0, 2]), or a "logit" (sigmoid) or "logit2"
    (2 sigmoid). All in float32.

    >>> import torch
    >>> Gate.linear().decay(torch.tensor([1.0, 0.0])).tolist()
    [0.0, -inf]
    >>> Gate.log(beta="logit2").strength(torch.tensor([0.0])).tolist()
    [1.0]
    """

    kind: str
    beta: str = "value"
    a_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        expect_choice("gate", self.kind, KINDS)
        expect_choice("beta", self.beta, BETAS)
        if self.lower_bound is not None:
            words = "None or a finite number below 0"
            expect_number("lower_bound", self.lower_bound, words, lambda bound: bound < 0)

    @staticmethod
    def log(*, beta: str = "value") -> Gate:
        """g is the log decay, <= 0, -inf meaning "forget all before"."""
        return Gate("log", beta)

    @staticmethod
    def linear(*, beta: str = "value") -> Gate:
        """g is the decay itself, in [0, 1]."""
        return Gate("linear", beta)

    @staticmethod
    def raw(
        a_log: torch.Tensor,
        dt_bias: torch.Tensor | None = None,
        lower_bound: float | None = None,
        *,
        beta: str = "value",
    ) -> Gate:
        """g is a projection; a_log [HV], dt_bias [HV] ([HV, K] per channel)."""
        return Gate("raw", beta, a_log, dt_bias, lower_bound)

    def decay(
        self,
        g: torch.Tensor,
        a_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Log decay of g (float32 or float64), in g's dtype and shape.

        a_log and dt_bias take the place of the gate's own where the caller has sliced or
        reshaped them to broadcast against g.
        """
        if self.kind == "log":
            return g
        if self.kind == "linear":
            return g.log()
        a_log = self.a_log if a_log is None else a_log
        dt_bias = self.dt_bias if dt_bias is None else dt_bias
        assert a_log is not None
        rate = a_log.to(g.dtype).exp()
        if dt_bias is not None:
            g = g + dt_bias.to(g.dtype)
        if self.lower_bound is not None:
            return self.lower_bound * sigmoid(rate * g)
        return -rate * softplus(g)

    def strength(self, beta: torch.Tensor) -> torch.Tensor:
        """beta as a value, from a float32 or float64 tensor, in its dtype and shape."""
        if self.beta == "value":
            return beta
        strength = sigmoid(beta)
        return strength if self.beta == "logit" else 2 * strength
