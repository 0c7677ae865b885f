"""The `reference` implementation: the definitions, sequence by sequence, in float32 or float64."""

from __future__ import annotations

import torch

from headstart.ops.activations import ACTIVATIONS, silu
from headstart.ops.convolution.histories import Histories, allocate
from headstart.ops.convolution.spec import Convolution, ConvolutionCall, GatedNormCall
from headstart.runtime.dispatch import Implementation


def convolve(call: ConvolutionCall) -> Convolution:
    """y_t = activation(bias + sum_w weight_w x_{t - width + 1 + w}), inputs before 0 being zero."""
    histories, y = Histories(call), allocate(call)
    wide, schedule = _wide(call.x), call.schedule
    weight = call.weight.to(wide)
    for n, length in enumerate(schedule.lengths):
        rows = slice(schedule.offsets[n], schedule.offsets[n + 1])
        inputs = torch.cat([histories.before[n], call.x[rows]]).to(wide)
        for t in range(length):
            total = weight[:, 0] * inputs[t]
            for w in range(1, call.width):
                total = total + weight[:, w] * inputs[t + w]
            if call.bias is not None:
                total = total + call.bias.to(wide)
            y[rows][t] = total if call.activation is None else silu(total)
    return histories.finish(y)


def norm(call: GatedNormCall) -> torch.Tensor:
    """x rsqrt(mean(x^2) + eps) weight activation(gate)."""
    wide = _wide(call.x)
    x, gate = call.x.to(wide), call.gate.to(wide)
    # A running sum, since the order of a plain one depends on strides and threads.
    mean = (x * x).cumsum(-1)[..., -1:] / x.shape[-1]
    x = x * torch.rsqrt(mean + call.eps) * call.weight.to(wide)
    return (x * ACTIVATIONS[call.activation](gate)).to(call.x.dtype)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


CONVOLUTION = Implementation("reference", lambda call: None, convolve)
NORM = Implementation("reference", lambda call: None, norm)
