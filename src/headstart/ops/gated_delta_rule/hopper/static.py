"""The configurations of the Hopper kernels, for inspection without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from headstart.ops.gated_delta_rule.hopper.call import (
    CHANNEL_FORM,
    CHANNEL_RINGS,
    COLUMNS,
    FORMS,
    PREPARE_REGISTERS,
    REACHES,
)
from headstart.ops.gated_delta_rule.hopper.channel_prepare import prepare_channels_kernel
from headstart.ops.gated_delta_rule.hopper.channel_scan import scan_channels_kernel
from headstart.ops.gated_delta_rule.hopper.decode import decode_kernel
from headstart.ops.gated_delta_rule.hopper.prepare import prepare_kernel
from headstart.ops.gated_delta_rule.hopper.scan import scan_kernel
from headstart.ops.gated_delta_rule.hopper.short import short_kernel
from headstart.ops.gated_delta_rule.hopper.short_call import (
    CACHED_REGISTERS,
    REGISTERS,
    WHOLE,
)
from headstart.ops.gated_delta_rule.hopper.tails import keep_keys_kernel
from headstart.runtime.static import StaticKernel, Target

PREPARE = {"q_rows": 128, "k_rows": 128, "T": 64, "P": 64}
SCAN = PREPARE | {"v_rows": 64, "o_rows": 64}
PREPARE_CHANNELS = {"T": 64, "P": 64}
SCAN_CHANNELS = {"q_starts": 128, "k_starts": 128, "k_ends": 128, "v_rows": 64, "o_rows": 64,
                 "T": 64, "P": 64}  # fmt: skip
"""Arguments that are descriptors -> columns of their blocks."""
ROWS = {
    "q",
    "k",
    "v",
    "o",
    "T_rows",
    "P_rows",
    "q_tiles",
    "k_tiles",
    "k_starts",
    "keys",
    "tail_k",
    "tail_v",
}
FLOATS = {"g", "beta", "a_log", "dt_bias", "k_norms", "q_reads", "from_start", "to_end", "sums",
          "log_decays", "strengths", "whole_decay", "carry", "old_state", "new_state", "snapshots",
          "tail_decay", "tail_beta"}  # fmt: skip
INTEGERS = {"clean", "base", "sequences", "items", "pieces", "slots", "read_slots", "write_slots",
            "snapshot_slots", "snapshot_position", "snapshot_end", "position",
            "tail_end"}  # fmt: skip
SNAPSHOT = [1, 128, 64]
"""A program's part of one."""
SNAPSHOTS = ("HAS_SNAPSHOTS", "HAS_SNAPSHOT_SLOTS", "SNAPSHOTS_CACHED", "snap_k", "snap_v")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GLUON = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
ODD = {"first_item", "together", "first_piece", "items_there", "pieces_there", "tail_rows"}


