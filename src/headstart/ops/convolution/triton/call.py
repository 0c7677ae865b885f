"""The `triton` implementation of the convolution and the gated norm: what it takes and runs.

Kernels are imported at the first call, so that asking does not need Triton.
"""

from __future__ import annotations

import torch

from headstart.ops.convolution.histories import expect_in_ring
from headstart.ops.convolution.spec import Convolution, ConvolutionCall, GatedNormCall
from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.runtime.checks import checking, host_ints
from headstart.runtime.dispatch import Implementation
from headstart.runtime.launcher import declines_tensors

MOST_WIDTH = 8
MOST_NORM = 16384


def _convolve(call: ConvolutionCall) -> Convolution:
    state = call.state
    if isinstance(state, CacheSlots) and (call.device.type == "cpu" or checking()):
        expect_in_ring(call, state.cache, host_ints("slots", state.slots)[: call.schedule.N])
    from headstart.ops.convolution.triton.convolve import convolve

    return convolve(call)


def _norm(call: GatedNormCall) -> torch.Tensor:
    from headstart.ops.convolution.triton.norm import norm

    return norm(call)


def _declines_convolution(call: ConvolutionCall) -> str | None:
    if sentence := declines_tensors(call.device, call.x.dtype):
        return sentence
    if call.width > MOST_WIDTH:
        return f"it takes a width of at most {MOST_WIDTH}, got {call.width}."
    return None


def _declines_norm(call: GatedNormCall) -> str | None:
    if sentence := declines_tensors(call.device, call.x.dtype):
        return sentence
    if call.x.shape[-1] > MOST_NORM:
        return f"it takes rows of at most {MOST_NORM} elements, got {call.x.shape[-1]}."
    return None


CONVOLUTION = Implementation("triton", _declines_convolution, _convolve)
NORM = Implementation("triton", _declines_norm, _norm)
