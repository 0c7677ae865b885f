"""The gated delta rule token by token, in the widest dtype around: it defines what is right.

Per value head, with state S [K, V] (Gated Delta Networks, arXiv 2412.06464; per channel: Kimi
Linear, arXiv 2510.26692):
    S <- exp(g) S          u = beta (v - S^T k)          S <- S + k u^T          o = scale S^T q
float64 inputs are computed and kept in float64, all others in float32. With a cache every row from
the canonical state on is computed again, so bits do not depend on the steps.
"""

from __future__ import annotations

import torch

from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.ops.gated_delta_rule.spec import GatedDelta, GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import SequenceStep, sequence_steps
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.runtime.dispatch import Implementation


def declines(call: GatedDeltaCall) -> str | None:
    """The reference runs everything whose positions the host can read."""
    if call.device.type not in ("cpu", "meta"):
        return "it runs on the CPU only."
    return None


def run(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call."""
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    steps = sequence_steps(call)
    stores = Stores.allocate(call, wide)
    for step in steps:
        _sequence(call, step, stores, wide)
    return stores.result


def _sequence(call: GatedDeltaCall, step: SequenceStep, stores: Stores, wide: torch.dtype) -> None:
    _, HV, K, V = call.sizes
    heads = slice(0, HV)
    state = torch.zeros(HV, K, V, dtype=wide, device=call.device)
    if (old := stores.read(step, heads)) is not None:
        state.copy_(old)  # contiguous whatever the old strides: sums keep their order
    _reached(step, stores, step.base, state)
    if step.fold == step.base:
        stores.write(step, heads, state)
    last = step.end if step.length else step.fold
    for position in range(step.base, last):
        if position < step.start:
            if not step.tail:
                continue
            q, (k, v, decay, beta) = None, _tail_row(call, step, stores, position, wide)
        else:
            q, k, v, decay, beta = _new_row(call, step.row + position - step.start, wide)
            if position >= step.fold:
                _keep_row(step, stores, position, k, v, decay, beta)
        state = state * decay.exp().reshape(HV, -1, 1)
        u = beta[:, None] * (v - (state * k[:, :, None]).sum(1))
        state = state + k[:, :, None] * u[:, None, :]
        if q is not None:
            o = (state * q[:, :, None]).sum(1) * call.scale
            stores.o[step.row + position - step.start] = o.to(stores.o.dtype)
        if (position + 1) % CHUNK == 0:
            _reached(step, stores, position + 1, state)
        if position + 1 == step.fold:
            stores.write(step, heads, state)
    stores.finish(step, heads)


def _reached(step: SequenceStep, stores: Stores, position: int, state: torch.Tensor) -> None:
    for wanted, index in step.snapshots:
        if wanted == position:
            stores.keep(position, index, slice(0, state.shape[0]), state)


def _new_row(call: GatedDeltaCall, row: int, wide: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k [HV, K], v [HV, V], log decay [HV] or [HV, K], beta [HV] of a packed row."""
    H, HV, K, _ = call.sizes
    q, k, v = (x[row].to(wide) for x in (call.q, call.k, call.v))
    if call.qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        k = k.to(call.k.dtype).to(wide)
    q, k = (x.repeat_interleave(HV // H, 0) for x in (q, k))
    if call.g is None:
        channels = [K] if call.per_channel else []
        decay = torch.zeros(HV, *channels, dtype=wide, device=call.device)
    else:
        a_log = call.gate.a_log
        if a_log is not None and call.per_channel:
            a_log = a_log[:, None]
        decay = call.gate.decay(call.g[row].to(wide), a_log)
    if call.beta is None:
        beta = torch.ones(HV, dtype=wide, device=call.device)
    else:
        beta = call.gate.strength(call.beta[row].to(wide))
    return q, k, v, decay, beta


def _tail_row(
    call: GatedDeltaCall, step: SequenceStep, stores: Stores, position: int, wide: torch.dtype
) -> tuple[torch.Tensor, ...]:
    cache = stores.tail_cache
    assert cache is not None
    H, HV, _, _ = call.sizes
    row = position % cache.tail_rows
    k, v, decay, beta = (
        cache.tensors[name][step.write, :, row].to(wide)
        for name in ("tail_k", "tail_v", "tail_decay", "tail_beta")
    )
    return k.repeat_interleave(HV // H, 0), v, decay, beta


def _keep_row(
    step: SequenceStep,
    stores: Stores,
    position: int,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> None:
    cache = stores.tail_cache
    if cache is None or step.write < 0:
        return
    row = position % cache.tail_rows
    per_key_head = k[:: cache.HV // cache.H]
    for name, value in (
        ("tail_k", per_key_head),
        ("tail_v", v),
        ("tail_decay", decay),
        ("tail_beta", beta),
    ):
        tail = cache.tensors[name]
        tail[step.write, :, row] = value.to(tail.dtype)


IMPLEMENTATION = Implementation("reference", declines, run)
