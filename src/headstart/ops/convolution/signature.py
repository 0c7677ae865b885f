"""Signatures of the convolution and the gated norm: see `gated_delta_rule/signature.py`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.ops.gated_delta_rule.signature import REFUSED, snapshot_facts, state_facts
from headstart.runtime import launcher
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import NAMED, NUMBERS, Signature
from headstart.runtime.steady import layout, plain


def convolution_signature(
    x: Any, weight: Any, bias: Any, schedule: Any, state: Any, snapshots: Any, return_state: Any,
    activation: Any, out: Any,
) -> Signature | None:  # fmt: skip
    """The signature of a call of `causal_conv1d`."""
    if (
        type(x) is not Tensor
        or x.device.type not in launcher.PREPARED
        or type(schedule) is not Schedule
        or type(return_state) is not bool
        or type(activation) not in NAMED
        or checking()
    ):
        return None
    tensors = [x, weight]
    tensors += [given for given in (bias, out) if given is not None]
    given = len(tensors)
    step = schedule.facts
    count, _, kept, _, _, capacity = step
    if capacity is not None:
        count, _, kept = capacity
    of_state = of_snapshots = None
    if state is not None:
        of_state = state_facts(state, count, x.device, tensors)
    if snapshots is not None:
        of_snapshots = snapshot_facts(snapshots, state, kept, x.device, tensors)
    if of_state is REFUSED or of_snapshots is REFUSED or not plain(tensors[:given]):
        return None
    facts = (
        bias is None, out is None, return_state, activation, schedule.device, step,
        of_state, of_snapshots, *map(layout, tensors[:given]),
    )  # fmt: skip
    return facts, tensors


def norm_signature(x: Any, weight: Any, gate: Any, eps: Any, activation: Any) -> Signature | None:
    """The signature of a call of `rms_norm_gated`."""
    if (
        type(x) is not Tensor
        or x.device.type not in launcher.PREPARED
        or type(eps) not in NUMBERS
        or type(activation) not in NAMED
        or not plain((x, weight, gate))
    ):
        return None
    return (eps, activation, layout(x), layout(weight), layout(gate)), [x, weight, gate]
