"""`headstart bench model`: time to first token of a whole model, arm by arm."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from headstart.cli.bench import names_of
from headstart.cli.commands import Command, need
from headstart.cli.devices import device_of
from headstart.cli.options import (
    DTYPES,
    Seconds,
    device_option,
    json_option,
    options_of,
    seed_option,
)
from headstart.cli.progress import progress_words

if TYPE_CHECKING:
    from headstart.evidence.models.records import ModelArm, ModelResult


@click.command(cls=Command)
@click.option(
    "--model",
    required=True,
    metavar="NAME|DIR",
    help="gpt-oss-20b, qwen3-next-80b, tiny-gpt-oss, tiny-qwen3-next, or a folder with a "
    "config.json and perhaps weights.",
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option(
    "--step",
    "steps",
    default="whole",
    show_default=True,
    metavar="N|whole",
    help="Tokens of a prefill step.",
)
@click.option(
    "--arms",
    default="headstart,eager",
    show_default=True,
    metavar="A,B,...",
    help="headstart, reproducible (a cache whose hits keep bits), flex_attention, "
    "flash_attention_2, _3, _4, sdpa, eager, or fla (sdpa, linear layers by fla). The first is "
    "what others are compared with.",
)
@click.option("--layers", type=int, help="Of random weights; default: as many as fit.")
@click.option("--experts", type=int, help="Of each layer, for random weights; default: all.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="By default bfloat16 on a GPU and float32 on a CPU.",
)
@device_option()
@click.option("--rounds", type=click.IntRange(min=3), default=7, show_default=True)
@click.option("--no-noise-floor", is_flag=True, help="Do not enter the first arm twice.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Kernels (operators on a CPU) of one profiled prefill to show.",
)
@click.option(
    "--limit",
    type=Seconds(1),
    metavar="SECONDS",
    help="Of preparing all arms: those that are not prepared by then are given up.",
)
@seed_option("Of weights and prompt.")
@json_option
@click.pass_context
def model(
    ctx: click.Context,
    model: str,
    prompt_tokens: int,
    steps: str,
    arms: str,
    layers: int | None,
    experts: int | None,
    dtype: str | None,
    device: str | None,
    rounds: int,
    no_noise_floor: bool,
    top: int,
    limit: float | None,
    seed: int,
    json_file: str | None,
) -> None:
    """Time prefill and first token of a model under every arm, in turn.

    Without weights in a folder the model gets random ones in its configuration's shape. Exits with
    1 if an arm's hidden states are wrong, a call was not headstart's, or an arm failed.
    """
    need("evidence", "pydantic", "numpy")
    need("models", "transformers", "safetensors", "tokenizers")
    # transformers would look for kernels that are not installed on its hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from headstart.evidence import runs
    from headstart.evidence.benching import DeviceLost
    from headstart.evidence.models.benching import bench_model, expect_arms
    from headstart.evidence.models.building import build

    if steps != "whole" and not (steps.isdecimal() and int(steps)):
        raise ValueError(f"step: expected a positive number or whole, got {steps!r}")
    names = names_of(arms)
    expect_arms(names)
    place = device_of(device)
    if json_file is not None:
        runs.expect_writable(json_file)
    dtype = dtype or ("bfloat16" if place.type == "cuda" else "float32")
    show = progress_words(model)
    show("building")
    built = build(
        model, layers=layers, experts=experts, device=place, dtype=getattr(torch, dtype), seed=seed
    )

    def keep(found: ModelResult) -> None:
        if json_file is not None:  # after every round: a run that is cut short is not lost
            runs.save(json_file, "model", [found], options_of(ctx))

    try:
        found = bench_model(
            built,
            names,
            prompt_tokens=prompt_tokens,
            step=None if steps == "whole" else int(steps),
            rounds=rounds,
            seed=seed,
            noise_floor=not no_noise_floor,
            profiled=bool(top),
            limit=limit,
            progress=show,
            told=keep,
        )
    except DeviceLost as lost:
        raise click.ClickException(str(lost)) from lost
    keep(found)
    print_model(found, top)
    for arm in found.arms:
        if arm.sentence:
            print(f"headstart: {arm.arm}: {arm.sentence}", file=sys.stderr)
    ctx.exit(any(arm.status in ("wrong", "failed") for arm in found.arms))


def print_model(found: ModelResult, top: int) -> None:
    """Everything that was found, for people."""
    from headstart.cli.printing import binary_size, print_stages, print_table

    steps = "whole" if found.step is None else f"in {found.steps} steps of {found.step:,}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.layers.items())
    print_table(
        ("arm", "status", "TTFT ms", "cold ms", "ratio", "wins", "at best", "peak", "difference"),
        [_row(arm) for arm in found.arms],
        title=f"{found.model} on {found.device}, {found.dtype}, {found.weights} weights of "
        f"{binary_size(found.weight_bytes)}{f', {found.cut}' if found.cut else ''}: {kinds}; "
        f"{found.prompt_tokens:,} tokens {steps}, {found.rounds} rounds",
    )
    timed = [arm for arm in found.arms if arm.status == "timed"]
    parts = list(dict.fromkeys(kind for arm in timed for kind in arm.split_ms))
    if timed:
        print()
        print_table(
            ("ms by kind of layer", *(arm.arm for arm in timed)),
            [
                (
                    kind.replace("_", " "),
                    *(
                        f"{arm.split_ms[kind]:.2f} ({arm.split_ms[kind] / arm.median_ms:.0%})"
                        if kind in arm.split_ms and arm.median_ms
                        else "-"
                        for arm in timed
                    ),
                )
                for kind in parts
            ],
        )
    routed = [(arm.arm, one) for arm in found.arms for one in arm.routed]
    if routed:
        print()
        print_table(
            ("arm", "layer kind", "operation", "implementation", "served"),
            [
                (
                    arm,
                    one.kind.replace("_", " "),
                    one.operation,
                    ", ".join(one.calls) or "-",
                    f"{sum(one.calls.values())} of {one.expected} calls",
                )
                for arm, one in routed
            ],
        )
    for arm in timed if top else ():
        if arm.kernel_us:
            print()
            title = f"{arm.arm}: {arm.kernel_us / 1000:.2f} ms in kernels"
            print_stages(arm.kernels[:top], arm.kernel_us, title)


def _row(arm: ModelArm) -> tuple[str, ...]:
    from headstart.cli.printing import binary_size
    from headstart.evidence.arms import named

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    ratio = arm.ratio
    return (
        named(arm.arm, arm.served),
        arm.status,
        number(arm.median_ms, ".2f"),
        number(arm.cold_ms, ".0f"),
        "-" if ratio is None else ratio.words(4),
        "-" if ratio is None else f"{ratio.wins}/{ratio.rounds}",
        "-" if arm.bound is None else f"/ {arm.bound:.3f}",
        "-" if arm.peak_bytes is None else binary_size(arm.peak_bytes),
        number(arm.difference, ".2e"),
    )
