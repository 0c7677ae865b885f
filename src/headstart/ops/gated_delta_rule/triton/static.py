"""The configurations of these kernels, for inspection without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headstart.ops.gated_delta_rule.passes.channel import (
    channel_configuration,
    prepare_channels_kernel,
)
from headstart.ops.gated_delta_rule.passes.config import (
    DECAY_HEADS,
    chained,
    joins,
    prepare_configuration,
)
from headstart.ops.gated_delta_rule.passes.decays import decays_kernel
from headstart.ops.gated_delta_rule.passes.join import JOIN_WARPS, join_kernel, joining
from headstart.ops.gated_delta_rule.passes.prepare import prepare_kernel
from headstart.ops.gated_delta_rule.triton.recurrent import COLUMNS, WARPS, recurrent_kernel
from headstart.ops.gated_delta_rule.triton.scan import scan_configuration, scan_kernel
from headstart.runtime.launcher import padded, precision, reads_descriptors
from headstart.runtime.static import StaticKernel, Target

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Size = tuple[int, int, torch.dtype]
SIZES: tuple[Size, ...] = (
    (128, 128, torch.bfloat16),
    (128, 128, torch.float16),
    (128, 128, torch.float32),
    (64, 64, torch.bfloat16),
    (256, 256, torch.bfloat16),
)
FLOATS = {
    "g", "beta", "a_log", "dt_bias", "tail_decay", "tail_beta", "from_start", "to_end",
    "whole_decay", "sums",
    "log_decays", "strengths", "carry", "old_state", "new_state", "snapshots", "scale",
    "lower_bound",
}  # fmt: skip
INTEGERS = {
    "sequences", "items", "pieces", "slots", "position", "base", "read_slots", "write_slots",
    "snapshot_slots", "snapshot_position", "clean", "snapshot_end", "tail_end",
}  # fmt: skip
ROWS = {
    "q", "k", "v", "o", "T", "P", "q_tiles", "k_tiles", "k_starts", "v_tiles",
    "tail_k", "tail_v", "keys",
}  # fmt: skip
ODD = {"first_item", "first_piece", "together", "tail_rows", "first", "factors", "maps"}


def _signature(
    fn: Any, kind: str, constexprs: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, int]]:
    signature, attrs = {}, {}
    for name in fn.arg_names:
        if name in constexprs or (name.isupper() and name not in ROWS):
            continue
        tiles = constexprs.get("TILES")
        described = constexprs.get("DESCRIBED", True)
        if (fn in (scan_kernel, prepare_kernel) and name in ("T", "P") and described) or (
            fn is scan_kernel
            and described
            and (
                name in ("q", "v_tiles")
                or (name == "k" and tiles)
                or (name == "k_starts" and constexprs["PER_CHANNEL"])
            )
        ):
            columns = {"T": 64, "P": 64, "v_tiles": constexprs["BV"]}.get(name, constexprs["BK"])
            block = f"64,1,{columns}" if name in ("q", "v_tiles") and not tiles else f"64,{columns}"
            signature[name] = f"tensordesc<{kind}[{block}]>"
        elif name in ROWS:
            signature[name] = f"*{kind}"
        elif name in ("scale", "lower_bound"):
            signature[name] = "fp32"
        elif name in FLOATS:
            signature[name] = "*fp32"
        elif name in INTEGERS:
            signature[name] = "*i32"
        elif name == "present":
            signature[name] = "*i1"
        else:
            signature[name] = "i32"
            if name not in ODD and not name.endswith(("position", "position_slot")):
                attrs[name] = 16
        if signature[name].startswith("*"):
            attrs[name] = 16
    return signature, attrs


def kernels(target: Target, sizes: Sequence[Size] = SIZES) -> list[StaticKernel]:
    """Every kernel in every configuration, plain and with a cache, for these K, V and dtypes."""
    found = []
    described = reads_descriptors(target)
    for K, V, dtype in sizes:
        config = scan_configuration(K, dtype, target)
        first = prepare_configuration(dtype, target)
        BK = padded(K)
        for cached in (False, True):
            shared: Mapping[str, Any] = {
                "H": 16, "HV": 32, "K": K, "V": V, "BK": BK, "CACHED": cached, "TILES": cached,
                "PER_CHANNEL": False, "CHAINED": chained(target),
                "PRECISION": precision(dtype, target.backend),
            }  # fmt: skip
            blocks = channel_configuration(dtype, target.backend, target.warp_size)
            gates = {
                "BV": padded(V), "GATE": "raw" if cached else "log",
                "BETA": "logit" if cached else "value", "HAS_G": True, "HAS_BETA": True,
                "HAS_BIAS": cached, "NORMALISE": cached,
            }  # fmt: skip
            pieces = {"BC": min(first.BC, BK, padded(V)), "DESCRIBED": described}
            channels = {
                "BC": blocks.BC, "GATE": "bounded" if cached else "log", "g_channel": 1,
                "bias_channel": 1,
            }  # fmt: skip
            strides = {
                f"{part}_{axis}": stride
                for part in ("old", "new", "snap")
                for axis, stride in (("k", V), ("v", 1))
            }
            scan = strides | {
                "BV": config.BV, "WIDTH": padded(V), "DESCRIBED": described,
                "HAS_STATE": True, "HAS_READ": cached, "HAS_PRESENT": False,
                "HAS_NEW": not cached, "HAS_WRITE": cached, "HAS_SNAPSHOTS": cached,
                "HAS_SNAPSHOT_SLOTS": cached, "SNAPSHOTS_CACHED": cached, "STAGES": config.stages,
                "MAPS": False,
            }  # fmt: skip
            pool = {"HAS_READ": cached, "HAS_WRITE": cached, "HAS_NEW": True}
            for fn, own, warps, stages in (
                (decays_kernel, gates | {"BH": DECAY_HEADS}, DECAY_HEADS // 2, 3),
                (prepare_kernel, gates | pieces, first.warps, 3),
                (prepare_channels_kernel, gates | channels, blocks.warps, 3),
                (recurrent_kernel, scan | gates | pool | {"BV": COLUMNS}, WARPS, 3),
                (scan_kernel, scan, config.warps, 3),
                (scan_kernel, scan | {"PER_CHANNEL": True, "TILES": True}, config.warps, 3),
                *((
                    (scan_kernel, scan | {"MAPS": True}, config.warps, 3),
                    (join_kernel, joining(K, V, dtype, target), JOIN_WARPS, 3),
                ) if joins(K, target) and not cached else ()),
            ):  # fmt: skip
                constexprs = {
                    name: value for name, value in {**shared, **own}.items() if name in fn.arg_names
                }
                signature, attrs = _signature(fn, NAMES[dtype], constexprs)
                options: Mapping[str, Any] = {"enable_fp_fusion": False}
                if constexprs.get("CHAINED"):
                    options |= {"launch_pdl": True}
                name = fn.__name__.removesuffix("_kernel")
                name += "_channels" if constexprs.get("PER_CHANNEL") else ""
                name += "_maps" if constexprs.get("MAPS") else ""
                found.append(
                    StaticKernel(
                        name=f"{name}-K{K}-V{V}-{NAMES[dtype]}{'-cache' if cached else ''}",
                        fn=fn,
                        signature=signature,
                        constexprs=constexprs,
                        num_warps=warps,
                        num_stages=stages,
                        # RDNA multiplies no float32 matrices.
                        has_product=fn not in (decays_kernel, recurrent_kernel)
                        and not (dtype == torch.float32 and target.name == "hip:gfx1151"),
                        attrs=attrs,
                        options=options,
                    )
                )
    return found
