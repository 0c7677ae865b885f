"""The configurations of the Hopper scan, for inspection without a GPU."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from headstart.ops.gated_delta_rule.hopper.call import COLUMNS, REGISTERS, STAGES
from headstart.ops.gated_delta_rule.hopper.scan import scan_kernel
from headstart.runtime.static import StaticKernel, Target

DESCRIBED = {"q": 128, "k": 128, "v_rows": 64, "T": 64, "P": 64, "o_rows": 64, "k_edges": 128,
             "v_edges": 64}  # fmt: skip
ROWS = {"v", "o", "k_tiles", "tail_k", "tail_v"}
FLOATS = {"from_start", "to_end", "log_decays", "strengths", "carry", "old_state", "new_state",
          "snapshots", "tail_decay", "tail_beta"}  # fmt: skip
INTEGERS = {"clean", "base", "sequences", "items", "read_slots", "write_slots", "snapshot_slots",
            "snapshot_position", "snapshot_end", "position", "tail_end"}  # fmt: skip
ODD = {"first_item", "last_item", "parity", "tail_rows"}


def kernels(target: Target) -> list[StaticKernel]:
    """The scan in both dtypes, plain and with a cache; on Hopper alone."""
    if target.name != "cuda:90":
        return []
    found = []
    for name, dtype in (("bf16", gl.bfloat16), ("fp16", gl.float16)):
        for cached in (False, True):
            constexprs: dict[str, Any] = {
                "H": 16, "HV": 32, "K": 128, "V": 128, "BV": COLUMNS, "STAGES": STAGES,
                "HAS_STATE": True, "HAS_READ": cached, "HAS_PRESENT": False,
                "HAS_NEW": not cached, "HAS_WRITE": cached, "HAS_SNAPSHOTS": cached,
                "HAS_SNAPSHOT_SLOTS": cached, "SNAPSHOTS_CACHED": cached, "CACHED": cached,
                "TILES": cached, "old_k": 128, "old_v": 1, "new_k": 128, "new_v": 1,
                "snap_k": 128, "snap_v": 1,
            }  # fmt: skip
            signature, attrs = {}, {}
            for argument in scan_kernel.arg_names:
                if argument in constexprs:
                    continue
                if argument in DESCRIBED:
                    block = [64, DESCRIBED[argument]]
                    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
                    signature[argument] = f"tensordesc<{name}{block},{layout!r}>"
                elif argument in ROWS:
                    signature[argument] = f"*{name}"
                elif argument in FLOATS:
                    signature[argument] = "*fp32"
                elif argument in INTEGERS:
                    signature[argument] = "*i32"
                elif argument == "present":
                    signature[argument] = "*i1"
                elif argument == "scale":
                    signature[argument] = "fp32"
                else:
                    signature[argument] = "i32"
                    if argument not in ODD and "position" not in argument:
                        attrs[argument] = 16
                if signature[argument].startswith("*"):
                    attrs[argument] = 16
            found.append(
                StaticKernel(
                    name=f"scan_hopper-K128-V128-{name}{'-cache' if cached else ''}",
                    fn=scan_kernel,
                    signature=signature,
                    constexprs=constexprs,
                    num_warps=4,
                    num_stages=3,
                    has_product=True,
                    targets=("cuda:90",),
                    attrs=attrs,
                    options={"maxnreg": REGISTERS},
                )
            )
    return found
