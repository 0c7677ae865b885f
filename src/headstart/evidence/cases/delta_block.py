"""Cases of a whole linear-attention layer: convolution, norms, gates, rule, gated norm, cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headstart.evidence.cases.gated_delta_rule import (
    DeltaCase,
    drawn_rates,
    drawn_steps,
    drawn_values,
)
from headstart.evidence.cases.record import Draws, Floor

if TYPE_CHECKING:
    from headstart import DeltaCache


@dataclass(frozen=True, kw_only=True)
class DeltaBlockCase(DeltaCase):
    """The layer as an engine calls it: packed projections in, the gated and normalised output out.

    Its inputs are those of `run`, not of one operation: mixed [T, 2 H K + HV V], z [T, HV, V],
    a and b [T, HV] (decay and beta projections), the layer's parameters, schedule and cache.

    conv_width: taps of the short convolution.
    """

    state: str = "cache"
    conv_width: int = 4

    @property
    def channels(self) -> int:
        """Channels of the short convolution: those of q, k and v."""
        return 2 * self.H * self.K + self.HV * self.V

    def floor(self) -> Floor:
        """The rule's floor, z read once more and the convolution's operations."""
        rule, T = super().floor(), self.tokens
        gate = T * self.HV * self.V * self.torch_dtype.itemsize
        taps = 2 * T * self.channels * self.conv_width
        return Floor(rule.bytes + gate, rule.operations + taps)

    def blank(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Arguments of the rule inside the layer, with undefined values."""
        block = self.blank_block(device)
        return rule_arguments(block, block["mixed"])

    def blank_block(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Keyword arguments of `run` with undefined values."""
        return self._steps(Draws(0, device, blank=True), self.torch_dtype)[-1]

    def inputs(
        self, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of `run`."""
        return self.steps(seed, device, dtype)[-1]

    def _cache_sizes(self) -> dict[str, Any]:
        block = {"conv_channels": self.channels, "conv_width": self.conv_width}
        return super()._cache_sizes() | block

    def _restore(self, draws: Draws, cache: DeltaCache, slots: list[int]) -> None:
        if any(start % 64 for start in self.positions):
            raise ValueError(f"starts: expected multiples of 64, got {self.positions}")
        states, histories = self._drawn_states(draws), self._drawn_histories(draws)
        cache.load(slots, list(self.positions), draws.place(states), draws.place(histories))

    def initial_histories(self, seed: int = 0) -> torch.Tensor:
        """Convolution inputs [N, conv_width - 1, channels] before the step, float32."""
        return self._drawn_histories(Draws(seed, "cpu"))

    def _drawn_histories(self, draws: Draws) -> torch.Tensor:
        count = len(self.lengths)
        histories = draws.normal("history", count, self.conv_width - 1, self.channels)
        at = torch.tensor(self.positions)[:, None] + torch.arange(1 - self.conv_width, 0)
        return torch.where((at < 0)[..., None], 0.0, histories)

    def _rows(self, draws: Draws, part: str, T: int, dtype: torch.dtype) -> dict[str, Any]:
        mixed = torch.cat(
            (
                draws.normal(part + "qk", T, 2 * self.H * self.K),
                drawn_values(draws, part, T, self.HV * self.V),
            ),
            dim=-1,
        )
        weight = draws.normal("weight", self.channels, self.conv_width) / self.conv_width**0.5
        norm = 1 + 0.1 * draws.normal("norm", self.V)
        # exp(a_log) is A; a head that never forgets has a very negative a_log, not -inf.
        a_log = drawn_rates(draws, self.HV).clamp(min=1e-9).log()
        return {
            "mixed": draws.place(mixed, dtype),
            "z": draws.place(draws.normal(part + "z", T, self.HV, self.V), dtype),
            "a": draws.place(drawn_steps(draws, part, T, self.HV), dtype),
            "b": draws.place(1.5 * draws.normal(part + "beta", T, self.HV), dtype),
            "weight": draws.place(weight, dtype),
            "a_log": draws.place(a_log),
            "dt_bias": draws.place(0.1 * draws.normal("dt_bias", self.HV)),
            "norm": draws.place(norm, dtype),
        }


def rule_arguments(block: dict[str, Any], mixed: torch.Tensor) -> dict[str, Any]:
    """Arguments of `gated_delta_rule` inside a block; `mixed` is the convolution's output."""
    from headstart import Gate

    cache = block["state"].cache
    T, HK = len(mixed), cache.H * cache.K
    q, k, v = mixed.split((HK, HK, cache.HV * cache.V), dim=-1)
    kept = {"snapshots": block["snapshots"]} if "snapshots" in block else {}
    return kept | {
        "q": q.view(T, cache.H, cache.K),
        "k": k.view(T, cache.H, cache.K),
        "v": v.view(T, cache.HV, cache.V),
        "g": block["a"],
        "beta": block["b"],
        "schedule": block["schedule"],
        "state": block["state"],
        "gate": Gate.raw(block["a_log"], block["dt_bias"], beta="logit"),
        "qk_l2norm": True,
    }


def run(block: dict[str, Any], *, implementation: str | None = None) -> torch.Tensor:
    """The layer's output [T, HV, V] from the inputs of a `DeltaBlockCase`.

    >>> from headstart.evidence import cases
    >>> run(cases.get("block-residual-512-small").inputs()).shape
    torch.Size([511, 4, 128])
    """
    import headstart

    convolved = headstart.causal_conv1d(
        block["mixed"],
        block["weight"],
        schedule=block["schedule"],
        state=block["state"],
        snapshots=block["mixed"].dtype if "snapshots" in block else None,
        implementation=implementation,
    )
    arguments = rule_arguments(block, convolved.y)
    out = headstart.gated_delta_rule(**arguments, implementation=implementation)
    return headstart.rms_norm_gated(out.o, block["norm"], block["z"])
