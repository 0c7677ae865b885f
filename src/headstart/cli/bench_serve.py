"""`headstart bench serve`: vLLM on this machine's CPU, without the plugin, with it and without."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headstart.cli.commands import Command, need
from headstart.cli.options import json_option, options_of, seed_option
from headstart.cli.progress import progress_words

if TYPE_CHECKING:
    from headstart.evidence.serving.rounds import Served


@click.command(cls=Command)
@click.option(
    "--model",
    default="tiny-qwen3-next",
    show_default=True,
    metavar="NAME|DIR",
    help="tiny-qwen3-next, tiny-gpt-oss, or a checkpoint as vLLM wants it.",
)
@click.option(
    "--python",
    default=".venv-vllm/bin/python",
    show_default=True,
    metavar="FILE",
    help="Of an environment with vLLM and headstart (make vllm-venv).",
)
@click.option(
    "--dtype",
    type=click.Choice(("bfloat16", "float32")),
    default="bfloat16",
    show_default=True,
    help="vLLM's own linear layers take bfloat16 alone.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=24, show_default=True)
@click.option("--prefix", type=click.IntRange(min=0), default=1400, show_default=True)
@click.option("--input", "new", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--output", type=click.IntRange(min=2), default=16, show_default=True)
@click.option("--concurrency", type=click.IntRange(min=1), default=2, show_default=True)
@seed_option("Of the requests.")
@json_option
@click.pass_context
def serve(
    ctx: click.Context,
    model: str,
    python: str,
    dtype: str,
    rounds: int,
    requests: int,
    prefix: int,
    new: int,
    output: int,
    concurrency: int,
    seed: int,
    json_file: str | None,
) -> None:
    """Time `vllm bench serve` against servers with the plugin and without, in turn.

    Prompts are PREFIX tokens that all share and INPUT of their own. Beside each difference stands
    what two sittings without the plugin differ by; feed-forward layers are the same in both arms.
    """
    need("evidence", "pydantic", "numpy")
    need("models", "safetensors")
    from headstart import checkpoints
    from headstart.evidence import runs
    from headstart.evidence.serving.rounds import Load, serve_rounds
    from headstart.integrations.vllm import tiny

    # Not resolved: an environment's interpreter is a link, and knows its place by it.
    interpreter = Path(python).absolute()
    if not interpreter.is_file():
        raise ValueError(f"python: no file {python} (make vllm-venv makes .venv-vllm)")
    if model not in checkpoints.names() and not (Path(model) / "config.json").is_file():
        raise ValueError(
            f"model: expected {' or '.join(checkpoints.names())}, or a folder with a config.json, "
            f"got {model!r}"
        )
    if json_file is not None:
        runs.expect_writable(json_file)
    load = Load(
        requests=requests,
        prefix=prefix,
        input=new,
        output=output,
        concurrency=concurrency,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        known = model in checkpoints.names()
        place = tiny.write(model, Path(folder) / model) if known else Path(model).absolute()
        try:
            found = serve_rounds(
                interpreter,
                place,
                load,
                name=model,
                dtype=dtype,
                rounds=rounds,
                progress=progress_words("serve"),
            )
        except RuntimeError as error:  # what vLLM said
            raise click.ClickException(str(error)) from error
    if json_file is not None:
        runs.save(json_file, "serve", [found], options_of(ctx))
    _print(found)


def _print(found: Served) -> None:
    from headstart.cli.printing import print_table

    print_table(
        ("", "vLLM's own", "with headstart", "ratio", "own against own"),
        [
            (
                one.quantity,
                f"{one.base:.2f}",
                f"{one.ours:.2f}",
                one.ratio.words(),
                one.spread.words(),
            )
            for one in found.comparisons
        ],
        title=f"{found.model}, {found.dtype}: {found.load.requests} requests of "
        f"{found.load.prefix} shared and {found.load.input} own tokens, "
        f"{found.load.concurrency} at once, {found.comparisons[0].ratio.rounds} rounds",
    )
    print()
    print_table(
        ("round", "arm", "prompt tokens hit", "of", "forwards", "served by headstart"),
        [
            (
                one.round + 1,
                one.arm,
                one.hit,
                one.queried,
                one.forwards,
                ", ".join(f"{kind} {count:,}" for kind, count in one.served.items()) or "-",
            )
            for one in found.sittings
        ],
    )
