"""Storing rows in a cache: rounding, float8 scaling and saturation."""

from __future__ import annotations

import torch

from headstart.ops.extend_attention.kv_cache import FP8, FP8_MAX


def stored(
    rows: torch.Tensor, dtype: torch.dtype, scale: float | torch.Tensor | None
) -> torch.Tensor:
    """Rows [T, HK, .] as a cache of `dtype` stores them: round(x / scale), saturated for float8."""
    if dtype != FP8 or scale is None:
        return rows.to(dtype)
    divisor = scale.view(-1, 1) if isinstance(scale, torch.Tensor) else scale
    # Clamped here: whether a cast saturates or gives NaN depends on the device and the version.
    return (rows.float() / divisor).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def bytewise(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes where indexing does not know the dtype."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
