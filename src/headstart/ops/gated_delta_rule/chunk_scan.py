"""All chunks of all sequences, one cache-sized group of heads after the other in each thread.

A group is U key heads with their value heads, of one or several sequences. Its tiles are gathered
from the packed tokens and, in a cache, from the tails; its state stays in a buffer from chunk to
chunk. One thread computes it from its first chunk to its last, so no bit depends on their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headstart.ops.gated_delta_rule.chunk_products import Span, span_shapes
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import SequenceStep
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.runtime.workers import share_out, worker_count
from headstart.runtime.workspace import Workspace

LANES = 8
"""Value heads of a group: their tiles and states stay in a core's second-level cache."""
CHANNEL_LANES = 2
"""The same with a decay per channel, whose pairs of rows take far more room."""
SPAN = 8
"""Chunks that are gathered and prepared together (bounds the scratch, changes no bits)."""


@dataclass(frozen=True)
class Run:
    """A range of key heads of one sequence, and its place in the group."""

    step: SequenceStep
    heads: slice
    """Key heads of the call."""
    units: slice
    """Key heads of the group."""

    def value_heads(self, ratio: int) -> slice:
        """The value heads that read these key heads."""
        return slice(self.heads.start * ratio, self.heads.stop * ratio)


def group_units(call: GatedDeltaCall) -> int:
    """Key heads of a group: one number for a head ratio, whatever the batch."""
    H, HV, _, _ = call.sizes
    return max(1, (CHANNEL_LANES if call.per_channel else LANES) // (HV // H))


def groups(call: GatedDeltaCall, steps: list[SequenceStep]) -> list[list[Run]]:
    """Sequences of like length share groups, so that few lanes idle."""
    H, units = call.sizes[0], group_units(call)
    found: list[list[Run]] = []
    room = 0
    for step in sorted(steps, key=lambda step: -len(step.chunks)):
        head = 0
        while head < H:
            if room == 0:
                found.append([])
                room = units
            take = min(room, H - head)
            place = units - room
            found[-1].append(Run(step, slice(head, head + take), slice(place, place + take)))
            head += take
            room -= take
    return found


def scan_bytes(call: GatedDeltaCall, steps: list[SequenceStep]) -> int:
    """Bytes that `scan` takes from the workspace."""
    if not steps:
        return 0
    shapes = span_shapes(*_extents(call, steps), call.per_channel)
    one = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    return one * worker_count(call.device, len(groups(call, steps)))


def scan(
    call: GatedDeltaCall, steps: list[SequenceStep], stores: Stores, workspace: Workspace
) -> None:
    """Compute `steps`: outputs, states, tails and snapshots."""
    if not steps:
        return
    found = groups(call, steps)
    spans = [
        Span(workspace, worker, *_extents(call, steps), call.per_channel)
        for worker in range(worker_count(call.device, len(found)))
    ]

    def compute(span: Span, runs: list[Run]) -> None:
        GroupScan(call, stores, span, runs).run()

    share_out(compute, found, spans, call.device)


def _extents(call: GatedDeltaCall, steps: list[SequenceStep]) -> tuple[int, int, int, int, int]:
    """M, U, R, K and V of the tiles.

    Head sizes are padded with zeros to a multiple of 16: rows of other sizes start at addresses
    for which a library product may sum in another order.
    """
    H, HV, K, V = call.sizes
    longest = max(1, *(len(step.chunks) for step in steps))
    M = 1 if call.per_channel else min(SPAN, longest)
    return M, _units(call, steps), HV // H, -(-K // 16) * 16, -(-V // 16) * 16


def _units(call: GatedDeltaCall, steps: list[SequenceStep]) -> int:
    """Groups are padded to one size where bits are promised, and else no larger than needed."""
    units = group_units(call)
    return units if call.reproducible else min(units, call.sizes[0] * len(steps))


class GroupScan:
    """The chunks of one group, first to last."""

    def __init__(self, call: GatedDeltaCall, stores: Stores, span: Span, runs: list[Run]) -> None:
        self.call, self.stores, self.span, self.runs = call, stores, span, runs
        H, HV, self.K, self.V = call.sizes
        self.ratio = HV // H
        self.buffers = span.buffers
        self.q, self.k = call.q, call.k
        self.v = call.v.unflatten(1, (H, self.ratio))
        self.g = None if call.g is None else call.g.unflatten(1, (H, self.ratio))
        self.beta = None if call.beta is None else call.beta.unflatten(1, (H, self.ratio))
        self.o = stores.o.unflatten(1, (H, self.ratio))
        self.a_log, self.dt_bias = self._gate_parameters()

    def run(self) -> None:
        """Load the states, compute every chunk, store the states."""
        self.span.clear()
        for run in self.runs:
            self._open(run)
        longest, M = max(len(run.step.chunks) for run in self.runs), len(self.span.chunks)
        for begin in range(0, longest, M):
            counts = range(begin, min(begin + M, longest))
            self._fill(counts)
            self.span.prepare(len(counts))
            for count in counts:
                self._advance(count, count - begin)
        for run in self.runs:
            self.stores.finish(run.step, run.value_heads(self.ratio))

    def _advance(self, count: int, m: int) -> None:
        """Chunk `count` of every sequence that has one, from place m of the span."""
        active = [run for run in self.runs if count < len(run.step.chunks)]
        out = self._place(active, count)
        want_state = any(
            count + 1 < len(run.step.chunks) or run.step.fold >= self._ends(run, count)
            for run in active
        )
        self.span.advance(m, self._values(active[0], count, m), out, want_state)
        for run in active:
            if out is self.span.out:
                self._store(run, count)
            self._pass(run, count)

    def _place(self, active: list[Run], count: int) -> torch.Tensor | None:
        """Where o of the chunk goes, [U, R, C, V]: its own rows, or the tile; None for no rows."""
        new = self._new_rows(active[0], count)
        if self._fills(active[0], len(new), self.o):
            return self._rows(self.o, active[0], new).movedim(0, 2)
        return self.span.out if any(self._new_rows(run, count) for run in active) else None

    def _values(self, run: Run, count: int, m: int) -> torch.Tensor:
        """v of the chunk, [U, R, C, V]: its own rows, or the tile that they were gathered into."""
        new = self._new_rows(run, count)
        if self._fills(run, len(new), self.v):
            return self._rows(self.v, run, new).movedim(0, 2)
        return self.buffers["values"][m]

    def _fills(self, run: Run, rows: int, x: torch.Tensor) -> bool:
        """Whether so many rows of v or o, [T, H, R, V], are all of a chunk's tile, and like it."""
        tile = self.span.out
        return (
            rows == CHUNK
            and run.units == slice(0, tile.shape[0])
            and x.shape[3] == tile.shape[3]
            and x.dtype == tile.dtype
        )

    def _rows(self, x: torch.Tensor, run: Run, new: range) -> torch.Tensor:
        """The run's heads of x [T, H, ...] at the positions `new`."""
        first = run.step.row - run.step.start
        return x[first + new.start : first + new.stop, run.heads]

    def _ends(self, run: Run, count: int) -> int:
        """Position that the sequence has reached after its chunk `count`."""
        step = run.step
        end = step.end if step.length else step.fold
        return min((step.chunks[count] + 1) * CHUNK, end)

    def _open(self, run: Run) -> None:
        step, heads = run.step, run.value_heads(self.ratio)
        if (state := self.stores.read(step, heads)) is not None:
            self._state(run).copy_(state.unflatten(0, (-1, self.ratio)))
        self._keep(run, step.base)
        if not step.chunks:
            self._write(run)

    def _state(self, run: Run) -> torch.Tensor:
        """S of the run, [heads, R, K, V]."""
        state = self.buffers["state"][run.units, : self.K]
        return state.unflatten(2, (self.ratio, -1)).transpose(1, 2)[..., : self.V]

    def _state_of_heads(self, run: Run) -> torch.Tensor:
        return self._state(run).flatten(0, 1)

    def _write(self, run: Run) -> None:
        self.stores.write(run.step, run.value_heads(self.ratio), self._state_of_heads(run))

    def _keep(self, run: Run, position: int) -> None:
        for wanted, index in run.step.snapshots:
            if wanted == position:
                value = self._state_of_heads(run)
                self.stores.keep(position, index, run.value_heads(self.ratio), value)

    def _new_rows(self, run: Run, count: int) -> range:
        """Positions of the chunk that are new tokens; none past the last chunk."""
        begin = (run.step.chunks.start + count) * CHUNK
        return range(max(begin, run.step.start), min(begin + CHUNK, run.step.end))

    def _fill(self, counts: range) -> None:
        """Gather chunks: new tokens, normalised and gated, then the tail's as they are."""
        call, n = self.call, len(counts)
        keys, decay, beta = (self.buffers[name][:n] for name in ("keys", "decay", "beta"))
        partial = []
        for run in self.runs:
            whole = self._whole(run, counts)
            if whole:
                new = range(
                    self._new_rows(run, whole[0]).start, self._new_rows(run, whole[-1]).stop
                )
                self._gather(run, slice(whole[0] - counts[0], whole[-1] + 1 - counts[0]), new)
            for m, count in enumerate(counts):
                if count in whole:
                    continue
                self._clear(run, m)
                if new := self._new_rows(run, count):
                    self._gather(run, slice(m, m + 1), new)
                partial.append((run, m, new))
        if call.qk_l2norm:
            self.span.normalise(n)
            if call.q.dtype != torch.float32:
                k = keys[:, :, :CHUNK]
                k.copy_(k.to(call.q.dtype))
        if not self._scaled_early:
            keys[:, :, CHUNK:].mul_(call.scale)
        if call.g is not None and call.gate.kind != "log":
            decay.copy_(call.gate.decay(decay, self.a_log, self.dt_bias))
            if call.per_channel:
                decay[..., self.K :].zero_()
        if call.beta is not None and call.gate.beta != "value":
            beta.copy_(call.gate.strength(beta))
        for run, m, new in partial:
            self._mask(run, m, new)
        idle = self.runs[-1].units.stop
        decay[:, idle:].zero_()
        beta[:, idle:].zero_()
        if self.stores.tail_cache is not None:
            for run in self.runs:
                for m, count in enumerate(
                    range(counts.start, min(counts.stop, len(run.step.chunks)))
                ):
                    self._tail(run, m, count)

    @property
    def _scaled_early(self) -> bool:
        """Whether queries are scaled on their way, which rounds no more than later in float32."""
        return not self.call.qk_l2norm and self.call.q.dtype == torch.float32

    def _whole(self, run: Run, counts: range) -> range:
        """Those of the chunks that are all new tokens."""
        step, first = run.step, run.step.chunks.start
        begin, stop = -(-step.start // CHUNK) - first, step.end // CHUNK - first
        return range(max(begin, counts.start), min(stop, counts.stop))

    def _clear(self, run: Run, m: int) -> None:
        for name in ("keys", "values", "decay", "beta"):
            self.buffers[name][m, run.units].zero_()

    def _gather(self, run: Run, places: slice, new: range) -> None:
        """The new tokens at positions `new` into the chunks `places` of the span."""
        b, count = self.buffers, places.stop - places.start
        rows = len(new) // count
        at = slice(new.start % CHUNK, new.start % CHUNK + rows)

        def taken(x: torch.Tensor) -> torch.Tensor:
            return self._rows(x, run, new).unflatten(0, (count, -1))

        keys = b["keys"][places, run.units, :, : self.K].unflatten(2, (2, CHUNK))
        keys[:, :, 0, at].copy_(taken(self.k).transpose(1, 2))
        queries = taken(self.q).transpose(1, 2)
        if self._scaled_early:
            torch.mul(queries, self.call.scale, out=keys[:, :, 1, at])
        else:
            keys[:, :, 1, at].copy_(queries)
        if not self._fills(run, rows, self.v):
            values = b["values"][places, run.units, :, at, : self.V]
            values.copy_(taken(self.v).movedim(1, 3))
        decay, beta = self._decay(run, places, at), b["beta"][places, run.units, :, at]
        if self.g is not None:
            decay.copy_(taken(self.g).movedim(1, 3))
        else:
            decay.zero_()
        if self.beta is not None:
            beta.copy_(taken(self.beta).movedim(1, 3))
        else:
            beta.fill_(1.0)

    def _decay(self, run: Run, places: slice | int, at: slice) -> torch.Tensor:
        """Decays of the rows `at`, [..., heads, R, rows] or [..., heads, R, rows, K]."""
        decay = self.buffers["decay"][places, run.units]
        if self.call.per_channel:
            return decay[..., at, : self.K]
        return decay[..., at]

    def _mask(self, run: Run, m: int, new: range) -> None:
        """Gates of rows that are no new tokens: no decay, no update."""
        first = new.start % CHUNK if new else 0
        for name in ("decay", "beta"):
            tile = self.buffers[name][m, run.units]
            tile[:, :, :first].zero_()
            tile[:, :, first + len(new) :].zero_()

    def _tail(self, run: Run, m: int, count: int) -> None:
        """Read the tail's rows of the chunk, and write the rows that stay in the tail."""
        cache, step = self.stores.tail_cache, run.step
        if cache is None or step.write < 0:
            return
        begin = step.chunks[count] * CHUNK
        if step.tail:
            self._exchange(run, m, count, range(begin, min(begin + CHUNK, step.start)), read=True)
        new = self._new_rows(run, count)
        self._exchange(run, m, count, range(max(new.start, step.fold), new.stop), read=False)

    def _exchange(self, run: Run, m: int, count: int, positions: range, read: bool) -> None:
        if not positions:
            return
        cache = self.stores.tail_cache
        assert cache is not None
        t, slot = cache.tensors, run.step.write
        heads = run.value_heads(self.ratio)
        ring = torch.arange(positions.start, positions.stop, device=cache.device) % cache.tail_rows
        at = slice(positions.start % CHUNK, positions.start % CHUNK + len(positions))
        keys = self.buffers["keys"][m, run.units, at, : self.K]
        values = self._values(run, count, m)[run.units, :, at, : self.V]
        decay, beta = self._decay(run, m, at), self.buffers["beta"][m, run.units, :, at]
        pairs = (
            (keys, t["tail_k"][slot, run.heads]),
            (values.flatten(0, 1), t["tail_v"][slot, heads]),
            (decay.flatten(0, 1), t["tail_decay"][slot, heads]),
            (beta.flatten(0, 1), t["tail_beta"][slot, heads]),
        )
        if not read:
            for tile, tail in pairs:
                tail[:, ring] = tile.to(tail.dtype)
            return
        keys.copy_(pairs[0][1][:, ring])
        values.copy_(pairs[1][1][:, ring].unflatten(0, (-1, self.ratio)))
        decay.copy_(pairs[2][1][:, ring].unflatten(0, (-1, self.ratio)))
        beta.copy_(pairs[3][1][:, ring].unflatten(0, (-1, self.ratio)))

    def _store(self, run: Run, count: int) -> None:
        """Copy o of the new tokens out of the tile."""
        if new := self._new_rows(run, count):
            at = slice(new.start % CHUNK, new.start % CHUNK + len(new))
            out = self.span.out[run.units, :, at, : self.V]
            self._rows(self.o, run, new).copy_(out.movedim(2, 0))

    def _pass(self, run: Run, count: int) -> None:
        """Keep and write the state that the chunk leaves, where that is asked for."""
        reached = self._ends(run, count)
        if reached % CHUNK == 0:
            self._keep(run, reached)
        if reached == run.step.fold:
            self._write(run)

    def _gate_parameters(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """a_log and dt_bias of the group's lanes, shaped to broadcast against `decay`."""
        gate = self.call.gate
        if gate.kind != "raw":
            return None, None
        units, R = self.buffers["beta"].shape[1:3]
        found = []
        for parameter in (gate.a_log, gate.dt_bias):
            if parameter is None:
                found.append(None)
                continue
            wide = self.buffers["decay"].shape[4:] if parameter.dim() == 2 else ()
            tile = self.buffers["decay"].new_zeros(units, R, *wide)
            for run in self.runs:
                own = parameter[run.value_heads(self.ratio)].float().unflatten(0, (-1, R))
                tile[run.units][..., : own.shape[-1]] = own
            found.append(tile[:, :, None])  # one for every row
        a_log, dt_bias = found
        if self.call.per_channel and a_log is not None:
            a_log = a_log[..., None]
        return a_log, dt_bias
