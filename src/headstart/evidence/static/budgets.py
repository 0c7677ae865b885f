"""What a target has, what a kernel may take of it, and how many blocks fit beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KIB = 1024


@dataclass(frozen=True)
class Device:
    """Limits of one multiprocessor (NVIDIA) or compute unit (AMD), from the vendors' tables.

    Of gfx1151 two compute units together, a workgroup processor: the compiler builds blocks for it
    (`workgroup_processor_mode`), and spreads their waves over its four SIMDs.

    registers: 32-bit vector registers a lane can have over all warps of a scheduler.
    grain: registers a thread are rounded up to this.
    schedulers: warp schedulers or SIMDs.
    warps: resident warps of a scheduler, at most.
    blocks: resident blocks, at most.
    shared: bytes of shared memory or LDS.
    reserved: bytes of it that every block loses.
    block: bytes of it that one block can have, at most, where that is not all.
    """

    registers: int
    grain: int
    schedulers: int
    warps: int
    blocks: int
    shared: int
    reserved: int = 0
    block: int | None = None


DEVICES = {
    "cuda:80": Device(512, 8, 4, 16, 32, 164 * KIB, KIB),
    "cuda:89": Device(512, 8, 4, 12, 24, 100 * KIB, KIB),
    "cuda:90": Device(512, 8, 4, 16, 32, 228 * KIB, KIB),
    "cuda:100": Device(512, 8, 4, 16, 32, 228 * KIB, KIB),
    "cuda:120": Device(512, 8, 4, 12, 24, 100 * KIB, KIB),
    "hip:gfx942": Device(512, 8, 4, 8, 32, 64 * KIB),
    "hip:gfx950": Device(512, 8, 4, 8, 32, 160 * KIB),
    "hip:gfx1151": Device(1536, 24, 4, 16, 32, 128 * KIB, block=64 * KIB),
}


@dataclass(frozen=True)
class Budget:
    """What every kernel must keep on a target.

    shared: bytes of shared memory or LDS of a block, at most.
    vector_spills: words of a thread, at most.
    matrix: a kernel with a product must use matrix instructions.
    why: the reason of the numbers.
    """

    shared: int
    vector_spills: int = 0
    matrix: bool = False
    why: str = ""


BUDGETS = {
    "cuda:80": Budget(163 * KIB, why="the most a block can ask for"),
    "cuda:89": Budget(99 * KIB, why="the most a block can ask for"),
    "cuda:90": Budget(227 * KIB, why="the most a block can ask for"),
    "cuda:100": Budget(227 * KIB, why="the most a block can ask for"),
    "cuda:120": Budget(99 * KIB, why="the most a block can ask for"),
    "hip:gfx942": Budget(64 * KIB, why="all of a compute unit"),
    "hip:gfx950": Budget(160 * KIB, why="all of a compute unit"),
    # A device would give a block twice as much.
    "hip:gfx1151": Budget(32 * KIB, matrix=True, why="two blocks a compute unit"),
}


TRAP = 8
"""Instructions, at most, of a kernel that the compiler made a mere trap of.

Triton does so where one needs more tensor memory than there is: it compiles, and cannot run.
"""

MORE_SPILLS = 0.25
"""Vector words that another Triton may spill beyond this one's, for each instruction.

Releases allocate registers differently: 3.9.0 spills up to 0.18 more than 3.6.0, on AMD where a
state of K = V = 256 is held. Beyond a word for every fourth instruction a kernel has fallen apart.
"""


def resident_blocks(
    target: str, *, registers: int, threads: int, warp_size: int, shared: int
) -> int:
    """Blocks that fit on one multiprocessor or compute unit at once; 0: the kernel cannot run.

    >>> resident_blocks("cuda:90", registers=168, threads=128, warp_size=32, shared=100 * 1024)
    2
    """
    device = DEVICES[target]
    warps = -(-threads // warp_size)
    held = max(-(-registers // device.grain) * device.grain, device.grain)
    by_registers = min(device.registers // held, device.warps) * device.schedulers // warps
    by_shared = device.shared // (shared + device.reserved) if shared + device.reserved else 10**9
    if device.block is not None and shared > device.block:
        by_shared = 0
    return min(by_registers, by_shared, device.blocks)


def failures(result: Mapping[str, Any]) -> list[str]:
    """A sentence for a result of the worker that no program comes of, whatever a budget allows."""
    if result["error"]:
        return [f"does not compile: {result['error']}"]
    if result["instructions"] <= TRAP:
        return [f"is nothing but a trap of {result['instructions']} instructions"]
    return ["does not fit on a multiprocessor"] if result["resident_blocks"] == 0 else []


def broken(target: str, result: Mapping[str, Any]) -> list[str]:
    """A sentence for everything that a result of the worker has over its target's budget."""
    if result["error"]:
        return failures(result)
    budget, found = BUDGETS[target], []
    if result["vector_spills"] > budget.vector_spills:
        found.append(
            f"spills {result['vector_spills']} vector words, allowed {budget.vector_spills}"
        )
    if result["shared"] > budget.shared:
        found.append(
            f"takes {result['shared']} bytes of shared memory, allowed {budget.shared} "
            f"({budget.why})"
        )
    found += failures(result)
    if budget.matrix and result["has_product"] and not result["matrix"]:
        found.append("has a product but no matrix instruction")
    return found


def spilled_more(result: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """A sentence where another Triton's `other` spills more than it may beside `result`; else "".

    >>> ours = {"error": "", "triton": "3.6.0", "vector_spills": 10, "instructions": 1000,
    ...         "resident_blocks": 1}
    >>> spilled_more(ours, ours | {"triton": "3.9.0", "vector_spills": 260})
    ''
    >>> spilled_more(ours, ours | {"triton": "3.9.0", "vector_spills": 261})
    'spills 261 vector words, allowed 260 beside the 10 of Triton 3.6.0'
    """
    if failures(result) or failures(other):
        return ""
    ours, theirs = result["vector_spills"], other["vector_spills"]
    allowed = ours + int(MORE_SPILLS * result["instructions"])
    if theirs <= allowed:
        return ""
    return (
        f"spills {theirs} vector words, allowed {allowed} beside the {ours} "
        f"of Triton {result['triton']}"
    )
