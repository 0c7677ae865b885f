"""Which calls short sequences make up, and their one launch, where its kernel is imported."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headstart.ops.gated_delta_rule.cache import CacheSlots, DeltaCache
from headstart.ops.gated_delta_rule.chunk_table import chunk_table
from headstart.ops.gated_delta_rule.passes.launch import state_arguments, step_arguments
from headstart.ops.gated_delta_rule.passes.scratch import aligned_rows
from headstart.ops.gated_delta_rule.schedule import CHUNK, WINDOW
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.runtime.launcher import current, processors, start

REGISTERS = 255
"""Of a thread: two programs on a multiprocessor. With fewer, what is spilt costs more than a third
program gains."""
CACHED_REGISTERS = {WINDOW: 128, CHUNK: 168}
"""Of a thread of a cached step, by rows of its window: two programs on a multiprocessor, or one."""
CHUNKS = 2
"""Of a sequence without a cache, where programs for halves of V leave processors idle.

A program takes one after the other. Two groups of warps that make T and P of both at a time are
faster in a row of calls, and slower with cold caches: their code is nearly twice as long.
"""
WHOLE = [1, 128, 128]
"""A state, which a cached step copies at once."""
TILE_ROWS = 16
"""Rows begin at, and step by, multiples of as many elements: they are copied 16 bytes at a time."""


def takes(call: GatedDeltaCall) -> bool:
    """Whether `launch` computes a call, whose rows are aligned: a function of host facts.

    Where each sequence has one chunk, its T and P need not leave a multiprocessor; CHUNKS says how
    many it may have where programs are few. With a cache the heads of a slot write its tail while
    others may still read it, so no new row may take the place of an old one: steps end with their
    chunk unless the tail has room for drafts.
    """
    schedule, state, aligned = call.schedule, call.state, True
    drafts = 0
    # Rows that are not aligned are copied before.
    rows = [x for x in (call.q, call.k, call.v) if aligned_rows(x)]
    if isinstance(state, CacheSlots):
        drafts, held = state.cache.draft_tokens, state.cache.tensors
        rows += [held["tail_k"], held["tail_v"]]
        aligned = _in_pieces(held["state"])
    short = bool(schedule.window(drafts))
    short = short or (not isinstance(state, CacheSlots) and _fits(call))
    return schedule.T > 0 and short and aligned and all(map(_in_pieces, rows))


def launch(call: GatedDeltaCall, stores: Stores) -> None:
    """Compute a call that `takes` takes."""
    given: dict[str, Any] = step_arguments(call, stores.o) | state_arguments(call, stores)
    with current(call.device):
        if isinstance(call.state, CacheSlots):
            _launch_cached(call, call.state.cache, given)
        else:
            _launch_plain(call, given)


def _launch_plain(call: GatedDeltaCall, given: dict[str, Any]) -> None:
    from headstart.ops.gated_delta_rule.hopper.short import short_kernel

    HV, schedule = call.sizes[1], call.schedule
    table = chunk_table(schedule, cached=False, drafting=False)
    # Few programs leave processors idle.
    programs = HV * schedule.N
    halves = 1 if 2 * programs <= processors(call.device) else 2
    given |= {
        "sequences": table.sequences, "items": table.items,
        "SEVERAL": not schedule.window(), "HALVES": halves,
    }  # fmt: skip
    grid = (programs * (2 // halves),)
    start(short_kernel, grid, given, num_warps=4, maxnreg=REGISTERS, enable_fp_fusion=False)


def _launch_cached(call: GatedDeltaCall, cache: DeltaCache, given: dict[str, Any]) -> None:
    from headstart.ops.gated_delta_rule.hopper.decode import decode_kernel

    table = chunk_table(call.schedule, cached=True, drafting=cache.draft_tokens > 0)
    rows = call.schedule.window(cache.draft_tokens)
    registers = CACHED_REGISTERS[rows]
    given |= {
        "sequences": table.sequences, "items": table.items,
        "states": _described(cache.tensors["state"]), "ROWS": rows, "REGISTERS": registers,
    }  # fmt: skip
    grid = (call.sizes[1] * call.schedule.N,)
    start(decode_kernel, grid, given, num_warps=4, maxnreg=registers, enable_fp_fusion=False)


def _described(states: torch.Tensor) -> TensorDescriptor:
    """A descriptor of states [S, HV, K, V], whose slot stride is free."""
    S, HV, K, V = states.shape
    strides = [states.stride(0), V, 1]
    return TensorDescriptor(states, [S, HV * K, V], strides, WHOLE, _layout())


@functools.cache
def _layout() -> Any:
    return gl.NVMMASharedLayout.get_default_for(WHOLE, gl.float32)


def _fits(call: GatedDeltaCall) -> bool:
    """Whether sequences have at most CHUNKS chunks, and two programs a head find processors."""
    schedule = call.schedule
    few = schedule.capacity is None and 2 * call.sizes[1] * schedule.N <= processors(call.device)
    steps = zip(schedule.starts, schedule.lengths, strict=True)
    return few and all(start % CHUNK + length <= CHUNKS * CHUNK for start, length in steps)


def _in_pieces(x: torch.Tensor) -> bool:
    begins = 0 if x.device.type == "meta" else x.data_ptr()
    return begins % 16 == 0 and all(step % TILE_ROWS == 0 for step in x.stride()[:2])
