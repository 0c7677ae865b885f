"""The configurations of these kernels, for inspection without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headstart.ops.extend_attention.triton.config import (
    Columns,
    Config,
    columns,
    configuration,
    converts_e4m3,
    kind_of,
    order,
    packing,
)
from headstart.ops.extend_attention.triton.extend import extend_kernel
from headstart.ops.extend_attention.triton.merge import ELEMENTS, merge_kernel
from headstart.ops.extend_attention.triton.pieces import join_kernel
from headstart.ops.extend_attention.triton.unified import unified_kernel
from headstart.ops.extend_attention.triton.write import ROWS as WRITTEN
from headstart.ops.extend_attention.triton.write import write_kernel
from headstart.runtime.launcher import padded, precision, reads_descriptors
from headstart.runtime.static import StaticKernel, Target
from headstart.runtime.tables import ratio_class

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Shape:
    """Head counts and sizes that kernels are compiled for."""

    HQ: int
    HK: int
    D: int
    DV: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """As part of a kernel's name."""
        heads = "-mqa" if self.HK == 1 else ""
        sizes = f"D{self.D}" if self.D == self.DV else f"D{self.D}-DV{self.DV}"
        return f"{sizes}{heads}-{NAMES[self.dtype]}"


SHAPES = (
    Shape(64, 8, 64, 64),
    Shape(32, 8, 128, 128),
    Shape(16, 2, 256, 256),
    Shape(16, 16, 192, 128),
    Shape(16, 4, 512, 512),
    Shape(32, 1, 128, 128),
    Shape(64, 8, 64, 64, torch.float16),
    Shape(32, 8, 128, 128, torch.float32),
)

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "win": {"WINDOWED": True, "PIECE": 0},
    "longwin": {"WINDOWED": True},
    "sinks": {"HAS_SINKS": True},
    "mask": {"MASK": "all"},
    "softcap": {"FORM": "tanh"},
    "pages": {"FOUND": "pages", "PAGE": 16},
    "slots": {"FOUND": "list"},
    "decode": {"FOUND": "pages", "PAGE": 16},
    "fp8": {"FOUND": "pages", "PAGE": 16, "NEW": "cached", "SCALES": True},
}
"""Switch -> constants that it changes. "longwin": a long window. "decode": few rows on pages, which
may change a tile."""
OF_ALL_SHAPES = ("", "win", "longwin", "pages", "slots", "decode")

POINTERS = {
    "sinks": "*fp32", "lse": "*fp32", "part_acc": "*fp32", "part_m": "*fp32", "part_l": "*fp32",
    "parked": "*fp32", "drawn": "*i32",
    "sequences": "*i64", "tiles": "*i32", "joins": "*i32", "places": "*i32", "positions": "*i32",
    "custom_mask": "*u8", "k_scale": "*fp32", "v_scale": "*fp32", "slots": "*i64",
}  # fmt: skip
NUMBERS = {"inner", "factor", "k_number", "v_number", "number"}
UNALIGNED = {
    "work",
    "total",
    "listed",
    "page_rows",
    "window",
    "heads",
    "blocks",
    "tokens",
    "lse_token",
    "k_scale_head",
    "v_scale_head",
}
"""Integers that are not known to be multiples of 16."""
UNIT = {"cache_k_channel", "cache_v_channel", "o_channel", "lse_head", "row_channel", "channel"}
"""Strides that are 1 in plain calls, which makes them constants."""


