"""How the kernels are built: a pure function of head sizes, dtype, window or not, and device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headstart.runtime.launcher import padded


@dataclass(frozen=True)
class Config:
    """How a kernel over tiles is built.

    BM: rows of a tile; BN: keys of a tile; stages of the loops over keys; warps of a program.
    piece: keys of a piece of a tile that is cut, a multiple of BN. In the reproducible kernel it is
    also the block of absolute positions in which all keys are reduced.
    registers: most that a thread may take on NVIDIA, so that more programs fit; 0: any number.
    resident: programs of a multiprocessor without a short window; in the reproducible kernel they
    stay there for tile after tile.
    """

    BM: int
    BN: int
    stages: int
    warps: int
    piece: int = 1024
    registers: int = 0
    resident: int = 1


# Kind of device -> width of a row (the wider of D and DV, as it is read) -> configuration; a width
# between two takes that of the wider.
# Small tiles, several programs on a multiprocessor, where rows are narrow; tiles of 128 rows where
# two of 64 would not fit beside each other. Those of "hopper" were the fastest of several on an
# H200 (`headstart tune` tries such), but for those of width 512 without a window; all others follow
# from registers and shared memory alone: they were compiled, not run.
FULL = {
    "hopper": {
        64: Config(64, 128, 2, 4, registers=168, resident=3),
        128: Config(64, 64, 3, 4, resident=2),
        192: Config(64, 64, 2, 4, resident=2),
        256: Config(128, 64, 2, 8),
        512: Config(64, 32, 2, 8),
    },
    "large": {
        64: Config(64, 64, 3, 4, registers=255),
        128: Config(64, 32, 3, 4, registers=255),
        256: Config(64, 32, 2, 8),
        512: Config(32, 32, 2, 8),
    },
    "small": {
        64: Config(64, 64, 2, 4, registers=255),
        128: Config(64, 32, 2, 4, registers=255),
        256: Config(64, 32, 1, 8),
        512: Config(32, 16, 1, 8),
    },
    "cdna": {
        64: Config(64, 64, 1, 4),
        128: Config(128, 64, 1, 8),
        256: Config(64, 32, 1, 8),
        512: Config(32, 32, 1, 4),
    },
    "rdna": {
        64: Config(64, 32, 1, 8),
        128: Config(32, 32, 1, 8),
        256: Config(16, 16, 1, 8),
        512: Config(16, 16, 1, 8),
    },
}
LONG_WINDOW = 2048
"""A window of so many keys or more counts as none: nearly all tiles that a row sees are clear, and
where few rows are decoded their keys are worth cutting into pieces."""
WINDOWED = {
    "hopper": {
        64: Config(64, 32, 2, 4, registers=80),
        128: Config(64, 32, 3, 4),
        192: Config(64, 32, 2, 4),
        256: Config(128, 64, 2, 8),
    },
    "large": {64: Config(64, 32, 3, 4), 128: Config(64, 32, 2, 4)},
    "small": {64: Config(64, 32, 2, 4)},
    "cdna": {64: Config(64, 32, 1, 4), 128: Config(64, 32, 1, 4)},
    "rdna": {},
}
"""Under a short window, where it differs."""
SCATTERED: dict[str, dict[tuple[bool, int], Config]] = {
    "hopper": {
        (False, 128): Config(128, 64, 4, 8),
        (True, 64): Config(64, 32, 2, 4, registers=96),
        (True, 80): Config(64, 32, 2, 4, registers=168),
        (True, 128): Config(64, 32, 3, 4, registers=168),
        (True, 256): Config(64, 32, 2, 4),
    }
}
"""Where cached keys are copied row by row: kind -> (under a short window or not, width), where it
differs from FULL and WINDOWED; rows of just such a width come before those that are read as wide.
Under a short window tiles of narrow rows are the same, and so are the bits.

Wide tiles without a window are for prompts, whose rows share each copy. Where every sequence brings
`FEW` rows at most, as in decoding, FULL and REPRODUCIBLE hold: of tiles of 128 rows there is room
for one program on a multiprocessor, of those of 64 for two, which ask for twice the keys."""
LISTED: dict[str, dict[tuple[bool, int], Config]] = {
    "hopper": {(False, 128): Config(128, 128, 3, 8)},
}
"""The same where each key has a slot of its own, before SCATTERED: tiles of twice the keys take 5 %
less time there on an H200."""
FEW = 64
"""Rows, all heads of a group counted, that fit a tile of those kinds of call."""
MANY = 32
"""Query heads of a key head from which tiles under a short window have so few tokens that they see
little more than one token does: tiles of 16 keys take 15 % less time there on an H200."""
REPRODUCIBLE = {
    "hopper": {
        64: Config(64, 128, 2, 4, piece=4096, registers=168, resident=3),
        128: Config(64, 64, 3, 4, piece=2048, resident=2),
        256: Config(128, 64, 2, 8, piece=4096),
        512: Config(32, 16, 2, 8),
    },
    "large": {
        64: Config(64, 64, 3, 4, registers=255, resident=2),
        128: Config(64, 32, 2, 8),
        256: Config(64, 16, 2, 8),
        512: Config(32, 16, 2, 8),
    },
    "small": {
        64: Config(64, 64, 2, 4, registers=255, resident=2),
        128: Config(64, 16, 2, 4, resident=2),
    },
    "cdna": {
        64: Config(64, 64, 1, 4, resident=2),
        128: Config(64, 64, 1, 8),
        512: Config(32, 16, 1, 4),
    },
    "rdna": {64: Config(32, 32, 1, 8), 256: Config(32, 32, 1, 8), 512: Config(32, 16, 1, 8)},
}
"""The reproducible kernel without a short window, where it differs.

