"""`headstart prefill` without its printing: the runs it makes and the report it gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from transformers import DynamicCache

from headstart import __version__
from headstart.evidence.prefill.compare import Comparison, compare
from headstart.evidence.prefill.loading import Loaded, quiet
from headstart.evidence.prefill.replay import Recorder, Replay, replay
from headstart.evidence.prefill.runs import Run, continuation, prefill
from headstart.evidence.prefill.timing import peak_memory
from headstart.integrations.transformers import PrefixCache, disable, enable, observe, statistics
from headstart.runtime.checks import dtype_name

SCHEMA = 1
"""Version of the JSON that a report becomes."""
GRAIN = 64
"""Tokens of a prefix are reused in blocks of this many."""
EAGER_STEP = 512
"""Steps of the model's own path where it holds all scores of a step at once."""

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None] | None]]


@dataclass(frozen=True)
class Options:
    """What is asked of the job.

    step: tokens of a step, None for the whole prompt.
    prefix_cache: prefill through a `PrefixCache`; ask it for the prompt again, replay the rows past
        the hit, and run the model from it.
    fixed_tiles: run every Linear in 64-row tiles on the absolute grid.
    compare: run the model's own path too.
    implementation: run this one strictly.
    continuation: tokens to predict.
    """

    step: int | None = None
    prefix_cache: bool = False
    fixed_tiles: bool = False
    compare: bool = False
    implementation: str | None = None
    continuation: int = 32


@dataclass(frozen=True)
class Served:
    """How many of an operation's calls in one layer kind an implementation served."""

    layer_kind: str
    operation: str
    implementation: str
    calls: int
    of: int


@dataclass(frozen=True)
class Hit:
    """The longest prefix hit of the prompt.

    position: tokens taken from the cache.
    replay: operations of the rows past it, on the cold prefill's inputs.
    seconds: time to first token from the hit.
    comparison: logits of the model run from the hit against the cold prefill's.
    """

    position: int
    replay: Replay
    seconds: float
    comparison: Comparison


@dataclass(frozen=True)
class Report:
    """All figures of one job; seconds and bytes.

    device, dtype: where the model ran, and of its weights.
    breaches: a sentence for every tolerance that was broken.
    """

    model: str
    device: str
    dtype: str
    options: Options
    tokens: int
    seconds: float
    seconds_by_kind: dict[str, float]
    served: list[Served]
    peak_memory: int
    continuation: bytes
    hit: Hit | None = None
    own_seconds: float | None = None
    comparison: Comparison | None = None
    breaches: list[str] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens by time to first token."""
        return self.tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """The report as plain data; the continuation's bytes as Latin-1 text."""
        data = {
            "schema": SCHEMA,
            "versions": {"headstart": __version__}
            | {name: version(name) for name in ("torch", "transformers")},
            "threads": torch.get_num_threads(),
        } | asdict(self)
        data["continuation"] = self.continuation.decode("latin-1")
        data["tokens_per_second"] = self.tokens_per_second
        if self.hit is not None:
            data["hit"]["seconds_saved"] = self.seconds - self.hit.seconds
        for place, comparison in (
            (data, self.comparison),
            (data["hit"], self.hit and self.hit.comparison),
        ):
            if comparison is not None:
                place["comparison"] |= {
                    "excluded_share": comparison.excluded_share,
                    "perplexity_difference": comparison.perplexity_difference,
                }
        return data


def silent(title: str, total: int) -> AbstractContextManager[None]:
    """Progress that nobody sees."""
    return nullcontext()


def run_job(
    loaded: Loaded, ids: list[int], options: Options, progress: Progress = silent
) -> Report:
    """Prefill the prompt `ids`, and what else the options ask for.

    progress: called with a title and a total; a context manager that gives a function of what is
    done, or None.
    """
    if options.step is not None and options.step < 1:
        raise ValueError(f"step: expected at least 1, got {options.step}")
    model = enable(loaded.model, implementation=options.implementation)
    try:
        with quiet():
            return _run_enabled(loaded, ids, options, progress)
    finally:
        if getattr(model, "headstart", None) is not None:
            disable(model)


