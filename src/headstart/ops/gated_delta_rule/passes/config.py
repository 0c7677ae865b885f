"""How the passes are built: a pure function of head sizes, dtype and kind of device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

SCRATCH = 96 * 2**20
"""Bytes of scratch that a span of chunks may take."""

DECAY_HEADS = 8
"""Value heads that one program of `decays` takes; two share a warp."""


class Backend(NamedTuple):
    """What kernels are compiled for.

    name: "cuda" or "hip"; warp_size: lanes of a warp; arch: compute capability times ten, 0 on AMD.
    """

    name: str
    warp_size: int
    arch: int

    @property
    def described(self) -> bool:
        """Whether tiles are copied through descriptors, which take a copy engine."""
        return 90 <= self.arch < 120


@dataclass(frozen=True)
class PrepareConfig:
    """How `prepare` is built.

    BC: columns taken at a time. Caps on registers all lost on an H200: 101 us for 8,192 tokens
    without one, 112 with 208, 135 with 168; 8 warps take 223.
    """

    BC: int
    warps: int


def prepare_configuration(dtype: torch.dtype, backend: Backend) -> PrepareConfig:
    """The one configuration for a dtype on a kind of device; measured on Hopper alone."""
    narrow = dtype != torch.float32
    if backend.described:
        return PrepareConfig(BC=128 if narrow else 32, warps=4)
    warps = 8 if backend.name == "cuda" else 4 if backend.warp_size == 64 else 16
    return PrepareConfig(BC=64 if narrow else 32, warps=warps)


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


@functools.cache
def backend_of(device: torch.device) -> Backend:
    """The backend of a device; in the interpreter that of an NVIDIA one without a copy engine."""
    if device.type != "cuda":
        return Backend("cuda", 32, 80)
    if torch.version.hip is not None:
        return Backend("hip", torch.cuda.get_device_properties(device).warp_size, 0)
    major, minor = torch.cuda.get_device_capability(device)
    return Backend("cuda", 32, 10 * major + minor)
