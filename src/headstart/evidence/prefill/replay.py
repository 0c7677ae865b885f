"""The rows past a prefix hit, computed again on restored states, histories and pages.

A cold prefill is watched; of every operation the inputs and outputs of the rows past the hit are
kept. Each operation then runs on these inputs from the restored cache, in one step, and its rows
must come out as the cold prefill had them, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import headstart
from headstart.evidence.prefill.compare import differing_bits

if TYPE_CHECKING:
    from headstart.integrations.transformers import HybridCache

ROWS = {
    "causal_conv1d": ("x",),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "rms_norm_gated": ("x", "gate"),
    "extend_attention": ("q",),
}
"""Arguments with a row a token; keys and values of attention are in its pages."""
PLACES = ("schedule", "state", "snapshots", "plan", "cache", "k", "v")
"""Arguments that say where a step stands, which the restored cache says anew."""


@dataclass
class Record:
    """What one operation of one layer was given and gave, from the hit on."""

    fixed: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    results: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Recorder:
    """An observer of a model's operations that keeps the rows from position `hit` on.

    position: where the step under way begins; the runner sets it.
    """

    hit: int
    position: int = 0
    records: dict[tuple[int, str], Record] = field(default_factory=dict)

    def step(self, position: int) -> None:
        """A step begins at `position`."""
        self.position = position

    def __call__(self, layer: int, operation: str, arguments: dict[str, Any], result: Any) -> None:
        """Keep what one call was given and gave."""
        record = self.records.setdefault((layer, operation), Record())
        row_names = ROWS[operation]
        rows = arguments[row_names[0]].shape[0]
        first = max(self.hit - self.position, 0)
        if first >= rows:
            return
        record.fixed = {
            name: value
            for name, value in arguments.items()
            if name not in row_names and (name not in PLACES or operation == "rms_norm_gated")
        }
        for name in row_names:
            record.rows.setdefault(name, []).append(arguments[name][first:].clone())
        record.results.append(rows_of(operation, result)[first:].clone())


def rows_of(operation: str, result: Any) -> torch.Tensor:
    """The rows that an operation gave, one a token."""
    field_name = {"causal_conv1d": "y", "gated_delta_rule": "o"}.get(operation)
    return result if field_name is None else getattr(result, field_name)


@dataclass(frozen=True)
class Replay:
    """operations: calls replayed; values: numbers compared; differing_bits: of these."""

    operations: int
    values: int
    differing_bits: int


@torch.inference_mode()
def replay(
    recorder: Recorder, cold: HybridCache, restored: HybridCache, implementation: str | None
) -> Replay:
    """Run every recorded operation from `restored`, which stands at the hit; count bits.

    cold: the cache of the watched prefill, whose pages hold the keys and values past the hit.
    """
    operations, values, bits = 0, 0, 0
    for (layer, operation), record in recorder.records.items():
        rows = {name: torch.cat(pieces) for name, pieces in record.rows.items()}
        wanted = torch.cat(record.results)
        count = len(wanted)
        places = {}
        if operation != "rms_norm_gated":
            if operation == "extend_attention":
                _copy_keys(layer, recorder.hit, count, cold, restored)
            places = restored.arguments(layer, recorder.hit, count)[operation]
        if operation == "extend_attention":
            places |= {"k": None, "v": None}
        result = getattr(headstart, operation)(
            **rows, **record.fixed, **places, implementation=implementation
        )
        operations += 1
        values += wanted.numel()
        bits += differing_bits(rows_of(operation, result), wanted)
    return Replay(operations, values, bits)


def _copy_keys(layer: int, hit: int, count: int, cold: HybridCache, restored: HybridCache) -> None:
    """Write the cold prefill's keys and values past the hit to the restored cache's own pages."""
    source = cold.arguments(layer, hit, count)["write_kv"]
    k, v = (x.flatten(0, 1)[source["slots"]] for x in (source["cache"].k, source["cache"].v))
    headstart.write_kv(k, v, **restored.arguments(layer, hit, count)["write_kv"])
