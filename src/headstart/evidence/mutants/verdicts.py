"""What every check needs: how figures and bits become a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headstart.evidence.mutants.record import Verdict
from headstart.evidence.poison import poisoned_memory
from headstart.evidence.verify import bits, verify_case
from headstart.evidence.verify.figures import Measured, Meter
from headstart.evidence.verify.tolerances import Tolerance
from headstart.runtime.dispatch import Declined


class Check(Protocol):
    """Judges the build that this process has loaded."""

    def run(self, implementation: str, device: str) -> Verdict:
        """The verdict; an exception is one too."""
        ...


@dataclass(frozen=True)
class Values:
    """Every output of a case against the truth, or against a neighbour."""

    case: Any
    against: str = "reference"

    def run(self, implementation: str, device: str) -> Verdict:
        """Verify the case."""
        found = verify_case(self.case, implementation, against=self.against, device=device)
        if found.declined is not None:
            raise Declined(found.declined)
        return Verdict(
            check="",
            failure="; ".join(found.failures[:2]) or None,
            excess=found.excess,
            cosine_passes=found.cosine_passes,
        )


@dataclass(frozen=True)
class Bits:
    """One check of the promise in one form, by torch.equal."""

    op: str
    form: str
    check: str

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare bits."""
        make, _, _ = bits.CHECKS[self.op]
        same = bits.Comparison()
        with poisoned_memory(), torch.inference_mode():
            getattr(make(self.form, implementation, torch.device(device)), self.check)(same)
        if not same.differing:
            return Verdict(check="")
        words = f"{same.differing} of {same.compared} tensors differ, the first: {same.where}"
        return Verdict(check="", failure=words, excess=float("inf"))


def compared(outputs: dict[str, tuple[torch.Tensor, torch.Tensor]], asked: Tolerance) -> Verdict:
    """A verdict on outputs [rows, heads, vector] beside their truths."""
    measured = []
    for name, (found, truth) in outputs.items():
        meter = Meter(name, found)
        meter.add(slice(0, None), truth)
        measured.append(meter.measured(asked))
    return judged(measured)


def judged(measured: list[Measured]) -> Verdict:
    """A verdict on figures."""
    failures = [words for one in measured for words in one.failures]
    return Verdict(
        check="",
        failure="; ".join(failures[:2]) or None,
        excess=max(one.excess for one in measured),
        cosine_passes=all(one.cosine_passes for one in measured),
    )
