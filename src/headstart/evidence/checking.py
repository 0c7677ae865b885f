"""Before an arm is timed: does it compute the case?"""

from __future__ import annotations

import torch

from headstart.evidence.arms import Arm, Outputs
from headstart.evidence.cases import Case
from headstart.evidence.runs import Record
from headstart.evidence.verify.figures import Meter
from headstart.evidence.verify.references import truths
from headstart.evidence.verify.tolerances import PEER, Tolerance, tolerance
from headstart.runtime.checks import dtype_name

MAIN = ("o", "norm", "convolution")
"""What a case is about: of a rule or attention, of a whole layer, of a convolution alone."""


class Accuracy(Record):
    """How far one output of an arm is from the float64 reference, in the heads that were checked.

    last_half: relative L2 over the last half of the tokens; for states over all values.
    row_error: the worst row. allowed: tolerance of last_half. failures: a sentence each.
    beyond_ours: of a peer, a sentence for each figure that would be a failure of ours.
    """

    output: str
    heads: int
    last_half: float
    row_error: float
    allowed: float
    failures: tuple[str, ...] = ()
    beyond_ours: tuple[str, ...] = ()


Truths = list[tuple[slice, dict[str, torch.Tensor]]]


def load_truths(case: Case, seed: int, device: torch.device, groups: int | None) -> Truths:
    """The float64 reference of the first `groups` groups of heads (None: all).

    What is no head's, such as a layer's convolution, comes besides.
    """
    found: Truths = []
    for heads, truth in truths(case, seed=seed, device=device):
        found.append((heads, truth))
        if sum(group.stop is not None for group, _ in found) == groups:
            break
    return found


def check(arm: Arm, case: Case, outputs: Outputs, reference: Truths) -> list[Accuracy]:
    """Figures of every output that the reference knows; one of `MAIN` must be there.

    Arms that headstart does not serve are allowed `PEER` times what ours are.
    """
    found = []
    for output, values in outputs.items():
        pieces = [(heads, truth[output]) for heads, truth in reference if output in truth]
        if not pieces:
            continue
        stop = max(heads.start + truth.shape[1] for heads, truth in pieces)
        meter = Meter(output, _rows(values)[:, :stop], late=_late(case, output, len(values)))
        if meter.late is not None:
            meter.late = meter.late.to(values.device)
        for heads, truth in pieces:
            meter.add(heads, truth)
        ours = meter.measured(_allowed(arm, case, output, values.dtype))
        figures = ours
        if not arm.served:
            figures = ours.model_copy(update={"tolerance": ours.tolerance.times(*PEER)})
        half = figures.relative if figures.last_half is None else figures.last_half
        found.append(
            Accuracy(
                output=output,
                heads=stop,
                last_half=half,
                row_error=figures.row_error,
                allowed=figures.tolerance.last_half,
                failures=tuple(figures.failures),
                beyond_ours=() if arm.served else tuple(ours.failures),
            )
        )
    if not any(one.output in MAIN for one in found):
        raise ValueError(f"arm: {arm.name} gave no output that the reference of {case.id} knows")
    return found


def _allowed(arm: Arm, case: Case, output: str, dtype: torch.dtype) -> Tolerance:
    return tolerance(
        case.op,
        output,
        dtype_name(dtype),
        case.dtype,
        # Peers round the operands of their products as our kernels do.
        implementation=arm.served.split(", ")[-1] if arm.served else "triton",
        block=hasattr(case, "conv_width"),
    )


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[rows, heads, vector]."""
    return values.flatten(2) if values.dim() > 2 else values[..., None]


def _late(case: Case, output: str, rows: int) -> torch.Tensor | None:
    """Rows of the last half of every sequence; None where rows are no tokens."""
    if output == "state":
        return None
    if output == "snapshots":
        return torch.arange(rows) >= rows // 2
    lengths: tuple[int, ...] = case.lengths  # type: ignore[attr-defined]
    parts = [torch.arange(length) >= length // 2 for length in lengths]
    return torch.cat([*parts, torch.zeros(0, dtype=torch.bool)])
