"""Model cases: public configurations measured end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headstart.evidence.cases.record import Case


@dataclass(frozen=True, kw_only=True)
class ModelCase(Case):
    """A whole model, prefilled; weights are random unless the project ships trained ones.

    layers: number of layers; linear: how many of them are linear attention.
    shape: what else the configuration says.
    prompts: prompt lengths in tokens; steps: tokens of a prefill step (0: the whole prompt).
    """

    op: ClassVar[str] = "model"

    layers: int
    linear: int = 0
    shape: str
    prompts: tuple[int, ...]
    steps: tuple[int, ...] = (0,)

    @property
    def tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompts)


MODELS = (
    ModelCase(
        id="gpt-oss-20b",
        why="windows of 128 and full layers in turn, with sinks",
        layers=24,
        shape="HQ 64, HK 8, D 64, window 128 / full, sinks, 32 experts top 4",
        prompts=(16384,),
        steps=(512, 0),
    ),
    ModelCase(
        id="qwen3-next-80b",
        why="three linear layers to one full; cut in layers or experts to fit, as the report says",
        layers=48,
        linear=36,
        shape="H 16, HV 32, K = V = 128; HQ 16, HK 2, D 256",
        prompts=(18778,),
    ),
    ModelCase(
        id="qwen3.5-9b-like",
        why="a dense hybrid",
        layers=32,
        linear=24,
        shape="H 16, HV 32, K = V = 128; HQ 16, HK 4, D 256, dense",
        prompts=(16384,),
    ),
    ModelCase(
        id="tiny-qwen3-next",
        why="trained and shipped: real gates, decays and activations on any machine",
        dtype="float32",
        layers=8,
        linear=6,
        shape="H 2, HV 4, K = V = 128; HQ 4, HK 2, D 128; byte tokens",
        prompts=(2048,),
        steps=(0, 100),
    ),
    ModelCase(
        id="tiny-gpt-oss",
        why="trained and shipped: real sinks and windows on any machine",
        dtype="float32",
        layers=6,
        shape="HQ 8, HK 2, D 64, window 128 / full, sinks, 4 experts top 2; byte tokens",
        prompts=(2048,),
        steps=(0, 100),
    ),
)
