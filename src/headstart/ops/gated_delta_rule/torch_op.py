"""The gated delta rule as ops of PyTorch: see `runtime/torch_ops.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headstart.ops.gated_delta_rule.flat import ARGUMENTS, Flat, flat, rebuilt
from headstart.ops.gated_delta_rule.gate import Gate
from headstart.ops.gated_delta_rule.spec import GatedDelta
from headstart.runtime import torch_ops
from headstart.runtime.checks import expect_no_gradients, expect_tensor, shown
from headstart.runtime.handles import found, handle_of
from headstart.runtime.workspace import Workspace

NAMES = ("state", "position", "end", "tail_k", "tail_v", "tail_decay", "tail_beta")
"""The tensors of a cache that the rule reads and writes."""
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, str kind, str strength, "
    f"Tensor? a_log, Tensor? dt_bias, float? lower_bound, {ARGUMENTS}, float? scale, "
    "bool qk_l2norm, bool? reproducible, str? implementation, Tensor? workspace, Tensor(e!)? out)"
    " -> (Tensor o, Tensor new_state, Tensor new_snapshots)"
)


def traced_rule(
    name: str,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None,
    beta: torch.Tensor | None, schedule: Any, state: Any, gate: Gate, snapshots: Any,
    return_state: bool, scale: float | None, qk_l2norm: bool, reproducible: bool | None,
    implementation: str | None, workspace: Workspace | None, out: torch.Tensor | None,
) -> GatedDelta:  # fmt: skip
    """The result of the op `name` for these arguments of its public function."""
    for word, given in (("q", q), ("k", k), ("v", v)):
        expect_tensor(word, given)
    if not isinstance(gate, Gate):
        raise ValueError(f"gate: expected a Gate such as Gate.log(), got {shown(gate)}")
    expect_no_gradients(name, q=q, k=k, v=v, g=g, beta=beta, a_log=gate.a_log, dt_bias=gate.dt_bias)
    o, new_state, new_snapshots = getattr(torch.ops.headstart, name)(
        q, k, v, g, beta,
        kind=gate.kind, strength=gate.beta, a_log=gate.a_log, dt_bias=gate.dt_bias,
        lower_bound=gate.lower_bound,
        **flat(q.shape[:-2], schedule, state, snapshots, return_state, NAMES),
        scale=scale, qk_l2norm=qk_l2norm, reproducible=reproducible,
        implementation=implementation,
        workspace=handle_of(workspace), out=out,
    )  # fmt: skip
    return GatedDelta(
        o if out is None else out,
        new_state if return_state else None,
        new_snapshots if isinstance(snapshots, torch.dtype) else None,
    )


def _run(function: Callable[..., GatedDelta], **given: Any) -> Any:
    call: Flat = rebuilt(given, NAMES)
    call["gate"] = Gate(
        given["kind"], given["strength"], given["a_log"], given["dt_bias"], given["lower_bound"]
    )
    call["workspace"] = found(Workspace, given["workspace"])
    for name in ("q", "k", "v", "g", "beta", "scale", "qk_l2norm", "implementation", "out"):
        call[name] = given[name]
    if function.__name__ == "gated_delta_rule":
        call["reproducible"] = given["reproducible"]
    else:
        del call["snapshots"]
    result = function(**call)
    o = result.o if given["out"] is None else None
    return torch_ops.present(result.o, o, result.state, result.snapshots)


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, ...]:
    HV, V, K = *v.shape[-2:], k.shape[-1]
    o = state = snapshots = None
    if given["out"] is None:
        o = q.new_empty(v.shape)
    if given["return_state"]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        dtype = wide if given["state"] is None else given["state"].dtype
        state = q.new_empty((given["entries"], HV, K, V), dtype=dtype)
    if given["snapshots"] is not None:
        shape = given["kept_entries"], HV, K, V
        snapshots = q.new_empty(shape, dtype=given["snapshots"])
    return torch_ops.present(q, o, state, snapshots)


for _name in ("gated_delta_rule", "recurrent_gated_delta_rule"):
    torch_ops.define(_name, _SCHEMA, _run, _fake)
