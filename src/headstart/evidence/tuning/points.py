"""Calls that configurations are compared on: those of a case, and of the same case shortened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from headstart.evidence.arms import Arm, Outputs
from headstart.evidence.cases import Case
from headstart.evidence.cases.delta_block import DeltaBlockCase, rule_arguments
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.gated_delta_rule import DeltaCase
from headstart.runtime import dispatch
from headstart.runtime.tables import using

OPERATIONS = ("extend_attention", "gated_delta_rule", "causal_conv1d", "rms_norm_gated")
KERNELS = "triton"
"""The implementation whose kernels have rows in tables."""


@dataclass(frozen=True)
class Point:
    """One call: an operation on a case's inputs, attention with or without reproducible=True."""

    operation: str
    case: Case
    reproducible: bool = False

    @property
    def name(self) -> str:
        """The case's id, and what it does not say."""
        return f"{self.case.id}{' reproducible' if self.reproducible else ''}"

    @cached_property
    def blank(self) -> dict[str, Any]:
        """Arguments on meta tensors, for rehearsals."""
        case = self.case
        if isinstance(case, DeltaBlockCase):
            return self._of_block(case.blank_block("meta"))
        return self._asked(case.blank("meta"))

    def arms(self, arguments: dict[str, Any]) -> Callable[[str, Any], Arm]:
        """Name and configurations -> the call with these and no others, on what `drawn` gave.

        Every arm begins with the memory that is there now. It goes the long way each time: a
        repeated launch would be that of another arm.
        """
        operation, call, _ = dispatch.bound(self.operation, (), arguments)
        memory = _memory(arguments.get("state"))
        before = [tensor.clone() for tensor in memory]

        def restore() -> None:
            for tensor, kept in zip(memory, before, strict=True):
                tensor.copy_(kept)

        def outputs(found: Any) -> Outputs:
            results = found._asdict() if hasattr(found, "_asdict") else {"o": found}
            there = {name: x for name, x in results.items() if isinstance(x, torch.Tensor)}
            if there.get("state") is None and memory:
                there |= {f"memory {i}": x for i, x in enumerate(memory) if x.is_floating_point()}
            return there

        def arm(name: str, rows: Any) -> Arm:
            def compute() -> Any:
                with using(rows):
                    return dispatch.run(operation, call, KERNELS)

            return Arm(name, compute, outputs, restore, kept=[arguments])

        return arm

    def drawn(self, seed: int, device: torch.device) -> dict[str, Any]:
        """Arguments drawn from a seed; a cache comes with its tails filled by these kernels."""
        case = self.case
        if isinstance(case, DeltaBlockCase):
            return self._of_block(case.inputs(seed, device))
        if isinstance(case, DeltaCase):
            import headstart

            *earlier, last = case.steps(seed, device)
            for step in earlier:
                headstart.gated_delta_rule(**step, implementation=KERNELS)
            return last
        return self._asked(case.inputs(seed, device))

    def _asked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments | ({"reproducible": True} if self.reproducible else {})

    def _of_block(self, block: dict[str, Any]) -> dict[str, Any]:
        if self.operation == "gated_delta_rule":
            return rule_arguments(block, block["mixed"])
        if self.operation == "rms_norm_gated":
            return {"x": block["z"], "weight": block["norm"], "gate": block["z"]}
        given = {"x": block["mixed"], "weight": block["weight"]}
        given |= {"schedule": block["schedule"], "state": block["state"]}
        if "snapshots" in block:
            given["snapshots"] = block["mixed"].dtype
        return given


def _memory(state: Any) -> list[torch.Tensor]:
    """Tensors that a call with this state changes in place."""
    if hasattr(state, "cache"):
        return list(state.cache.tensors.values())
    return [state.tensor] if hasattr(state, "read_slots") else []


def points_of(operation: str, case: Case) -> Iterator[Point]:
    """The calls of an operation that a case stands for; none if it has none.

    >>> from headstart.evidence import cases
    >>> [point.name for point in points_of("extend_attention", cases.get("oss-16k-win"))]
    ['oss-16k-win', 'oss-16k-win reproducible']
    >>> list(points_of("causal_conv1d", cases.get("gdn-next-8k")))
    []
    """
    if isinstance(case, AttentionCase):
        if operation == "extend_attention":
            yield Point(operation, case)
            yield Point(operation, case, reproducible=True)
    elif isinstance(case, DeltaBlockCase):
        if operation != "extend_attention":
            yield Point(operation, case)
    elif case.op == operation:
        yield Point(operation, case)


def shortened(case: Case, share: float) -> Case | None:
    """The case with a share of its lengths; None where states at given positions forbid it.

    >>> from headstart.evidence import cases
    >>> short = shortened(cases.get("oss-chunk-win"), 0.25)
    >>> short.id, short.lengths, short.prefixes
    ('oss-chunk-win@0.25', (512,), (3584,))
    """

    def shorter(lengths: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(1, round(n * share)) if n else 0 for n in lengths)

    if isinstance(case, DeltaCase) and case.snapshot_positions:
        return None
    changed = {name: shorter(getattr(case, name, ())) for name in ("lengths", "prefixes")}
    there = {name: lengths for name, lengths in changed.items() if lengths}
    return replace(case, id=f"{case.id}@{share:g}", **there)