The end of a block costs a program time, most where it has to fill its pipeline again; the shorter
blocks are, the more programs share a row that is decoded. On the H200 those of 8192 take 4 %
less time than those of 4096 where rows are 256 wide. Where they are 64 wide, 4096 takes 38 % less
time than 8192 for one row after 100,000 keys, and up to 3 % more for prefills; where they are 128
wide, 2048 41 % less than 4096 for a draft's few rows after a long prefix, and up to 9 % more.
"""
REPRODUCIBLE_NARROW = {"hopper": {256: Config(128, 64, 3, 8, piece=4096)}}
"""The same where values are at most half as wide as keys: another stage fits, and takes 12 % less
time."""

REPRODUCIBLE_SCATTERED: dict[str, dict[tuple[bool, int], dict[str, int]]] = {
    "hopper": {
        (False, 128): {"BM": 128, "stages": 3, "warps": 8, "resident": 1},
        (True, 64): {"registers": 96},
    }
}
"""What is otherwise in the reproducible kernel where cached keys are copied row by row, as in
`SCATTERED`; nothing that `order_of_sums` names. Tiles of 128 rows share a copied key among more
rows: they are the faster ones on an H200 from pages of 1 and 16, and take 15 to 24 % more time from
packed keys; beside a mask's entries registers do not hold them.
"""

REPRODUCIBLE_WINDOWED: dict[str, dict[int, Config]] = {
    "hopper": {
        64: Config(64, 32, 2, 4, registers=80),
        80: Config(64, 32, 3, 4),
        128: Config(64, 32, 3, 4, registers=168),
        256: Config(64, 32, 2, 4),
    },
    "rdna": REPRODUCIBLE["rdna"],
}
"""The same under a short window; rows of just such a width come first here too."""


def configuration(
    D: int,
    DV: int,
    dtype: torch.dtype,
    *,
    windowed: bool,
    ratio: int = 1,
    scattered: bool = False,
    listed: bool = False,
    few: bool = False,
    masked: bool = False,
    reproducible: bool = False,
    target: str = "cuda:90",
) -> Config:
    """The one configuration of a kind of call. Of lengths and the batch it depends on `few` alone.

    Entries of a custom mask take registers, so tiles are smaller; but not where bits are promised:
    there a mask that says what the causal rule says must give the bits of that rule. windowed:
    under a window below `LONG_WINDOW`. ratio: query heads of
    a key head, as a class; bits that are promised do not depend on it. scattered: cached keys are
    copied row by row. listed: each of those has a slot of its own. few: no sequence brings
    more than `FEW` rows. target: as `headstart static` names it.

    >>> configuration(64, 64, torch.bfloat16, windowed=True)
    Config(BM=64, BN=32, stages=2, warps=4, piece=1024, registers=80, resident=1)
    """
    kind = kind_of(target)
    width = max(padded(D), padded(DV))
    if not reproducible:
        width = max(columns(D, dtype, target).whole, padded(DV))
    width = min(known for known in FULL[kind] if known >= width)
    found = FULL[kind][width]
    if windowed:
        found = WINDOWED[kind].get(width, found)
        if ratio >= MANY and not reproducible and (kind, width) == ("hopper", 128):
            found = replace(found, BN=16)
    if scattered and not few:
        rows = SCATTERED.get(kind, {}) | (LISTED.get(kind, {}) if listed else {})
        found = rows.get((windowed, max(D, DV)), rows.get((windowed, width), found))
    if reproducible:
        own = (REPRODUCIBLE_WINDOWED if windowed else REPRODUCIBLE).get(kind, {})
        found = own.get(max(D, DV), own.get(width, found))
        if not windowed and 2 * padded(DV) <= width:
            found = REPRODUCIBLE_NARROW.get(kind, {}).get(width, found)
        if scattered and not (masked or few):
            changed = REPRODUCIBLE_SCATTERED.get(kind, {}).get((windowed, width), {})
            found = replace(found, **changed)
    if dtype == torch.float32:
        # Operands of twice the size, and products of several parts.
        if width == 64:
            resident = min(found.resident, 2)
            return replace(found, BN=min(found.BN, 32), stages=1, registers=0, resident=resident)
        # Tiles of fewer than 64 rows are not given to Hopper's products over warp groups, which go
        # wrong over rows of 16 numbers (as `padded` says).
        BM = min(found.BM, 32)
        return replace(found, BM=BM, BN=16, stages=1, warps=8, registers=0, resident=1)
    if masked and not reproducible:
        found = replace(found, registers=0)
        if (kind, width) != ("hopper", 128) or scattered:
            return replace(found, BN=min(found.BN, 32), stages=1)
        # For the few rows of a tree of drafts on an H200: short pieces take 30 % less time, a
        # second stage 12 to 16 % less though some words spill, small tiles 7 % under a window.
        return replace(found, BM=16, stages=2) if windowed else replace(found, stages=2, piece=512)
    if masked and found.registers:
        return replace(found, registers=0, resident=min(found.resident, 2))
    return found


@dataclass(frozen=True)
class Columns:
    """How rows of queries and keys are read: `parts` tiles of `size` columns each.

    again: queries are read again for every tile of keys, `size` columns at a time.
    """

    size: int
    parts: int = 1
    again: bool = False

    @property
    def whole(self) -> int:
        """Columns of all parts."""
        return self.size * self.parts


def columns(D: int, dtype: torch.dtype, target: str, *, reproducible: bool = False) -> Columns:
    """How D channels are read: 192 by the default kernel as 3 x 64, not as 256 with many zeros.

    On AMD's RDNA every warp takes whole rows of queries; those that registers cannot hold are read
    again and again. The reproducible kernel, which looks for keys in two tensors, holds none.

    >>> columns(80, torch.float16, "cuda:90").size, columns(192, torch.float16, "cuda:90").parts
    (128, 3)
    >>> columns(512, torch.float16, "hip:gfx1151").again
    True
    """
    most = 0 if reproducible else 256 if dtype == torch.float32 else 512
    if kind_of(target) == "rdna" and D * dtype.itemsize > most:
        return Columns(64, padded(D) // 64, again=True)
    part = D & -D
    return Columns(part, D // part) if part >= 64 and not reproducible else Columns(padded(D))


def order(
    D: int,
    DV: int,
    dtype: torch.dtype,
    *,
    windowed: bool,
    reproducible: bool = False,
    target: str,
) -> str:
    """How a turn of the loops over tiles of keys is laid out, as it was fastest.

    "early" (`sweep_early`) and "late" (`sweep_late`): products run beside the softmax of another
    turn. "ahead" (`sweep`): the next tiles are on their way during a softmax; where rows are
    narrow, several programs of a multiprocessor do the rest for each other, with fewer registers.
    "": none of them. windowed: as for `configuration`. Measured on Hopper alone. The reproducible
    kernel knows no "early"; tiles that a page table names it reads late in any case: that is how
    they are on their way in time.

    >>> order(64, 64, torch.bfloat16, windowed=True, target="cuda:90")
    'ahead'
    """
    if kind_of(target) != "hopper" or dtype == torch.float32:
        return ""
    if max(D, DV) <= 64:
        return "ahead"
    if windowed:
        return "early" if max(D, DV) > 192 and not reproducible else ""
    early = columns(D, dtype, target).parts > 1 and not reproducible
    return "early" if early else "late"


def kind_of(target: str) -> str:
    """Kind of a device: "hopper"; NVIDIA's "large" and "small" shared memory; AMD's two families.

    >>> kind_of("cuda:120"), kind_of("hip:gfx942")
    ('small', 'cdna')
    """
    backend, arch = target.split(":")
    if backend == "hip":
        return "cdna" if arch.startswith("gfx9") else "rdna"
    if arch == "90":
        return "hopper"
    return "small" if arch in ("86", "89", "120", "121") else "large"


def converts_e4m3(target: str) -> bool:
    """Whether a device turns float8 e4m3 into wider numbers itself.

    >>> converts_e4m3("cuda:89"), converts_e4m3("cuda:80"), converts_e4m3("hip:gfx950")
    (True, False, False)
    """
    backend, arch = target.split(":")
    return backend == "cuda" and int(arch) >= 89


def packing(HQ: int, HK: int, BM: int) -> tuple[int, int]:
    """Query heads of a group that share a tile, and the new tokens of a tile.

    >>> packing(64, 8, 64), packing(5, 1, 64), packing(16, 16, 64)
    ((8, 8), (5, 12), (1, 64))
    """
    heads = min(HQ // HK, BM)
    return heads, BM // heads