def kernels(target: Target) -> list[StaticKernel]:
    """All kernels in both dtypes, plain and with a cache; on Hopper alone."""
    if target.name != "cuda:90":
        return []
    found = []
    sizes = {"H": 16, "HV": 32, "K": 128, "V": 128}
    for (kind, dtype), cached in itertools.product(
        (("bf16", gl.bfloat16), ("fp16", gl.float16)), (False, True)
    ):
        suffix = f"{kind}{'-cache' if cached else ''}"
        common: dict[str, Any] = {**sizes, "CACHED": cached}
        own = {"H": 16, "HV": 32, "K": 128, "CACHED": cached, "NORMALISE": cached}
        name = f"prepare_hopper-K128-V128-{suffix}"
        options = {"maxnreg": PREPARE_REGISTERS, "enable_fp_fusion": False, "launch_pdl": True}
        found.append(_kernel(name, prepare_kernel, PREPARE, own, kind, dtype, options))
        if cached:
            own = {"K": 128, "NORMALISE": True}
            options = {"enable_fp_fusion": False, "launch_pdl": True}
            name = f"keep_keys_hopper-K128-{kind}"
            keys = _kernel(name, keep_keys_kernel, {}, own, kind, dtype, options)
            found.append(replace(keys, has_product=False))
        states = {
            "HAS_STATE": True, "HAS_READ": cached, "HAS_PRESENT": False,
            "HAS_NEW": not cached, "HAS_WRITE": cached, "HAS_SNAPSHOTS": cached,
            "HAS_SNAPSHOT_SLOTS": cached, "SNAPSHOTS_CACHED": cached,
            "old_k": 128, "old_v": 1, "new_k": 128, "new_v": 1, "snap_k": 128, "snap_v": 1,
        }  # fmt: skip
        gates = {
            "GATE": "raw" if cached else "log", "BETA": "logit" if cached else "value",
            "HAS_G": True, "HAS_BETA": True, "HAS_BIAS": cached, "NORMALISE": cached,
        }  # fmt: skip
        for halves, several in () if cached else ((2, False), (1, False), (1, True)):
            own = sizes | states | gates | {"SEVERAL": several, "HALVES": halves}
            name = f"short_hopper-K128-V128-{'chunks' if several else halves}-{suffix}"
            options = {"maxnreg": REGISTERS, "enable_fp_fusion": False}
            found.append(_kernel(name, short_kernel, {}, own, kind, dtype, options))
        for rows, registers in CACHED_REGISTERS.items() if cached else ():
            kept = {switch: states[switch] for switch in SNAPSHOTS}
            own = sizes | gates | kept | {"ROWS": rows, "REGISTERS": registers}
            name = f"decode_hopper-K128-V128-{rows}-{suffix}"
            options = {"maxnreg": registers, "enable_fp_fusion": False}
            found.append(_kernel(name, decode_kernel, {}, own, kind, dtype, options))
        channels, registers = CHANNEL_FORM
        shift, reach = REACHES[DTYPES[kind]]
        own = gates | {
            "H": 32, "HV": 32, "K": 128, "CACHED": cached, "g_channel": 1, "bias_channel": 1,
            "BC": channels, "SHIFT": shift, "REACH": reach,
        }  # fmt: skip
        name = f"prepare_channels_hopper-K128-{suffix}"
        options = {"maxnreg": registers, "enable_fp_fusion": False}
        found.append(
            _kernel(name, prepare_channels_kernel, PREPARE_CHANNELS, own, kind, dtype, options)
        )
        for maps in (False,) if cached else (False, True):
            stages, ends = CHANNEL_RINGS
            own = common | states | {
                "H": 32, "BV": COLUMNS, "STAGES": stages, "ENDS": ends, "MAPS": maps,
            }  # fmt: skip
            name = f"scan_channels_hopper-K128-V128-{'maps-' if maps else ''}{suffix}"
            options = {"maxnreg": FORMS["deep"].registers, "enable_fp_fusion": False}
            found.append(
                _kernel(name, scan_channels_kernel, SCAN_CHANNELS, own, kind, dtype, options)
            )
        plain = [(form, 0, False) for form in FORMS] + [("deep", 68, False)]
        only_plain = [] if cached else [("deep", 0, True), ("wide", 0, True)]
        for form, preparers, maps in plain + only_plain:
            stages, groups, registers = FORMS[form]
            own = common | states | {
                "BV": COLUMNS, "STAGES": stages, "GROUPS": groups,
                "PREPARERS": preparers, "MAPS": maps,
                "BULK": cached and groups == 1,
                "NORMALISE": cached,
            }  # fmt: skip
            kind_of = "-beside" if preparers else "-maps" if maps else ""
            name = f"scan_hopper-K128-V128-{form}{kind_of}-{suffix}"
            options = {
                "maxnreg": registers, "enable_fp_fusion": False, "launch_pdl": not preparers,
            }  # fmt: skip
            found.append(_kernel(name, scan_kernel, SCAN, own, kind, dtype, options))
    return found


def _kernel(
    name: str,
    fn: Any,
    described: dict[str, int],
    constexprs: dict[str, Any],
    kind: str,
    dtype: Any,
    options: dict[str, Any],
) -> StaticKernel:
    signature, attrs = {}, {}
    for argument in fn.arg_names:
        if argument in constexprs:
            continue
        if argument in described:
            block = [64, described[argument]]
            layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
            signature[argument] = f"tensordesc<{kind}{block},{layout!r}>"
        elif argument == "snapshot_tiles":
            block, of = (SNAPSHOT, "fp32") if constexprs["BULK"] else ([64, 64], kind)
            layout = gl.NVMMASharedLayout.get_default_for(block, GLUON[of])
            signature[argument] = f"tensordesc<{of}{block},{layout!r}>"
        elif argument == "states":
            layout = gl.NVMMASharedLayout.get_default_for(WHOLE, gl.float32)
            signature[argument] = f"tensordesc<fp32{WHOLE},{layout!r}>"
        elif argument in ROWS:
            signature[argument] = f"*{kind}"
        elif argument in FLOATS:
            signature[argument] = "*fp32"
        elif argument in INTEGERS:
            signature[argument] = "*i32"
        elif argument == "present":
            signature[argument] = "*i1"
        elif argument in ("scale", "lower_bound"):
            signature[argument] = "fp32"
        else:
            signature[argument] = "i32"
            if argument not in ODD and "position" not in argument:
                attrs[argument] = 16
        if signature[argument].startswith("*"):
            attrs[argument] = 16
    return StaticKernel(
        name=name,
        fn=fn,
        signature=signature,
        constexprs=constexprs,
        num_warps=4,
        num_stages=3,
        has_product=True,
        targets=("cuda:90",),
        attrs=attrs,
        options=options,
    )
