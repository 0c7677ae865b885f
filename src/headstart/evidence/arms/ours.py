"""Headstart's own arms, of this package or of a separately loaded copy of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

import headstart
from headstart.evidence.arms import Arm, Outputs, Unfit
from headstart.evidence.cases import Case
from headstart.evidence.cases.convolution import BLOCK

PICKED = ("headstart", "reproducible")
"""Arms whose implementation is dispatch's choice."""


def build(
    name: str,
    case: Case,
    device: torch.device,
    seed: int = 0,
    *,
    package: str = "headstart",
    plan_in_call: bool = False,
) -> Arm:
    """An arm that runs `package`'s implementation `name` ("headstart": what dispatch picks).

    package: name of a loaded package that is headstart or a copy of it; its own classes build the
        inputs, since a copy knows no class of the original.
    plan_in_call: build the host metadata (schedule, plan) in every call instead of beforehand.
    """
    library = importlib.import_module(package)
    if package != "headstart":
        case = importlib.import_module(f"{package}.evidence.cases").get(case.id)
    options: dict[str, Any] = {} if name in PICKED else {"implementation": name}
    if name == "reproducible":
        options["reproducible"] = True
    if case.op == "model":
        raise Unfit(f"{case.id} is a whole model; `headstart prefill` runs models")
    remade = _remaking(library, case, device) if plan_in_call else dict
    if case.op == "extend_attention":
        inputs = case.inputs(seed, device)
        arm = Arm(
            name,
            lambda: library.extend_attention(**inputs | remade(), **options),
            lambda o: {"o": o},
        )
    elif case.op == "causal_conv1d":
        if "reproducible" in options:
            raise Unfit("rows of a convolution are reproducible anyway")
        arm = _convolution_arm(library, name, options, case.inputs(seed, device))
    elif hasattr(case, "conv_width"):
        if "reproducible" in options:
            raise Unfit("a layer's rule runs on a cache, whose rows are reproducible anyway")
        arm = _block_arm(package, name, options, steps(case, seed, device)[-1])
    else:
        arm = _rule_arm(library, name, options, steps(case, seed, device), remade)
    with importlib.import_module(f"{package}.runtime.dispatch").watching() as ran:
        arm.restore()
        arm.call()
        arm.restore()
    arm.served = ", ".join(dict.fromkeys(implementation for _, implementation in ran))
    return arm


def scratch(name: str, case: Case, device: torch.device, served: str) -> int | None:
    """Bytes of workspace that the implementation `served` takes; None for a whole layer."""
    if hasattr(case, "conv_width"):
        return None
    options: dict[str, Any] = {"reproducible": True} if name == "reproducible" else {}
    return headstart.workspace_bytes(case.op, **case.blank(device), **options,
                                     implementation=served or None)  # fmt: skip


def steps(case: Any, seed: int, device: torch.device) -> list[dict[str, Any]]:
    """The calls that lead up to a case of the rule and the case itself."""
    return case.steps(seed, device)


def _remaking(library: Any, case: Any, device: torch.device) -> Callable[[], dict[str, Any]]:
    """A function that makes a call's host metadata anew."""
    if hasattr(case, "conv_width"):
        raise Unfit("a layer shares its schedule with other layers")
    if case.op == "gated_delta_rule":
        return lambda: {
            "schedule": library.Schedule(
                list(case.lengths),
                start_positions=list(case.positions),
                drafts=case.drafts,
                snapshot_every=case.snapshot_every,
                snapshot_positions=case.snapshot_positions or None,
                device=device,
            )
        }
    if case.layout != "rows":
        raise Unfit("only plans from lengths are made in a call")
    prefixes = list(case.cached) if any(case.cached) else None
    make = library.ExtendPlan.from_lengths
    return lambda: {"plan": make(list(case.lengths), prefixes, device=device)}


def _rule_arm(
    library: Any,
    name: str,
    options: dict[str, Any],
    steps: list[dict],
    remade: Callable[[], dict[str, Any]],
) -> Arm:
    *earlier, last = steps
    for step in earlier:
        library.gated_delta_rule(**step, **options)
    state: Any = last.get("state")

    def outputs(found: Any) -> Outputs:
        kept: Outputs = {"o": found.o}
        if found.state is not None:
            kept["state"] = found.state.flatten(2)
        elif hasattr(state, "read_slots"):
            kept["state"] = state.tensor[list(state.read_slots)].flatten(2)
        elif hasattr(state, "cache"):
            kept["state"] = state.cache.export(state.slots)[1].flatten(2)
        if found.snapshots is not None:
            kept["snapshots"] = found.snapshots.flatten(2)
        return kept

    return Arm(
        name,
        lambda: library.gated_delta_rule(**last | remade(), **options),
        outputs,
        _restoring(state),
    )


def _convolution_arm(library: Any, name: str, options: dict[str, Any], call: dict) -> Arm:
    return Arm(
        name,
        lambda: library.causal_conv1d(**call, **options),
        lambda found: {"convolution": found.y.unflatten(1, (-1, BLOCK))},
    )


def _block_arm(package: str, name: str, options: dict[str, Any], block: dict[str, Any]) -> Arm:
    run = importlib.import_module(f"{package}.evidence.cases.delta_block").run
    return Arm(
        name,
        lambda: run(block, **options),
        lambda normed: {"norm": normed},
        _restoring(block["state"]),
    )


def _restoring(state: Any) -> Callable[[], None]:
    """A function that puts back the memory of a pool or cache as it is now."""
    if hasattr(state, "cache"):
        memory = list(state.cache.tensors.values())
    elif hasattr(state, "read_slots"):
        memory = [state.tensor]
    else:
        return lambda: None
    before = [tensor.clone() for tensor in memory]

    def restore() -> None:
        for tensor, kept in zip(memory, before, strict=True):
            tensor.copy_(kept)

    return restore
