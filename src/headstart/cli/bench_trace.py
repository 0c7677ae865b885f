"""`headstart bench trace`: traffic on a prefix cache, as bookkeeping, on a model, as workloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from headstart.cli.commands import Command, need
from headstart.cli.devices import device_of
from headstart.cli.options import device_option, json_option, options_of, seed_option
from headstart.cli.progress import progress_words

if TYPE_CHECKING:
    from headstart.evidence.traffic.records import HitBits, HitShare, Replayed, Workload

PARTS = ("bookkeeping", "replay", "workloads")
GIB = 2**30


@click.command(cls=Command)
@click.option(
    "--trace",
    "trace_file",
    required=True,
    metavar="FILE|seed:N",
    help="A request trace, or a made one.",
)
@click.option("--requests", default="200", show_default=True, metavar="N|all", help="Of a sample.")
@click.option(
    "--parts",
    default="bookkeeping,replay",
    show_default=True,
    metavar="A,B,...",
    help="bookkeeping, replay (on a model), workloads (single layers, compared and timed).",
)
@click.option(
    "--policies",
    default="ends,branches,geometric,thinned,all",
    show_default=True,
    metavar="A,B,...",
    help="Where states are kept; `replay` and `workloads` take geometric.",
)
@click.option(
    "--budgets",
    default="8,16,32,64,none",
    show_default=True,
    metavar="GIB,...",
    help="Of the bookkeeping; workloads take the hits of the last.",
)
@click.option(
    "--sizes",
    default="qwen3-next-80b",
    show_default=True,
    metavar="MODEL",
    help="Whose pages, states and heads bookkeeping and workloads count.",
)
@click.option(
    "--strict-text", is_flag=True, help="What only begins as all prompts do continues none."
)
@click.option(
    "--model", default="tiny-qwen3-next", show_default=True, metavar="NAME|DIR", help="To replay."
)
@click.option(
    "--shorten",
    type=click.Choice(("1", "2", "4", "8")),
    default="8",
    show_default=True,
    help="Divide all lengths of the replay.",
)
@click.option(
    "--replay-budget", default="1", show_default=True, metavar="GIB", help="Of the replay's cache."
)
@click.option(
    "--step-tokens",
    type=click.IntRange(min=64),
    default=8192,
    show_default=True,
    help="New tokens of a step of the workloads.",
)
@click.option(
    "--compared",
    type=click.IntRange(min=0),
    default=16,
    show_default=True,
    help="Requests with hits whose rows workloads compare with a cold prefill's.",
)
@click.option("--rounds", type=click.IntRange(min=3), default=6, show_default=True)
@device_option("cpu")
@seed_option("Of the sample.")
@json_option
@click.pass_context
def trace(
    ctx: click.Context,
    trace_file: str,
    requests: str,
    parts: str,
    policies: str,
    budgets: str,
    sizes: str,
    strict_text: bool,
    model: str,
    shorten: str,
    replay_budget: str,
    step_tokens: int,
    compared: int,
    rounds: int,
    device: str,
    seed: int,
    json_file: str | None,
) -> None:
    """Replay a request trace: what prefix hits find, that they change no bit, what they save.

    Exits with 1 if a bit differs between a hit and a cold prefill.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.evidence import runs
    from headstart.evidence.traffic.bookkeeping import MODELS, hit_shares
    from headstart.evidence.traffic.trace import GRAIN, read, texts
    from headstart.integrations.snapshot_policy import POLICIES
    from headstart.runtime.checks import expect_choice

    chosen = _listed("parts", parts, PARTS)
    names = _listed("policies", policies, tuple(POLICIES))
    bounds = [_bytes("budgets", word) for word in budgets.split(",")]
    replay_bound = _bytes("replay-budget", replay_budget)
    expect_choice("sizes", sizes, tuple(MODELS))
    if requests != "all" and not (requests.isdecimal() and int(requests)):
        raise ValueError(f"requests: expected a positive number or all, got {requests!r}")
    on = device_of(device)
    if json_file is not None:
        runs.expect_writable(json_file, sources=[trace_file])
    whole = read(trace_file)
    sample = whole if requests == "all" else whole.sample(int(requests), seed)
    results: list[Any] = []

    def keep(found: Sequence[Any]) -> None:
        results.extend(found)
        if json_file is not None:  # after every part: a run that is cut short is not lost
            runs.save(json_file, "trace", results, options_of(ctx))

    texts_of_sample = texts(sample, strict=strict_text)
    if "bookkeeping" in chosen:
        shares = hit_shares(sample, texts_of_sample, model=sizes, policies=names, budgets=bounds)
        keep(shares)
        _print_shares(shares)
    broken = False
    if "replay" in chosen:
        need("models", "transformers", "safetensors", "tokenizers")
        from headstart.evidence.prefill.loading import load
        from headstart.evidence.traffic.replay import replay_on_model

        replayed = replay_on_model(
            load(model, device=on),
            texts(sample.shortened(int(shorten)), strict=strict_text),
            shortened=int(shorten),
            budget=replay_bound,
            progress=progress_words("replay"),
        )
        keep([replayed])
        _print_replay(replayed)
        broken = bool(replayed.differing)
    if "workloads" in chosen:
        from headstart.evidence.traffic.hits import compare_hits
        from headstart.evidence.traffic.workloads import COLD, time_workloads

        shares = hit_shares(sample, texts_of_sample, model=sizes, budgets=bounds[-1:])
        hits = {one.grain: one.hits for one in shares if one.text == "synthetic"}
        prompts = [one.prompt for one in sample.requests]
        how: dict[str, Any] = {
            "model": sizes,
            "device": on,
            "step_tokens": step_tokens,
            "progress": progress_words("workloads"),
        }
        chosen_hits = [pair for pair in zip(prompts, hits[GRAIN], strict=True) if pair[1]]
        if pairs := chosen_hits[:compared]:
            bits = compare_hits(*zip(*pairs, strict=True), **how)
            keep(bits)
            _print_bits(bits)
            broken |= any(one.differing for one in bits)
        timed = time_workloads(prompts, {COLD: [0] * len(prompts)} | hits, rounds=rounds, **how)
        keep(timed)
        _print_workloads(timed)
    ctx.exit(1 if broken else 0)


