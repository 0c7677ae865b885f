"""The page: one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headstart.evidence.bundles.records import Built, Checked, FirstCall
from headstart.evidence.models.records import ModelResult
from headstart.evidence.mutants import Found
from headstart.evidence.report import bundles, figures, models, tables, traffic, tuning
from headstart.evidence.report.reading import (
    KINDS,
    Compiled,
    RunFile,
    benched,
    host_times,
    results,
)
from headstart.evidence.report.summary import verdict
from headstart.evidence.report.tables import Table
from headstart.evidence.simulated_clock import Promise
from headstart.evidence.stages import StagesResult
from headstart.evidence.tile_bounds import Count, Saving
from headstart.evidence.traffic.records import HitBits, HitShare, Replayed, Workload
from headstart.evidence.tuning.results import KeyResult, LeftOut
from headstart.evidence.verify.bits import Bits
from headstart.evidence.verify.soak import Soak
from headstart.evidence.verify.transcript import Transcript
from headstart.evidence.verify.verification import Verification

OPERATIONS = {
    "gated_delta_rule": "Gated delta rule",
    "extend_attention": "Extend attention",
    "causal_conv1d": "Short convolution",
}


@dataclass(frozen=True)
class Picture:
    """A figure and what to see in it."""

    title: str
    caption: str
    svg: Markup


@dataclass
class Section:
    """A part of the page; id: its anchor. where: the device, if it is about one."""

    id: str
    title: str
    lead: str
    where: str = ""
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def draw(self, title: str, caption: str, make: Callable[[str], Markup | None]) -> None:
        """Add a figure, unless it has no points."""
        drawn = make(f"{self.id}: {title}")
        if drawn is not None:
            self.pictures.append(Picture(title, caption, drawn))


def page(files: Sequence[RunFile]) -> str:
    """The page about these runs, as HTML; ValueError where there is none.

    It refers to no other file and to no address. Sections appear for what the runs hold.
    """
    if not files:
        raise ValueError("report: expected one run or more, got none")
    ordered = sorted(files, key=lambda file: list(KINDS).index(file.kind))
    sections = [section for make in SECTIONS for section in make(files)]
    environment = Environment(
        loader=PackageLoader("headstart.evidence.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        verdicts=[(file, verdict(file)) for file in ordered], sections=sections
    )


def _times(files: Sequence[RunFile]) -> list[Section]:
    found = []
    for index, ((device, op, arm), group) in enumerate(benched(files).items(), 1):
        section = Section(
            f"times-{index}",
            f"Times: {OPERATIONS.get(op, op)}" + (f", to {arm}" if arm != "headstart" else ""),
            f"All arms of a case run in one process, launch by launch in turn, after each has been "
            f"held against float64. Ratios are to {arm}, paired by round; its noise floor is "
            f"{arm} entered a second time. Of a case that several runs timed, the latest counts, "
            f"with arms that only a run before it had.",
            where=device,
        )
        section.draw(
            "Time against prompt length",
            "Cases that differ in nothing but their length. Dashed: what no implementation can "
            "beat at the rates the device reached in the same run.",
            lambda name, group=group: figures.time_figure(group, name),
        )
        section.draw(
            f"Ratios to {arm}",
            "Median over the rounds of time by time, with its 95 % interval. An interval that "
            "holds 1 decides nothing.",
            lambda name, group=group: figures.ratio_figure(group, name),
        )
        section.draw(
            "Distance to the floor",
            "The floor counts every input read once, every output written once, and the "
            "operations of the cheapest known form.",
            lambda name, group=group: figures.floor_figure(group, name),
        )
        section.tables += [tables.times(group), tables.conditions(group)]
        found.append(section)
    return found


def _stages(files: Sequence[RunFile]) -> list[Section]:
    found = [one for _, one in results(files, StagesResult)]
    if not found:
        return []
    section = Section(
        "stages",
        "Stages: where the time of a call goes",
        "Kernel times from a profiler, wall and launch times of single calls on an idle device. "
        "The gap is what the device waits for the host.",
    )
    section.draw(
        "Computing and waiting",
        "Cases as they stand.",
        lambda name: figures.stage_figure(found, name),
    )
    section.tables += [tables.stages(found), tables.kernels(found)]
    return [section]


def _host(files: Sequence[RunFile]) -> list[Section]:
    found = host_times(files)
    if not found:
        return []
    section = Section(
        "host",
        "Host time: how long a call keeps the host",
        "Medians of steady calls, their outputs not checked: in a row without a wait for the "
        "device, alone on an idle device until they returned and until their work was done, and "
        "the same after unrelated work in the host's caches. The latest run counts.",
    )
    section.tables.append(tables.host(found))
    return [section]


def _errors(files: Sequence[RunFile]) -> list[Section]:
    found = [one for _, one in results(files, Verification)]
    if not found:
        return []
    section = Section(
        "errors",
        "Errors",
        "Every output at full length against the truth, computed in float64 from the same rounded "
        "inputs unless another reference is named.",
    )
    section.draw(
        "Errors in units of their tolerance",
        "A point for each case and implementation: the largest of relative L2, that of the last "
        "half and the worst row, by its own tolerance.",
        lambda name: figures.error_figure(found, name),
    )
    section.tables.append(tables.errors(found))
    if any(one.declined or one.notes for one in found):
        section.tables.append(tables.left_out(found))
    return [section]


def _bits(files: Sequence[RunFile]) -> list[Section]:
    checks = [one for _, one in results(files, Bits)]
    replays = [one for _, one in results(files, Transcript)]
    soaks = [one for _, one in results(files, Soak)]
    if not checks and not replays and not soaks:
        return []
    section = Section(
        "bits",
        "Bits",
        "A row depends on its own sequence's inputs and positions and on nothing else: not on "
        "splits, hits, batches, heads, drafts or pages.",
    )
    section.tables += [tables.bits(checks)] if checks else []
    section.tables += [tables.transcripts(replays)] if replays else []
    section.tables += [tables.soaks(soaks)] if soaks else []
    return [section]


def _mutants(files: Sequence[RunFile]) -> list[Section]:
    found = [one for _, one in results(files, Found)]
    if not found:
        return []
    section = Section(
        "mutants",
        "Mutants",
        "Known-bad builds of the package. A check counts once it has failed on one.",
    )
    section.draw(
        "How clearly they fail",
        "The check's figure by its tolerance. A gate on the cosine at 0.999 would let some live.",
        lambda name: figures.mutant_figure(found, name),
    )
    section.tables.append(tables.mutants(found))
    return [section]


def _tiles(files: Sequence[RunFile]) -> list[Section]:
    counts = [one for _, one in results(files, Count)]
    savings = [one for _, one in results(files, Saving)]
    if not counts and not savings:
        return []
    section = Section(
        "tiles",
        "Tile bounds",
        "The first and last key tile that a block of queries must visit, held against the literal "
        "mask key by key.",
    )
    section.tables += [tables.tile_counts(counts)] if counts else []
    section.tables += [tables.tile_savings(savings)] if savings else []
    return [section]


def _static(files: Sequence[RunFile]) -> list[Section]:
    found = [one for _, one in results(files, Compiled)]
    if not found:
        return []
    section = Section(
        "kernels", "Kernels", "Cross-compiled without a device. Budgets are data, by target."
    )
    section.tables.append(tables.compiled(found))
    return [section]


def _statistics(files: Sequence[RunFile]) -> list[Section]:
    found = [one for _, one in results(files, Promise)]
    if not found:
        return []
    section = Section(
        "statistics",
        "Statistics",
        "The intervals of ratios, tried on a clock with two performance states, drift, scatter and "
        "rare slow launches. Times are compared by the percentile form.",
    )
    section.tables.append(tables.statistics(found))
    return [section]


def _traffic(files: Sequence[RunFile]) -> list[Section]:
    shares = [one for _, one in results(files, HitShare)]
    replays = [one for _, one in results(files, Replayed)]
    bits = [one for _, one in results(files, HitBits)]
    timed = [one for _, one in results(files, Workload)]
    if not (shares or replays or bits or timed):
        return []
    section = Section(
        "traffic",
        "Traffic",
        "A request trace against a prefix cache. What is below the trace's blocks of 512 tokens, "
        "and all outputs, is synthetic text by one rule; figures from ids alone need no such rule.",
    )
    section.draw(
        "What prefixes are found, by budget",
        "Of all prompt tokens. Dashed: a state kept at every 64 tokens and no bound. Dotted: from "
        "the trace's ids alone.",
        lambda name: traffic.share_figure(shares, name),
    )
    section.draw(
        "How much sooner the first token comes",
        "A point for each request with a hit, both runs with their own layers in fixed tiles.",
        lambda name: traffic.served_figure(replays, name),
    )
    section.draw(
        "What a grain costs in the operations",
        "All steps of the same requests, batched under a token budget.",
        lambda name: traffic.workload_figure(timed, name),
    )
    section.tables += [traffic.shares(shares)] if shares else []
    section.tables += [traffic.replays(replays)] if replays else []
    section.tables += [traffic.hit_bits(bits)] if bits else []
    section.tables += [traffic.workloads(timed)] if timed else []
    return [section]


def _models(files: Sequence[RunFile]) -> list[Section]:
    found = [one for _, one in results(files, ModelResult)]
    if not found:
        return []
    section = Section(
        "models",
        "Models",
        "Prefill and first token of whole models, arms in turn, each compared with the first arm "
        "before it was timed. The bound is how many times faster an arm could be if its attention "
        "layers took no time.",
    )
    section.tables += [models.times(found), models.split(found)]
    return [section]


def _configurations(files: Sequence[RunFile]) -> list[Section]:
    found = [one for _, one in results(files, KeyResult)]
    left = [one for _, one in results(files, LeftOut)]
    if not found and not left:
        return []
    section = Section(
        "configurations",
        "Configurations",
        "The rule's configuration of a kernel beside those one change away, in turn, each held "
        "against the rule's outputs first. Regret is how much longer the rule's takes than the "
        "fastest. The ranking has moved where another than the chosen one is faster beyond doubt.",
    )
    if found:
        section.tables += [tuning.keys(found), tuning.points(found), tuning.trials(found)]
    section.tables += [tuning.left_out(left)] if left else []
    return [section]


def _bundles(files: Sequence[RunFile]) -> list[Section]:
    built = [one for _, one in results(files, Built)]
    checked = [one for _, one in results(files, Checked)]
    first = results(files, FirstCall)
    if not built and not checked and not first:
        return []
    section = Section(
        "bundles",
        "Bundles",
        "Programs compiled ahead of time, without a device. A first call is that of a fresh "
        "process that may compile nothing, with an empty cache of Triton's, on inputs that are "
        "there.",
    )
    section.tables += [bundles.built(built)] if built else []
    section.tables += [bundles.checked(checked)] if checked else []
    section.tables += [bundles.first_calls(first)] if first else []
    return [section]


def _environment(files: Sequence[RunFile]) -> list[Section]:
    section = Section("environment", "Environment", "Where, when and how each run was made.")
    section.tables.append(tables.environments(files))
    return [section]


SECTIONS = (
    _times,
    _stages,
    _host,
    _errors,
    _bits,
    _mutants,
    _tiles,
    _static,
    _statistics,
    _traffic,
    _models,
    _configurations,
    _bundles,
    _environment,
)
