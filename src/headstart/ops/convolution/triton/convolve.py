"""The short causal convolution of a packed batch in one launch.

    y[t, c] = activation(bias[c] + sum over w of weight[c, w] x[t - (width - 1) + w, c])

A program walks down a tile of rows of one sequence for a block of channels and keeps the last
width - 1 inputs in registers, so every row is read once, in whole vectors. Products are summed by
explicit fma in float32 and nothing else may be contracted: the bits of a row depend on its own
inputs alone. The first tile of a sequence is the only program that reads its history, and the one
that writes it, after a barrier; snapshots that see nothing but x are copied by further programs.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from headstart.ops.convolution.histories import deliver, output
from headstart.ops.convolution.spec import Convolution, ConvolutionCall
from headstart.ops.convolution.triton.activations import silu
from headstart.ops.convolution.triton.step_table import entries, step_table, tiles
from headstart.ops.gated_delta_rule.cache import CacheSlots, DeltaCache
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.runtime.launcher import current, device_ints, interpreted, processors, start
from headstart.runtime.tables import Key, configuration

NOWHERE, PLAIN, RING = 0, 1, 2
"""Where histories lie: not kept; [S, width - 1, channels]; a ring of a cache, rows by position."""
_NOWHERE, _PLAIN, _RING = tl.constexpr(NOWHERE), tl.constexpr(PLAIN), tl.constexpr(RING)
_PROBES = tl.constexpr(32)
LEAST_ROWS = 8


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for.

    channels: channels of a program, a power of two.
    unroll: rows whose loads are in flight together.
    """

    channels: int
    unroll: int
    num_warps: int

    @classmethod
    def rule(cls, channels: int, dtype: torch.dtype) -> Config:
        """One vector of 8 bytes a thread, 16 rows in flight: on an H200 twice as many threads with
        half the registers were faster than vectors of 16 bytes, and eight rows up to 9 % slower.

        The interpreter takes as long for a row as for a channel block: few rows at once there.
        """
        most = 128 * 8 // dtype.itemsize
        unroll = 2 if interpreted() else 16
        return cls(min(most, triton.next_power_of_2(channels)), unroll, 4)


def rows_of_a_program(tokens: int, channel_blocks: int, processors: int, unroll: int) -> int:
    """Rows that a program walks down: as many as leave every processor four programs.

    At least 8, the widest history, so that only the first tile of a sequence sees its history.

    >>> rows_of_a_program(18778, 8, 132, 8), rows_of_a_program(512, 8, 132, 8)
    (64, 8)
    """
    rows = max(unroll, LEAST_ROWS)
    while rows < 64 and tokens * channel_blocks >= 4 * rows * processors:
        rows *= 2
    return rows


@triton.jit
def _find(offsets, count, i, rows):
    """The sequence of tile i: the last e with offsets[e] // rows + e <= i; `count` is nobody."""
    low = 0
    span = count + 1
    while span > 1:
        stride = tl.cdiv(span, _PROBES)
        o_probe = tl.arange(0, _PROBES) * stride
        m_probe = o_probe < span
        e = low + o_probe
        first = tl.load(offsets + e, mask=m_probe, other=0) // rows + e
        step = (tl.sum((m_probe & (first <= i)).to(tl.int32)) - 1) * stride
        low += step
        span = tl.minimum(stride, span - step)
    return low


@triton.jit
def _input(since, step, history, block, OLD: tl.constexpr, WIDTH: tl.constexpr):
    """The input [BC] that came `since` tokens after a step's start, from its history if before."""
    x, x_row, row, start = step
    o_c, m_c, _is_first = block
    p_x = x + (row + since).to(tl.int64) * x_row
    b_x = tl.load(p_x + o_c, mask=m_c & (since >= 0), other=0.0)
    if OLD != _NOWHERE:
        old, old_row, old_channel, old_rows, readable = history
        seen = readable & (since < 0)
        if OLD == _RING:
            # Inputs before position 0 are zeros, whatever the ring holds.
            seen = seen & (start + since >= 0)
            at = (start + since) % old_rows
        else:
            at = since + (WIDTH - 1)
        p_old = old + at.to(tl.int64) * old_row + o_c.to(tl.int64) * old_channel
        b_x = tl.where(since >= 0, b_x, tl.load(p_old, mask=m_c & seen, other=0.0))
    return b_x