def constants(
    shape: Shape, config: Config, target: Target, reproducible: bool = False, **switches: Any
) -> dict[str, Any]:
    """The constants of a plain call of this shape, with some of them changed."""
    heads, tokens = packing(shape.HQ, shape.HK, config.BM)
    group = shape.HQ // shape.HK
    read = columns(shape.D, shape.dtype, target.name, reproducible=reproducible)
    if switches.get("SCALES", False):
        read = Columns(padded(shape.D))
    BDV = padded(shape.DV)
    packed = switches.get("NEW", "packed") == "packed"
    described = packed and reads_descriptors(target) and (read.whole, BDV) == (shape.D, shape.DV)
    kind = shape.D, shape.DV, shape.dtype
    place: dict[str, Any] = {"windowed": switches.get("PIECE") == 0, "target": target.name}
    return {
        "HQ": shape.HQ, "HEADS": shape.HK * -(-group // heads), "GROUP": group, "PACK": heads,
        "D": shape.D, "DV": shape.DV, "BD": read.size, "BDV": BDV,
        "PARTS": read.parts, "AGAIN": read.again,
        "BM": config.BM, "BN": config.BN, "BT": tokens, "STAGES": config.stages,
        "PIECE": config.piece, "BH": 1024 // BDV,
        "FOUND": "", "PAGE": 1, "NEW": "packed", "DESCRIBED": described,
        "CACHE_DESCRIBED": False, "CAUSAL": True, "WINDOWED": False, "MASK": "",
        "LISTED": False, "SCALES": False, "WIDE": False, "HAS_SINKS": False, "HAS_LSE": False,
        "FORM": "plain", "PRECISION": precision(shape.dtype, target.backend),
        "ORDER": order(*kind, **place, reproducible=reproducible),
    } | switches  # fmt: skip


def absent(chosen: Mapping[str, Any]) -> set[str]:
    """Pointers that a call with these constants does not have."""
    found = set()
    for there, names in (
        (chosen["FOUND"], ("cache_k", "cache_v", "places")),
        (chosen["NEW"] == "packed", ("k", "v")),
        (chosen["NEW"] == "packed" and chosen["DESCRIBED"], ("k_tiles", "v_tiles")),
        (chosen["CACHE_DESCRIBED"], ("cache_k_tiles", "cache_v_tiles")),
        (chosen["SCALES"], ("k_scale", "v_scale")),
        (chosen["HAS_SINKS"], ("sinks",)),
        (chosen["HAS_LSE"], ("lse",)),
        (chosen["MASK"], ("custom_mask",)),
        (chosen["LISTED"], ("positions",)),
    ):
        if not there:
            found.update(names)
    return found


def compiled(
    fn: Any,
    name: str,
    shape: Shape,
    config: Config,
    target: Target,
    chosen: Mapping[str, Any],
    has_product: bool = False,
) -> StaticKernel:
    """One kernel with these constants, for inspection."""
    kind, missing = NAMES[shape.dtype], absent(chosen)
    cached = kind
    if chosen["SCALES"]:
        cached = "fp8e4nv" if fn is not write_kernel and converts_e4m3(target.name) else "u8"
    signature, attrs, constexprs = {}, {}, {}
    for argument in fn.arg_names:
        if argument in chosen:
            constexprs[argument] = chosen[argument]
        elif argument in missing or argument in UNIT:
            constexprs[argument] = 1 if argument in UNIT else None
        elif argument.endswith("_tiles"):
            columns = chosen["BD"] if "k_" in argument else chosen["BDV"]
            keys = chosen["BN"]
            if argument.startswith("cache") and chosen["FOUND"] == "pages":
                keys = min(keys, chosen["PAGE"])
            signature[argument] = f"tensordesc<{kind}[{keys},{columns}]>"
        elif argument in POINTERS:
            signature[argument] = POINTERS[argument]
        elif argument in ("q", "k", "v", "o", "rows"):
            signature[argument] = f"*{kind}"
        elif argument in ("cache_k", "cache_v", "store"):
            signature[argument] = f"*{cached}"
        else:
            signature[argument] = "fp32" if argument in NUMBERS else "i32"
        whole = signature.get(argument) == "i32" and argument not in UNALIGNED
        if signature.get(argument, "").startswith("*") or whole:
            attrs[argument] = 16
    options: dict[str, Any] = {"enable_fp_fusion": False}
    if config.registers:
        options["maxnreg"] = config.registers
    return StaticKernel(
        name=name,
        fn=fn,
        signature=signature,
        constexprs=constexprs,
        num_warps=config.warps,
        num_stages=config.stages,
        has_product=has_product,
        attrs=attrs,
        options=options,
    )


def kernels(target: Target) -> list[StaticKernel]:
    """Every kernel in every configuration, and every switch at the shape of most calls."""
    found = list(_merging(target))
    for shape in SHAPES:
        # There are no matrix instructions for float32 on AMD's RDNA.
        has_product = shape.dtype != torch.float32 or kind_of(target.name) != "rdna"
        for switch, changed in SWITCHES.items():
            if shape is not SHAPES[0] and switch not in OF_ALL_SHAPES:
                continue
            for fn in (extend_kernel, unified_kernel):
                reproducible = fn is unified_kernel
                config = configuration(
                    shape.D,
                    shape.DV,
                    shape.dtype,
                    windowed=switch == "win",
                    ratio=ratio_class(shape.HQ, shape.HK),
                    scattered="FOUND" in changed,
                    listed=switch == "slots",
                    few=switch == "decode",
                    masked="MASK" in changed,
                    reproducible=reproducible,
                    target=target.name,
                )
                name = f"{_plain_name(fn)}-{shape.name}{'-' + switch if switch else ''}"
                chosen = constants(shape, config, target, reproducible, **changed)
                found.append(compiled(fn, name, shape, config, target, chosen, has_product))
    return found


def _plain_name(fn: Any) -> str:
    return fn.__name__.removesuffix("_kernel")


def _merging(target: Target) -> Iterator[StaticKernel]:
    """The kernels without a product: joining pieces and parts, storing keys."""
    for shape in SHAPES[:2]:
        chosen = constants(shape, Config(64, 64, 1, 4), target, HAS_SINKS=True, HAS_LSE=True)
        yield compiled(join_kernel, f"join-{shape.name}", shape, Config(0, 0, 1, 4), target, chosen)
        for scales in (False, True):
            switches = {
                "SIZE": shape.D, "BD": shape.D, "BT": WRITTEN, "PAGE": 1, "FP8": scales,
                "SCALES": scales, "scale": None,
            }  # fmt: skip
            name = f"write-{shape.name}{'-fp8' if scales else ''}"
            yield compiled(write_kernel, name, shape, Config(0, 0, 1, 4), target, chosen | switches)
        parts = 2
        yield StaticKernel(
            name=f"merge-D{shape.DV}-fp32",
            fn=merge_kernel,
            signature={
                "parts_o": ("*fp32",) * parts, "parts_lse": ("*fp32",) * parts,
                "o_strides": (("i32", "i32", "i32"),) * parts,
                "lse_strides": (("i32", "i32"),) * parts,
                "sinks": "*fp32", "o": "*fp32", "lse": "*fp32", "total": "i32", "heads": "i32",
                "o_token": "i32", "o_head": "i32", "lse_token": "i32",
            },
            constexprs={
                "DV": shape.DV, "BDV": shape.DV, "BR": ELEMENTS // shape.DV, "PARTS": parts,
                "o_channel": 1, "lse_head": 1,
            },
            num_warps=4,
            num_stages=1,
            has_product=False,
            attrs={"sinks": 16, "o": 16, "lse": 16},
        )  # fmt: skip
