"""The scratch of a call: tiles of one span of chunks, and how many chunks a span has."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.chunk_table import ChunkTable, chunk_table
from headstart.ops.gated_delta_rule.cutting import CARRY, CHUNK, Cut
from headstart.ops.gated_delta_rule.passes.config import INTERPRETED_AS, SCRATCH, joins
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall
from headstart.runtime.launcher import padded, processors, target_of

FIXED = ("base", "carry")
SEGMENTED, SEGMENT, LEAST = 64, 8, 4
"""Chunks of a sequence that is cut into segments; chunks of a segment; and how many segments make
up for maps, which take as long again as what is left."""
Shape = tuple[tuple[int, ...], torch.dtype]


class Facts(NamedTuple):
    """What the scratch of a call depends on: host facts alone, no tensor.

    scratch: bytes that a call may take; sequences: those that a launch takes, a capacity's
    included; chunks: rows of the table of chunks; segments: pieces of one sequence's part of a
    span; tiles: whether gathered, normalised tiles of q, k and v are kept; norms: whether only
    what rows of q and k are multiplied by is.
    """

    scratch: int
    H: int
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    per_channel: bool
    cached: bool
    sequences: int
    chunks: int
    segments: int
    tiles: bool
    norms: bool

    def cut(self, span: int) -> Cut:
        """The cut into spans of so many chunks."""
        state = self.HV * self.K * self.V * 4
        live = max(1, min(self.sequences, CARRY // state))
        return Cut(span, live, self.segments)

    def shapes(self, span: int) -> dict[str, Shape]:
        """Name -> shape and dtype for spans of so many chunks; all but FIXED grow with the span."""
        wide, kind, BK, N = torch.float32, self.dtype, padded(self.K), self.sequences
        heads, keys = span * self.HV, span * self.H
        row = ((heads, CHUNK), wide)
        shapes: dict[str, Shape] = {
            "T": ((heads * CHUNK, CHUNK), kind),
            "P": ((heads * CHUNK, CHUNK), kind),
            "from_start": row,
            "strengths": row,
            "clean": ((heads,), torch.int32),
        }
        if self.per_channel:
            # Tiles of q and k carry their value head's decay; a tail takes k as it was.
            tiles = ("q_tiles", "k_tiles", "k_starts")
            shapes |= dict.fromkeys(tiles, ((heads * CHUNK, BK), kind))
            shapes["whole_decay"] = ((heads, BK), wide)
            if self.cached:
                shapes["keys"] = ((keys * CHUNK, BK), kind)
                shapes["log_decays"] = ((heads * CHUNK, BK), wide)
        else:
            shapes |= {"to_end": row, "sums": ((2 * heads, CHUNK), wide)}
            if self.tiles:
                shapes |= dict.fromkeys(("q_tiles", "k_tiles"), ((keys * CHUNK, BK), kind))
            if self.norms:
                shapes |= dict.fromkeys(("k_norms", "q_reads"), row)
            if self.cached:
                shapes["log_decays"] = row
        if self.tiles:
            shapes["v_tiles"] = ((heads * CHUNK, padded(self.V)), kind)
        if self.cached:
            shapes["base"] = ((N, self.HV), torch.int32)
        if span < self.chunks or self.segments > 1:
            shapes["carry"] = ((self.cut(span).carried, self.HV, self.K, self.V), wide)
        return shapes


@functools.lru_cache(1024)
def planned(facts: Facts) -> tuple[Cut, dict[str, Shape]]:
    """The cut, and the shapes: spans of equal size, as few as the scratch allows."""
    sizes = {name: _bytes(*shape) for name, shape in facts.shapes(1).items()}
    fixed = sum(size for name, size in sizes.items() if name in FIXED)
    most = max(1, (facts.scratch - fixed) // (sum(sizes.values()) - fixed))
    spans = max(1, -(-facts.chunks // most))
    span = max(1, -(-facts.chunks // spans))
    return facts.cut(span), facts.shapes(span)


@dataclass(frozen=True, eq=False)
class Plan:
    """The spans of a call. table: its sequences, chunks and pieces; cut: how they are cut."""

    facts: Facts
    table: ChunkTable
    cut: Cut
    shapes: dict[str, Shape]

    @staticmethod
    def of(call: GatedDeltaCall, gathers: bool = False, programs: int = 0) -> Plan:
        """The plan of a call.

        gathers: whether the scan reads rows of the call and of a tail itself; programs: that it
        starts for a sequence, where segments are worth it.
        """
        state = call.state
        cached = isinstance(state, CacheSlots)
        drafting = isinstance(state, CacheSlots) and state.cache.draft_tokens > 0
        chunks = call.schedule.chunk_count(drafting)
        # Without tiles the scan copies rows in bulk, which takes aligned rows.
        tiles = call.qk_l2norm or cached or call.per_channel or call.q.shape[0] == 0
        tiles = tiles or not all(aligned_rows(x) for x in (call.q, call.k, call.v))
        sequences = call.schedule.slot_count(call.schedule.N, 0)
        facts = Facts(
            SCRATCH, *call.sizes, call.q.dtype, call.per_channel, cached, sequences, chunks,
            _segments(call, chunks, programs), tiles and not gathers, call.qk_l2norm and gathers,
        )  # fmt: skip
        cut, shapes = planned(facts)
        return Plan(facts, chunk_table(call.schedule, cached, drafting, cut), cut, shapes)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First item and end of every span; one empty span where there are no items."""
        count, span = self.facts.chunks, self.cut.span
        return [(first, min(count, first + span)) for first in range(0, max(1, count), span)]

    @property
    def bytes(self) -> int:
        """Scratch of the call."""
        return sum(_bytes(*shape) for shape in self.shapes.values())


def _segments(call: GatedDeltaCall, chunks: int, programs: int) -> int:
    """As many segments as a device runs side by side, where that is worth running maps first.

    It changes bits, so never where those are promised.
    """
    _, _, K, V = call.sizes
    alone = call.schedule.N == 1 and call.schedule.capacity is None and chunks >= SEGMENTED
    if call.reproducible or not programs or not alone or K != V:
        return 1
    if not joins(K, target_of(call.device, INTERPRETED_AS)):
        return 1
    fitting = min(processors(call.device) // programs, chunks // SEGMENT)
    return fitting if fitting >= LEAST else 1


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def aligned_rows(x: torch.Tensor) -> bool:
    """Whether rows of x [T, heads, columns] begin and step by multiples of 16 bytes."""
    begins = 0 if x.device.type == "meta" else x.data_ptr()
    return begins % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:2])
