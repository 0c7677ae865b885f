"""`headstart prefill`: the main job, on a real model."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from headstart.cli.commands import Command, need
from headstart.cli.devices import device_of
from headstart.cli.options import DTYPES, device_option, json_option
from headstart.cli.progress import progress_bar

if TYPE_CHECKING:
    from headstart.evidence.prefill.compare import Comparison
    from headstart.evidence.prefill.job import Hit, Report


@click.command(cls=Command)
@click.option(
    "--model", required=True, metavar="NAME|DIR", help="A shipped checkpoint or a folder."
)
@click.option("--prompt-file", required=True, metavar="FILE", help="The prompt, read as bytes.")
@click.option("--step", type=click.IntRange(min=1), help="Tokens of a step; default: whole prompt.")
@click.option(
    "--prefix-cache", is_flag=True, help="Replay the rows past the longest hit, and run from it."
)
@click.option(
    "--fixed-tiles", is_flag=True, help="Every Linear in 64-row tiles, for logits equal in bits."
)
@click.option("--compare", is_flag=True, help="Run the model's own path too, and compare.")
@click.option("--implementation", metavar="NAME", help="Run this implementation, strictly.")
@device_option()
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Of weights and activations.",
)
@click.option(
    "--continuation",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Tokens to predict after the prompt.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    prompt_file: str,
    step: int | None,
    prefix_cache: bool,
    fixed_tiles: bool,
    compare: bool,
    implementation: str | None,
    device: str | None,
    dtype: str,
    continuation: int,
    json_file: str | None,
) -> None:
    """Prefill a prompt with a Qwen3-Next, Qwen3.5 or gpt-oss model.

    Exits with 1 when --compare breaks a tolerance, or --prefix-cache finds a differing bit or no
    hit.
    """
    need("models", "transformers", "safetensors", "tokenizers")
    import torch

    from headstart.evidence.files import expect_writable, write
    from headstart.evidence.prefill.job import Options, run_job
    from headstart.evidence.prefill.loading import load, read_prompt, tokens

    place = device_of(device)
    prompt = read_prompt(prompt_file)
    if json_file is not None:
        expect_writable(json_file, sources=[prompt_file])
    loaded = load(model, device=place, dtype=getattr(torch, dtype))
    options = Options(
        step=step,
        prefix_cache=prefix_cache,
        fixed_tiles=fixed_tiles,
        compare=compare,
        implementation=implementation,
        continuation=continuation,
    )
    report = run_job(loaded, tokens(loaded, prompt), options, progress_bar)
    print_report(report)
    if json_file is not None:
        write(json_file, json.dumps(report.as_json(), indent=2) + "\n")
    for sentence in report.breaches:
        print(f"headstart: {sentence}", file=sys.stderr)
    ctx.exit(1 if report.breaches else 0)


def print_report(report: Report) -> None:
    """Everything the job found, for people."""
    from headstart.cli.printing import binary_size, print_table

    print_table(
        ("prefill", ""),
        [
            ("model", f"{report.model}, {report.dtype} on {report.device}"),
            ("prompt", f"{report.tokens:,} tokens" + _steps(report)),
            ("time to first token", f"{report.seconds:.3f} s"),
            ("tokens per second", f"{report.tokens_per_second:,.0f}"),
            ("peak memory", binary_size(report.peak_memory)),
            ("continuation", shown_text(report.continuation)),
        ],
    )
    print()
    rest = report.seconds - sum(report.seconds_by_kind.values())
    print_table(
        ("layer kind", "seconds", "share"),
        [
            (kind.replace("_", " "), f"{seconds:.3f}", f"{seconds / report.seconds:.0%}")
            for kind, seconds in (*report.seconds_by_kind.items(), ("everything else", rest))
        ],
    )
    print()
    print_table(
        ("layer kind", "operation", "implementation", "served"),
        [
            (
                served.layer_kind.replace("_", " "),
                served.operation,
                served.implementation,
                f"{served.calls} of {served.of} calls",
            )
            for served in report.served
        ],
    )
    if report.hit is not None:
        _print_hit(report, report.hit)
    if report.comparison is not None:
        _print_comparison(report, report.comparison)


def _steps(report: Report) -> str:
    step = report.options.step
    return f" in steps of {step:,}" if step else ", whole"


def _print_hit(report: Report, hit: Hit) -> None:
    from headstart.cli.printing import print_table

    replayed, logits = hit.replay, hit.comparison
    saved = report.seconds - hit.seconds
    rows = [
        ("longest hit", f"{hit.position:,} of {report.tokens:,} tokens"),
        (
            "replayed past it",
            (
                f"{replayed.differing_bits} differing bits "
                f"({replayed.values:,} values of {replayed.operations} operations)"
            ),
        ),
        ("time to first token", f"{hit.seconds:.3f} s"),
        ("time saved", f"{saved:.3f} s ({saved / report.seconds:.0%})"),
        ("largest logit difference", f"{logits.difference:.2e}"),
        ("top-1 agreement", f"{logits.agreeing:,} of {logits.rows:,} rows"),
    ]
    if report.options.fixed_tiles:
        rows.append(("logits", f"{logits.differing_bits} differing bits"))
    print()
    print_table(("prefix cache", ""), rows)


def _print_comparison(report: Report, found: Comparison) -> None:
    from headstart.cli.printing import print_table

    counted = found.rows - found.excluded
    print()
    print_table(
        ("the model's own path", ""),
        [
            ("time to first token", f"{report.own_seconds:.3f} s"),
            ("largest logit difference", f"{found.difference:.2e}"),
            (
                "top-1 agreement",
                (
                    f"{counted - found.disagreeing:,} of {counted:,} rows "
                    f"({found.excluded_share:.3%} excluded as near-ties)"
                ),
            ),
            (
                "perplexity",
                (
                    f"{found.perplexity:.6f}, own path {found.other_perplexity:.6f} "
                    f"(relative difference {found.perplexity_difference:.1e})"
                ),
            ),
        ],
    )


def shown_text(data: bytes) -> str:
    r"""Bytes as one printable line.

    >>> shown_text(b"And it\ncame \xff")
    "'And it\\ncame \\xff'"
    """
    return repr(data.decode("utf-8", errors="backslashreplace")).replace("\\\\x", "\\x")
