"""`headstart bundle`: kernels compiled ahead of time into a directory, without a GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from headstart.cli.commands import Group, need
from headstart.cli.options import cores, device_option, json_option, options_of
from headstart.cli.progress import progress_count

MODELS = click.option(
    "--models",
    multiple=True,
    metavar="M",
    help="Only what these call: catalogue, qwen3-next-80b, gpt-oss-20b, ...; by default all.",
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
@json_option
@click.pass_context
def build(
    ctx: click.Context,
    targets: tuple[str, ...],
    models: tuple[str, ...],
    jobs: int | None,
    pythons: tuple[str, ...],
    output: str,
    json_file: str | None,
) -> None:
    """Compile every program that the models' calls can launch, and keep it in DIR.

    Programs that DIR holds already are left. Exits with 1 when one does not compile.
    """
    import triton

    from headstart.cli.printing import console, print_table
    from headstart.evidence.cases.profiles import profile, reach
    from headstart.evidence.static.collect import resolve_targets
    from headstart.runtime.bundle import Bundle
    from headstart.runtime.bundle_build import build
    from headstart.runtime.bundle_host import Python
    from headstart.runtime.static import TARGETS

    if not output:
        raise ValueError("output: expected a directory, got ''")
    if json_file is not None:
        place = Path(output).resolve()
        _expect_record(json_file, [place, *place.parents])
    bundle, found = Bundle(Path(output)), []
    most = jobs or cores()
    serving = [Python.at(python) for python in pythons]
    wanted = resolve_targets(targets)
    for model in models:
        profile(model)  # there is one
    bundle.make()  # rather than find out after minutes
    for target in wanted:
        began = time.perf_counter()
        reached = reach(TARGETS[target], models)
        programs = list(reached.programs.values())
        with progress_count(target) as progress:
            built = build(bundle, programs, most, progress, serving)
        failed = [
            f"FAILS for {target}: {program.name}, {reached.asked[program.key]}: {error}"
            for program, _, error in built
            if error
        ]
        found.append(
            {
                "target": target, "triton": triton.__version__, "models": models,
                "programs": len(programs), "compiled": len(built) - len(failed),
                "before": len(programs) - len(built), "seconds": time.perf_counter() - began,
                "compiling": sum(one.seconds for one in built), "jobs": most, "failed": failed,
            }
        )  # fmt: skip
        if json_file is not None:
            _keep(ctx, json_file, "Built", found)
    print_table(
        ("target", "programs", "there before", "compiled", "seconds"),
        [
            (one["target"], one["programs"], one["before"], one["compiled"],
             round(one["seconds"], 1))
            for one in found
        ],
    )  # fmt: skip
    said = [line for one in found for line in one["failed"]]
    for line in said:
        console().print(line, markup=False)
    ctx.exit(1 if said else 0)


@command.command()
@click.argument("directory", metavar="DIR")
@click.option(
    "--target", "targets", multiple=True, metavar="T", help="Only these; by default all in DIR."
)
@MODELS
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    directory: str,
    targets: tuple[str, ...],
    models: tuple[str, ...],
    json_file: str | None,
) -> None:
    """Compare DIR with what the models' calls launch; every artefact is read and hashed.

    Exits with 1 when a program is missing, stale or damaged, or what a Python of DIR launches it
    with.
    """
    import triton

    from headstart.cli.printing import console, print_table
    from headstart.evidence.cases.profiles import reach
    from headstart.evidence.static.collect import resolve_targets
    from headstart.runtime import bundle_host
    from headstart.runtime.bundle import Artefact, Bundle
    from headstart.runtime.static import TARGETS

    if json_file is not None:
        _expect_record(json_file)
    bundle, checked = Bundle(Path(directory)), []
    there = tuple(target for target in TARGETS if bundle.folders(target))
    if not there and not targets:
        raise ValueError(f"bundle: {directory} holds nothing")
    pythons = bundle_host.pythons(bundle.path) or ["any Python"]
    for target in resolve_targets(targets or there):
        found = reach(TARGETS[target], models)
        held, others, said = 0, set(bundle.folders(target)), []
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
        checked.append(
            {
                "target": target, "triton": triton.__version__, "models": models,
                "reachable": len(found.programs), "held": held, "others": len(others),
                "declined": len(found.declined), "said": said,
            }
        )  # fmt: skip
    if json_file is not None:
        _keep(ctx, json_file, "Checked", checked)
    print_table(
        ("target", "reachable", "held", "share", "others", "declined calls"),
        [
            (one["target"], one["reachable"], one["held"],
             f"{100 * one['held'] / one['reachable']:.1f} %", one["others"], one["declined"])
            for one in checked
        ],
    )  # fmt: skip
    told = [line for one in checked for line in one["said"]]
    for line in told:
        console().print(line, markup=False)
    ctx.exit(1 if told else 0)


@command.command("list")
@click.argument("directory", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Everything that the artefacts say.")
@click.pass_context
def list_programs(ctx: click.Context, directory: str, as_json: bool) -> None:
    """Print what DIR holds.

    Exits with 1 where a description is damaged or a program is gone, and names it on standard
    error.
    """
    from headstart.cli.printing import binary_size, print_json, print_table
    from headstart.runtime.bundle import Artefact, Bundle

    found, damaged = [], False
    for folder in Bundle(Path(directory)).folders():
        try:
            artefact = Artefact.read(folder)
            found.append((artefact.fields, artefact.size()))
        except ValueError as error:
            damaged = True
            print(f"headstart: {error}", file=sys.stderr)
    if as_json:
        print_json([dict(fields) for fields, _ in found])
    else:
        print_table(
            ("kernel", "target", "key", "Triton", "size"),
            [
                (one["kernel"], one["target"], one["key"][:12], one["triton"], binary_size(size))
                for one, size in found
            ],
        )
    ctx.exit(1 if damaged else 0)


@command.command()
@click.argument("directory", metavar="DIR")
@click.option("--call", "names", multiple=True, metavar="NAME", help="Only these; by default all.")
@device_option()
@json_option
@click.pass_context
def first(
    ctx: click.Context,
    directory: str,
    names: tuple[str, ...],
    device: str | None,
    json_file: str | None,
) -> None:
    """Time first calls from DIR alone, each in a process of its own that may compile nothing.

    Exits with 1 when one takes longer than 0.3 seconds or is not made.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.cli.devices import device_of
    from headstart.cli.printing import console, print_table
    from headstart.evidence.bundles.waiting import CALLS, first_call
    from headstart.runtime.bundle import Bundle
    from headstart.runtime.checks import expect_choice

    for name in names:
        expect_choice("call", name, tuple(CALLS))
    if json_file is not None:
        _expect_record(json_file)
    place, bundle = device_of(device), Bundle(Path(directory))
    bundle.folders()  # there is one
    found = [first_call(name, bundle.path, str(place)) for name in names or CALLS]
    if json_file is not None:
        _keep(ctx, json_file, "FirstCall", [one.model_dump() for one in found])
    print_table(
        ("call", "torch s", "start s", "package s", "first s", "second ms", "loaded", "compiled"),
        [
            (one.call, f"{one.torch:.2f}", f"{one.start:.2f}", f"{one.package:.3f}",
             f"{one.first:.3f}", f"{1000 * one.second:.2f}", one.loaded, one.compiled)
            for one in found
        ],
    )  # fmt: skip
    for one in found:
        if one.failed:
            console().print(f"{one.call}: {one.failed}", markup=False)
    ctx.exit(0 if all(one.good for one in found) else 1)


def _expect_record(file: str, sources: Sequence[Path] = ()) -> None:
    """Raise unless a record can be written there, and is none of what the command needs."""
    need("evidence", "pydantic", "numpy")
    from headstart.evidence.files import expect_writable

    expect_writable(file, sources=sources)


def _keep(ctx: click.Context, file: str, kind: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Write what was found of this kind of record."""
    from headstart.evidence import runs
    from headstart.evidence.bundles import records

    runs.save(file, "bundle", [getattr(records, kind)(**one) for one in found], options_of(ctx))
