"""Which calls short sequences make up, and their one launch."""

from __future__ import annotations

from typing import Any

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.chunk_table import chunk_table
from headstart.ops.gated_delta_rule.hopper.short import short_kernel
from headstart.ops.gated_delta_rule.passes.launch import state_arguments, step_arguments
from headstart.ops.gated_delta_rule.passes.scratch import aligned_rows
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.runtime.launcher import current, processors, start

REGISTERS = 255
"""Of a thread: two programs on a multiprocessor. With fewer, what is spilt costs more than a third
program gains."""
CHUNKS = 2
"""Of a sequence without a cache, where programs for halves of V leave processors idle."""
TILE_ROWS = 16
"""Rows begin at, and step by, multiples of as many elements: they are copied 16 bytes at a time."""


def takes(call: GatedDeltaCall) -> bool:
    """Whether `launch` computes a call, whose rows are aligned: a function of host facts.

    Where each sequence has one chunk, its T and P need not leave a multiprocessor; CHUNKS says how
    many it may have where programs are few. With a cache the heads of a slot write its tail while
    others may still read it, so no new row may take the place of an old one: steps end with their
    chunk unless the tail has room for drafts.
    """
    schedule, state, rows = call.schedule, call.state, []
    drafts = 0
    if isinstance(state, CacheSlots):
        drafts = state.cache.draft_tokens
        rows = [state.cache.tensors[name] for name in ("tail_k", "tail_v")]
    # Rows that are not aligned are copied before.
    rows += [x for x in (call.q, call.k, call.v) if aligned_rows(x)]
    short = schedule.short(drafts) or (not isinstance(state, CacheSlots) and _fits(call))
    return schedule.T > 0 and short and all(map(_in_pieces, rows))


def launch(call: GatedDeltaCall, stores: Stores) -> None:
    """Compute a call that `takes` takes."""
    HV, schedule, state = call.sizes[1], call.schedule, call.state
    cached = isinstance(state, CacheSlots)
    drafting = isinstance(state, CacheSlots) and state.cache.draft_tokens > 0
    several = drafting or not schedule.short()
    table = chunk_table(schedule, cached, drafting)
    # Few programs leave processors idle; with a cache one program owns a head's positions.
    programs = HV * schedule.N
    halves = 1 if not cached and 2 * programs <= processors(call.device) else 2
    given: dict[str, Any] = step_arguments(call, stores.o) | state_arguments(call, stores)
    given |= {
        "sequences": table.sequences, "items": table.items,
        "SEVERAL": several, "HALVES": halves,
    }  # fmt: skip
    with current(call.device):
        grid = (programs * (2 // halves),)
        start(short_kernel, grid, given, num_warps=4, maxnreg=REGISTERS, enable_fp_fusion=False)


def _fits(call: GatedDeltaCall) -> bool:
    """Whether sequences have at most CHUNKS chunks, and two programs a head find processors."""
    schedule = call.schedule
    few = schedule.capacity is None and 2 * call.sizes[1] * schedule.N <= processors(call.device)
    steps = zip(schedule.starts, schedule.lengths, strict=True)
    return few and all(start % CHUNK + length <= CHUNKS * CHUNK for start, length in steps)


def _in_pieces(x: torch.Tensor) -> bool:
    begins = 0 if x.device.type == "meta" else x.data_ptr()
    return begins % 16 == 0 and all(step % TILE_ROWS == 0 for step in x.stride()[:2])
