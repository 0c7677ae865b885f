"""A trace run on a model: every request from its longest kept prefix and cold, compared bit by bit.

A product of the model's own layers may change the bits of a row with the number of rows beside it.
Both runs therefore compute them in tiles of 64 rows on the absolute grid; then every operation gets
equal inputs, and its rows past the hit, like the logits, must come out equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from headstart.evidence.prefill.loading import Loaded, quiet
from headstart.evidence.prefill.replay import rows_of
from headstart.evidence.prefill.runs import Run, decode, prefill
from headstart.evidence.traffic.bookkeeping import ceiling, of_text
from headstart.evidence.traffic.hits import differing_rows
from headstart.evidence.traffic.records import Replayed, Served
from headstart.evidence.traffic.trace import GRAIN, Text
from headstart.integrations.snapshot_policy import POLICIES
from headstart.integrations.transformers import (
    HybridCache,
    PrefixCache,
    PrefixRequest,
    disable,
    enable,
    observe,
)
from headstart.runtime.checks import expect_choice

BLOCK = 512
"""Rows whose logits are held at once."""


@dataclass
class Watch:
    """An observer that keeps every operation's output rows from `first` on, in order."""

    first: int
    kept: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, layer: int, operation: str, arguments: dict[str, Any], result: Any) -> None:
        """Keep what one call gave."""
        self.kept.append(rows_of(operation, result)[self.first :].clone())


@dataclass
class Compare:
    """An observer that compares every operation's rows with those of a `Watch`, and drops these."""

    watch: Watch
    rows: int = 0
    differing: int = 0

    def __call__(self, layer: int, operation: str, arguments: dict[str, Any], result: Any) -> None:
        """Compare what one call gave."""
        found, wanted = rows_of(operation, result), self.watch.kept.pop(0)
        self.rows += len(wanted)
        self.differing += differing_rows(found, wanted)


def text_tokens(text: Text, vocabulary: int) -> list[int]:
    """Token ids of a request's prompt and output: each key stands for 64 drawn by it as a seed."""
    pieces = [
        torch.randint(vocabulary, (GRAIN,), generator=torch.Generator().manual_seed(key))
        for key in text.keys
    ]
    return torch.cat(pieces)[: text.request.prompt + text.request.output].tolist()


def replay_on_model(
    loaded: Loaded,
    texts: Sequence[Text],
    *,
    shortened: int = 1,
    policy: str = "geometric",
    budget: int | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> Replayed:
    """Serve every request, in order, from a prefix cache, and again cold; compare the bits.

    Outputs are forced: the model is given those of the trace, in one step, after each prompt.
    Raises ValueError where the model has no positions for a request.
    """
    expect_choice("policy", policy, tuple(POLICIES))
    longest = max(text.request.prompt + text.request.output for text in texts)
    if longest > loaded.config.max_position_embeddings:
        raise ValueError(
            f"trace: expected requests of at most {loaded.config.max_position_embeddings} tokens "
            f"(max_position_embeddings of {loaded.name}), got one of {longest}; shorten it more"
        )
    model = enable(loaded.model)
    try:
        prefixes = PrefixCache(model, budget=budget, policy=POLICIES[policy])
        served = []
        with quiet():
            for index, text in enumerate(texts):
                progress(f"request {index + 1} of {len(texts)}")
                served.append(_serve(loaded, prefixes, text))
    finally:
        disable(model)
    return Replayed(
        model=loaded.name,
        device=str(loaded.model.device),
        shortened=shortened,
        policy=policy,
        budget=budget,
        ceiling_tokens=sum(ceiling(of_text(texts, GRAIN), GRAIN)),
        evicted=prefixes.evicted,
        served=tuple(served),
    )


def _serve(loaded: Loaded, prefixes: PrefixCache, text: Text) -> Served:
    """One request: cold, from its hit, and then its output."""
    ids = text_tokens(text, loaded.config.vocab_size)
    prompt = ids[: text.request.prompt]
    with prefixes.request(prompt) as request:
        watch = Watch(request.hit) if request.hit else None
        compare = Compare(watch) if watch else None
        cold = _run(loaded, prompt, HybridCache(loaded.model), 0, watch)
        warm = _run(loaded, prompt, request.cache, request.hit, compare)
        _force(loaded, request, ids)
    logits, differing_logits = _compare_logits(cold, warm, len(prompt)) if request.hit else (0, 0)
    return Served(
        prompt=len(prompt),
        output=text.request.output,
        hit=request.hit,
        cold_seconds=cold.seconds,
        hit_seconds=warm.seconds,
        rows=compare.rows if compare else 0,
        differing=compare.differing if compare else 0,
        logits=logits,
        differing_logits=differing_logits,
        kept_bytes=prefixes.bytes,
    )


def _run(loaded: Loaded, ids: list[int], cache: Any, start: int, observer: Any) -> Run:
    with observe(loaded.model, observer) if observer else nullcontext():
        return prefill(loaded, ids, cache, start=start, fixed_tiles=True)


@torch.inference_mode()
def _force(loaded: Loaded, request: PrefixRequest, ids: list[int]) -> None:
    """Give the model the request's output, as if it had decoded it."""
    begin = len(request.tokens)
    if len(ids) > begin:
        rows = torch.tensor([ids[begin:]], device=loaded.model.device)
        decode(loaded, rows, request.cache, begin, fixed_tiles=True)
        request.append(ids[begin:])


def _compare_logits(cold: Run, warm: Run, end: int) -> tuple[int, int]:
    """Rows of logits past the hit, and how many of them differ."""
    differing = 0
    for begin in range(warm.start, end, BLOCK):
        stop = min(begin + BLOCK, end)
        differing += differing_rows(warm.logits(begin, stop), cold.logits(begin, stop))
    return end - warm.start, differing
