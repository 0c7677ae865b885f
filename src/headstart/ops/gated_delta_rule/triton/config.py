"""How the kernels are built: a pure function of head sizes, dtype and kind of device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCRATCH = 96 * 2**20
"""Bytes of scratch that a span of chunks may take."""

DECAY_HEADS = 8
"""Value heads that one program of `decays` takes; two share a warp."""


@dataclass(frozen=True)
class Config:
    """How `prepare` and `scan` are built for (K, V, dtype).

    BV: columns of V that one program of `scan` holds; BC: columns that `prepare` takes at a time,
    rows of 128 bytes; their warps, and the stages of the scan.
    """

    BV: int
    BC: int
    prepare_warps: int
    scan_warps: int
    stages: int


def configuration(K: int, V: int, dtype: torch.dtype) -> Config:
    """The one configuration of a kind of call; it never depends on lengths or on the batch."""
    wide = dtype == torch.float32 or K > 128
    return Config(
        BV=64,
        BC=128 // dtype.itemsize,
        prepare_warps=4,
        scan_warps=4,
        stages=1 if wide else 3,
    )


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
