"""The public functions of the short convolution and the gated norm."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headstart.ops.convolution import spec
from headstart.ops.convolution.signature import convolution_signature, norm_signature
from headstart.ops.convolution.spec import Convolution
from headstart.ops.convolution.torch_op import traced_convolution, traced_norm
from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.runtime import dispatch
from headstart.runtime.torch_ops import traced

if TYPE_CHECKING:
    from jaxtyping import Float


def causal_conv1d(
    x: Float[torch.Tensor, "*lead channels"],
    weight: Float[torch.Tensor, "channels width"],
    bias: Float[torch.Tensor, " channels"] | None = None,
    *,
    schedule: Schedule | Sequence[int] | None = None,
    state: torch.Tensor | Pool | CacheSlots | None = None,
    snapshots: torch.dtype | Pool | CacheSlots | None = None,
    return_state: bool = False,
    activation: str | None = "silu",
    implementation: str | None = None,
    out: torch.Tensor | None = None,
) -> Convolution:
    """The short causal convolution of each channel, over a packed batch of sequences.

        y[t, c] = activation(bias[c] + sum over w of weight[c, w] x[t - (width - 1) + w, c])

    in float32, x before position 0 being zero. The bits of a row depend on its own `width` inputs
    alone, never on the steps, the batch, the strides or the threads.

    Parameters
    ----------
    x: [T, channels], sequences end to end; float32, bfloat16 or float16, any strides but a
        contiguous last dimension (a slice of a packed projection). [B, L, channels] are B sequences
        of length L.
    weight: [channels, width], width at least 2, the last column for the newest input, as in
        torch.nn.Conv1d; any float dtype, read as float32.
    bias: [channels], any float dtype, read as float32. None: 0.
    schedule: a `Schedule`, or the lengths of sequences that start at position 0. None: one
        sequence.
    state: the histories before the call, in x's dtype: a tensor [N, width - 1, channels], oldest
        input first (read only), a `Pool` of [S, width - 1, channels] (in place), or
        `cache.at(slots)` (in place; needs a Schedule). In a cache a sequence may start wherever its
        width - 1 last inputs are still kept, so rolling back is passing a smaller start, and a
        start of 0 is an empty slot whatever it held. None: zeros.
    snapshots: where the histories at the schedule's snapshot positions go: x's dtype (returned
        packed [M, width - 1, channels]), a `Pool` with write_slots [M], or `cache.at(slots)` with M
        slots. None: they are not kept.
    return_state: return the new histories [N, width - 1, channels]. Not with a Pool or a cache.
    activation: "silu", or None.
    implementation: "reference", "torch", ...; None: the first that accepts.
    out: tensor that receives y; it must not overlap x.

    Returns
    -------
    Convolution(y, state, snapshots): y like x, rows past the last sequence 0.

    Raises
    ------
    ValueError: a wrong argument, by name; with a cache on the CPU also a start or a snapshot
    position whose inputs are no longer kept, before anything is written. Declined: no
    implementation runs the call.

    >>> import torch
    >>> from headstart.ops.convolution.api import causal_conv1d
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])  # [T, channels] = [3, 1]
    >>> weight = torch.tensor([[10.0, 1.0]])  # ten times the input before, and the input
    >>> y, history, _ = causal_conv1d(x, weight, activation=None, return_state=True)
    >>> y.flatten().tolist(), history.tolist()
    ([1.0, 12.0, 23.0], [[[3.0]]])
    """
    arguments = x, weight, bias, schedule, state, snapshots, return_state, activation, out
    if traced(x):
        return traced_convolution(*arguments, implementation)
    seen = convolution_signature(*arguments)
    if seen is not None:
        result = dispatch.again(_CONVOLUTION, seen, implementation, schedule=schedule)
        if result is not dispatch.MISSED:
            return result
    return dispatch.anew(_CONVOLUTION, seen, spec.bind(*arguments), implementation)


def rms_norm_gated(
    x: Float[torch.Tensor, "*lead D"],
    weight: Float[torch.Tensor, " D"],
    gate: Float[torch.Tensor, "*lead D"],
    eps: float = 1e-6,
    activation: str = "silu",
    *,
    implementation: str | None = None,
) -> Float[torch.Tensor, "*lead D"]:
    """Root mean square norm, then a gate: x rsqrt(mean(x^2) + eps) weight activation(gate).

    In float32, rounded once. The bits of a row depend on that row alone.

    Parameters
    ----------
    x: [..., D], float32, bfloat16 or float16, any strides.
    weight: [D], any float dtype, read as float32.
    gate: of x's shape, any float dtype and strides, read as float32.
    eps: at least 0.
    activation: "silu" or "sigmoid".
    implementation: "reference", "torch", ...; None: the first that accepts.

    Returns
    -------
    Of x's shape and dtype, contiguous.

    Raises
    ------
    ValueError: a wrong argument, by name. Declined: no implementation runs the call.

    >>> import torch
    >>> from headstart.ops.convolution.api import rms_norm_gated
    >>> x, gate = torch.tensor([[3.0, -4.0]]), torch.zeros(1, 2)
    >>> rms_norm_gated(x, torch.full((2,), 2.5**0.5), gate, eps=0.0, activation="sigmoid")
    tensor([[ 0.6708, -0.8944]])
    """
    if traced(x):
        return traced_norm(x, weight, gate, eps, activation, implementation)
    seen = norm_signature(x, weight, gate, eps, activation)
    if seen is not None:
        result = dispatch.again(_NORM, seen, implementation)
        if result is not dispatch.MISSED:
            return result
    call = spec.bind_norm(x, weight, gate, eps, activation)
    return dispatch.anew(_NORM, seen, call, implementation)


_HERE = "headstart.ops.convolution"
_CONVOLUTION = dispatch.register(
    dispatch.Operation(
        name="causal_conv1d",
        bind=spec.bind,
        places={
            "triton": f"{_HERE}.triton.call:CONVOLUTION",
            "torch": f"{_HERE}.decomposed:CONVOLUTION",
            "reference": f"{_HERE}.reference:CONVOLUTION",
        },
        function=causal_conv1d,
        written=operator.attrgetter("written"),
        changed=operator.attrgetter("changed"),
    )
)
_NORM = dispatch.register(
    dispatch.Operation(
        name="rms_norm_gated",
        bind=spec.bind_norm,
        places={
            "triton": f"{_HERE}.triton.call:NORM",
            "torch": f"{_HERE}.decomposed:NORM",
            "reference": f"{_HERE}.reference:NORM",
        },
        function=rms_norm_gated,
        written=operator.attrgetter("written"),
    )
)
