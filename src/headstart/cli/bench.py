"""`headstart bench`: arms against each other on one case, launch by launch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from headstart.cli.commands import Group, need
from headstart.cli.devices import device_of
from headstart.cli.options import Seconds, device_option, json_option, options_of, seed_option
from headstart.cli.progress import progress_words

if TYPE_CHECKING:
    from headstart.evidence.arms.sources import Sources
    from headstart.evidence.bench_jobs import Job, Lost
    from headstart.evidence.benching import ArmResult, CaseResult
    from headstart.evidence.cases import Case
    from headstart.evidence.stages import StagesResult
    from headstart.evidence.timing import Ceilings


ELSEWHERE = {
    "host": "headstart.cli.bench_host",
    "model": "headstart.cli.bench_model",
    "serve": "headstart.cli.bench_serve",
    "trace": "headstart.cli.bench_trace",
}
"""Subcommand -> the module that has it, as an attribute of the same name."""
ROUNDS = click.IntRange(3, 10_000)
"""An interval resamples all of them two thousand times at once."""


class WithDefault(Group):
    """A group whose command `run` may be left out: `bench CASE` is `bench run CASE`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the subcommands."""
        return sorted([*self.commands, *ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand called `cmd_name`, or None."""
        if cmd_name in ELSEWHERE:
            return getattr(importlib.import_module(ELSEWHERE[cmd_name]), cmd_name)
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `run` in front of what names no command."""
        if args and args[0] not in self.list_commands(ctx) and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=WithDefault)
def command() -> None:
    """Time arms in one process, interleaved, after checking each: `bench CASE ... --arms ...`.

    `bench run --help` tells the options; `run` itself may be left out.
    """


def _shared(function: Callable[..., None]) -> Callable[..., None]:
    """Options of `run` and `stages`."""
    for option in (
        json_option,
        seed_option("Of the inputs."),
        device_option(),
    ):
        function = option(function)
    return function


@command.command("run")
@click.argument("case_ids", metavar="CASE[=A,B,...]...", nargs=-1, required=True)
@click.option(
    "--arms",
    default="headstart",
    show_default=True,
    metavar="A,B,...",
    help="Of every CASE that names none of its own: "
    "headstart, hopper, triton, torch, reference, reproducible, fla, flashinfer, flashqla, "
    "fa4, sdpa, flex, sglang, sglang-unified, transformers, unbounded or unbounded:reproducible "
    "(attention's kernels without their bounds), or git revisions (HEAD, main~5, main~5:torch); "
    "each also as ARM@CASE, on another case. The first is what others are compared with.",
)
@click.option("--rounds", type=ROUNDS, default=60, show_default=True)
@click.option(
    "--clock",
    type=click.Choice(("auto", "graph", "events")),
    default="auto",
    show_default=True,
    help="On a GPU: replay captured graphs, or time calls.",
)
@click.option(
    "--check",
    "check",
    default="2",
    show_default=True,
    metavar="N|all",
    help="Groups of heads whose outputs are checked first.",
)
@click.option("--no-noise-floor", is_flag=True, help="Do not enter the first arm twice.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Above 1: compile and check so many cases at once, each in a process of its own, and then "
    "time them one by one.",
)
@click.option(
    "--limit",
    type=Seconds(1),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="With --jobs: of so many cases' preparation, and of the timing of one.",
)
@_shared
@click.pass_context
def run(
    ctx: click.Context,
    case_ids: tuple[str, ...],
    arms: str,
    rounds: int,
    clock: str,
    check: str,
    no_noise_floor: bool,
    jobs: int,
    limit: float,
    device: str | None,
    seed: int,
    json_file: str | None,
) -> None:
    """Time CASEs under every arm. Exits with 1 if an arm's output is wrong or an arm failed."""
    need("evidence", "pydantic", "numpy")
    from headstart.evidence import runs
    from headstart.evidence.arms.sources import Sources
    from headstart.evidence.bench_jobs import Job, Lost, run_jobs

    if check != "all" and not (check.isdecimal() and int(check)):
        raise ValueError(f"check: expected a positive number or all, got {check!r}")
    if json_file is not None:
        runs.expect_writable(json_file)
    chosen = [
        (case_of(id), names_of(own if its else arms)) for id, its, own in map(_parts, case_ids)
    ]
    place = device_of(device)
    if clock == "graph" and place.type != "cuda":
        raise ValueError(f"clock: graph needs a GPU, not {place}")
    wanted = [
        Job(
            case=case.id,
            arms=names,
            device=str(place),
            seed=seed,
            rounds=rounds,
            clock=clock,
            groups=None if check == "all" else int(check),
            noise_floor=not no_noise_floor,
            # Cases that need the same program then seldom compile it at the same time.
            first=number if jobs > 1 else 0,
        )
        for number, (case, names) in enumerate(chosen)
    ]
    results: list[CaseResult] = []
    lost = 0
    with Sources(tuple(dict.fromkeys(name for _, names in chosen for name in names))) as sources:
        if jobs > 1:
            found = run_jobs(wanted, jobs, limit, progress_words("bench"))
        else:
            found = _one_by_one(wanted, sources)
        for job, result in found:
            if isinstance(result, Lost):
                print(f"headstart: {job.case}: {result}", file=sys.stderr)
                lost += 1
                continue
            results.append(result)
            _print_case(result)
            if json_file is not None:  # after every case: a run that is cut short is not lost
                runs.save(json_file, "bench", results, options_of(ctx))
    bad = any(arm.status in ("wrong", "failed") for result in results for arm in result.arms)
    ctx.exit(1 if bad or lost else 0)


