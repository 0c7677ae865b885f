"""The arguments of merge_attention, checked once for every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.ops.extend_attention.spec import DTYPES, expect_output
from headstart.runtime.checks import (
    expect_device,
    expect_dtype,
    expect_no_gradients,
    expect_own_memory,
    expect_shape,
    expect_tensor,
    in_memory,
    shown,
)

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class MergeCall:
    """A checked call: pairs (o [T, HQ, DV], lse [T, HQ])."""

    parts: list[Pair]
    sinks: torch.Tensor | None
    out: Pair | None

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.parts[0][0].device

    def deliver(self, o: torch.Tensor, lse: torch.Tensor) -> Pair:
        """The results in the caller's tensors (which may be parts: all are read by now)."""
        if self.out is None:
            return o.to(self.parts[0][0].dtype), lse
        self.out[0].copy_(o)
        self.out[1].copy_(lse)
        return self.out


def bind(parts: Sequence[Pair], sinks: torch.Tensor | None, out: Pair | None) -> MergeCall:
    """Check the arguments; raises ValueError naming the first wrong one."""
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError(f"parts: expected at least one pair (o, lse), got {shown(parts)}")
    pairs = [_pair(f"parts[{i}]", part) for i, part in enumerate(parts)]
    o, lse = pairs[0]
    if o.dim() != 3 or min(o.shape[1:]) < 1:
        raise ValueError(f"parts[0][0]: expected [T, HQ, DV] with HQ, DV >= 1, got {list(o.shape)}")
    expect_dtype("parts[0][0]", o, DTYPES)
    wide = torch.float64 if o.dtype == torch.float64 else torch.float32
    for i, (o_part, lse_part) in enumerate(pairs):
        expect_shape(f"parts[{i}][0]", o_part, "[T, HQ, DV]", o.shape)
        expect_dtype(f"parts[{i}][0]", o_part, (o.dtype,))
        expect_device(f"parts[{i}][0]", o_part, o.device, "parts[0]")
        expect_shape(f"parts[{i}][1]", lse_part, "[T, HQ]", o.shape[:2])
        expect_dtype(f"parts[{i}][1]", lse_part, (wide,))
        expect_device(f"parts[{i}][1]", lse_part, o.device, "parts[0]")
        expect_no_gradients("merge_attention", parts=o_part, lse=lse_part)
        pairs[i] = in_memory(f"parts[{i}][0]", o_part), in_memory(f"parts[{i}][1]", lse_part)
    if sinks is not None:
        expect_shape("sinks", sinks, "[HQ]", (o.shape[1],))
        expect_dtype("sinks", sinks, DTYPES)
        expect_device("sinks", sinks, o.device, "parts[0]")
        expect_no_gradients("merge_attention", sinks=sinks)
        sinks = in_memory("sinks", sinks)
    if out is not None:
        o_out, lse_out = _pair("out", out)
        expect_no_gradients("merge_attention", **{"out[0]": o_out, "out[1]": lse_out})
        expect_dtype("out[0]", o_out, DTYPES)
        expect_output("out[0]", o_out, "[T, HQ, DV]", o.shape, o, o_out.dtype)
        expect_output("out[1]", lse_out, "[T, HQ]", o.shape[:2], o, lse.dtype)
        expect_own_memory("out[0]", o_out, **{"out[1]": lse_out})
        out = o_out, lse_out
    return MergeCall(pairs, sinks, out)


def _pair(name: str, values: object) -> Pair:
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise ValueError(f"{name}: expected a pair (o, lse), got {shown(values)}")
    return expect_tensor(f"{name}[0]", values[0]), expect_tensor(f"{name}[1]", values[1])
