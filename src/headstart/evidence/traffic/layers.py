"""One layer of a model over synthetic rows: what headstart computes of it in a scheduler's step.

Rows are drawn once, as many as a step has; whoever wants more of them takes these again in another
order. Memory is a server's: states in slots, keys and values in pages of 64 tokens that lie in no
order. All calls promise their bits, as `PrefixCache` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import headstart
from headstart.evidence.cases.delta_block import DeltaBlockCase, rule_arguments
from headstart.evidence.cases.record import Draws
from headstart.evidence.traffic.shapes import Shape
from headstart.evidence.traffic.trace import GRAIN

Call = Callable[[], torch.Tensor]
"""Computes a step of a layer and returns its rows [T, heads, size]."""


@dataclass(frozen=True)
class Step:
    """What a step brings of each sequence.

    new: tokens. prefixes: tokens before them, multiples of 64.
    places: of each sequence its slot in a linear layer, its pages in order in a softmax layer.
    """

    new: Sequence[int]
    prefixes: Sequence[int]
    places: Sequence[Any]


class Layer(Protocol):
    """One layer: its memory, and calls on it."""

    device: torch.device

    def places(self, tokens: Sequence[int]) -> list[Any]:
        """Room for each of these sequences, of so many tokens: a slot, or pages in order."""
        ...

    def hit_places(self, tokens: Sequence[int]) -> list[Any]:
        """Where the same sequences start from hits of what lies in their `places`."""
        ...

    def forget(self, place: Any, prefix: int) -> None:
        """Spoil what a sequence has written past a prefix and a hit may not read."""
        ...

    def restore(self, step: Step) -> None:
        """Make memory as it would be at a step's prefixes."""
        ...

    def call(
        self,
        step: Step,
        index: torch.Tensor | slice,
        keep: tuple[Sequence[Sequence[int]], Sequence[int]] | None = None,
    ) -> Call:
        """The step on the drawn rows `index`, all host facts made beforehand.

        keep: of each sequence the positions whose states are kept, and slots for all of these.
        """
        ...


class LinearLayer:
    """Convolution, gated delta rule and gated norm on canonical states.

    rows: that are drawn. slots: of the cache.
    """

    def __init__(
        self, shape: Shape, rows: int, slots: int, device: torch.device, seed: int = 0
    ) -> None:
        heads = {name: getattr(shape, name) for name in ("H", "HV", "K", "V", "conv_width")}
        case = DeltaBlockCase(
            id="trace", why="a step of a trace", dtype=shape.dtype, lengths=(rows,), **heads
        )
        drawn = case.inputs(seed, device)
        self._rows = {name: drawn[name] for name in ("mixed", "z", "a", "b")}
        self._parameters = {name: drawn[name] for name in ("weight", "a_log", "dt_bias", "norm")}
        state = Draws(seed, device).normal("a state", 1, shape.HV, shape.K, shape.V) / 4
        self._state = state.to(device)
        self.device = device
        self.cache = headstart.DeltaCache(
            slots, **heads, conv_channels=shape.channels, dtype=shape.torch_dtype, device=device
        )

    def places(self, tokens: Sequence[int]) -> list[int]:
        """A slot for each of these sequences, of so many tokens."""
        return list(range(len(tokens)))

    def hit_places(self, tokens: Sequence[int]) -> list[int]:
        """Slots besides `places`, for sequences that start from what those keep."""
        return list(range(len(tokens), 2 * len(tokens)))

    def forget(self, place: int, prefix: int) -> None:
        """Nothing: what a slot keeps at a prefix lies in another."""

    def restore(self, step: Step) -> None:
        """Fill the slots of a step with states and histories as they would be at its prefixes."""
        count = len(step.new)
        histories = self._rows["mixed"][: self.cache.conv_width - 1].expand(count, -1, -1)
        states = self._state.expand(count, -1, -1, -1)
        self.cache.load(step.places, step.prefixes, states, histories)

    def call(
        self,
        step: Step,
        index: torch.Tensor | slice,
        keep: tuple[Sequence[Sequence[int]], Sequence[int]] | None = None,
    ) -> Call:
        """The step on the drawn rows `index`; states and histories are kept."""
        positions, slots = keep or (None, ())
        block = {
            **{name: rows[index] for name, rows in self._rows.items()},
            **self._parameters,
            "schedule": headstart.Schedule(
                list(step.new),
                start_positions=list(step.prefixes),
                snapshot_positions=positions,
                device=self.device,
            ),
            "state": self.cache.at(step.places),
        }
        kept = None if keep is None else self.cache.at(slots)

        def run() -> torch.Tensor:
            convolved = headstart.causal_conv1d(
                block["mixed"],
                block["weight"],
                schedule=block["schedule"],
                state=block["state"],
                snapshots=kept,
            )
            found = headstart.gated_delta_rule(**rule_arguments(block, convolved.y), snapshots=kept)
            return headstart.rms_norm_gated(found.o, block["norm"], block["z"])

        return run


