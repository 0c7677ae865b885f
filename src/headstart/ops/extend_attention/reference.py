"""The `reference` implementation: one query row and one head at a time, against the literal mask.

    s_j = softcap(scale q . k_j),   o = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))

over the keys j that the row sees. It computes in float32, or in float64 for float64 inputs. A row's
bits depend on the keys that it sees alone.
"""

from __future__ import annotations

import torch

from headstart.ops.extend_attention.keys import load
from headstart.ops.extend_attention.merge_spec import MergeCall
from headstart.ops.extend_attention.spec import ExtendCall
from headstart.ops.extend_attention.write_spec import WriteCall
from headstart.ops.extend_attention.writing import bytewise, stored
from headstart.runtime.dispatch import Implementation


def run(call: ExtendCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the call."""
    o, lse = call.outputs()
    dtype = call.lse_dtype
    group = call.HQ // call.HK
    for n in range(call.plan.N):
        keys = call.keys(n)
        k = torch.empty(len(keys), call.HK, call.D, dtype=dtype, device=call.device)
        v = torch.empty(len(keys), call.HK, call.DV, dtype=dtype, device=call.device)
        load(call, n, keys.start, keys.stop, k, v)
        visible = visible_mask(call, n)
        first = call.plan.offsets[n]
        for t in range(call.plan.lengths[n]):
            seen = visible[t].nonzero().squeeze(1)
            k_seen, v_seen = k[seen], v[seen]
            for h in range(call.HQ):
                q = call.q[first + t, h].to(dtype)
                sink = None if call.sinks is None else call.sinks[h].to(dtype)
                at = h // group
                o[first + t, h], lse[first + t, h] = _row(
                    q, k_seen[:, at], v_seen[:, at], call.scale, call.softcap, sink
                )
    return call.result(o, lse)


def _row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's output [DV] and LSE; q [D], k [keys, D], v [keys, DV]."""
    scores = (k * q).sum(1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink is not None:
        scores = torch.cat([scores, sink.view(1)])
    if not scores.numel() or scores.max() == -torch.inf:
        return v.new_zeros(v.shape[1]), v.new_tensor(-torch.inf)
    weights = torch.exp(scores - scores.max())
    total = weights.sum()
    return (weights[: v.shape[0], None] * v).sum(0) / total, scores.max() + torch.log(total)


def visible_mask(call: ExtendCall, n: int) -> torch.Tensor:
    """Which of the part's keys each row of sequence n sees: bool [length, keys]."""
    plan = call.plan
    length, prefix = plan.lengths[n], plan.prefix[n]
    own = plan.query_start[n] + torch.arange(length, device=call.device)[:, None]
    if plan.position_tensor is None:
        cached = plan.key_start[n] + torch.arange(prefix, device=call.device)
    else:
        cached = plan.position_tensor[plan.prefix_offsets[n] : plan.prefix_offsets[n + 1]]
        cached = cached.to(call.device)
    position = torch.cat([cached, own[:, 0]])[None, :]
    visible = torch.ones(length, prefix + length, dtype=torch.bool, device=call.device)
    if call.causal:
        visible &= position <= own
    mask = call.mask(n)
    if mask is not None:
        covered = slice(0 if plan.mask_covers == "all" else prefix, None)
        visible[:, covered] = mask
    if call.window is not None:
        visible &= position > own - call.window
    keys = call.keys(n)
    return visible[:, keys.start : keys.stop]


def merge(call: MergeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the parts: the softmax over their LSEs and the sink weighs their outputs."""
    wide = call.parts[0][1].dtype
    logits = [lse for _, lse in call.parts]
    if call.sinks is not None:
        logits.append(call.sinks.to(wide).expand_as(logits[0]))
    lse = torch.logsumexp(torch.stack(logits), dim=0)
    # Not exp(lse_part - lse): where the LSE is large, its own rounding would be the shares' error.
    shares = torch.softmax(torch.stack(logits), dim=0).masked_fill(lse == -torch.inf, 0.0)
    o = torch.zeros_like(call.parts[0][0], dtype=wide)
    for (o_part, _), share in zip(call.parts, shares, strict=False):
        o += share[..., None] * o_part
    return call.deliver(o, lse)


def write(call: WriteCall) -> None:
    """Store one row at a time."""
    cache = call.cache
    for rows, store, scale in (
        (call.k, cache.k, cache.k_scale),
        (call.v, cache.v, cache.v_scale),
    ):
        values = bytewise(stored(rows, store.dtype, scale))
        for t, slot in enumerate(call.slots.tolist()):
            if slot >= 0:
                at = (slot,) if store.dim() == 3 else divmod(slot, cache.page_size)
                bytewise(store)[at] = values[t]


IMPLEMENTATION = Implementation("reference", declines=lambda call: None, run=run)
MERGE = Implementation("reference", declines=lambda call: None, run=merge)
WRITE = Implementation("reference", declines=lambda call: None, run=write)
