"""What a replay of a trace found: the results of `headstart bench trace`."""

from __future__ import annotations

from typing import Any

from headstart.evidence.paired import Ratio
from headstart.evidence.runs import Record


class HitShare(Record):
    """What requests found under one budget and policy.

    text: "synthetic" (what ids stand for is made up by the trace's rule) or "ids" (whole blocks of
        the trace alone, outputs unknown).
    grain: tokens of a block. policy: where states are kept. model: whose sizes; budget: bytes, or
    None.
    tokens: of all prompts. hit_tokens: found. ceiling_tokens: found with a state at every block of
        the finest grain of this text and no bound.
    kept_bytes: at the end. evicted: places given up.
    hits: of each request, in tokens.
    """

    text: str
    grain: int
    policy: str
    model: str
    budget: int | None
    requests: int
    tokens: int
    hit_tokens: int
    ceiling_tokens: int
    kept_bytes: int
    evicted: int
    hits: tuple[int, ...]

    @property
    def share(self) -> float:
        """Hits among all prompt tokens."""
        return self.hit_tokens / self.tokens

    @property
    def of_ceiling(self) -> float:
        """Hits among all that could be."""
        return self.hit_tokens / self.ceiling_tokens if self.ceiling_tokens else 1.0


class Served(Record):
    """One request of a replay.

    prompt, output, hit: tokens. cold_seconds, hit_seconds: time to first token, from the first
        token and from behind the hit.
    rows: rows past the hit that were compared, in all outputs of operations.
    differing: of these, rows with a differing bit. logits, differing_logits: the same of logits.
    kept_bytes: what the prefix cache held afterwards.
    """

    prompt: int
    output: int
    hit: int
    cold_seconds: float
    hit_seconds: float
    rows: int
    differing: int
    logits: int
    differing_logits: int
    kept_bytes: int


class Replayed(Record):
    """A trace on a model.

    shortened: what all lengths were divided by. policy, budget (bytes, or None): of the prefix
    cache. ceiling_tokens: what could be hit with a state at every 64 tokens and no bound.
    served: each request in order.
    """

    model: str
    device: str
    shortened: int
    policy: str
    budget: int | None
    ceiling_tokens: int
    evicted: int
    served: tuple[Served, ...]

    def total(self, name: str) -> Any:
        """A field of `Served`, summed over all requests."""
        return sum(getattr(one, name) for one in self.served)

    @property
    def share(self) -> float:
        """Hits among all prompt tokens."""
        return self.total("hit") / self.total("prompt")

    @property
    def of_ceiling(self) -> float:
        """Hits among all that could be."""
        return self.total("hit") / self.ceiling_tokens if self.ceiling_tokens else 1.0

    @property
    def differing(self) -> int:
        """Rows with a differing bit, in outputs of operations and in logits."""
        return self.total("differing") + self.total("differing_logits")

    @property
    def saved(self) -> float:
        """Share of the time to first token that hits have saved."""
        return 1 - self.total("hit_seconds") / self.total("cold_seconds")


class HitBits(Record):
    """Hits of some requests in one layer of a kind, compared with cold prefills.

    requests: cold each alone and whole, with hits side by side in a scheduler's steps.
    hit_tokens: found, of all requests. rows: past the hits. differing: of these, rows with a
    differing bit.
    """

    kind: str
    model: str
    device: str
    served: str
    requests: int
    hit_tokens: int
    rows: int
    differing: int


ALL_LAYERS = "all layers"
"""The kind of a `Workload` that adds up all layers."""


class Workload(Record):
    """All steps of one layer of a kind at one grain, on one device; or of `ALL_LAYERS`.

    layers: how many are added up. grain: 0 for a cache that is never hit.
    new_tokens, prefix_tokens: of all requests. ms: time of all steps, in each round.
    ratio, of_cold: to the grain of 64, and to the cache that is never hit, round by round.
    """

    kind: str
    layers: int
    model: str
    device: str
    served: str
    clock: str
    grain: int
    requests: int
    steps: int
    step_tokens: int
    new_tokens: int
    prefix_tokens: int
    ms: tuple[float, ...]
    median_ms: float
    ratio: Ratio
    of_cold: Ratio

    @property
    def saved(self) -> float:
        """Share of the cold prefills' time that hits have saved."""
        return 1 - self.of_cold.ratio