class SoftmaxLayer:
    """Keys and values into their pages, then attention.

    rows: that are drawn. pages: of the cache, all filled.
    """

    def __init__(
        self,
        shape: Shape,
        window: int | None,
        rows: int,
        pages: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        draws, dtype = Draws(seed, device), shape.torch_dtype
        # Twice a unit normal: as peaked as trained heads are.
        self._q = draws.place(2 * draws.normal("q", rows, shape.HQ, shape.D), dtype)
        self._k, self._v = (
            draws.place(draws.normal(name, rows, shape.HK, shape.D), dtype) for name in "kv"
        )
        sinks = draws.place(draws.normal("sinks", shape.HQ)) if shape.sinks else None
        self._how = {"window": window, "sinks": sinks, "reproducible": True}
        self._order = draws.permutation("pages", pages).tolist()
        self.device = device
        # Drawn where it lies: a server's pages are gigabytes.
        source = torch.Generator(device).manual_seed(seed)
        size = (pages, GRAIN, shape.HK, shape.D)
        self.cache = headstart.KVCache(
            *(torch.empty(size, dtype=dtype, device=device).normal_(generator=source)
              for _ in "kv")
        )  # fmt: skip

    def places(self, tokens: Sequence[int]) -> list[list[int]]:
        """Pages for each of these sequences, of so many tokens."""
        counts, found, begin = [-(-count // GRAIN) for count in tokens], [], 0
        for count in counts:
            found.append(self._order[begin : begin + count])
            begin += count
        return found

    def hit_places(self, tokens: Sequence[int]) -> list[list[int]]:
        """The same pages: a hit reads what was written."""
        return self.places(tokens)

    def forget(self, place: Sequence[int], prefix: int) -> None:
        """Spoil what a sequence has written past a prefix."""
        rest = torch.tensor(place[prefix // GRAIN :], device=self.device)
        for memory in (self.cache.k, self.cache.v):
            memory[rest] = torch.nan

    def restore(self, step: Step) -> None:
        """Nothing: a step overwrites its own rows alone."""

    def call(self, step: Step, index: torch.Tensor | slice, keep: Any = None) -> Call:
        """The step on the drawn rows `index`; keys and values are kept anyway."""
        q, k, v = (rows[index] for rows in (self._q, self._k, self._v))
        ends = [new + prefix for new, prefix in zip(step.new, step.prefixes, strict=True)]
        slots = []
        table = torch.zeros(len(ends), max(map(len, step.places)), dtype=torch.int32)
        for n, (pages, prefix, end) in enumerate(
            zip(step.places, step.prefixes, ends, strict=True)
        ):
            table[n, : len(pages)] = torch.tensor(pages)
            at = torch.arange(prefix, end)
            slots.append(table[n, at // GRAIN].long() * GRAIN + at % GRAIN)
        where = torch.cat(slots).to(self.device)
        plan = headstart.ExtendPlan.from_pages(
            list(step.new), ends, table.to(self.device), GRAIN, new_in_cache=True
        )

        attend: Any = headstart.extend_attention  # of two results only if it is asked for them

        def run() -> torch.Tensor:
            headstart.write_kv(k, v, self.cache, where)
            return attend(q, None, None, plan=plan, cache=self.cache, **self._how)

        return run


def layer_of(
    shape: Shape, kind: str, *, rows: int, slots: int, pages: int, device: torch.device
) -> Layer:
    """A layer of this kind with memory for so many sequences, or pages."""
    if kind == "linear_attention":
        return LinearLayer(shape, rows, slots, device)
    window = shape.window if kind == "sliding_attention" else None
    return SoftmaxLayer(shape, window, rows, pages, device)