def _one_by_one(jobs: Sequence[Job], sources: Sources) -> Iterator[tuple[Job, CaseResult | Lost]]:
    """Every job with its result, in this process; a lost device ends them."""
    import torch

    from headstart.evidence.bench_jobs import Lost
    from headstart.evidence.benching import DeviceLost, bench_case
    from headstart.evidence.timing import measure_ceilings

    ceilings: dict[str, Ceilings] = {}
    for number, job in enumerate(jobs):
        case, device = case_of(job.case), torch.device(job.device)
        if case.dtype not in ceilings:
            ceilings[case.dtype] = measure_ceilings(device, case.torch_dtype)
        try:
            yield (
                job,
                bench_case(
                    case,
                    job.arms,
                    sources,
                    device=device,
                    seed=job.seed,
                    rounds=job.rounds,
                    clock=job.clock,
                    groups=job.groups,
                    noise_floor=job.noise_floor,
                    ceilings=ceilings[case.dtype],
                    progress=progress_words(case.id),
                ),
            )
        except DeviceLost as lost:
            left = ", ".join(other.case for other in jobs[number + 1 :]) or "no other case"
            yield job, Lost(f"{lost}; not run: {left}")
            return


@command.command()
@click.argument("case_ids", metavar="CASE...", nargs=-1, required=True)
@click.option("--arms", default="headstart", show_default=True, metavar="A,B,...")
@click.option("--against", metavar="ARM", help="Compare with this arm; by default the first.")
@click.option("--rounds", type=ROUNDS, default=24, show_default=True)
@click.option("--top", type=click.IntRange(min=0), default=8, show_default=True, help="Kernels.")
@_shared
@click.pass_context
def stages(
    ctx: click.Context,
    case_ids: tuple[str, ...],
    arms: str,
    against: str | None,
    rounds: int,
    top: int,
    device: str | None,
    seed: int,
    json_file: str | None,
) -> None:
    """Where the time of a call goes: kernels, host gap, launches, copies; with variants.

    Exits with 1 if an arm failed.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.cli.printing import print_table
    from headstart.evidence import runs
    from headstart.evidence.arms import ARMS
    from headstart.evidence.stages import stages_of_case

    if json_file is not None:
        runs.expect_writable(json_file)
    names = names_of(arms)
    for name in names:
        if name not in ARMS:
            raise ValueError(f"arm: expected one of {list(ARMS)}, got {name!r}")
    place = device_of(device)
    results: list[StagesResult] = []
    for case in [case_of(id) for id in case_ids]:
        found = stages_of_case(
            case,
            names,
            device=place,
            against=against,
            seed=seed,
            rounds=rounds,
            progress=progress_words(case.id),
        )
        results += found
        _print_stages(found, top)
        if json_file is not None:
            runs.save(json_file, "stages", results, options_of(ctx))
    print_table(STAGE_COLUMNS, [_stage_row(result) for result in results], title="Summary")
    ctx.exit(1 if any(result.failed for result in results) else 0)


STAGE_COLUMNS = (
    "case",
    "arm",
    "variant",
    "device us",
    "wall us",
    "launch us",
    "gap us",
    "launches",
    "to host",
    "scratch MiB",
    "device x",
    "wall x",
)


def _stage_row(result: StagesResult) -> tuple[str, ...]:
    from headstart.evidence.arms import named

    name = named(result.arm, result.served)
    if result.sentence:
        return (result.case, name, result.variant, *["-"] * 8, result.sentence[:120])

    def number(value: float | None, digits: str = ".1f") -> str:
        return "-" if value is None else format(value, digits)

    # Speedups: how many times faster than the arm compared with.
    wall = "-"
    if result.against is not None:
        r = result.against
        wall = f"{1 / r.ratio:.3f} [{1 / r.high:.3f}, {1 / r.low:.3f}]"
    return (
        result.case,
        name,
        result.variant,
        number(result.device_us),
        number(result.wall_us),
        number(result.launch_us),
        number(result.gap_us),
        number(result.launches, "g"),
        number(result.copies_to_host, "g"),
        number(None if result.scratch is None else result.scratch / 2**20),
        "-" if result.device_ratio is None else f"{1 / result.device_ratio:.3f}",
        wall,
    )


def _print_stages(found: list[StagesResult], top: int) -> None:
    """The kernels of each arm on the case as it stands."""
    from headstart.cli.printing import print_stages
    from headstart.evidence.stages import AS_IT_STANDS

    for result in found:
        if top and result.stages and result.variant == AS_IT_STANDS:
            title = f"{result.case}, {result.arm} on {result.device}"
            print_stages(result.stages[:top], result.device_us, title)
            print()


@command.command()
@click.option("--experiments", type=click.IntRange(10, 1_000_000), default=400, show_default=True)
@click.option("--rounds", type=ROUNDS, default=60, show_default=True)
@click.option("--planted", type=float, default=0.03, show_default=True, help="To be found.")
@json_option
@click.pass_context
def simulate(
    ctx: click.Context, experiments: int, rounds: int, planted: float, json_file: str | None
) -> None:
    """Check the statistics against a clock whose truth is known.

    Exits with 1 unless an interval of an arm against itself holds 1 in 92 to 98 % of the
    experiments and the planted difference is found in 95 %.
    """
    need("evidence", "pydantic", "numpy")
    from headstart.cli.printing import print_table
    from headstart.evidence import runs
    from headstart.evidence.simulated_clock import simulate as run_simulation

    if json_file is not None:
        runs.expect_writable(json_file)
    if not 0 < planted < 1:
        raise ValueError(f"planted: expected a share between 0 and 1, got {planted}")
    found = run_simulation(experiments=experiments, rounds=rounds, planted=planted)
    print_table(
        ("interval", "experiments", "rounds", "coverage of 1", f"{planted:.1%} found", "width"),
        [
            (
                one.interval,
                one.experiments,
                one.rounds,
                f"{one.coverage:.1%}",
                f"{one.found:.1%}",
                f"{one.width:.2%}",
            )
            for one in found
        ],
    )
    if json_file is not None:
        runs.save(json_file, "simulate", found, options_of(ctx))
    if not found[0].kept:
        print(f"headstart: the interval that bench reports: {found[0].verdict}", file=sys.stderr)
    ctx.exit(0 if found[0].kept else 1)


def _print_case(result: CaseResult) -> None:
    from headstart.cli.printing import console, print_table

    print_table(
        (
            "arm",
            "status",
            "device ms",
            "host us",
            "wall ms",
            "of floor",
            "ratio",
            "wins",
            "error",
            "worst row",
        ),
        [_row(arm) for arm in result.arms],
        title=f"{result.case} on {result.device}, {result.dtype}, {result.tokens:,} tokens, "
        f"{result.rounds} rounds, clock {result.clock or '-'}, flushed {result.flushed or '-'}; "
        f"floor {result.floor_ms:.4f} ms at {result.ceilings.copy_rate / 1e12:.3f} TB/s and "
        f"{result.ceilings.matmul_rate / 1e12:.2f} TFLOP/s",
    )
    if result.clock_note:
        console().print(f"no graphs: {result.clock_note}", markup=False)
    for arm in result.arms:
        for words in (arm.sentence, arm.note):
            if words:
                console().print(f"{arm.arm}: {words}", markup=False)
    print()


def _row(arm: ArmResult) -> tuple[str, ...]:
    from headstart.evidence.arms import named

    error, ratio = arm.error, arm.ratio

    def number(value: float | None, digits: str) -> str:
        return "-" if value is None else format(value, digits)

    return (
        named(arm.arm, arm.served),
        arm.status,
        number(arm.median_ms, ".4f"),
        number(None if arm.host_ms is None else 1000 * arm.host_ms, ".0f"),
        number(arm.wall_ms, ".4f"),
        number(arm.floor_share, ".1%"),
        "-" if ratio is None else ratio.words(4),
        "-" if ratio is None else f"{ratio.wins}/{ratio.rounds}",
        number(None if error is None else error.last_half, ".2e"),
        number(None if error is None else error.row_error, ".2e"),
    )


def _parts(case: str) -> tuple[str, str, str]:
    """CASE=ARMS, taken apart."""
    return case.partition("=")


def names_of(names: str) -> tuple[str, ...]:
    """Names of arms, taken apart at commas; ValueError unless there is one, each once."""
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    if len(set(found)) != len(found) or not found:
        raise ValueError(f"arms: expected one or more, each once, got {names!r}")
    return found


def case_of(id: str) -> Case:
    """A case of an operation; ValueError for an unknown one and for a whole model."""
    from headstart.evidence import cases

    case = cases.get(id)
    if case.op == "model":
        raise ValueError(f"case: {id} is a whole model; bench runs the operations' cases")
    return case
