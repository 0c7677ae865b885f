"""How the passes are built: a pure function of head sizes, dtype and kind of device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCRATCH = 96 * 2**20
"""Bytes of scratch that a span of chunks may take."""

DECAY_HEADS = 8
"""Value heads that one program of `decays` takes; two share a warp."""


@dataclass(frozen=True)
class PrepareConfig:
    """How `prepare` is built.

    BC: columns taken at a time. Caps on registers all lost on an H200: 101 us for 8,192 tokens
    without one, 112 with 208, 135 with 168; 8 warps take 223.
    """

    BC: int
    warps: int


def prepare_configuration(dtype: torch.dtype, backend: str) -> PrepareConfig:
    """The one configuration for a dtype on a kind of device."""
    narrow = dtype != torch.float32
    return PrepareConfig(
        BC=128 if narrow and backend == "cuda" else 128 // dtype.itemsize,
        warps=4,
    )


def heads_together(H: int, HV: int, items: int, processors: int) -> int:
    """Value heads of a key head that one program of `prepare` takes in turn.

    They share products; fewer where programs would not fill the device. Bits do not depend on it.

    >>> heads_together(16, 32, 128, 132), heads_together(2, 8, 16, 132), heads_together(1, 5, 99, 1)
    (2, 1, 1)
    """
    ratio = HV // H
    fitting = [n for n in (4, 3, 2) if ratio % n == 0 and HV // n * items >= 4 * processors]
    return fitting[0] if fitting else 1


def padded(size: int) -> int:
    """Columns of a tile of `size` channels: a power of two, at least 64.

    Triton 3.6 reads outside shared memory in some products over rows of less than 128 bytes.

    >>> padded(24), padded(96)
    (64, 128)
    """
    return max(64, 1 << (size - 1).bit_length())


def precision(dtype: torch.dtype, backend: str) -> str:
    """How float32 operands are multiplied; for 16-bit ones a name that every target accepts."""
    return "tf32x3" if dtype == torch.float32 and backend == "cuda" else "ieee"


def backend_of(device: torch.device) -> tuple[str, int]:
    """Backend and lanes of a warp; those of NVIDIA in the interpreter."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "hip", torch.cuda.get_device_properties(device).warp_size
    return "cuda", 32
