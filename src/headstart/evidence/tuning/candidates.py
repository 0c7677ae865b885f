"""What is tried beside the rule: configurations one change away, in steps that kernels can take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from headstart.runtime.table_files import KERNELS
from headstart.runtime.tables import Key

LADDERS: Mapping[str, tuple[int, ...]] = {
    "BM": (16, 32, 64, 128),
    "BN": (16, 32, 64, 128),
    "BC": (16, 32, 64, 128),
    "BV": (16, 32, 64, 128),
    "stages": (1, 2, 3, 4),
    "warps": (2, 4, 8, 16),
    "num_warps": (1, 2, 4, 8, 16),
    "piece": (512, 1024, 2048, 4096, 8192),
    "registers": (0, 168, 128, 96, 80),
    "resident": (1, 2, 3, 4),
    "rows": (1, 2, 4, 8, 16, 32, 64),
    "channels": (64, 128, 256, 512, 1024, 2048),
    "unroll": (2, 4, 8, 16),
}
"""Values of a field in the order of steps; registers: 0 is no limit, which is 255."""
TOGETHER = (("BM", "warps"), ("BV", "warps"), ("rows", "num_warps"), ("channels", "num_warps"))
"""Fields that are tried in steps of both: a tile of twice the rows by twice the warps."""


def candidates(key: Key, configuration: Any, target: str) -> list[Any]:
    """What is tried of a key beside a configuration on a target.

    Where a key's switches may change no bits, the order of sums stays: it is tried of the key
    without them, whose choice holds for both.

    >>> import torch
    >>> from headstart.ops.extend_attention.triton.config import Config
    >>> key = Key("extend_attention", "unified", (128, 128), torch.bfloat16)
    >>> all_of_them = candidates(key, Config(64, 64, 3, 4, 2048, 0, 2), "cuda:90")
    >>> key = key._replace(switches=("scattered",))
    >>> same_sums = candidates(key, Config(64, 64, 3, 4, 2048, 0, 2), "cuda:90")
    >>> len(all_of_them), len(same_sums), Config(128, 64, 3, 8, 2048, 0, 2) in same_sums
    (15, 6, True)
    """
    tried = neighbours(configuration, fixed_fields(key, target))
    sums = KERNELS[key.operation, key.kernel].sums
    if sums is None or not key.switches:
        return tried
    return [one for one in tried if sums(asdict(one)) == sums(asdict(configuration))]


def neighbours(configuration: Any, fixed: Collection[str] = ()) -> list[Any]:
    """Configurations one step away, each once; fixed: fields that stay as they are.

    >>> from headstart.ops.gated_delta_rule.passes.config import PrepareConfig
    >>> neighbours(PrepareConfig(BC=128, warps=4))
    [PrepareConfig(BC=64, warps=4), PrepareConfig(BC=128, warps=2), PrepareConfig(BC=128, warps=8)]
    """
    values = asdict(configuration)
    steps = {name: _steps(name, value) for name, value in values.items() if name not in fixed}
    found = [{name: value} for name, near in steps.items() for value in near.values()]
    for names in TOGETHER:
        for way in (-1, 1):
            if all(way in steps.get(name, ()) for name in names):
                found.append({name: steps[name][way] for name in names})
    tried = [replace(configuration, **changed) for changed in found]
    return [one for one in dict.fromkeys(tried) if _possible(one)]


def fixed_fields(key: Key, target: str) -> set[str]:
    """Fields of a key's configuration that change nothing on a target.

    >>> import torch
    >>> key = Key("extend_attention", "extend", (64, 64), torch.bfloat16, 8, windowed=True)
    >>> sorted(fixed_fields(key, "hip:gfx942"))
    ['piece', 'registers', 'resident']
    """
    found = set() if target.startswith("cuda") else {"registers"}
    if key.windowed:
        found |= {"piece", "resident"}  # rows are not cut, however many programs there are
    return found


def _steps(name: str, value: int) -> dict[int, int]:
    """Way (-1 or 1) -> the next value of a field that way."""
    ladder = LADDERS[name]
    if name == "registers" and value == 255:
        value = 0
    near = [step for step in (-1, 1) if value in ladder]
    return {
        way: ladder[ladder.index(value) + way]
        for way in near
        if 0 <= ladder.index(value) + way < len(ladder)
    }


def _possible(configuration: Any) -> bool:
    """Whether a kernel can be built so: pieces hold whole tiles."""
    BN, piece = (getattr(configuration, name, 0) for name in ("BN", "piece"))
    return not piece or piece % BN == 0
