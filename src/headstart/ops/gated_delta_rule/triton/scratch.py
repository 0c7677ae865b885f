"""The scratch of a call: tiles of one span of chunks, and how many chunks a span has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.chunk_table import ChunkTable, chunk_table
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall
from headstart.ops.gated_delta_rule.triton.config import SCRATCH, padded

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, eq=False)
class Plan:
    """The spans of a call.

    table: its sequences and chunks; span: chunks of a span.
    """

    call: GatedDeltaCall
    table: ChunkTable
    span: int

    @staticmethod
    def of(call: GatedDeltaCall) -> Plan:
        """Spans of equal size, as few as the scratch allows."""
        cached = isinstance(call.state, CacheSlots)
        drafting = isinstance(call.state, CacheSlots) and call.state.cache.draft_tokens > 0
        table = chunk_table(call.schedule, cached, drafting)
        most = max(1, SCRATCH // Plan(call, table, 1).bytes_of_a_span)
        spans = max(1, -(-table.count // most))
        return Plan(call, table, max(1, -(-table.count // spans)))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First item and end of every span; one empty span where there are no items."""
        count = self.table.count
        return [
            (first, min(count, first + self.span)) for first in range(0, max(1, count), self.span)
        ]

    @cached_property
    def tiles(self) -> bool:
        """Whether gathered, normalised tiles of q and k are kept.

        Without them the scan copies rows of q in bulk, which takes aligned rows.
        """
        call, q = self.call, self.call.q
        aligned = all(stride * q.element_size() % 16 == 0 for stride in q.stride()[:2])
        aligned = aligned and q.data_ptr() % 16 == 0 and q.shape[0] > 0
        cached = isinstance(call.state, CacheSlots)
        return call.qk_l2norm or cached or call.per_channel or not aligned

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Name -> shape and dtype; all but `base` and `carry` grow with the span."""
        call = self.call
        H, HV, K, V = call.sizes
        N = call.schedule.slot_count(call.schedule.N, 0)
        wide, kind, BK = torch.float32, call.q.dtype, padded(K)
        heads, keys = self.span * HV, self.span * H
        cached = isinstance(call.state, CacheSlots)
        row = ((heads, CHUNK), wide)
        shapes: dict[str, Shape] = {
            "W": ((heads * CHUNK, BK), kind),
            "U": ((heads * CHUNK, padded(V)), kind),
            "P": ((heads * CHUNK, CHUNK), kind),
            "from_start": row,
        }
        if call.per_channel:
            # Tiles of q and k carry their value head's decay; a tail takes k as it was.
            shapes |= dict.fromkeys(("q_tiles", "k_tiles"), ((heads * CHUNK, BK), kind))
            shapes["whole_decay"] = ((heads, BK), wide)
            if cached:
                shapes["keys"] = ((keys * CHUNK, BK), kind)
                shapes["log_decays"] = ((heads * CHUNK, BK), wide)
                shapes["strengths"] = row
        else:
            shapes |= {"to_end": row, "strengths": row, "sums": ((2 * heads, CHUNK), wide)}
            shapes["clean"] = ((heads,), torch.int32)
            if self.tiles:
                shapes |= dict.fromkeys(("q_tiles", "k_tiles"), ((keys * CHUNK, BK), kind))
            if cached:
                shapes["log_decays"] = row
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
        fixed = ("base", "carry")
        return sum(_bytes(*shape) for name, shape in self.shapes.items() if name not in fixed)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size
