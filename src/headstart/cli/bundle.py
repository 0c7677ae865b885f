"""`headstart bundle`: kernels compiled ahead of time into a directory, without a GPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from headstart.cli.commands import Group

MODELS = click.option(
    "--models",
    multiple=True,
    metavar="M",
    help="Only what these call: catalogue, qwen3-next-80b, gpt-oss-20b, ...; all.",
)


@click.group(cls=Group)
def command() -> None:
    """Compile kernels ahead of time; see what a bundle holds and what it lacks."""


@command.command()
@click.option(
    "--target", "targets", multiple=True, required=True, metavar="T", help="cuda:90, gfx942, ..."
)
@MODELS
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes; one a core.")
@click.option(
    "--python", "pythons", multiple=True, metavar="PYTHON", help="That will serve; this one."
)
@click.option("-o", "--output", required=True, metavar="DIR", help="Made if it is not there.")
@click.pass_context
def build(
    ctx: click.Context,
    targets: tuple[str, ...],
    models: tuple[str, ...],
    jobs: int | None,
    pythons: tuple[str, ...],
    output: str,
) -> None:
    """Compile every program that the models' calls can launch, and keep it in DIR.

    Programs that DIR holds already are left. Exits with 1 when one does not compile.
    """
    from headstart.cli.printing import console, print_table
    from headstart.evidence.cases.profiles import reach
    from headstart.evidence.static.collect import resolve_targets
    from headstart.runtime.bundle import Bundle
    from headstart.runtime.bundle_build import build
    from headstart.runtime.bundle_host import Python
    from headstart.runtime.static import TARGETS

    bundle, rows, failed = Bundle(Path(output)), [], []
    serving = [Python.at(python) for python in pythons]
    for target in resolve_targets(targets):
        began = time.perf_counter()
        found = reach(TARGETS[target], models)
        programs = list(found.programs.values())
        bundle.make()  # rather than find out after the first has compiled
        with _progress(target) as progress:
            most = jobs or len(os.sched_getaffinity(0))
            built = build(bundle, programs, most, progress, serving)
        broken = [
            f"FAILS for {target}: {program.name}, {found.asked[program.key]}: {error}"
            for program, _, error in built
            if error
        ]
        failed += broken
        seconds = round(time.perf_counter() - began, 1)
        before, compiled = len(programs) - len(built), len(built) - len(broken)
        rows.append((target, len(programs), before, compiled, seconds))
    print_table(("target", "programs", "there before", "compiled", "seconds"), rows)
    for line in failed:
        console().print(line, markup=False)
    ctx.exit(1 if failed else 0)


@command.command()
@click.argument("directory", metavar="DIR")
@click.option("--target", "targets", multiple=True, metavar="T", help="Only these; all in DIR.")
@MODELS
@click.pass_context
def check(
    ctx: click.Context, directory: str, targets: tuple[str, ...], models: tuple[str, ...]
) -> None:
    """Compare DIR with what the models' calls launch; every artefact is read and hashed.

    Exits with 1 when a program is missing, stale or damaged, or what a Python of DIR launches it
    with.
    """
    from headstart.cli.printing import console, print_table
    from headstart.evidence.cases.profiles import reach
    from headstart.evidence.static.collect import resolve_targets
    from headstart.runtime import bundle_host
    from headstart.runtime.bundle import Artefact, Bundle
    from headstart.runtime.static import TARGETS

    bundle, rows, said = Bundle(Path(directory)), [], []
    there = tuple(target for target in TARGETS if bundle.folders(target))
    if not there and not targets:
        raise ValueError(f"bundle: {directory} holds nothing")
    pythons = bundle_host.pythons(bundle.path) or ["any Python"]
    for target in resolve_targets(targets or there):
        found = reach(TARGETS[target], models)
        held, others = 0, set(bundle.folders(target))
        for key, program in found.programs.items():
            others.discard(bundle.folder(program))
            asked = f"{program.name}, key {key}, {found.asked[key]}"
            try:
                compiled = bundle.compiled(program)
                if compiled is None:
                    said.append(f"missing for {target}: {asked}")
                    continue
                lacking = bundle.without_launcher(program, compiled, pythons)
            except ValueError as error:
                said.append(str(error))
                continue
            said += [f"missing for {target}: what {x} launches with: {asked}" for x in lacking]
            held += not lacking
        for folder in sorted(others):
            try:
                Artefact.read(folder).check()
            except ValueError as error:
                said.append(str(error))
        share = f"{100 * held / len(found.programs):.1f} %"
        rows.append((target, len(found.programs), held, share, len(others), len(found.declined)))
    print_table(("target", "reachable", "held", "share", "others", "declined calls"), rows)
    for line in said:
        console().print(line, markup=False)
    ctx.exit(1 if said else 0)


@command.command("list")
@click.argument("directory", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Everything that the artefacts say.")
def list_programs(directory: str, as_json: bool) -> None:
    """Print what DIR holds."""
    from headstart.cli.printing import binary_size, print_json, print_table
    from headstart.runtime.bundle import Bundle

    found = list(Bundle(Path(directory)).artefacts())
    if as_json:
        print_json([dict(artefact.fields) for artefact in found])
        return
    print_table(
        ("kernel", "target", "key", "Triton", "size"),
        [
            (fields["kernel"], fields["target"], fields["key"][:12], fields["triton"], size)
            for artefact in found
            for fields in [artefact.fields]
            for size in [binary_size(artefact.program.stat().st_size)]
        ],
    )


@contextmanager
def _progress(target: str) -> Iterator[Any]:
    """A line on a terminal's stderr that says how far the compiling is."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(done: int, count: int, name: str) -> None:
        print(f"\r\x1b[K{target}: {done} of {count}, {name}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr)