def _run_enabled(loaded: Loaded, ids: list[int], options: Options, progress: Progress) -> Report:
    hit = GRAIN * ((len(ids) - 1) // GRAIN)
    recorder = Recorder(hit)

    def run(title: str, cache: Any, start: int = 0, before: Any = None) -> Run:
        step = options.step or len(ids)
        total = len(loaded.kinds) * -(-(len(ids) - start) // step)
        with progress(title, total) as show:
            return prefill(
                loaded,
                ids,
                cache,
                start=start,
                step=options.step,
                fixed_tiles=options.fixed_tiles,
                progress=show,
                before_step=before,
            )

    counted = statistics(loaded.model)
    counted.reset()
    prefixes = PrefixCache(loaded.model)
    if options.prefix_cache:
        with prefixes.request(ids) as request, observe(loaded.model, recorder):
            cold = run("prefill", request.cache, before=recorder.step)
        cache: Any = request.cache
    else:
        cache = DynamicCache(config=loaded.model.config)
        cold = run("prefill", cache)
    served = _served(counted.calls)
    peak = peak_memory(cold.hidden.device)
    breaches = []
    found = None
    if options.prefix_cache and not hit:
        breaches.append(
            f"no hit: a prompt of {len(ids)} tokens has no block of {GRAIN} before its last token"
        )
    elif options.prefix_cache:
        with prefixes.request(ids) as request:
            replayed = replay(recorder, cache, request.cache, options.implementation)
        with prefixes.request(ids) as request:
            warm = run("from the hit", request.cache, start=request.hit)
        found = Hit(request.hit, replayed, warm.seconds, compare(warm, cold, ids))
        breaches += _hit_breaches(found, options.fixed_tiles)
    following = continuation(loaded, cold, cache, len(ids), options.continuation)
    comparison = own_seconds = None
    if options.compare:
        disable(loaded.model)
        own = _own_path(loaded, ids, progress)
        own_seconds, comparison = own.seconds, compare(cold, own, ids)
        breaches += [f"compare: {sentence}" for sentence in comparison.breaches()]
    return Report(
        model=loaded.name,
        device=str(loaded.model.device),
        dtype=dtype_name(loaded.model.dtype),
        options=options,
        tokens=len(ids),
        seconds=cold.seconds,
        seconds_by_kind=cold.by_kind,
        served=served,
        peak_memory=peak,
        continuation=loaded.decode(following),
        hit=found,
        own_seconds=own_seconds,
        comparison=comparison,
        breaches=breaches,
    )


def _hit_breaches(hit: Hit, fixed_tiles: bool) -> list[str]:
    found = []
    if hit.replay.differing_bits:
        found.append(
            f"prefix cache: {hit.replay.differing_bits} differing bits in {hit.replay.values} "
            f"values past the hit at {hit.position}"
        )
    if fixed_tiles and hit.comparison.differing_bits:
        found.append(
            f"prefix cache: {hit.comparison.differing_bits} differing bits in the logits past the "
            f"hit at {hit.position}, with fixed tiles"
        )
    return found


def _served(calls: dict[tuple[str, str, str], int]) -> list[Served]:
    totals: dict[tuple[str, str], int] = {}
    for (kind, operation, _), count in calls.items():
        totals[kind, operation] = totals.get((kind, operation), 0) + count
    return [
        Served(kind, operation, implementation, count, totals[kind, operation])
        for (kind, operation, implementation), count in sorted(calls.items())
    ]


def _own_path(loaded: Loaded, ids: list[int], progress: Progress) -> Run:
    """The prompt through the model as transformers runs it."""
    # Eager attention holds [heads, step, prompt] scores; whole prompts would not fit.
    eager = loaded.config._attn_implementation == "eager"
    step = EAGER_STEP if eager and len(ids) > EAGER_STEP else None
    total = len(loaded.kinds) * -(-len(ids) // (step or len(ids)))
    with progress("the model's own path", total) as show:
        cache = DynamicCache(config=loaded.model.config)
        return prefill(loaded, ids, cache, step=step, progress=show)
