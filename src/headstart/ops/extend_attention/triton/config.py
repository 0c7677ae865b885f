"""How the kernels are built: a pure function of head sizes, dtype, window or not, and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """How a kernel over tiles is built.

    BM: rows of a tile; BN: keys of a tile; stages of the loops over keys; warps of a program.
    piece: keys of a piece of a tile that is cut, a multiple of BN. In the reproducible kernel it is
    also the block of absolute positions in which all keys are reduced.
    registers: most that a thread may take on NVIDIA, so that more programs fit; 0: any number.
    """

    BM: int
    BN: int
    stages: int
    warps: int
    piece: int = 1024
    registers: int = 0


def configuration(
    D: int,
    DV: int,
    dtype: torch.dtype,
    *,
    windowed: bool,
    masked: bool = False,
    reproducible: bool = False,
    backend: str = "cuda",
) -> Config:
    """The one configuration of a kind of call; it never depends on lengths or on the batch.

    Small tiles, several programs on a multiprocessor: 64 x 32 was the fastest under a window of 128
    on an H200, 64 x 128 in two stages at D 64 and 64 x 64 in three at D 128 without one. The other
    sizes and devices follow from registers and shared memory alone; they were compiled, not run.
    Entries of a custom mask take registers, so tiles are smaller; but not where bits are promised:
    there a mask that says what the causal rule says must give the bits of that rule.

    >>> configuration(64, 64, torch.bfloat16, windowed=True)
    Config(BM=64, BN=32, stages=3, warps=4, piece=1024, registers=80)
    """
    width = max(padded(D), padded(DV))
    warps = 4 if width <= 128 else 8
    if dtype == torch.float32 or (masked and not reproducible):
        return Config(64, 32, 1, warps)
    if backend == "hip":
        return Config(64, 32 if windowed or width > 128 else 64, 1, warps)
    if width > 256:
        return Config(64, 16, 3, warps)
    if windowed and width > 128:
        return Config(64, 32, 2, warps)
    if windowed:
        return Config(64, 32, 3, warps, registers=80 if width == 64 else 0)
    if width == 64 and not reproducible:
        return Config(64, 128, 2, warps, registers=168)
    return Config(64, 64, 3 if width <= 128 else 2, warps)


def padded(size: int) -> int:
    """Columns of a tile of `size` channels: a power of two, at least 64.

    Triton 3.6 reads outside shared memory in some products over rows of less than 128 bytes.

    >>> padded(24), padded(96)
    (64, 128)
    """
    return max(64, 1 << (size - 1).bit_length())


def packing(HQ: int, HK: int, BM: int) -> tuple[int, int]:
    """Query heads of a group that share a tile, and the new tokens of a tile.

    >>> packing(64, 8, 64), packing(5, 1, 64), packing(16, 16, 64)
    ((8, 8), (5, 12), (1, 64))
    """
    heads = min(HQ // HK, BM)
    return heads, BM // heads


def precision(dtype: torch.dtype, backend: str) -> str:
    """How float32 operands are multiplied; for 16-bit ones a name that every target accepts."""
    return "tf32x3" if dtype == torch.float32 and backend == "cuda" else "ieee"


def backend_of(device: torch.device) -> str:
    """Backend of a device; that of NVIDIA in the interpreter."""
    return "hip" if device.type == "cuda" and torch.version.hip is not None else "cuda"


def descriptors(device: torch.device) -> bool:
    """Whether a device reads tiles through descriptors (TMA); the interpreter does, to test it."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
