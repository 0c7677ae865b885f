"""vLLM without the plugin, with it, and without it again: each sitting a server of its own.

What two sittings of the same arm differ by is the noise that a difference between arms must exceed.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from headstart.evidence.paired import Ratio, compare
from headstart.evidence.runs import Record
from headstart.evidence.serving.server import ENVIRONMENT, Server

BASE, OURS = "vllm", "headstart"
ORDER = (BASE, OURS, BASE)
LATENCIES = ("p50_ttft_ms", "p90_ttft_ms", "p50_tpot_ms", "p50_e2el_ms")
PREFIX_TOKENS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


class Load(Record):
    """What `vllm bench serve` asks of a server: random tokens after a prefix that all share.

    prefix, input, output: tokens of each request. concurrency: requests under way at once.
    """

    requests: int
    prefix: int
    input: int
    output: int
    concurrency: int
    seed: int


class Sitting(Record):
    """One server under the load.

    latencies: of `vllm bench serve`, in ms, by its own names.
    completed: requests. queried, hit: prompt tokens looked up and found in vLLM's prefix cache.
    forwards: of the model. layer_ms: host ms a forward in each kind of layer ("model": in all).
    served: layers times steps that headstart computed, by kind.
    """

    arm: str
    round: int
    latencies: dict[str, float]
    completed: int
    queried: int
    hit: int
    forwards: int
    layer_ms: dict[str, float]
    served: dict[str, int]


class Comparison(Record):
    """A quantity of one arm against the other.

    base, ours: medians, in ms. ratio: ours over the mean of the base around it, round by round.
    spread: the base's second sitting over its first, round by round.
    """

    quantity: str
    base: float
    ours: float
    ratio: Ratio
    spread: Ratio


class Served(Record):
    """All sittings of a model, and what they say."""

    model: str
    dtype: str
    load: Load
    sittings: tuple[Sitting, ...]
    comparisons: tuple[Comparison, ...]


def serve_rounds(
    python: Path,
    model: Path,
    load: Load,
    *,
    name: str,
    dtype: str,
    rounds: int,
    progress: Callable[[str], None] = lambda words: None,
) -> Served:
    """Run `rounds` times three sittings; python: of an environment with vLLM and this package.

    Raises RuntimeError where a server or vLLM's benchmark fails, or a request is not completed.
    """
    sittings = []
    for index in range(rounds):
        for place, arm in enumerate(ORDER):
            progress(f"round {index + 1} of {rounds}, {arm} ({place + 1} of {len(ORDER)})")
            sittings.append(_sit(python, model, load, dtype=dtype, arm=arm, index=index))
    return Served(
        model=name,
        dtype=dtype,
        load=load,
        sittings=tuple(sittings),
        comparisons=tuple(comparisons(sittings)),
    )


def comparisons(sittings: Sequence[Sitting]) -> list[Comparison]:
    """Every latency, and the time of every kind of layer, of one arm against the other."""
    values = {arm: [_quantities(one) for one in sittings if one.arm == arm] for arm in ORDER}
    first, second = values[BASE][::2], values[BASE][1::2]
    found = []
    for name in values[OURS][0]:
        one, other, ours = ([each[name] for each in some] for some in (first, second, values[OURS]))
        around = [(before + after) / 2 for before, after in zip(one, other, strict=True)]
        found.append(
            Comparison(
                quantity=name,
                base=median(one + other),
                ours=median(ours),
                ratio=compare(ours, around),
                spread=compare(other, one),
            )
        )
    return found


def _quantities(one: Sitting) -> dict[str, float]:
    return one.latencies | {f"{kind}, a forward": ms for kind, ms in one.layer_ms.items()}


def _sit(python: Path, model: Path, load: Load, *, dtype: str, arm: str, index: int) -> Sitting:
    options = [
        *("--dtype", dtype, "--enforce-eager", "--enable-prefix-caching"),
        *("--max-model-len", str(load.prefix + load.input + load.output + 64)),
        *("--max-num-seqs", str(max(load.concurrency, 1)), "--max-num-batched-tokens", "512"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with Server(python, model, log, plugin=arm == OURS, options=options) as server:
            warm = load.model_copy(update={"requests": 2, "seed": load.seed + 1})
            _bench(python, model, server, warm, folder)
            server.worker("headstart_time_layers")
            before = [server.counter(name) for name in PREFIX_TOKENS]
            served = server.worker("headstart_statistics")["served"]
            result = _bench(python, model, server, load, folder)
            times = server.worker("headstart_layer_times")
            after = server.worker("headstart_statistics")["served"]
            queried, hit = (
                int(server.counter(name) - old)
                for name, old in zip(PREFIX_TOKENS, before, strict=True)
            )
    if result["completed"] != load.requests:
        raise RuntimeError(f"{result['completed']} of {load.requests} requests were completed")
    return Sitting(
        arm=arm,
        round=index,
        latencies={name: result[name] for name in LATENCIES},
        completed=result["completed"],
        queried=queried,
        hit=hit,
        forwards=times["forwards"],
        layer_ms={
            kind: 1e3 * seconds / times["forwards"] for kind, seconds in times["seconds"].items()
        },
        served={kind: count - served.get(kind, 0) for kind, count in after.items()},
    )


def _bench(python: Path, model: Path, server: Server, load: Load, folder: str) -> dict[str, Any]:
    """What `vllm bench serve` found."""
    place = Path(folder) / f"bench-{load.seed}.json"
    command = [
        *(str(python), "-m", "headstart.evidence.serving.command", "bench", "serve"),
        *("--backend", "openai", "--base-url", f"http://127.0.0.1:{server.port}"),
        *("--endpoint", "/v1/completions", "--model", "tiny", "--tokenizer", str(model)),
        *("--dataset-name", "random", "--random-prefix-len", str(load.prefix)),
        *("--random-input-len", str(load.input), "--random-output-len", str(load.output)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--ignore-eos", "--temperature", "0", "--seed", str(load.seed)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *("--save-result", "--result-filename", str(place)),
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(f"vllm bench serve failed:\n{ended.stderr[-3000:]}")
    return json.loads(place.read_text())
