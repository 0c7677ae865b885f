"""Cases of the short convolution alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from headstart.evidence.cases.record import SMALL, SMALL_HEADS, Case, Draws, Floor, small_lengths

BLOCK = 128
"""Channels that figures and reports count as one head."""


@dataclass(frozen=True, kw_only=True)
class ConvolutionCase(Case):
    """A step of the short convolution over a packed batch, from empty histories.

    channels: a multiple of 128. width: taps. lengths: new tokens of each sequence.
    """

    op: ClassVar[str] = "causal_conv1d"

    channels: int
    width: int = 4
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.lengths)

    def small(self) -> ConvolutionCase:
        """An eighth of the channels, lengths to 1,199."""
        channels = max(1, self.channels // BLOCK // SMALL_HEADS) * BLOCK
        lengths = small_lengths(self.lengths)
        return replace(self, id=self.id + SMALL, channels=channels, lengths=lengths)

    def floor(self) -> Floor:
        """x and the weights read once, y written once; two operations a tap."""
        values = (2 * self.tokens + self.width) * self.channels
        operations = 2 * self.tokens * self.channels * self.width
        return Floor(values * self.torch_dtype.itemsize, operations)

    def inputs(
        self, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of `causal_conv1d`."""
        return self._call(Draws(seed, device), dtype or self.torch_dtype)

    def blank(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The same with undefined values."""
        return self._call(Draws(0, device, blank=True), self.torch_dtype)

    def _call(self, draws: Draws, dtype: torch.dtype) -> dict[str, Any]:
        import headstart

        weight = draws.normal("weight", self.channels, self.width) / self.width**0.5
        return {
            "x": draws.place(draws.normal("x", self.tokens, self.channels), dtype),
            "weight": draws.place(weight, dtype),
            "schedule": headstart.Schedule(list(self.lengths), device=draws.device),
        }


CASES = (
    ConvolutionCase(
        id="conv-next-18778",
        channels=8192,
        lengths=(18778,),
        why="Qwen3-Next's convolution on a long real prompt: bound by memory alone",
    ),
)
