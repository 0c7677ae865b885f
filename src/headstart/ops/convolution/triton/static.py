"""The configurations of the convolution's kernels, for `headstart static`."""

from __future__ import annotations

import torch
import triton

from headstart.ops.convolution.triton import convolve, norm
from headstart.ops.convolution.triton.convolve import NOWHERE, PLAIN, RING
from headstart.runtime.static import StaticKernel, Target

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FEATURES = {
    "plain": (NOWHERE, NOWHERE, NOWHERE),
    "pool": (PLAIN, PLAIN, NOWHERE),
    "cache": (RING, RING, NOWHERE),
    "cache-snapshots": (RING, RING, RING),
}
"""Where histories are read, where the new ones go, where snapshots go."""
CHANNELS, HEAD_SIZES = 8192, (64, 128, 256)


def kernels(target: Target) -> list[StaticKernel]:
    """Every dtype and feature at width 4 and 8,192 channels, widths 2 and 3 with all features;
    every head size of the gated norm."""
    listed = [_convolve(dtype, 4, features) for dtype in TYPES for features in FEATURES]
    listed += [_convolve(torch.bfloat16, width, "cache-snapshots") for width in (2, 3)]
    listed += [_norm(torch.bfloat16, size, True) for size in HEAD_SIZES]
    return listed + [_norm(dtype, 128, False) for dtype in TYPES]


def _convolve(dtype: torch.dtype, width: int, features: str) -> StaticKernel:
    old, new, kept = FEATURES[features]
    config, name = convolve.Config.rule(CHANNELS, dtype), TYPES[dtype]
    constexprs = {
        "WIDTH": width, "SILU": True, "OLD": old, "NEW": new, "KEPT": kept,
        "BC": config.channels, "UNROLL": config.unroll, "weight_tap": 1,
    }  # fmt: skip
    histories = {"old": old, "new": new, "kept": kept}
    for memory, kind in histories.items():
        constexprs[f"{memory}_channel"] = 1
        if kind == NOWHERE or (memory, kind) == ("new", RING):
            constexprs[memory] = None
    lists = {"read_slots": old, "present": old == PLAIN, "write_slots": new == PLAIN}
    lists |= {"first": new == RING, "end": new == RING, "kept_slots": kept}
    lists |= {"kept_first": kept == RING, "kept_end": kept == RING}
    constexprs |= {argument: None for argument, present in lists.items() if not present}
    signature = {}
    for argument in convolve.convolve_kernel.arg_names:
        if argument in constexprs:
            continue
        if argument in ("x", "weight", "bias", "y", *histories):
            signature[argument] = f"*{name}"
        elif argument == "present":
            signature[argument] = "*u8"
        elif argument in lists or argument == "table":
            signature[argument] = "*i32"
        else:
            signature[argument] = "i32"
    whole = ("channels", "_row", "_slot")
    attrs = {
        argument: 16
        for argument, kind in signature.items()
        if (kind == f"*{name}" or argument.endswith(whole)) and not argument.endswith("first_slot")
    }
    return StaticKernel(
        name=f"convolve-{features}-w{width}-{name}",
        fn=convolve.convolve_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=3,
        has_product=False,
        attrs=attrs | {"table": 16},
        options={"enable_fp_fusion": False},
    )


def _norm(dtype: torch.dtype, size: int, silu: bool) -> StaticKernel:
    config, name = norm.Config.rule(size), TYPES[dtype]
    pointers = ("x", "weight", "gate", "y")
    constexprs = {
        "SILU": silu, "UNIT": norm.BLOCK, "WIDE": False,
        "BR": config.rows, "BD": triton.next_power_of_2(size),
    }  # fmt: skip
    signature = {
        argument: f"*{name}" if argument in pointers else "i32"
        for argument in norm.norm_kernel.arg_names
        if argument not in constexprs
    }
    return StaticKernel(
        name=f"norm-D{size}-{'silu' if silu else 'sigmoid'}-{name}",
        fn=norm.norm_kernel,
        signature=signature | {"eps": "fp32"},
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=3,
        has_product=False,
        attrs=dict.fromkeys((*pointers, "size"), 16),
        options={"enable_fp_fusion": False},
    )
