"""The Hopper kernels, after the decays that both GPU implementations share.

Each is imported where it is launched: Triton reads the source of every function with its module,
which a first call that launches another would wait for.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.hopper import short_call
from headstart.ops.gated_delta_rule.passes.config import heads_together
from headstart.ops.gated_delta_rule.passes.launch import (
    Given,
    launch,
    state_arguments,
    step_arguments,
)
from headstart.ops.gated_delta_rule.passes.scratch import Plan, aligned_rows
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDelta, GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import sequence_steps
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import Implementation
from headstart.runtime.launcher import current, processors, start, target_of

SIZES = (128, 128)
"""The one (K, V) that the scan is written for."""
COLUMNS = 64
"""Columns of V that one program holds: rows of the smallest product of a warp group."""


class Form(NamedTuple):
    """How a program of the scan is built; every form gives the same bits.

    stages: chunks in shared memory; groups: blocks of V, each a group of four warps; registers:
    that a thread starts with. Warps that only copy, or have nothing to do, give up theirs.
    """

    stages: int
    groups: int
    registers: int


FORMS = {"deep": Form(3, 1, 168), "wide": Form(3, 2, 168)}
"""deep: fastest for one sequence; wide: two groups share what they read."""
PREPARE_REGISTERS = 128
"""Three programs of the pass before on a multiprocessor."""
CHANNEL_FORM = (64, 255)
"""Of `prepare` for a decay per channel: channels at a time, registers. On an H200 three or four
programs on a multiprocessor, with fewer of either, were slower than two."""
CHANNEL_RINGS = (3, 2)
"""Of the scan after it: chunks in shared memory, and their keys decayed to the chunk's end."""
REACHES = {torch.bfloat16: (56.0, 160.0), torch.float16: (0.0, 0.0)}
"""Powers of two by which decays within 16 rows are shifted, and may fall, before products are
formed of smaller blocks. Float16 holds too few for any."""
STEP, WAITING_STEP, TILE, START = 1.05, 1.24, 1.54, 7.3
"""Microseconds on one H200 (`headstart bench stages` shows kernels): a chunk in the scan; in one
that waits for tiles made meanwhile; preparing a tile, of one processor; until the first tile is
there and the last chunk through. 16 to 293 chunks of 32 and of 48 heads: the faster is chosen."""
CROWDED_STEP, WIDE_STEP = 1.6, 2.46
"""A chunk where programs are on all processors, of a block of V and of two: one round of programs
of two beats two rounds of one (133 us, 146), and three beat five (631, 678): those idle more."""
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
STATE_DTYPES = DTYPES | {torch.float32: gl.float32}


def declines(call: GatedDeltaCall) -> str | None:
    """Why the kernel cannot run a call, or None."""
    if call.device.type not in ("cuda", "meta"):
        return f"it runs on NVIDIA Hopper alone, not on {call.device.type}."
    if target_of(call.device).name != "cuda:90":
        return "it runs on NVIDIA Hopper (compute capability 9.0) alone."
    if call.q.dtype not in DTYPES:
        return "it takes bfloat16 and float16."
    if call.sizes[2:] != SIZES:
        return f"K and V must be {SIZES}, got {call.sizes[2:]}."
    states = (call.state, call.snapshots)
    if any(isinstance(s, torch.Tensor) and s.dtype == torch.float64 for s in states):
        return "it keeps states in float32; float64 is for the reference."
    return None


def workspace_bytes(call: GatedDeltaCall) -> int:
    """Scratch of `run`, exactly."""
    return 0 if _short(call) else _plan(call).bytes


def _short(call: GatedDeltaCall) -> bool:
    return not call.per_channel and short_call.takes(call)


