"""The configurations of these kernels, for inspection without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headstart.ops.extend_attention.triton.config import (
    Config,
    configuration,
    packing,
    padded,
    precision,
)
from headstart.ops.extend_attention.triton.extend import extend_kernel
from headstart.runtime.static import StaticKernel, Target

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Shape:
    """Head counts and sizes that a kernel is compiled for."""

    HQ: int
    HK: int
    D: int
    DV: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """As part of a kernel's name."""
        sizes = f"D{self.D}" if self.D == self.DV else f"D{self.D}-DV{self.DV}"
        return f"{sizes}-{NAMES[self.dtype]}"


SHAPES = (
    Shape(64, 8, 64, 64),
    Shape(32, 8, 128, 128),
    Shape(16, 2, 256, 256),
    Shape(16, 16, 192, 128),
    Shape(16, 4, 512, 512),
    Shape(64, 8, 64, 64, torch.float16),
    Shape(32, 8, 128, 128, torch.float32),
)

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "win": {"WINDOWED": True},
    "sinks": {"HAS_SINKS": True},
    "mask": {"MASK": "all"},
    "softcap": {"FORM": "tanh"},
    "pages": {"FOUND": "pages", "PAGE": 16},
    "fp8": {"FOUND": "pages", "PAGE": 16, "SCALES": True},
}
"""Switch -> constants that it changes."""

ROWS = {"q", "k", "v", "o"}
POINTERS = {
    "sinks": "*fp32", "lse": "*fp32", "part_acc": "*fp32", "part_m": "*fp32", "part_l": "*fp32",
    "sequences": "*i64", "tiles": "*i32", "joins": "*i32", "places": "*i32", "positions": "*i32",
    "custom_mask": "*u8", "k_scale": "*fp32", "v_scale": "*fp32",
}  # fmt: skip
NUMBERS = {"inner", "factor", "k_number", "v_number"}
ODD = {"total", "listed", "window", "cache_k_channel", "cache_v_channel", "o_channel", "lse_head"}
ODD |= {"k_scale_head", "v_scale_head", "lse_token"}
UNIT = {"cache_k_channel": 1, "cache_v_channel": 1, "o_channel": 1, "lse_head": 1}


def constants(shape: Shape, config: Config, target: Target, **switches: Any) -> dict[str, Any]:
    """The constants of a plain call of this shape, with some of them changed."""
    heads, tokens = packing(shape.HQ, shape.HK, config.BM)
    group = shape.HQ // shape.HK
    described = (
        target.backend == "cuda" and int(target.arch) >= 90
        and padded(shape.D) == shape.D and padded(shape.DV) == shape.DV
    )  # fmt: skip
    found = {
        "HQ": shape.HQ, "HEADS": shape.HK * -(-group // heads), "GROUP": group, "PACK": heads,
        "D": shape.D, "DV": shape.DV, "BD": padded(shape.D), "BDV": padded(shape.DV),
        "BM": config.BM, "BN": config.BN, "BT": tokens, "STAGES": config.stages,
        "PIECE": config.piece, "FOUND": "", "PAGE": 1, "NEW": "packed", "DESCRIBED": described,
        "CACHE_DESCRIBED": False, "UNIT": True, "CAUSAL": True, "WINDOWED": False, "MASK": "",
        "LISTED": False, "BLOCK": config.piece, "SCALES": False, "WIDE": False,
        "HAS_SINKS": False, "HAS_LSE": False, "FORM": "plain",
        "PRECISION": precision(shape.dtype, target.backend),
        "BH": max(1, min(1024 // padded(shape.DV), shape.HQ)),
    }  # fmt: skip
    return found | switches


def compiled(
    fn: Any, name: str, shape: Shape, config: Config, target: Target, chosen: Mapping[str, Any]
) -> StaticKernel:
    """One kernel with these constants, for inspection."""
    kind = NAMES[shape.dtype]
    absent = set()
    if not chosen["FOUND"]:
        absent |= {"cache_k", "cache_v", "places"}
    if not chosen["SCALES"]:
        absent |= {"k_scale", "v_scale"}
    for switch, names in (
        ("HAS_SINKS", {"sinks"}), ("HAS_LSE", {"lse"}), ("MASK", {"custom_mask"}),
        ("LISTED", {"positions"}), ("DESCRIBED", {"k_tiles", "v_tiles"}),
        ("CACHE_DESCRIBED", {"cache_k_tiles", "cache_v_tiles"}),
    ):  # fmt: skip
        if not chosen[switch]:
            absent |= names
    signature, attrs, constexprs = {}, {}, {}
    for argument in fn.arg_names:
        if argument in chosen:
            constexprs[argument] = chosen[argument]
            continue
        if argument in absent:
            constexprs[argument] = None
            continue
        if argument in UNIT:
            constexprs[argument] = UNIT[argument]
            continue
        if argument.endswith("_tiles"):
            columns = chosen["BD"] if "k_" in argument else chosen["BDV"]
            signature[argument] = f"tensordesc<{kind}[{chosen['BN']},{columns}]>"
        elif argument in ROWS:
            signature[argument] = f"*{kind}"
        elif argument in ("cache_k", "cache_v"):
            signature[argument] = "*u8" if chosen["SCALES"] else f"*{kind}"
        elif argument in POINTERS:
            signature[argument] = POINTERS[argument]
        else:
            signature[argument] = "fp32" if argument in NUMBERS else "i32"
        whole = signature[argument] == "i32" and argument not in ODD
        if signature[argument].startswith("*") or whole:
            attrs[argument] = 16
    return StaticKernel(
        name=name,
        fn=fn,
        signature=signature,
        constexprs=constexprs,
        num_warps=config.warps,
        num_stages=config.stages,
        has_product=True,
        attrs=attrs,
        options={"maxnreg": config.registers} if config.registers else {},
    )


def kernels(target: Target) -> list[StaticKernel]:
    """Every kernel in every configuration, and every switch at the shape of most calls."""
    found = []
    for shape in SHAPES:
        for switch, changed in SWITCHES.items():
            if shape is not SHAPES[0] and switch not in ("", "win", "pages"):
                continue
            config = configuration(
                shape.D, shape.DV, shape.dtype,
                windowed=bool(changed.get("WINDOWED")), masked=bool(changed.get("MASK")),
                backend=target.backend,
            )  # fmt: skip
            chosen = constants(shape, config, target, **changed)
            name = f"extend-{shape.name}{'-' + switch if switch else ''}"
            found.append(compiled(extend_kernel, name, shape, config, target, chosen))
    return found
