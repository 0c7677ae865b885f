"""The tables of a report: rows of cells, ready to be shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from headstart.evidence.arms import named
from headstart.evidence.host import HostResult
from headstart.evidence.mutants import Found
from headstart.evidence.paired import Ratio
from headstart.evidence.report.reading import Benched, Compiled, RunFile
from headstart.evidence.stages import AS_IT_STANDS, StagesResult
from headstart.evidence.tile_bounds import Count, Saving
from headstart.evidence.verify.bits import Bits
from headstart.evidence.verify.soak import Soak
from headstart.evidence.verify.transcript import Transcript
from headstart.evidence.verify.verification import Verification


class Cell(NamedTuple):
    """What stands in a cell; tone: "", "good", "bad", "win" or "quiet"."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Columns, and rows as long; folded: shown only when asked for."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    folded: bool = False

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers only."""
        return tuple(all(NUMBER.fullmatch(row[i].text) for row in self.rows)
                     for i in range(len(self.columns)))  # fmt: skip


NONE = Cell("-", "quiet")


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, folded: bool = False
) -> Table:
    """A table of cells, strings and numbers (None: a dash)."""
    return Table(title, tuple(columns), tuple(tuple(map(_cell, row)) for row in rows), folded)


def number(value: float | None, form: str) -> Cell:
    """A number in a format; None is a dash."""
    return NONE if value is None else Cell(format(value, form))


def interval(ratio: Ratio | None, tone: str = "") -> Cell:
    """A ratio with its 95 % interval; None is a dash."""
    return NONE if ratio is None else Cell(ratio.words(), tone)


def times(group: Sequence[Benched]) -> Table:
    """Every arm of every case, timed or not."""
    rows = []
    for one in group:
        for arm in one.result.arms:
            error = arm.error
            rows.append(
                (
                    one.result.case,
                    f"{one.result.tokens:,}",
                    named(arm.arm, arm.served),
                    Cell(arm.status, "" if arm.status == "timed" else _tone(arm.status)),
                    number(arm.median_ms, ".4f"),
                    number(one.floors(arm), ".1f"),
                    interval(arm.ratio, "win" if one.clear(arm) == "faster" else ""),
                    NONE if arm.ratio is None else f"{arm.ratio.wins}/{arm.ratio.rounds}",
                    number(None if arm.host_ms is None else 1000 * arm.host_ms, ".0f"),
                    number(arm.wall_ms, ".4f"),
                    number(None if error is None else error.last_half, ".2e"),
                    number(None if error is None else error.row_error, ".2e"),
                    "; ".join(filter(None, (arm.sentence, arm.note))),
                )
            )
    columns = ("case", "tokens", "arm", "status", "ms", "x floor", "ratio [95 %]", "wins",
               "host us", "wall ms", "error", "worst row", "note")  # fmt: skip
    return table("Times", columns, rows)


def conditions(group: Sequence[Benched]) -> Table:
    """How the cases were timed, and the ceilings of the device in the same run."""
    rows = [
        (
            one.result.case,
            one.result.dtype,
            one.result.rounds,
            one.result.clock or "-",
            one.result.flushed or "-",
            f"{one.result.ceilings.copy_rate / 1e12:.3f}",
            f"{one.result.ceilings.matmul_rate / 1e12:.2f}",
            f"{one.result.floor_ms:.4f}",
            one.file.name,
        )
        for one in group
    ]
    columns = ("case", "dtype", "rounds", "clock", "flushed", "copy TB/s", "product TFLOP/s",
               "floor ms", "run")  # fmt: skip
    return table("How it was timed", columns, rows, folded=True)


def host(found: Sequence[tuple[RunFile, HostResult]]) -> Table:
    """Every arm of every case whose calls were measured, with the device."""
    rows = [(one.case, *one.cells, file.device(one.device), one.note) for file, one in found]
    return table("Host times", ("case", *HostResult.COLUMNS, "device", "note"), rows)


def errors(found: Sequence[Verification]) -> Table:
    """Every output of every case, the worst on top."""
    rows = [
        (
            one.case,
            one.implementation,
            output.output,
            Cell("right", "good") if output.passed else Cell("WRONG", "bad"),
            _excess(output.excess),
            f"{1 - output.cosine:.1e}",
            f"{output.relative:.1e}",
            number(output.last_half, ".1e"),
            f"{output.row_error:.1e}",
            f"({output.row}, {output.head})",
            output.nan,
            output.unwritten,
            one.against,
        )
        for one, output in sorted(
            ((one, output) for one in found for output in one.outputs),
            key=lambda pair: -pair[1].excess,
        )
    ]
    columns = ("case", "implementation", "output", "", "of tolerance", "1 - cosine", "relative L2",
               "last half", "worst row", "at (row, head)", "NaN", "unwritten",
               "against")  # fmt: skip
    return table("Every output, the worst on top", columns, rows)


def left_out(found: Sequence[Verification]) -> Table:
    """What was not verified, and why."""
    rows = [(one.case, one.implementation, note) for one in found for note in one.notes]
    rows += [(one.case, one.implementation, one.declined) for one in found if one.declined]
    return table("Left out", ("case", "implementation", "why"), rows, folded=True)


def bits(found: Sequence[Bits]) -> Table:
    """Every check of the promised bits."""
    rows = [
        (
            one.op,
            one.implementation,
            one.device,
            one.check,
            one.form,
            one.compared,
            Cell(f"{one.differing:,}", "bad" if one.differing else "good"),
            one.declined or one.where,
        )
        for one in found
    ]
    columns = ("operation", "implementation", "device", "check", "form", "tensors compared",
               "differing", "")  # fmt: skip
    return table("Bits against a cold prefill", columns, rows)


def transcripts(found: Sequence[Transcript]) -> Table:
    """Every transcript of an engine."""
    rows = [
        (
            one.implementation,
            one.form,
            one.device,
            one.seed,
            one.turns,
            one.rows,
            ", ".join(f"{event} {count}" for event, count in sorted(one.events.items())),
            _excess(one.excess),
            Cell(one.failure, "bad") if one.failure else Cell("right", "good"),
        )
        for one in found
    ]
    columns = ("implementation", "form", "device", "seed", "turns", "rows", "events",
               "of tolerance", "")  # fmt: skip
    return table("Transcripts replayed in float64", columns, rows)


def soaks(found: Sequence[Soak]) -> Table:
    """Every soak, and what the process held at each stop."""
    rows = [
        (
            one.implementation,
            one.device,
            one.threads,
            f"{sample.seconds:.0f}",
            sample.laps,
            *(f"{n / 2**20:,.1f}" for n in (sample.host_bytes, sample.device_bytes,
                                            sample.scratch_bytes)),
            Cell("; ".join(one.failures), "bad") if one.failures else Cell("right", "good"),
        )
        for one in found
        for sample in one.samples
    ]  # fmt: skip
    columns = ("implementation", "device", "threads", "seconds", "laps", "host MiB", "device MiB",
               "scratch MiB", "of the whole soak")  # fmt: skip
    return table("What the process held while it soaked", columns, rows)


def mutants(found: Sequence[Found]) -> Table:
    """Every known-bad build, survivors on top."""
    gate = {None: Cell("not asked", "quiet"), True: Cell("lets it live"),
            False: Cell("fails too")}  # fmt: skip
    rows = [
        (
            one.mutant,
            _end(one),
            NONE if one.killed_by is None else _factor(one.excess),
            gate[one.cosine_passes],
            one.fault + (f" Equivalent: {one.equivalent}" if one.equivalent else ""),
            one.op,
            one.implementation,
            "generated" if one.generated else "listed",
            one.device,
        )
        for one in sorted(found, key=lambda one: one.killed_by is not None)
    ]
    columns = ("mutant", "killed by", "over tolerance", "a cosine gate", "fault", "operation",
               "implementation", "kind", "device")  # fmt: skip
    return table("Known-bad builds", columns, rows)


def _end(one: Found) -> Cell:
    if one.killed_by is not None:
        return Cell(one.killed_by)
    return Cell("SURVIVES", "bad") if one.equivalent is None else Cell("equivalent", "quiet")


def tile_counts(found: Sequence[Count]) -> Table:
    """What the brute force over literal masks found."""
    rows = [
        (
            one.rules,
            one.blocks,
            one.visited,
            *(Cell(f"{bad:,}", "bad" if bad else "good")
              for bad in (one.lost, one.idle, one.unmasked)),
            one.lower,
            one.upper,
        )
        for one in found
    ]  # fmt: skip
    columns = ("rules", "blocks", "tiles visited", "left out", "for nothing", "wrongly unmasked",
               "witnesses below", "witnesses above")  # fmt: skip
    return table("Tile bounds against the literal mask", columns, rows)


def tile_savings(found: Sequence[Saving]) -> Table:
    """Key tiles of each case with and without bounds."""
    rows = [
        (one.case, f"{one.tiling[0]} x {one.tiling[1]}", one.before, one.after, f"{one.saved:.1%}")
        for one in found
    ]
    columns = ("case", "rows x keys", "key tiles", "within bounds", "predicted saving")
    return table("Predicted saving", columns, rows)


def stages(found: Sequence[StagesResult]) -> Table:
    """Every arm and variant."""
    rows = [
        (
            one.case,
            named(one.arm, one.served),
            one.variant,
            number(one.device_us, ",.1f"),
            number(one.wall_us, ",.1f"),
            number(one.launch_us, ",.1f"),
            number(one.gap_us, ",.1f"),
            number(one.launches, "g"),
            number(one.copies_to_host, "g"),
            number(None if one.scratch is None else one.scratch / 2**20, ",.1f"),
            interval(one.against),
            "; ".join(filter(None, (one.sentence, one.note))),
        )
        for one in found
    ]
    columns = ("case", "arm", "variant", "device us", "wall us", "launch us", "gap us", "launches",
               "copies to host", "scratch MiB", "wall ratio [95 %]", "note")  # fmt: skip
    return table("Arms and variants", columns, rows)


def kernels(found: Sequence[StagesResult], top: int = 12) -> Table:
    """The stages that take longest, of cases as they stand."""
    rows = [
        (one.case, one.arm, *stage.cells(one.device_us))
        for one in found
        if one.variant == AS_IT_STANDS
        for stage in one.stages[:top]
    ]
    columns = ("case", "arm", "kernel or operator", "times", "us", "share")
    return table(f"Kernels, the {top} longest of each", columns, rows, folded=True)


def compiled(found: Sequence[Compiled]) -> Table:
    """Every configuration on every target, broken budgets on top."""
    rows = [
        (
            one.kernel,
            one.target,
            Cell("; ".join(one.broken), "bad") if one.broken else Cell("fits", "good"),
            *(NONE if value is None else value
              for value in (one.registers, one.vector_spills, one.scalar_spills, one.shared,
                            one.resident_blocks, one.instructions)),
            ", ".join(f"{name} {count}" for name, count in sorted(one.matrix.items())) or "none",
            one.triton,
        )
        for one in sorted(found, key=lambda one: not one.broken)
    ]  # fmt: skip
    columns = ("kernel", "target", "budget", "registers", "vector spills", "scalar spills",
               "shared bytes", "resident blocks", "instructions", "matrix instructions",
               "Triton")  # fmt: skip
    return table("What the compiler makes of each kernel", columns, rows)


def statistics(found: Sequence[Any]) -> Table:
    """What intervals keep against a clock whose truth is known."""
    rows = [
        (
            one.interval,
            one.experiments,
            one.rounds,
            f"{one.coverage:.1%}",
            f"{one.planted:.1%}",
            f"{one.found:.1%}",
            f"{one.width:.2%}",
        )
        for one in found
    ]
    columns = ("interval", "experiments", "rounds", "holds 1", "planted", "found", "mean width")
    return table("Intervals on a simulated clock", columns, rows)


def environments(files: Sequence[RunFile]) -> Table:
    """Where, when and how each run was made."""
    rows = []
    for file in files:
        known = file.run.environment
        versions = [known.version.get(name) for name in ("python", "torch", "triton")]
        variables = [f"{name}={value}" for name, value in known.variable.items()]
        options = [
            f"{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in file.run.options.items()
            if value is not False and value not in (None, [], "")
        ]
        rows.append(
            (
                file.name,
                file.kind,
                f"{file.run.created:%Y-%m-%d %H:%M}",
                file.commit,
                "; ".join(known.device.values()),
                *versions,
                " ".join(variables) or None,
                " ".join(options) or None,
            )
        )
    columns = ("run", "kind", "made (UTC)", "commit", "device", "Python", "torch", "Triton",
               "variables", "called with")  # fmt: skip
    return table("Runs", columns, rows)


def _cell(value: object) -> Cell:
    if isinstance(value, Cell):
        return value
    if value is None:
        return NONE
    return Cell(f"{value:,}" if isinstance(value, int) else str(value))


NUMBER = re.compile(r"-|-?[\d.,]+(e[+-]\d+)?( \[[\d., -]+\]|%| x|/\d+)?")


def _tone(status: str) -> str:
    return "bad" if status in ("wrong", "failed") else "quiet"


def _excess(value: float) -> Cell:
    return Cell(f"{value:.0%}" if isfinite(value) else "no bound", "" if value <= 1 else "bad")


def _factor(value: float) -> Cell:
    return (
        Cell(f"{value:,.{0 if value >= 100 else 1}f} x")
        if isfinite(value)
        else Cell("differs", "quiet")
    )
