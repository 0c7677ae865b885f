"""The scratch of a call: tiles of one span of chunks, and how many chunks a span has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.chunk_table import ChunkTable, chunk_table
from headstart.ops.gated_delta_rule.passes.config import SCRATCH, padded
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall

FIXED = ("base", "carry", "k_edges", "v_edges")
Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class Plan:
    """The spans of a call.

    table: its sequences and chunks; span: chunks of a span; edges: whether the scan copies whole
    tiles and wants those made that are not whole in q, k and v.
    """

    call: GatedDeltaCall
    table: ChunkTable
    span: int
    edges: bool

    @staticmethod
    def of(call: GatedDeltaCall, edges: bool = False) -> Plan:
        """Spans of equal size, as few as the scratch allows."""
        cached = isinstance(call.state, CacheSlots)
        drafting = isinstance(call.state, CacheSlots) and call.state.cache.draft_tokens > 0
        table = chunk_table(call.schedule, cached, drafting)
        most = max(1, SCRATCH // Plan(call, table, 1, edges).bytes_of_a_span)
        spans = max(1, -(-table.count // most))
        return Plan(call, table, max(1, -(-table.count // spans)), edges)

    @property
    def sequences(self) -> int:
        """Sequences that a launch takes, those of a capacity included."""
        return self.call.schedule.slot_count(self.call.schedule.N, 0)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First item and end of every span; one empty span where there are no items."""
        count = self.table.count
        return [
            (first, min(count, first + self.span)) for first in range(0, max(1, count), self.span)
        ]

    @cached_property
    def tiles(self) -> bool:
        """Whether gathered, normalised tiles of q, k and v are kept.

        Without them the scan copies rows in bulk, which takes aligned rows.
        """
        call = self.call
        aligned = all(aligned_rows(x) for x in (call.q, call.k, call.v)) and call.q.shape[0] > 0
        cached = isinstance(call.state, CacheSlots)
        return call.qk_l2norm or cached or call.per_channel or not aligned

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Name -> shape and dtype; all but those in FIXED grow with the span."""
        call = self.call
        H, HV, K, V = call.sizes
        N = self.sequences
        wide, kind, BK = torch.float32, call.q.dtype, padded(K)
        heads, keys = self.span * HV, self.span * H
        cached = isinstance(call.state, CacheSlots)
        row = ((heads, CHUNK), wide)
        shapes: dict[str, Shape] = {
            "T": ((heads * CHUNK, CHUNK), kind),
            "P": ((heads * CHUNK, CHUNK), kind),
            "from_start": row,
            "strengths": row,
            "clean": ((heads,), torch.int32),
        }
        if call.per_channel:
            # Tiles of q and k carry their value head's decay; a tail takes k as it was.
            tiles = ("q_tiles", "k_tiles", "k_starts")
            shapes |= dict.fromkeys(tiles, ((heads * CHUNK, BK), kind))
            shapes["whole_decay"] = ((heads, BK), wide)
            if cached:
                shapes["keys"] = ((keys * CHUNK, BK), kind)
                shapes["log_decays"] = ((heads * CHUNK, BK), wide)
        else:
            shapes |= {"to_end": row, "sums": ((2 * heads, CHUNK), wide)}
            if self.tiles:
                shapes |= dict.fromkeys(("q_tiles", "k_tiles"), ((keys * CHUNK, BK), kind))
            if cached:
                shapes["log_decays"] = row
        if self.tiles and not self.edges:
            shapes["v_tiles"] = ((heads * CHUNK, padded(V)), kind)
        if self.edges and not self.tiles:
            shapes["k_edges"] = ((2 * N * H * CHUNK, BK), kind)
        if self.edges and cached:
            shapes["v_edges"] = ((2 * N * HV * CHUNK, padded(V)), kind)
        if cached:
            shapes["base"] = ((N, HV), torch.int32)
        if self.span < self.table.count:
            shapes["carry"] = ((2, HV, K, V), wide)
        return shapes

    @property
    def bytes(self) -> int:
        """Scratch of the call."""
        return sum(_bytes(*shape) for shape in self.shapes.values())

    @property
    def bytes_of_a_span(self) -> int:
        """The part that grows with the span."""
        return sum(_bytes(*shape) for name, shape in self.shapes.items() if name not in FIXED)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def aligned_rows(x: torch.Tensor) -> bool:
    """Whether rows of x [T, heads, columns] begin and step by multiples of 16 bytes."""
    begins = 0 if x.device.type == "meta" else x.data_ptr()
    return begins % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:2])
