"""How far an output is from the truth: figures that no single wrong row can hide in.

Outputs are [rows, heads, vector]: o by (token, head), states by (sequence, head), LSE with vectors
of length 1. The truth comes in pieces, a group of heads at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite, nan, sqrt

import torch

from headstart.evidence.runs import Record
from headstart.evidence.verify.tolerances import COSINE_GATE, Tolerance
from headstart.runtime.checks import dtype_name


class Measured(Record):
    """One output of one case under one implementation, and what is asked of it.

    rows, heads: shape of the output. dtype: of the output.
    cosine: of all values taken as one vector; what weaker gates look at, no figure here.
    relative: |found - truth| / |truth|, L2 over all values.
    last_half: the same over the last half of every sequence's tokens (of the snapshots); None where
        rows are no tokens (states).
    row_error: largest error of one (row, head), relative to the larger of that row and the root
        mean square row of its head; at (row, head).
    nan: NaN values. infinite: values infinite in one of found and truth, or of another sign.
    unwritten: rows that still hold the poison. trespassed: rows of a pool written that are not the
        call's.
    tolerance: most of relative, last_half and row_error, and why. Counts must be 0.
    """

    output: str
    dtype: str
    rows: int
    heads: int
    cosine: float
    relative: float
    last_half: float | None
    row_error: float
    row: int
    head: int
    nan: int
    infinite: int
    unwritten: int
    trespassed: int = 0
    tolerance: Tolerance

    def figures(self) -> dict[str, tuple[float, float]]:
        """Figure -> (value, most that passes)."""
        most = self.tolerance
        found = {
            "relative": (self.relative, most.relative),
            "row error": (self.row_error, most.row),
            "NaN": (float(self.nan), 0.0),
            "infinite": (float(self.infinite), 0.0),
            "unwritten rows": (float(self.unwritten), 0.0),
            "trespassed rows": (float(self.trespassed), 0.0),
        }
        if self.last_half is not None:
            found["last half"] = (self.last_half, most.last_half)
        return found

    @property
    def excess(self) -> float:
        """The largest figure in units of its tolerance: above 1 fails."""
        ratios = [
            value / most if most else (inf if value else 0.0)
            for value, most in self.figures().values()
        ]
        return max((inf if ratio != ratio else ratio for ratio in ratios), default=0.0)

    @property
    def failures(self) -> list[str]:
        """A sentence for each figure above its tolerance."""
        return [
            f"{self.output}: {name} {value:.3g}"
            + (f" > {most:.3g}" if most else "")
            + (f" at row {self.row}, head {self.head}" if name == "row error" else "")
            for name, (value, most) in self.figures().items()
            if not value <= most
        ]

    @property
    def passed(self) -> bool:
        """Whether every figure is within its tolerance."""
        return not self.failures

    @property
    def cosine_passes(self) -> bool:
        """What a gate on the cosine alone would say (a NaN anywhere fails it)."""
        return self.cosine >= COSINE_GATE


@dataclass
class Meter:
    """Takes an output piece by piece and adds up its figures.

    found: [rows, heads, vector], what an implementation gave.
    late: bool [rows], the rows of the last half; None where rows are no tokens.
    unit: least size that errors are taken relative to (1 for an LSE, which may be near 0).
    """

    output: str
    found: torch.Tensor
    late: torch.Tensor | None = None
    unit: float = 0.0
    unwritten: int = 0
    trespassed: int = 0
    seen: int = 0
    nan: int = 0
    infinite: int = 0
    worst: tuple[float, int, int] = (0.0, 0, 0)
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, heads: slice, truth: torch.Tensor) -> None:
        """Take the truth [rows, some heads, vector] about some of the heads."""
        part = self.found[:, heads]
        if part.shape != truth.shape:
            raise ValueError(
                f"{self.output}: expected [rows, heads, vector] = {list(truth.shape)}, "
                f"got {list(part.shape)}"
            )
        self.seen += part.shape[1]
        truth = truth.to(device=part.device, dtype=torch.float64)
        part = part.double()
        self.nan += int(part.isnan().sum())
        odd = (part.isinf() | truth.isinf()) & (part != truth) & ~part.isnan()
        self.infinite += int(odd.sum())
        known = truth.isfinite() & ~part.isinf()
        part, truth = torch.where(known, part, 0.0), torch.where(known, truth, 0.0)
        error = part - truth
        self._sum("found", part * part)
        self._sum("truth", truth * truth)
        self._sum("both", part * truth)
        self._sum("error", error * error)
        self.sums["units"] = self.sums.get("units", 0.0) + self.unit**2 * part.numel()
        if self.late is not None:
            self._sum("late error", (error * error)[self.late])
            self._sum("late truth", (truth * truth)[self.late])
            late = self.unit**2 * part[self.late].numel()
            self.sums["late units"] = self.sums.get("late units", 0.0) + late
        self._find_worst(heads.start or 0, error, truth)

    def _sum(self, name: str, values: torch.Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())

    def _find_worst(self, first_head: int, error: torch.Tensor, truth: torch.Tensor) -> None:
        if not error.numel():
            return
        distance, own = error.norm(dim=-1), truth.norm(dim=-1)  # [rows, heads]
        typical = own.square().mean(0).sqrt().clamp_min(self.unit)
        ratio = distance / torch.maximum(own, typical)
        ratio = torch.where(distance == 0, 0.0, ratio).nan_to_num(nan=inf, posinf=inf)
        at = int(ratio.argmax())
        row, head = divmod(at, ratio.shape[1])
        if float(ratio[row, head]) > self.worst[0]:
            self.worst = float(ratio[row, head]), row, first_head + head

    def measured(self, tolerance: Tolerance) -> Measured:
        """The figures of all pieces; every head must have been seen."""
        if self.seen != self.found.shape[1]:
            raise ValueError(
                f"{self.output}: expected the truth about {self.found.shape[1]} heads, "
                f"got {self.seen}"
            )
        get = self.sums.get
        norms = sqrt(get("found", 0.0) * get("truth", 0.0)) if isfinite(get("found", 0.0)) else nan
        cosine = get("both", 0.0) / norms if norms else float(get("found") == get("truth"))
        worst, row, head = self.worst
        return Measured(
            output=self.output,
            dtype=dtype_name(self.found.dtype),
            rows=self.found.shape[0],
            heads=self.found.shape[1],
            cosine=cosine,
            relative=_ratio(get("error", 0.0), max(get("truth", 0.0), get("units", 0.0))),
            last_half=None
            if self.late is None
            else _ratio(
                get("late error", 0.0), max(get("late truth", 0.0), get("late units", 0.0))
            ),
            row_error=worst,
            row=row,
            head=head,
            nan=self.nan,
            infinite=self.infinite,
            unwritten=self.unwritten,
            trespassed=self.trespassed,
            tolerance=tolerance,
        )


def _ratio(error: float, truth: float) -> float:
    """sqrt(error / truth); a truth of 0 asks for an error of 0, a NaN is infinite."""
    if error != error:
        return inf
    if not truth:
        return inf if error else 0.0
    return sqrt(error / truth)