def _plan(call: GatedDeltaCall) -> Plan:
    _, HV, _, V = call.sizes
    return Plan.of(call, gathers=True, programs=V // COLUMNS * HV)


def run(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call."""
    if checking():
        sequence_steps(call)  # raises where a start is not legal in its slot
    # Rows that cannot be copied in bulk are copied once more rather than declined: who serves a
    # cache, and so its bits, must not depend on strides.
    call = replace(call, q=_aligned(call.q), k=_aligned(call.k), v=_aligned(call.v))
    stores = Stores.allocate(call, torch.float32)
    if _short(call):
        short_call.launch(call, stores)
        return stores.result
    plan = _plan(call)
    if plan.facts.sequences:
        o = stores.o if aligned_rows(stores.o) else _packed(stores.o)
        launch(call, replace(stores, o=o), plan, _scan, _prepare)
        if isinstance(call.state, CacheSlots) and not call.per_channel:
            _keep_keys(call, stores, plan)
        if o is not stores.o:
            tokens = call.schedule.T
            stores.o[:tokens].copy_(o[:tokens])
    return stores.result


def _keep_keys(call: GatedDeltaCall, stores: Stores, plan: Plan) -> None:
    from headstart.ops.gated_delta_rule.hopper.tails import keep_keys_kernel

    given = step_arguments(call, stores.o) | state_arguments(call, stores)
    grid = (given["H"], plan.facts.sequences)
    with current(call.device):
        own = given | {"sequences": plan.table.sequences}
        start(keep_keys_kernel, grid, own, num_warps=4, enable_fp_fusion=False, launch_pdl=True)


def _packed(o: torch.Tensor) -> torch.Tensor:
    return torch.empty(o.shape, dtype=o.dtype, device=o.device)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if aligned_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _preparers(given: Given) -> int:
    """Processors that prepare chunks beside a scan that leaves them free; 0: a launch before it."""
    HV, chunks = given["HV"], given["items_there"]
    there = processors(given["q"].device)
    left = there - given["V"] // COLUMNS * HV * given["N"]
    # Chunks are prepared sequence after sequence: more than one would wait for each other.
    if given["N"] > 1 or given["SEGMENTS"] > 1 or left <= 0:
        return 0
    meanwhile = START + chunks * max(WAITING_STEP, TILE * HV / left)
    return left if meanwhile < chunks * (STEP + TILE * HV / there) else 0


def _rows(given: Given) -> Given:
    """Descriptors of what both kernels read, and what is fixed for both."""
    T = given["T"]
    # A call without tokens may still fold a tail: then nothing is read from q, k and v.
    q, k = (given[name] if given["q"].shape[0] else T for name in "qk")
    return {
        "q_rows": _described(q, given["K"]), "k_rows": _described(k, given["K"]),
        "T": _described(T, CHUNK), "P": _described(given["P"], CHUNK),
        "T_rows": T, "P_rows": given["P"],
    }  # fmt: skip


def _together(given: Given, items: int) -> int:
    """Value heads of a key head that share what is read and multiplied of its rows."""
    return heads_together(given["H"], given["HV"], items, processors(given["q"].device))


def _prepare(given: Given, items: int) -> None:
    from headstart.ops.gated_delta_rule.hopper.prepare import prepare_kernel

    if given["PER_CHANNEL"]:
        _prepare_channels(given, items)
        return
    if _preparers(given):
        return
    HV, together = given["HV"], _together(given, items)
    start(
        prepare_kernel,
        (HV // together, items),
        given | _rows(given) | {"together": together},
        num_warps=4,
        maxnreg=PREPARE_REGISTERS,
        enable_fp_fusion=False,
        launch_pdl=True,
    )


def _scan(given: Given, pieces: int) -> None:
    from headstart.ops.gated_delta_rule.hopper.scan import scan_kernel

    if given["PER_CHANNEL"]:
        _scan_channels(given, pieces)
        return
    V, HV = given["V"], given["HV"]
    v, o = (given[name] if given["q"].shape[0] else given["T"] for name in "vo")
    own = _rows(given) | {"v_rows": _described(v, COLUMNS), "o_rows": _described(o, COLUMNS)}
    preparers = _preparers(given)
    blocks, there = V // COLUMNS * HV, processors(given["q"].device)
    # Most rows of the table are none where sequences are spread over spans.
    programs = blocks * given["pieces_about"]
    form = FORMS["deep"]
    if -(-programs // there) * CROWDED_STEP > -(-programs // (2 * there)) * WIDE_STEP:
        form = FORMS["wide"]
    together = _together(given, given["items_there"])
    if preparers and not given["NORMALISE"]:
        # A scan that waits begins sooner where units are small: 184 us became 179. Where rows are
        # normalised, once for a unit, 240 became 269.
        together = 1
    own |= {
        "BV": COLUMNS, "STAGES": form.stages, "GROUPS": form.groups, "PREPARERS": preparers,
        "together": together,
    }  # fmt: skip
    described = None
    if form.groups == 1 and given["HAS_SNAPSHOTS"] and not given["MAPS"]:
        described = _snapshot_tiles(given)
    own |= {"snapshot_tiles": described or own["T"], "BULK": described is not None}
    grid = (preparers + blocks * pieces // form.groups,)
    # Programs that wait for others of their launch must all be there: none comes before its turn.
    start(
        scan_kernel, grid, given | own, num_warps=4, maxnreg=form.registers,
        enable_fp_fusion=False, launch_pdl=not preparers,
    )  # fmt: skip


def _snapshot_tiles(given: Given) -> TensorDescriptor | None:
    """A descriptor of what a program stores of a snapshot; None where strides do not allow one."""
    K, V, HV, kept = given["K"], given["V"], given["HV"], given["snapshots"]
    slot, head, *rows = (given[f"snap_{axis}"] for axis in "nhkv")
    aligned = kept.device.type == "meta" or kept.data_ptr() % 16 == 0
    if not kept.numel() or not aligned or head != K * V or slot * kept.element_size() % 16:
        return None
    if rows == [V, 1]:
        length, width, block = K, V, (1, K, COLUMNS)
    elif rows == [1, K]:
        length, width, block = V, K, (1, COLUMNS, K)
    else:
        return None
    shape, strides = [kept.shape[0], HV * length, width], [slot, width, 1]
    return TensorDescriptor(kept, shape, strides, list(block), _layout(block, kept.dtype))


def _prepare_channels(given: Given, items: int) -> None:
    from headstart.ops.gated_delta_rule.hopper.channel_prepare import prepare_channels_kernel

    channels, registers = CHANNEL_FORM
    shift, reach = REACHES[given["q"].dtype]
    own = {
        "T": _described(given["T"], CHUNK), "P": _described(given["P"], CHUNK),
        "BC": channels, "SHIFT": shift, "REACH": reach,
    }  # fmt: skip
    start(
        prepare_channels_kernel, (given["HV"], items), given | own,
        num_warps=4, maxnreg=registers, enable_fp_fusion=False,
    )  # fmt: skip


def _scan_channels(given: Given, pieces: int) -> None:
    from headstart.ops.gated_delta_rule.hopper.channel_scan import scan_channels_kernel

    K, V, HV, T = given["K"], given["V"], given["HV"], given["T"]
    v, o = (given[name] if given["q"].shape[0] else T for name in "vo")
    stages, ends = CHANNEL_RINGS
    own = {
        "q_starts": _described(given["q_tiles"], K), "k_starts": _described(given["k_starts"], K),
        "k_ends": _described(given["k_tiles"], K), "v_rows": _described(v, COLUMNS),
        "T": _described(T, CHUNK), "P": _described(given["P"], CHUNK),
        "o_rows": _described(o, COLUMNS),
        "BV": COLUMNS, "STAGES": stages, "ENDS": ends,
    }  # fmt: skip
    start(
        scan_channels_kernel, (V // COLUMNS * HV * pieces,), given | own,
        num_warps=4, maxnreg=FORMS["deep"].registers, enable_fp_fusion=False,
    )  # fmt: skip


def _described(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """A descriptor of tiles of 64 rows of x [rows, ...]; a head begins at its stride in a row."""
    width = sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:], strict=True)) + 1
    block = [CHUNK, columns]
    return TensorDescriptor(
        x, [x.shape[0], width], [x.stride(0), 1], block, _layout(tuple(block), x.dtype)
    )


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), STATE_DTYPES[dtype])


IMPLEMENTATION = Implementation("hopper", declines, run, workspace_bytes)
