"""The short convolution and the gated norm as ops of PyTorch: see `runtime/torch_ops.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headstart.ops.convolution.spec import Convolution
from headstart.ops.gated_delta_rule.flat import ARGUMENTS, flat, rebuilt
from headstart.runtime import torch_ops
from headstart.runtime.checks import expect_no_gradients, expect_shape, expect_tensor

NAMES = ("history", "history_first", "history_end")
"""The tensors of a cache that the convolution reads and writes."""
_CONVOLUTION = (
    f"(Tensor x, Tensor weight, Tensor? bias, {ARGUMENTS}, str? activation, "
    "str? implementation, Tensor(e!)? out) -> (Tensor y, Tensor new_state, Tensor new_snapshots)"
)
_NORM = (
    "(Tensor x, Tensor weight, Tensor gate, float eps, str activation, str? implementation)"
    " -> Tensor"
)


def traced_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, schedule: Any, state: Any,
    snapshots: Any, return_state: bool, activation: str | None, out: torch.Tensor | None,
    implementation: str | None,
) -> Convolution:  # fmt: skip
    """`causal_conv1d` of a call that is traced."""
    expect_tensor("x", x)
    expect_shape("weight", weight, "[channels, width]", (None, None))
    expect_no_gradients("causal_conv1d", x=x, weight=weight, bias=bias)
    y, new_state, new_snapshots = torch.ops.headstart.causal_conv1d(
        x, weight, bias, **flat(x.shape[:-1], schedule, state, snapshots, return_state, NAMES),
        activation=activation, implementation=implementation, out=out,
    )  # fmt: skip
    return Convolution(
        y if out is None else out,
        new_state if return_state else None,
        new_snapshots if isinstance(snapshots, torch.dtype) else None,
    )


def _run_convolution(function: Callable[..., Convolution], **given: Any) -> Any:
    own = {
        name: given[name] for name in ("x", "weight", "bias", "activation", "implementation", "out")
    }
    result = function(**own, **rebuilt(given, NAMES))
    y = result.y if given["out"] is None else None
    return torch_ops.present(result.y, y, result.state, result.snapshots)


def _fake_convolution(
    x: torch.Tensor, weight: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, ...]:
    y = state = snapshots = None
    rows = weight.shape[1] - 1, x.shape[-1]
    if given["out"] is None:
        y = x.new_empty(x.shape)
    if given["return_state"]:
        state = x.new_empty((given["entries"], *rows))
    if given["snapshots"] is not None:
        snapshots = x.new_empty((given["kept_entries"], *rows))
    return torch_ops.present(x, y, state, snapshots)


def traced_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, activation: str,
    implementation: str | None,
) -> torch.Tensor:  # fmt: skip
    """`rms_norm_gated` of a call that is traced."""
    expect_no_gradients("rms_norm_gated", x=x, weight=weight, gate=gate)
    return torch.ops.headstart.rms_norm_gated(
        x, weight, gate, eps, activation, implementation=implementation
    )


def _run_norm(function: Callable[..., torch.Tensor], **given: Any) -> torch.Tensor:
    return function(**given)


def _fake_norm(x: torch.Tensor, **given: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


torch_ops.define("causal_conv1d", _CONVOLUTION, _run_convolution, _fake_convolution)
torch_ops.define("rms_norm_gated", _NORM, _run_norm, _fake_norm)
