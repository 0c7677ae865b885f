"""The scratch of a call: tiles of one span of chunks, and how many chunks a span has."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.chunk_table import ChunkTable, chunk_table
from headstart.ops.gated_delta_rule.passes.config import SCRATCH
from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDeltaCall
from headstart.runtime.launcher import padded

FIXED = ("base", "carry", "k_edges", "v_edges")
Shape = tuple[tuple[int, ...], torch.dtype]


class Facts(NamedTuple):
    """What the scratch of a call depends on: host facts alone, no tensor.

    scratch: bytes that a span may take; sequences: those that a launch takes, a capacity's
    included; chunks: rows of the table of chunks; tiles: whether gathered, normalised tiles of q, k
    and v are kept; edges: whether the scan copies whole tiles and wants those made that are not
    whole in q, k and v.
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
    tiles: bool
    edges: bool

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
            if self.cached:
                shapes["log_decays"] = row
        if self.tiles and not self.edges:
            shapes["v_tiles"] = ((heads * CHUNK, padded(self.V)), kind)
        if self.edges and not self.tiles:
            shapes["k_edges"] = ((2 * N * self.H * CHUNK, BK), kind)
        if self.edges and self.cached:
            shapes["v_edges"] = ((2 * N * self.HV * CHUNK, padded(self.V)), kind)
        if self.cached:
            shapes["base"] = ((N, self.HV), torch.int32)
        if span < self.chunks:
            shapes["carry"] = ((2, self.HV, self.K, self.V), wide)
        return shapes


@functools.lru_cache(1024)
def planned(facts: Facts) -> tuple[int, dict[str, Shape]]:
    """Chunks of a span, and the shapes: spans of equal size, as few as the scratch allows."""
    one = sum(_bytes(*shape) for name, shape in facts.shapes(1).items() if name not in FIXED)
    most = max(1, facts.scratch // one)
    spans = max(1, -(-facts.chunks // most))
    span = max(1, -(-facts.chunks // spans))
    return span, facts.shapes(span)


@dataclass(frozen=True, eq=False)
class Plan:
    """The spans of a call. table: its sequences and chunks; span: chunks of a span."""

    facts: Facts
    table: ChunkTable
    span: int
    shapes: dict[str, Shape]

    @staticmethod
    def of(call: GatedDeltaCall, edges: bool = False) -> Plan:
        """The plan of a call, for a scan that copies whole tiles or one that does not (`edges`)."""
        state = call.state
        cached = isinstance(state, CacheSlots)
        drafting = isinstance(state, CacheSlots) and state.cache.draft_tokens > 0
        table = chunk_table(call.schedule, cached, drafting)
        # Without tiles the scan copies rows in bulk, which takes aligned rows; one with edges has
        # seen to that.
        tiles = call.qk_l2norm or cached or call.per_channel or call.q.shape[0] == 0
        aligned = edges or all(aligned_rows(x) for x in (call.q, call.k, call.v))
        tiles = tiles or not aligned
        sequences = call.schedule.slot_count(call.schedule.N, 0)
        facts = Facts(
            SCRATCH, *call.sizes, call.q.dtype, call.per_channel, cached, sequences, table.chunks,
            tiles, edges,
        )  # fmt: skip
        return Plan(facts, table, *planned(facts))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First item and end of every span; one empty span where there are no items."""
        count = self.table.chunks
        return [
            (first, min(count, first + self.span)) for first in range(0, max(1, count), self.span)
        ]

    @property
    def bytes(self) -> int:
        """Scratch of the call."""
        return sum(_bytes(*shape) for shape in self.shapes.values())


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def aligned_rows(x: torch.Tensor) -> bool:
    """Whether rows of x [T, heads, columns] begin and step by multiples of 16 bytes."""
    begins = 0 if x.device.type == "meta" else x.data_ptr()
    return begins % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:2])