def _listed(option: str, words: str, known: Sequence[str]) -> list[str]:
    """The words of a list with commas, each one of `known`."""
    from headstart.runtime.checks import expect_choice

    found = [word.strip() for word in words.split(",")]
    for word in found:
        expect_choice(option, word, tuple(known))
    return list(dict.fromkeys(found))


def _bytes(option: str, word: str) -> int | None:
    """GiB in bytes; None for "none"."""
    if word.strip() == "none":
        return None
    try:
        found = float(word)
    except ValueError:
        found = -1.0
    if not 0 <= found < 2**30:
        raise ValueError(f"{option}: expected GiB or none, got {word!r}")
    return int(found * GIB)


def _print_shares(shares: Sequence[HitShare]) -> None:
    from headstart.cli.printing import binary_size, print_table

    first = shares[0]
    print_table(
        ("text", "grain", "policy", "budget", "hit share", "of ceiling", "kept", "evicted"),
        [
            (
                one.text,
                one.grain,
                one.policy,
                "none" if one.budget is None else binary_size(one.budget),
                f"{one.share:.2%}",
                f"{one.of_ceiling:.1%}",
                binary_size(one.kept_bytes),
                one.evicted,
            )
            for one in shares
        ],
        title=f"{first.requests:,} requests, {first.tokens:,} prompt tokens, sizes of "
        f"{first.model}; ceiling: a state at every block of 64 tokens (of ids: 512), no bound",
    )
    print()


def _print_replay(found: Replayed) -> None:
    from headstart.cli.printing import binary_size, print_table

    hits = sum(one.hit > 0 for one in found.served)
    last = found.served[-1]
    rows = f"{found.total('differing'):,} of {found.total('rows'):,} rows differ"
    seconds = f"{found.total('hit_seconds'):.1f} s, cold {found.total('cold_seconds'):.1f} s"
    print_table(
        (f"replay on {found.model}", ""),
        [
            ("requests", f"{len(found.served):,}, lengths divided by {found.shortened}"),
            ("prompt tokens", f"{found.total('prompt'):,}"),
            ("hit share", f"{found.share:.2%}, {found.of_ceiling:.1%} of the ceiling"),
            ("budget", "none" if found.budget is None else binary_size(found.budget)),
            ("kept at the end", f"{binary_size(last.kept_bytes)}, {found.evicted:,} evicted"),
            ("operations past hits", f"{rows} ({hits:,} requests)"),
            (
                "logits past hits",
                f"{found.total('differing_logits'):,} of {found.total('logits'):,} rows differ",
            ),
            ("time to first token", f"{seconds}: {found.saved:.1%} saved"),
        ],
    )
    print()


def _print_bits(found: Sequence[HitBits]) -> None:
    from headstart.cli.printing import print_table

    first = found[0]
    print_table(
        ("layer", "implementation", "rows past hits", "that differ"),
        [
            (one.kind.replace("_", " "), one.served, f"{one.rows:,}", f"{one.differing:,}")
            for one in found
        ],
        title=f"One layer of {first.model} on {first.device}: {first.requests:,} requests from "
        "their hits, side by side, against each alone and cold",
    )
    print()


def _print_workloads(timed: Sequence[Workload]) -> None:
    from headstart.cli.printing import print_table

    first = timed[0]
    print_table(
        ("layer", "grain", "steps", "new tokens", "on prefixes", "ms", "x of grain 64", "saved"),
        [
            (
                f"{one.layers} x {one.kind.replace('_', ' ')}"
                if one.layers > 1
                else one.kind.replace("_", " "),
                one.grain or "no hits",
                one.steps,
                f"{one.new_tokens:,}",
                f"{one.prefix_tokens:,}",
                f"{one.median_ms:.2f}",
                one.ratio.words(),
                f"{one.saved:.1%}",
            )
            for one in timed
        ],
        title=f"Layers of {first.model} on {first.device}, by {timed[-1].served}: "
        f"{first.requests:,} requests in steps of {first.step_tokens:,} new tokens, "
        f"clock {first.clock}",
    )
