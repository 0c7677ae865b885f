"""Attention layers of several arms on the same inputs, whatever the layers between make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Witness:
    """What one prefill gave to its layers and got from its attention; others are held to both.

    The first prefill is kept. In a later one every decoder layer is given what it was given then,
    so that an arm answers for its attention alone: where experts are chosen, one rounding in one
    layer makes others of all that follow.

    layers: of the decoder. half: the first token whose outputs are compared.
    """

    def __init__(self, layers: Sequence[Any], half: int) -> None:
        self._layers, self._half = list(layers), half
        self._inputs: list[torch.Tensor] = []  # call by call: a layer's, in every step
        self._outputs: list[torch.Tensor] = []
        self.complete = False

    @contextmanager
    def first(self) -> Iterator[None]:
        """Keep what the prefill inside does."""
        self._inputs, self._outputs, self.complete = [], [], False

        def given(call: int, rows: torch.Tensor) -> None:
            self._inputs.append(rows)

        def made(call: int, rows: torch.Tensor) -> None:
            self._outputs.append(rows)

        with self._watching(given, made):
            yield
        self.complete = True

    @contextmanager
    def later(self) -> Iterator[list[torch.Tensor]]:
        """Hold the prefill inside to the first one.

        Gives a list that holds one number for each attention layer afterwards, on the device: the
        relative L2 distance of its outputs from those of the first prefill.
        """
        count = len(self._layers)
        far = [torch.zeros((), device=self._outputs[0].device) for _ in range(count)]
        long = [torch.zeros_like(x) for x in far]
        found: list[torch.Tensor] = []

        def given(call: int, rows: torch.Tensor) -> torch.Tensor:
            return self._inputs[call]

        def made(call: int, rows: torch.Tensor) -> None:
            wanted = self._outputs[call].float()
            far[call % count] += (rows.float() - wanted).square().sum()
            long[call % count] += wanted.square().sum()

        with self._watching(given, made):
            yield found
        found += [(a / b.clamp_min(1e-30)).sqrt() for a, b in zip(far, long, strict=True)]

    @contextmanager
    def _watching(
        self,
        given: Callable[[int, torch.Tensor], torch.Tensor | None],
        made: Callable[[int, torch.Tensor], None],
    ) -> Iterator[None]:
        """Call both for every layer: `given` may put other rows in place of a layer's inputs."""
        position = calls = 0

        def before(layer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
            rows = args[0] if args else kwargs["hidden_states"]
            other = given(calls, rows)
            if other is None:
                return None
            if args:
                return (other, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": other}

        def after(module: Any, args: tuple, output: Any) -> None:
            nonlocal position, calls
            rows = output[0] if isinstance(output, tuple) else output
            made(calls, rows[:, max(self._half - position, 0) :])
            calls += 1
            if calls % len(self._layers) == 0:
                position += rows.shape[1]

        handles = []
        for layer in self._layers:
            attention = getattr(layer, "linear_attn", None) or layer.self_attn
            handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(attention.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
