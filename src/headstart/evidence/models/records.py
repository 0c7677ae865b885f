"""What a run of kind "model" holds."""

from __future__ import annotations

from pydantic import Field

from headstart.evidence.paired import Ratio
from headstart.evidence.runs import Record
from headstart.evidence.stages import Stage

ATTENTION = ("linear_attention", "full_attention", "sliding_attention")
"""Kinds of layers that an arm computes; all else is the same in every arm."""
REST = "rest"
"""Norms, residuals, embedding and head: what lies outside of attention and feed-forward layers."""


class Routed(Record):
    """Calls of one operation in the layers of one kind, in one prefill.

    calls: by implementation. expected: layers times steps.
    """

    kind: str
    operation: str
    calls: dict[str, int]
    expected: int

    @property
    def complete(self) -> bool:
        """Whether every layer called it in every step."""
        return sum(self.calls.values()) == self.expected


class ModelArm(Record):
    """What became of an arm.

    status: "timed", "missing" (not installed), "declined" (does not run this model), "wrong" (in
        what its layers compute) or "failed" (raised). sentence: why, where it was not timed.
    served: what computed the attention layers.
    cold_ms: the arm's first prefill in this process, compiling included.
    ttft_ms: prefill and first token of each round; median_ms: of these.
    ratio: to the first timed arm, paired by round; None for that arm itself.
    split_ms: medians by kind of layer, "projections" (of all attention layers, which count without
        them), "mlp" and "rest" among them.
    bound: how many times faster this arm could be at best, if its attention layers took no time and
        all else stayed (Amdahl).
    peak_bytes: most memory held on the device, weights included; None on a CPU, where all arms
        share the process.
    difference: relative L2 distance of the last half of an attention layer's outputs from the first
        arm's, where both had the first arm's inputs: the largest of all layers.
    same_token: whether it predicts the first arm's token.
    routed: headstart's calls in one prefill; none for other arms.
    kernels: of one prefill, by falling time, where a profile was asked for; kernel_us: all of them.
    """

    arm: str
    status: str
    sentence: str = ""
    served: str = ""
    cold_ms: float | None = None
    ttft_ms: tuple[float, ...] = ()
    median_ms: float | None = None
    ratio: Ratio | None = None
    split_ms: dict[str, float] = Field(default_factory=dict)
    bound: float | None = None
    peak_bytes: int | None = None
    difference: float | None = None
    same_token: bool | None = None
    routed: tuple[Routed, ...] = ()
    kernels: tuple[Stage, ...] = ()
    kernel_us: float | None = None


class ModelResult(Record):
    """A model prefilled by all arms asked for; the noise floor comes second.

    source: of its configuration. weights: "random" or "trained". cut: what was left out to fit.
    layers: how many there are of each kind. weight_bytes: of all weights.
    step: tokens of a step, None: the whole prompt in one. steps: of a prefill.
    """

    model: str
    source: str
    weights: str
    cut: str
    layers: dict[str, int]
    weight_bytes: int
    device: str
    dtype: str
    prompt_tokens: int
    step: int | None
    steps: int
    seed: int
    rounds: int
    arms: tuple[ModelArm, ...]
