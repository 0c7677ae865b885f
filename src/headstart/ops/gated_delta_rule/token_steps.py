"""The token-by-token form, all heads of several sequences at once:

S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q       (float32)
"""

from __future__ import annotations

import torch

from headstart.ops.gated_delta_rule.spec import GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import SequenceStep
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.runtime.workspace import Workspace

STATE_BYTES = 4 << 20
"""States of the sequences that are advanced together."""


def batch_size(call: GatedDeltaCall, steps: list[SequenceStep]) -> int:
    """Sequences that are advanced together."""
    _, HV, K, V = call.sizes
    return min(len(steps), max(1, STATE_BYTES // (4 * HV * K * V)))


def token_bytes(call: GatedDeltaCall, steps: list[SequenceStep]) -> int:
    """Bytes that `advance` takes from the workspace."""
    _, HV, K, V = call.sizes
    return 4 * batch_size(call, steps) * HV * K * V


def advance(
    call: GatedDeltaCall, steps: list[SequenceStep], stores: Stores, workspace: Workspace
) -> None:
    """Compute `steps` token by token: outputs and plain states."""
    if not steps:
        return
    size = batch_size(call, steps)
    order = sorted(steps, key=lambda step: -step.length)
    for first in range(0, len(order), size):
        _advance(call, order[first : first + size], stores, workspace)


def _advance(
    call: GatedDeltaCall, steps: list[SequenceStep], stores: Stores, workspace: Workspace
) -> None:
    _, HV, K, V = call.sizes
    every = slice(0, HV)
    count = len(steps)
    S = workspace.buffer("states", (count, HV, K, V), torch.float32)
    for i, step in enumerate(steps):
        old = stores.read(step, every)
        S[i].zero_() if old is None else S[i].copy_(old)
    for t in range(steps[0].length):
        alive = [step for step in steps if step.length > t]
        n = len(alive)
        rows = torch.tensor([step.row + t for step in alive], device=call.device)
        q, k, v, g, beta = _token(call, rows)
        state = S[:n]
        if g is not None:
            state.mul_(g.exp()[..., None] if call.per_channel else g.exp()[..., None, None])
        lanes = state.view(n * HV, K, V)
        seen = torch.bmm(k.view(n * HV, 1, K), lanes).view(n, HV, V)
        u = (v - seen) * beta[..., None]
        lanes.baddbmm_(k.view(n * HV, K, 1), u.view(n * HV, 1, V))
        o = torch.bmm(q.view(n * HV, 1, K), lanes).view(n, HV, V)
        stores.o[rows] = o.to(stores.o.dtype)
    for i, step in enumerate(steps):
        stores.write(step, every, S[i])


def _token(
    call: GatedDeltaCall, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """One token of each sequence: q (scaled), k [n, HV, K], v, log decay, beta, in float32."""
    H, HV, _, _ = call.sizes
    q, k, v = (x[rows].float() for x in (call.q, call.k, call.v))
    if call.qk_l2norm:
        q, k = (x * (x * x).sum(-1, keepdim=True).add(1e-6).rsqrt() for x in (q, k))
        k = k.to(call.k.dtype).float()
    q = q * call.scale
    if HV != H:
        q, k = (x.repeat_interleave(HV // H, 1) for x in (q, k))
    g = None
    if call.g is not None:
        a_log = call.gate.a_log
        if a_log is not None and call.per_channel:
            a_log = a_log[:, None]
        g = call.gate.decay(call.g[rows].float(), a_log)
    if call.beta is None:
        beta = torch.ones(len(rows), HV, dtype=torch.float32, device=call.device)
    else:
        beta = call.gate.strength(call.beta[rows].float())
    return q, k, v, g, beta
