"""`verify_case`: one case, one implementation, every output against the truth."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headstart.evidence.cases import Case
from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.runs import Record
from headstart.evidence.verify.computing import Computed, compute
from headstart.evidence.verify.figures import Measured, Meter
from headstart.evidence.verify.references import truths
from headstart.evidence.verify.tolerances import Tolerance, tolerance
from headstart.evidence.workers import spread
from headstart.runtime.checks import dtype_name
from headstart.runtime.dispatch import Declined


class Verification(Record):
    """What became of one case under one implementation.

    declined: the sentence why the implementation does not run the case; then nothing else is said.
    notes: what was left out, and why.
    outputs: a record for each output.
    repeats: how often it was computed, always from the same memory. differing: outputs whose bits
        were not the same every time.
    seconds: of computing and comparing, the truth included.
    """

    case: str
    op: str
    implementation: str
    against: str = "reference"
    device: str = "cpu"
    dtype: str
    seed: int = 0
    declined: str | None = None
    notes: tuple[str, ...] = ()
    outputs: tuple[Measured, ...] = ()
    repeats: int = 1
    differing: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """A sentence for each figure above its tolerance, and for each output that wavers."""
        above = [failure for output in self.outputs for failure in output.failures]
        return above + [f"{name}: other bits within {self.repeats} runs" for name in self.differing]

    @property
    def passed(self) -> bool:
        """Whether every figure of every output is within its tolerance, and no bit wavers."""
        return not self.failures

    @property
    def excess(self) -> float:
        """The largest figure in units of its tolerance: above 1 fails."""
        return max((output.excess for output in self.outputs), default=0.0)

    @property
    def cosine_passes(self) -> bool:
        """What a gate on the cosine alone would say of all outputs."""
        return all(output.cosine_passes for output in self.outputs)


def verify_case(
    case: Case,
    implementation: str,
    *,
    against: str = "reference",
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    repeats: int = 1,
    kept: bool = True,
    progress: Callable[[float], None] = lambda share: None,
) -> Verification:
    """Compute a case and compare every output.

    implementation: a name; one that declines gives a `Verification` with the sentence.
    against: "reference" (float64, token by token or row by row), or a neighbour of
        `headstart.evidence.oracles.foreign`.
    device: where the implementation runs (inputs are drawn on the CPU). A truth is computed there
        too where it is no CPU.
    dtype: takes the place of the case's own.
    repeats: compute it so often, and compare the bits of every time with those of the first.
    kept: keep truths on disk.
    progress: told the share that is done.

    >>> from headstart.evidence import cases
    >>> found = verify_case(cases.get("gdn-1x1-small"), "torch", kept=False)
    >>> found.passed, [output.output for output in found.outputs]
    (True, ['o', 'state'])
    """
    began = time.perf_counter()
    place = torch.device(device)
    inputs = dtype_name(dtype or case.torch_dtype)
    result = Verification(
        case=case.id,
        op=case.op,
        implementation=implementation,
        against=against,
        device=str(place),
        dtype=inputs,
        seed=seed,
    )
    run = functools.partial(compute, case, implementation, seed=seed, device=place, dtype=dtype)
    try:
        computed = run()
    except Declined as reason:
        return result.model_copy(update={"declined": str(reason)})
    differing: dict[str, None] = {}
    for _ in range(repeats - 1):
        differing |= dict.fromkeys(_differing(computed, run()))
    meters = _meters(case, computed)
    if against == "reference":
        pieces = truths(case, seed=seed, dtype=dtype, device=place, kept=kept, progress=progress)
    else:
        from headstart.evidence.oracles.foreign import outputs

        try:
            pieces = [(slice(0, None), outputs(against, case, seed, place, dtype))]
        except Declined as reason:
            return result.model_copy(update={"declined": str(reason)})
    covered = set()
    for heads, values in pieces:
        for name, truth in values.items():
            for output in (name, f"merged {name}"):
                if output in meters:
                    meters[output].add(heads, truth)
                    covered.add(output)
    measured = tuple(
        meter.measured(_asked(case, name, meter, result))
        for name, meter in meters.items()
        if name in covered
    )
    left = [f"{against} gives no {name}" for name in meters if name not in covered]
    return result.model_copy(
        update={
            "outputs": measured,
            "notes": (*computed.notes, *left),
            "repeats": repeats,
            "differing": tuple(differing),
            "seconds": time.perf_counter() - began,
        }
    )


def _differing(first: Computed, again: Computed) -> list[str]:
    """Outputs whose bits are not the same."""
    return [
        name
        for name, output in first.outputs.items()
        if not torch.equal(*(_bits(one.values) for one in (output, again.outputs[name])))
    ]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def verify_many(
    jobs: Sequence[tuple[Case, str]],
    *,
    processes: int = 1,
    progress: Callable[[float], None] = lambda share: None,
    told: Callable[[Verification], None] = lambda one: None,
    **options: Any,
) -> list[Verification]:
    """`verify_case` for each (case, implementation), with the same options, in order.

    processes: how many share the work, each with one thread; 1 stays in this process and thread
        count. progress: told the share of tokens that is done. told: hears of each, in order.
    """
    weights = [case.tokens + 100 for case, _ in jobs]
    total, done, found = sum(weights), 0, []
    if processes > 1 and len(jobs) > 1:
        calls = [functools.partial(verify_case, case, name, **options) for case, name in jobs]
        results = spread(calls, min(processes, len(jobs)))
        for result, weight in zip(results, weights, strict=True):
            found.append(result)
            told(result)
            done += weight
            progress(done / total)
        return found
    for (case, name), weight in zip(jobs, weights, strict=True):

        def part(share: float, before: int = done, weight: int = weight) -> None:
            progress((before + share * weight) / total)

        found.append(verify_case(case, name, **options, progress=part))
        told(found[-1])
        done += weight
        progress(done / total)
    return found


def _asked(case: Case, output: str, meter: Meter, result: Verification) -> Tolerance:
    dtype = dtype_name(meter.found.dtype)

    def asked(implementation: str) -> Tolerance:
        block = isinstance(case, DeltaBlockCase)
        return tolerance(
            case.op, output, dtype, result.dtype, implementation=implementation, block=block
        )

    against = result.against
    if against == "reference":
        return asked(result.implementation)
    if against == "onnxruntime":
        mine = asked(result.implementation)
        return mine.times(2.0, f"{against} rounds too").plus(2e-6, "its sums are in float32")
    return asked(against).times(2.0, f"{against} rounds too, stored and in its products")


def _meters(case: Case, computed: Computed) -> dict[str, Meter]:
    late = torch.cat(
        [torch.arange(length) >= length // 2 for length in case.lengths]  # type: ignore[attr-defined]
        or [torch.zeros(0, dtype=torch.bool)]
    )
    meters = {}
    for name, output in computed.outputs.items():
        rows = len(output.values)
        if name in ("state", "history"):
            chosen = None
        elif name == "snapshots":
            chosen = torch.arange(rows) >= rows // 2
        else:
            chosen = late
        meters[name] = Meter(
            name,
            output.values,
            late=None if chosen is None else chosen.to(output.values.device),
            unit=1.0 if name.endswith("LSE") else 0.0,
            unwritten=output.unwritten,
            trespassed=output.trespassed,
        )
    return meters
