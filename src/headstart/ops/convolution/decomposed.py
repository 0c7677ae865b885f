"""The `torch` implementation: blocks of rows in PyTorch operations, tuned for the CPU.

Every value of a row is the same sequence of single float32 roundings, whatever block, stride or
thread computes it: products and sums are separate operations, activations are composed of those
whose vector and scalar code agree, and the sum of a row runs over a contiguous buffer.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from headstart.ops.activations import ACTIVATIONS
from headstart.ops.convolution.histories import Histories, allocate
from headstart.ops.convolution.spec import (
    Convolution,
    ConvolutionCall,
    GatedNormCall,
    three_dimensions,
)
from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.runtime.dispatch import Implementation
from headstart.runtime.workspace import default_workspace

BLOCK = 2**18
"""Elements of a block per thread: in cache, yet with few operations to fork threads for."""
GAP = 32
"""Rows between two stretches that are cheaper to compute twice than to start another stretch."""


def convolve(call: ConvolutionCall) -> Convolution:
    """Compute the convolution: rows that see only x straight from x, the others from a copy."""
    histories, y = Histories(call), allocate(call)
    rows = _Rows(call)
    past = call.width - 1
    for begin, end in _stretches(call):
        for row in range(begin, end, rows.most):
            stop = min(row + rows.most, end)
            rows.compute(call.x[row - past : stop], y[row:stop])
    _heads(call, histories.before, rows, y)
    return histories.finish(y)


class _Rows:
    """Weights and buffers of a call."""

    def __init__(self, call: ConvolutionCall) -> None:
        self.taps = call.weight.t().to(torch.float32).contiguous()
        self.bias = None if call.bias is None else call.bias.to(torch.float32)
        self.activation = None if call.activation is None else ACTIVATIONS[call.activation]
        self.most = max(1, _block() // call.channels)
        workspace = default_workspace(call.device)
        buffers = {
            name: workspace.buffer(f"convolution {name}", (size,), torch.float32)
            for name, size in _convolution_buffers(call).items()
        }
        self.total, self.product = buffers["total"], buffers["product"]
        self.inputs = buffers.get("inputs")

    def compute(self, inputs: torch.Tensor, y: torch.Tensor) -> None:
        """Rows y [..., n, channels] from inputs [..., n + width - 1, channels]."""
        if self.inputs is not None:
            inputs = self.inputs[: inputs.numel()].view(inputs.shape).copy_(inputs)
        count = y.shape[-2]
        total = self.total[: y.numel()].view(y.shape)
        product = self.product[: y.numel()].view(y.shape)
        torch.mul(inputs.narrow(-2, 0, count), self.taps[0], out=total)
        for w in range(1, len(self.taps)):
            torch.mul(inputs.narrow(-2, w, count), self.taps[w], out=product)
            total += product
        if self.bias is not None:
            total += self.bias
        y.copy_(total if self.activation is None else self.activation(total, product))


def _stretches(call: ConvolutionCall) -> list[tuple[int, int]]:
    """Ranges of packed rows without the first width - 1 of any sequence, but for short gaps.

    Rows in a gap are wrong until `_heads` computes them.
    """
    offsets, past = call.schedule.offsets, call.width - 1
    stretches: list[tuple[int, int]] = []
    for begin, end in pairwise(offsets):
        if end - begin <= past:
            continue
        if stretches and begin + past - stretches[-1][1] <= GAP:
            stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((begin + past, end))
    return stretches


def _heads(call: ConvolutionCall, before: torch.Tensor, rows: _Rows, y: torch.Tensor) -> None:
    """The first width - 1 rows of every sequence, which see its history."""
    offsets, lengths = call.schedule.offsets, call.schedule.lengths
    past = call.width - 1
    count = min(past, max(lengths, default=0))
    if not count:
        return
    some = [n for n, length in enumerate(lengths) if length]
    each = max(1, rows.most // (count + past))
    after = torch.arange(count, device=call.device)
    for i in range(0, len(some), each):
        batch = some[i : i + each]
        first = torch.tensor([offsets[n] for n in batch], device=call.device)
        length = torch.tensor([lengths[n] for n in batch], device=call.device)
        at = first[:, None] + after  # [batch, count]
        new = call.x[at.clamp(max=call.x.shape[0] - 1)]
        head = torch.empty_like(new)
        rows.compute(torch.cat([before[batch], new], 1), head)
        valid = after < length[:, None]
        y[at[valid]] = head[valid]


def norm(call: GatedNormCall) -> torch.Tensor:
    """Compute the gated norm, block by block of rows."""
    x, gate = three_dimensions(call.x), three_dimensions(call.gate)
    out = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.device)
    if not out.numel():
        return out
    y, weight = three_dimensions(out), call.weight.to(torch.float32)
    workspace = default_workspace(call.device)
    first, second, third = (
        workspace.buffer(f"norm {name}", (size,), torch.float32)
        for name, size in _norm_buffers(call).items()
    )
    activate = ACTIVATIONS[call.activation]
    outer, inner = _norm_rows(call)
    for a in range(0, x.shape[0], outer):
        for b in range(0, x.shape[1], inner):
            place = (slice(a, a + outer), slice(b, b + inner))
            block = x[place]
            size, shape, D = block.numel(), block.shape, block.shape[2]
            normed, other = first[:size].view(shape), second[:size].view(shape)
            normed.copy_(block)
            torch.mul(normed, normed, out=other)
            # Two rows at least: torch may split the sum of a single one between threads.
            total = second[: max(size, 2 * D)].view(-1, D).sum(-1)[: size // D]
            normed *= total.div_(D).add_(call.eps).rsqrt_().view(*shape[:2], 1)
            normed *= weight
            # In place of x^2 the gate, in place of the gate its activation.
            normed *= activate(other.copy_(gate[place]), third[:size].view(shape))
            y[place].copy_(normed)
    return out


def _block() -> int:
    return BLOCK * torch.get_num_threads()


def _convolution_buffers(call: ConvolutionCall) -> dict[str, int]:
    """Elements of each buffer; what a call cannot fill is not taken."""
    past, C = call.width - 1, call.channels
    rows = max(past, min(_block() // C, 2 * past * call.x.shape[0]))
    buffers = {"total": rows * C, "product": rows * C}
    if call.x.dtype != torch.float32:
        buffers["inputs"] = (rows + past) * C
    return buffers


def _norm_rows(call: GatedNormCall) -> tuple[int, int]:
    """Rows of a block in the first and the second of three dimensions."""
    outer, inner, D = three_dimensions(call.x).shape
    inner = max(1, min(inner, _block() // D))
    return max(1, min(outer, _block() // (inner * D))), inner


def _norm_buffers(call: GatedNormCall) -> dict[str, int]:
    if not call.x.numel():
        return {}
    outer, inner = _norm_rows(call)
    D = call.x.shape[-1]
    size = outer * inner * D
    return {"rows": size, "gate": max(size, 2 * D), "activated": size}


def _declines_convolution(call: ConvolutionCall) -> str | None:
    if call.x.dtype == torch.float64:
        return "it computes in float32; float64 is for the reference."
    cached = any(isinstance(place, CacheSlots) for place in (call.state, call.snapshots))
    if cached and call.device.type not in ("cpu", "meta"):
        return f"a DeltaCache needs the promise of bits, which it does not keep on {call.device}."
    return None


def _declines_norm(call: GatedNormCall) -> str | None:
    if call.x.dtype == torch.float64:
        return "it computes in float32; float64 is for the reference."
    return None


CONVOLUTION = Implementation(
    "torch",
    _declines_convolution,
    convolve,
    lambda call: 4 * sum(_convolution_buffers(call).values()),
)
NORM = Implementation(
    "torch", _declines_norm, norm, lambda call: 4 * sum(_norm_buffers(call).values())
)
