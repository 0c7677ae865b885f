"""Signatures of the convolution and the gated norm: see `gated_delta_rule/signature.py`."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from torch import Tensor

from headstart.ops.convolution.torch_op import NAMES
from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.ops.gated_delta_rule.signature import REFUSED, snapshot_facts, state_facts
from headstart.runtime import launcher
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import NAMED, NUMBERS, Signature
from headstart.runtime.steady import layouts

used = itemgetter(*NAMES)
"""Those of a cache's tensors that the convolution uses."""


def convolution_signature(
    x: Any, weight: Any, bias: Any, schedule: Any, state: Any, snapshots: Any, return_state: Any,
    activation: Any, out: Any,
) -> Signature | None:  # fmt: skip
    """The signature of a call of `causal_conv1d`."""
    if (
        type(x) is not Tensor
        or not launcher.prepares(x)
        or type(schedule) is not Schedule
        or type(return_state) is not bool
        or type(activation) not in NAMED
        or (type(state) is CacheSlots and not state.cache.conv_channels)
        or (type(snapshots) is CacheSlots and not snapshots.cache.conv_channels)
        or checking()
    ):
        return None
    tensors = [x, weight, *[given for given in (bias, out) if given is not None]]
    of_rows = layouts(tensors)
    step = schedule.facts
    count, _, kept, _, _, capacity = step
    if capacity is not None:
        count, _, kept = capacity
    of_state = of_snapshots = None
    if state is not None:
        of_state = state_facts(state, count, x.device, tensors, used)
    if snapshots is not None:
        of_snapshots = snapshot_facts(snapshots, state, kept, x.device, tensors, used)
    if of_state is REFUSED or of_snapshots is REFUSED or of_rows is None:
        return None
    facts = (
        bias is None, out is None, return_state, activation, schedule.device, step,
        of_state, of_snapshots, *of_rows,
    )  # fmt: skip
    return facts, tensors


def norm_signature(x: Any, weight: Any, gate: Any, eps: Any, activation: Any) -> Signature | None:
    """The signature of a call of `rms_norm_gated`."""
    if (
        type(x) is not Tensor
        or not launcher.prepares(x)
        or type(eps) not in NUMBERS
        or type(activation) not in NAMED
    ):
        return None
    tensors = [x, weight, gate]
    of_rows = layouts(tensors)
    return None if of_rows is None else ((eps, activation, *of_rows), tensors)