@triton.jit
def _keep(
    slot, position, target, step, history, block,
    OLD: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the history of a sequence at `position` into a slot of the snapshots."""
    kept, kept_slot, kept_row, kept_channel, room, first, first_slot, end, end_slot = target
    o_c, m_c, is_first = block
    p_kept = kept + slot.to(tl.int64) * kept_slot + o_c.to(tl.int64) * kept_channel
    for w in tl.static_range(WIDTH - 1):
        there = position - (WIDTH - 1 - w)
        b_x = _input(there - step[3], step, history, block, OLD, WIDTH)
        if KEPT == _RING:
            at = (there % room).to(tl.int64)
            tl.store(p_kept + at * kept_row, b_x, mask=m_c & (there >= 0))
        else:
            tl.store(p_kept + _long(w) * kept_row, b_x, mask=m_c)
    if KEPT == _RING and is_first:
        oldest = tl.maximum(position - (WIDTH - 1), 0)
        tl.store(first + slot.to(tl.int64) * first_slot, oldest)
        tl.store(end + slot.to(tl.int64) * end_slot, position)


@triton.jit
def _long(value: tl.constexpr):
    """A constant that multiplies a stride in 64 bits."""
    return tl.full((), value, tl.int64)


@triton.jit
def _slot(slots, entry, otherwise):
    """The slot of an entry; without a list, `otherwise`."""
    slot = otherwise
    if slots is not None:
        slot = tl.load(slots + entry).to(tl.int32)
    return slot


@triton.jit(
    do_not_specialize=["tokens", "count", "snapshots", "rows", "tiles"],
    do_not_specialize_on_alignment=["read_slots", "write_slots", "kept_slots", "present"],
)
def convolve_kernel(
    x, weight, bias, y, table,
    old, read_slots, present, new, write_slots, first, end,
    kept, kept_slots, kept_first, kept_end,
    tokens, count, snapshots, rows, tiles, channels,
    x_row, y_row, weight_channel, weight_tap,
    old_slot, old_row, old_channel, old_rows,
    new_slot, new_row, new_channel,
    first_slot, end_slot,
    kept_slot, kept_row, kept_channel, kept_rows, kept_first_slot, kept_end_slot,
    WIDTH: tl.constexpr, SILU: tl.constexpr, OLD: tl.constexpr, NEW: tl.constexpr,
    KEPT: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A tile (behind the tiles: a snapshot) for a block of channels.

    The blocks of a tile are neighbours: programs that run at a time read and write whole rows.

    table: see step_table.py. OLD, NEW and KEPT say where histories are read, where the new ones go
    (RING: where the old ones lie) and where snapshots go. Lists that are None mean entry for entry.
    """
    blocks = tl.cdiv(channels, BC)
    i, at_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    o_c = at_block * BC + tl.arange(0, BC)
    m_c = o_c < channels
    block = (o_c, m_c, at_block == 0)
    offsets = table + 1
    starts = offsets + count + 1
    firsts = starts + count
    positions = firsts + count + 1
    index = tl.maximum(i - tiles, 0)
    if i < tiles:  # noqa: SIM108 (a kernel's branch)
        n = _find(offsets, count, i, rows)
    else:
        n = tl.load(positions + snapshots + index)
    row = tl.load(offsets + n)
    known = n < count
    length = tl.load(offsets + n + 1, mask=known, other=0) - row
    start = tl.load(starts + n, mask=known, other=0)
    live = n < tl.load(table)
    step = (x, x_row, row, start)
    slot = n
    if read_slots is not None:
        slot = tl.load(read_slots + n, mask=live, other=-1).to(tl.int32)
    readable = live & (slot >= 0)
    if present is not None:
        readable = readable & (tl.load(present + n, mask=live, other=0) != 0)
    p_old = x
    if OLD != _NOWHERE:
        p_old = old + slot.to(tl.int64) * old_slot
    history = (p_old, old_row, old_channel, old_rows, readable)
    target = (x, 0, 0, 0, 0, x, 0, x, 0)
    if KEPT == _PLAIN:
        target = (kept, kept_slot, kept_row, kept_channel, 0, x, 0, x, 0)
    if KEPT == _RING:
        target = (
            kept, kept_slot, kept_row, kept_channel, kept_rows,
            kept_first, kept_first_slot, kept_end, kept_end_slot,
        )  # fmt: skip

    if i >= tiles:
        if KEPT != _NOWHERE:
            last = tl.load(firsts + count)
            position = tl.load(positions + index)
            if index >= last:
                if kept_slots is None:
                    for w in tl.static_range(WIDTH - 1):
                        p_kept = kept + index.to(tl.int64) * kept_slot + _long(w) * kept_row
                        tl.store(p_kept + o_c, tl.zeros([BC], x.dtype.element_ty), mask=m_c)
            elif position - start >= WIDTH - 1:
                place = _slot(kept_slots, index, index)
                if place >= 0:
                    _keep(place, position, target, step, history, block, OLD, KEPT, WIDTH)
    elif n == count:
        # Rows of nobody.
        begin = row + (i - (row // rows + n)) * rows
        for t in range(tl.minimum(rows, tokens - begin)):
            p_y = y + (begin + t).to(tl.int64) * y_row
            tl.store(p_y + o_c, tl.zeros([BC], y.dtype.element_ty), mask=m_c)
    else:
        tile = i - (row // rows + n)
        begin = tile * rows
        stop = tl.minimum(begin + rows, length)
        if begin < stop:
            taps = ()
            for w in tl.static_range(WIDTH):
                p_weight = weight + o_c * weight_channel + w * weight_tap
                taps = taps + (tl.load(p_weight, mask=m_c, other=0.0).to(tl.float32),)
            if bias is not None:
                b_bias = tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
            past = ()
            for w in tl.static_range(WIDTH - 1):
                since = begin + w - (WIDTH - 1)
                b_x = _input(since, step, history, block, OLD, WIDTH)
                past = past + (b_x.to(tl.float32),)
            for t in range(begin, stop, UNROLL):
                p_x = x + (row + t).to(tl.int64) * x_row + o_c
                p_y = y + (row + t).to(tl.int64) * y_row + o_c
                window = past
                for u in tl.static_range(UNROLL):
                    b_x = tl.load(p_x, mask=m_c & (t + u < stop), other=0.0)
                    window = window + (b_x.to(tl.float32),)
                    p_x += x_row
                for u in tl.static_range(UNROLL):
                    b_y = window[u] * taps[0]
                    for w in tl.static_range(1, WIDTH):
                        b_y = tl.fma(window[u + w], taps[w], b_y)
                    if bias is not None:
                        b_y += b_bias
                    if SILU:
                        b_y = silu(b_y)
                    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_c & (t + u < stop))
                    p_y += y_row
                past = window[UNROLL:]
        if tile == 0:
            # This program alone reads the history of the sequence, all of it before it writes.
            if KEPT != _NOWHERE:
                for s in range(2):
                    index = tl.load(firsts + n) + s
                    if index < tl.load(firsts + n + 1):
                        position = tl.load(positions + index)
                        if position - start < WIDTH - 1:
                            place = _slot(kept_slots, index, index)
                            if place >= 0:
                                _keep(
                                    place, position, target, step, history, block,
                                    OLD, KEPT, WIDTH,
                                )  # fmt: skip
            if NEW == _PLAIN:
                latest = ()
                for w in tl.static_range(WIDTH - 1):
                    since = length + w - (WIDTH - 1)
                    latest = latest + (_input(since, step, history, block, OLD, WIDTH),)
                place = n
                if write_slots is not None:
                    place = tl.load(write_slots + n, mask=live, other=-1).to(tl.int32)
                tl.debug_barrier()
                if place >= 0:
                    p_new = new + place.to(tl.int64) * new_slot + o_c.to(tl.int64) * new_channel
                    for w in tl.static_range(WIDTH - 1):
                        tl.store(p_new + _long(w) * new_row, latest[w], mask=m_c)
            if NEW == _RING:
                tl.debug_barrier()
                if readable:
                    p_new = p_old + o_c.to(tl.int64) * old_channel
                    for t in range(tl.maximum(length - old_rows, 0), length, UNROLL):
                        p_x = x + (row + t).to(tl.int64) * x_row + o_c
                        latest = ()
                        for u in tl.static_range(UNROLL):
                            latest = latest + (tl.load(p_x, mask=m_c & (t + u < length)),)
                            p_x += x_row
                        for u in tl.static_range(UNROLL):
                            p_row = p_new + ((start + t + u) % old_rows).to(tl.int64) * old_row
                            m_new = m_c & (t + u < length)
                            tl.store(p_row, latest[u], mask=m_new)
                    if at_block == 0:
                        p_first = first + slot.to(tl.int64) * first_slot
                        oldest = tl.where(start == 0, 0, tl.load(p_first))
                        tl.store(p_first, tl.maximum(oldest, start + length - old_rows))
                        tl.store(end + slot.to(tl.int64) * end_slot, start + length)


@dataclass(frozen=True)
class Histories:
    """Where histories lie, as the kernel takes them: strides of a slot, an input and a channel."""

    kind: int = NOWHERE
    memory: torch.Tensor | None = None
    strides: tuple[int, int, int] = (0, 0, 0)
    rows: int = 0
    first: torch.Tensor | None = None
    end: torch.Tensor | None = None

    @classmethod
    def plain(cls, memory: torch.Tensor) -> Histories:
        """[S, width - 1, channels]."""
        slot, row, channel = memory.stride()
        return cls(PLAIN, memory, (slot, row, channel))

    @classmethod
    def ring(cls, cache: DeltaCache) -> Histories:
        """[S, rows, channels] of a cache."""
        memory = cache.tensors["history"]
        slot, row, channel = memory.stride()
        first, end = cache.tensors["history_first"], cache.tensors["history_end"]
        return cls(RING, memory, (slot, row, channel), cache.history_rows, first, end)

    @property
    def bounds(self) -> tuple[int, int]:
        """Strides of a slot's first and last position."""
        if self.first is None or self.end is None:
            return 0, 0
        return self.first.stride(0), self.end.stride(0)


def convolve(call: ConvolutionCall) -> Convolution:
    """Run a bound call."""
    state, target, x = call.state, call.snapshots, call.x
    count, room = entries(call.schedule)
    key = Key("causal_conv1d", "convolve", (call.channels, call.width), x.dtype)
    rule = partial(Config.rule, call.channels, x.dtype)
    config = configuration(key, x.device, rule)
    blocks = triton.cdiv(call.channels, config.channels)
    rows = rows_of_a_program(x.shape[0], blocks, processors(x.device), config.unroll)
    shape = (call.width - 1, call.channels)
    ints = partial(device_ints, device=x.device)

    old = new = kept = Histories()
    read = present = write = places = fresh = snapshots = None
    if isinstance(state, torch.Tensor):
        old = Histories.plain(state)
    elif isinstance(state, CacheSlots):
        old, new, read = Histories.ring(state.cache), Histories(RING), ints(state.slots)
    elif isinstance(state, Pool):
        new = Histories.plain(state.tensor)
        write = state.read_slots if state.write_slots is None else state.write_slots
        write = None if write is None else ints(write)
        if state.read_slots is not None:
            old, read = new, ints(state.read_slots)
        present = None if state.present is None else ints(state.present)
    if call.return_state:
        fresh = x.new_empty(count, *shape)
        new = Histories.plain(fresh)
    if isinstance(target, torch.dtype):
        snapshots = x.new_empty(room, *shape)
        kept = Histories.plain(snapshots)
    elif isinstance(target, Pool):
        kept, places = Histories.plain(target.tensor), target.write_slots
    elif target is not None:
        kept, places = Histories.ring(target.cache), target.slots
    places = None if places is None else ints(places)

    y = output(call)
    bias = None if call.bias is None else call.bias.contiguous()
    cut = tiles(call.schedule, x.shape[0], rows)
    grid = ((cut + (room if kept.kind else 0)) * blocks,)
    given = (
        x, call.weight, bias, y, call.schedule.on_device(step_table),
        old.memory, read, present, new.memory, write, old.first, old.end,
        kept.memory, places, kept.first, kept.end,
        x.shape[0], count, room, rows, cut, call.channels,
        x.stride(0), y.stride(0), *call.weight.stride(),
        *old.strides, old.rows, *new.strides, *old.bounds,
        *kept.strides, kept.rows, *kept.bounds,
        call.width, call.activation is not None, old.kind, new.kind, kept.kind,
        config.channels, config.unroll,
    )  # fmt: skip
    arguments = dict(zip(convolve_kernel.arg_names, given, strict=True))
    with current(x.device):
        start(convolve_kernel, grid, arguments, num_warps=config.num_warps, enable_fp_fusion=False)
    return Convolution(deliver(call, y), fresh, snapshots)
