"""Signatures of the convolution and the gated norm: see `gated_delta_rule/signature.py`."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from torch import Tensor

from headstart.ops.convolution.torch_op import NAMES
from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.ops.gated_delta_rule.signature import REFUSED, snapshot_facts, state_facts
from headstart.runtime import checks, launcher
from headstart.runtime.dispatch import NAMED, NUMBERS, Signature

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
        or checks.asked
    ):
        return None
    rows, held = [x, weight], []
    if bias is not None:
        rows.append(bias)
    if out is not None:
        rows.append(out)
    step = schedule.facts
    of_state = of_snapshots = None
    if state is not None:
        of_state = state_facts(state, step, rows, held, used)
    if snapshots is not None:
        of_snapshots = snapshot_facts(snapshots, state, step, rows, held, used)
    if of_state is REFUSED or of_snapshots is REFUSED:
        return None
    facts = (
        bias is None, out is None, return_state, activation, schedule.device, step,
        of_state, of_snapshots,
    )  # fmt: skip
    return facts, rows, held


def norm_signature(x: Any, weight: Any, gate: Any, eps: Any, activation: Any) -> Signature | None:
    """The signature of a call of `rms_norm_gated`."""
    if (
        type(x) is not Tensor
        or not launcher.prepares(x)
        or type(eps) not in NUMBERS
        or type(activation) not in NAMED
    ):
        return None
    return (eps, activation), [x, weight, gate], []
