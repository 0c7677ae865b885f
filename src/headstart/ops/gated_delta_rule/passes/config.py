"""How the passes are built: a pure function of head sizes, dtype and kind of device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headstart.runtime.launcher import reads_descriptors
from headstart.runtime.static import Target

SCRATCH = 96 * 2**20
"""Bytes of scratch that a span of chunks may take."""

INTERPRETED_AS = 80
"""The interpreter takes the path of devices without a copy engine, of which no GPU tells."""

DECAY_HEADS = 8
"""Value heads that one program of `decays` takes; two share a warp."""


def chained(target: Target) -> bool:
    """Whether programs of these passes start while the launch before still runs, and wait for it.

    It saves an H200 what lies between launches, 1 to 4 us; no other device was measured. A kernel
    that waits so does it before anything else, so that whatever it reads or overwrites is done
    with; only then are programs of the next launch let in.

    >>> chained(Target("cuda:90", "cuda", 90, 32)), chained(Target("cuda:80", "cuda", 80, 32))
    (True, False)
    """
    return target.name == "cuda:90"


@dataclass(frozen=True)
class PrepareConfig:
    """How `prepare` is built.

    BC: columns taken at a time. On an H200 every cap on registers lost, and so did 8 warps.
    """

    BC: int
    warps: int


def prepare_configuration(dtype: torch.dtype, target: Target) -> PrepareConfig:
    """The one configuration for a dtype on a kind of device; measured on Hopper alone."""
    narrow = dtype != torch.float32
    if reads_descriptors(target):
        if target.arch == 90:
            return PrepareConfig(BC=128 if narrow else 32, warps=4)
        # On 100 four warps spill what tensor memory gives back. Of float32 K = 256 in steps of 32
        # columns takes more tensor memory than there is (Triton 3.6), and 64 spill no more.
        return PrepareConfig(BC=128 if narrow else 64, warps=8)
    warps = 8 if target.backend == "cuda" else 4 if target.warp_size == 64 else 16
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


def joins(K: int, target: Target) -> bool:
    """Whether `join` is of use: L lies in shared memory, and products have instructions."""
    return K <= 128 and (target.backend == "cuda" or target.warp_size == 64)
