"""Models as a prefix cache and a kernel see them: kinds of layers, heads, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headstart.evidence.traffic.trace import GRAIN


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Layers and heads of a model, under the names that cases use.

    linear, full, sliding: layers of each kind.
    H, HV, K, V, conv_width: of a linear layer. HQ, HK, D: of a softmax layer. window: keys that a
    query of a sliding layer sees, its own included. dtype: of activations, keys and values.
    """

    dtype: str
    linear: int = 0
    full: int = 0
    sliding: int = 0
    H: int = 0
    HV: int = 0
    K: int = 128
    V: int = 128
    conv_width: int = 4
    HQ: int
    HK: int
    D: int
    window: int | None = None
    sinks: bool = False

    @property
    def layers(self) -> dict[str, int]:
        """Kind of layer -> how many; only kinds that the model has."""
        counts = {
            "linear_attention": self.linear,
            "full_attention": self.full,
            "sliding_attention": self.sliding,
        }
        return {kind: count for kind, count in counts.items() if count}

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch spells it."""
        return getattr(torch, self.dtype)

    @property
    def channels(self) -> int:
        """Channels of a linear layer's short convolution."""
        return 2 * self.H * self.K + self.HV * self.V

    @property
    def page_bytes(self) -> int:
        """Keys and values of 64 tokens in all softmax layers; sliding ones keep all keys too."""
        values = GRAIN * (self.full + self.sliding) * 2 * self.HK * self.D
        return values * self.torch_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """A float32 state and a history of the convolution in all linear layers."""
        history = (self.conv_width - 1) * self.channels * self.torch_dtype.itemsize
        return self.linear * (4 * self.HV * self.K * self.V + history)


SHAPES = {
    "qwen3-next-80b": Shape(dtype="bfloat16", linear=36, full=12, H=16, HV=32, HQ=16, HK=2, D=256),
    "gpt-oss-20b": Shape(
        dtype="bfloat16", full=12, sliding=12, HQ=64, HK=8, D=64, window=128, sinks=True
    ),
    "tiny-qwen3-next": Shape(dtype="float32", linear=6, full=2, H=2, HV=4, HQ=4, HK=2, D=128),
    "tiny-gpt-oss": Shape(
        dtype="float32", full=3, sliding=3, HQ=8, HK=2, D=64, window=128, sinks=True
    ),
}
"""Models by name, in the dtype of their checkpoints."""
