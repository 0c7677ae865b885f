"""The gated norm, x rsqrt(mean(x^2) + eps) weight activation(gate), in one launch.

A program takes whole rows, in float32. The order in which a row's squares are summed follows from
how the compiler spreads a tile over threads, and that from what is known of the alignment of the
loads. So exactly one thing is known for rows of a size: with whole blocks of 16 elements every
stride is such a block and every pointer aligned (else the tensor is copied first), with other
sizes nothing is. The bits of a row then depend on that row and the types alone.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headstart.ops.convolution.spec import GatedNormCall, three_dimensions
from headstart.ops.convolution.triton.activations import sigmoid, silu
from headstart.runtime.launcher import current, start
from headstart.runtime.tables import Key, configuration

BLOCK = 16
"""Elements that strides are multiples of where rows are."""
MOST_NARROW = 2**30
"""Rows that are counted in 32 bits: the last program's rows past them fit too."""


@dataclass(frozen=True)
class Config:
    """Rows of a program (a power of two) and its warps."""

    rows: int
    num_warps: int

    @classmethod
    def rule(cls, size: int) -> Config:
        """2,048 elements of whole rows for two warps, 32 a thread; a longer row has a program of
        its own and up to 16 warps.

        On an H200 rows of 128 take 4 % less time so than in four warps where they are many, and 5 %
        more where they are few.
        """
        padded = triton.next_power_of_2(size)
        if padded > 2048:
            return cls(1, min(16, padded // 1024))
        return cls(2048 // padded, 2)


@triton.jit(do_not_specialize=["count", "inner", "x_outer", "x_inner", "gate_outer", "gate_inner"])
def norm_kernel(
    x, weight, gate, y, eps, count, inner, size,
    x_outer, x_inner, gate_outer, gate_inner,
    SILU: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Rows [BR, BD] of [outer, inner, size]; strides in units of UNIT elements.

    WIDE: rows are counted in 64 bits, whose division takes longer than a row's arithmetic.
    """
    r = tl.program_id(0).to(tl.int64 if WIDE else tl.int32) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m = (r < count)[:, None] & (o_d < size)[None, :]
    outer, at = (r // inner).to(tl.int64), (r % inner).to(tl.int64)
    p_x = x + (outer * x_outer + at * x_inner)[:, None] * UNIT + o_d[None, :]
    p_gate = gate + (outer * gate_outer + at * gate_inner)[:, None] * UNIT + o_d[None, :]
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate, mask=m, other=0.0).to(tl.float32)
    b_weight = tl.load(weight + o_d, mask=o_d < size, other=0.0).to(tl.float32)
    mean = tl.sum(b_x * b_x, axis=1) / size
    b_y = b_x * tl.rsqrt(mean + eps)[:, None] * b_weight[None, :]
    b_active = sigmoid(b_gate)
    if SILU:
        b_active = silu(b_gate)
    p_y = y + r.to(tl.int64)[:, None] * size + o_d[None, :]
    tl.store(p_y, (b_y * b_active).to(y.dtype.element_ty), mask=m)


def norm(call: GatedNormCall) -> torch.Tensor:
    """Run a bound call."""
    y = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.device)
    if not y.numel():
        return y
    size = call.x.shape[-1]
    key = Key("rms_norm_gated", "norm", (size,), call.x.dtype)
    config = configuration(key, call.device, lambda: Config.rule(size))
    unit = 1 if size % BLOCK else BLOCK
    x, gate = (_loadable(three_dimensions(tensor), unit) for tensor in (call.x, call.gate))
    count, inner = x.shape[0] * x.shape[1], x.shape[1]
    strides = [stride // unit for tensor in (x, gate) for stride in tensor.stride()[:2]]
    given = (
        x, call.weight.contiguous(), gate, y, call.eps, count, inner, size, *strides,
        call.activation == "silu", unit, count > MOST_NARROW,
        config.rows, triton.next_power_of_2(size),
    )  # fmt: skip
    arguments = dict(zip(norm_kernel.arg_names, given, strict=True))
    grid = (triton.cdiv(count, config.rows),)
    with current(x.device):
        start(norm_kernel, grid, arguments, num_warps=config.num_warps, enable_fp_fusion=False)
    return y


def _loadable(tensor: torch.Tensor, unit: int) -> torch.Tensor:
    """The tensor, or a copy where its strides or its address are not what the kernel counts on."""
    outer, inner, last = tensor.stride()
    strided = last == 1 or tensor.shape[-1] == 1
    aligned = unit == 1 or (tensor.data_ptr() % 16 == 0 and not outer % unit and not inner % unit)
    return tensor if strided and aligned else tensor.clone(memory_format=torch.contiguous_format)
