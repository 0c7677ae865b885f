"""Softmax attention under a literal mask in float64, one sequence and key head at a time.

A row sums over the keys that it sees:

    s_j = softcap(scale q . k_j),   Z = exp(sink) + sum_j exp(s_j),   o = sum_j exp(s_j) v_j / Z
"""

from __future__ import annotations

import torch

ROWS = 256
"""Query rows of one product."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    positions: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New rows q [T, G, D] of the heads of one key head, over all keys k [J, D], v [J, DV].

    positions: [T] of the rows; key j sits at j. Row t sees j <= positions[t] and
    j > positions[t] - window; mask, bool [T, J], takes the place of the causal rule.
    sinks: [G]. Returns o [T, G, DV] and LSE [T, G], float64, on q's device.

    >>> o, lse = attend(torch.ones(1, 1, 4), torch.ones(2, 4), torch.ones(2, 4),
    ...                 positions=torch.tensor([1]))
    >>> o.round(decimals=9).flatten().tolist(), round(float(lse), 3)
    ([1.0, 1.0, 1.0, 1.0], 2.693)
    """
    T, G, D = q.shape
    k, v = k.double(), v.double()
    factor = D**-0.5 if scale is None else scale
    o = torch.empty(T, G, v.shape[1], dtype=torch.float64, device=q.device)
    lse = torch.empty(T, G, dtype=torch.float64, device=q.device)
    for first in range(0, T, ROWS):
        rows = slice(first, min(first + ROWS, T))
        own = positions[rows]
        begin, end = 0, len(k)
        if window is not None:
            begin = min(max(0, int(own.min()) - window + 1), end)
        if mask is None:
            end = min(end, int(own.max()) + 1)
        keys = torch.arange(begin, end, device=q.device)
        seen = keys <= own[:, None] if mask is None else mask[rows, begin:end]
        if window is not None:
            seen = seen & (keys > own[:, None] - window)
        scores = factor * torch.einsum("tgd,jd->gtj", q[rows].double(), k[begin:end])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        extra = scores.new_full((G, len(own), 1), -torch.inf)
        if sinks is not None:
            extra = extra.copy_(sinks.double().view(G, 1, 1))
        total = torch.logsumexp(torch.cat([scores, extra], dim=2), dim=2)  # [G, rows]
        weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0)[..., None])
        o[rows] = torch.einsum("gtj,jd->tgd", weights, v[begin:end])
        lse[rows] = total.T
    return o, lse
