"""Dense float64 attention under a literal mask, and batches to hold implementations against it."""

from dataclasses import dataclass, field
from typing import Any

import torch

from headstart import ExtendPlan, KVCache

INF = float("inf")


@dataclass(frozen=True)
class Batch:
    """Packed new rows q, k, v, and packed cached rows of the prefixes; where each of them sits."""

    lengths: list[int]
    prefix: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    prefix_k: torch.Tensor
    prefix_v: torch.Tensor
    query_start: list[int] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    """Positions of the prefix keys of each sequence."""

    def arguments(self, **options: Any) -> dict[str, Any]:
        """Keyword arguments with the prefixes in consecutive slots; options go to the plan."""
        plan = ExtendPlan.from_lengths(self.lengths, self.prefix, device="cpu", **options)
        cache = KVCache(self.prefix_k, self.prefix_v)
        return {"q": self.q, "k": self.k, "v": self.v, "plan": plan, "cache": cache}


def draw(
    lengths,
    prefix=None,
    HQ=2,
    HK=1,
    D=16,
    DV=None,
    *,
    dtype=torch.float32,
    seed=0,
    query_start=None,
    positions=None,
) -> Batch:
    """A seeded batch; scores spread over about +-6, as trained heads' do."""
    at = torch.Generator().manual_seed(seed)
    prefix = [0] * len(lengths) if prefix is None else prefix
    DV = D if DV is None else DV

    def normal(*shape):
        return torch.randn(shape, generator=at).to(dtype)

    T, S = sum(lengths), sum(prefix)
    return Batch(
        lengths=list(lengths),
        prefix=list(prefix),
        q=(2 * normal(T, HQ, D).float()).to(dtype),
        k=normal(T, HK, D),
        v=normal(T, HK, DV),
        prefix_k=normal(S, HK, D),
        prefix_v=normal(S, HK, DV),
        query_start=list(prefix) if query_start is None else query_start,
        positions=[torch.arange(p) for p in prefix] if positions is None else positions,
    )


def tail(batch: Batch, rows: int) -> Batch:
    """The last rows of a batch of one sequence, all before them cached."""
    cut = batch.lengths[0] - rows
    prefix = batch.prefix[0] + cut
    return Batch(
        [rows],
        [prefix],
        *(x[cut:] for x in (batch.q, batch.k, batch.v)),
        torch.cat([batch.prefix_k, batch.k[:cut]]),
        torch.cat([batch.prefix_v, batch.v[:cut]]),
        [prefix],
        [torch.arange(prefix)],
    )


def visible(batch, n, *, window=None, causal=True, mask=None, covers="all", part="all"):
    """Bool [length, prefix + length]: j <= own, j > own - window, or the custom mask."""
    length, prefix = batch.lengths[n], batch.prefix[n]
    own = batch.query_start[n] + torch.arange(length)
    position = torch.cat([batch.positions[n], own])
    seen = torch.ones(length, prefix + length, dtype=torch.bool)
    if causal:
        seen &= position[None, :] <= own[:, None]
    if mask is not None and covers == "all":
        seen = mask.bool()
    elif mask is not None:
        seen[:, prefix:] = mask.bool()
    if window is not None:
        seen = seen & (position[None, :] > own[:, None] - window)
    if part == "prefix":
        seen[:, prefix:] = False
    if part == "extend":
        seen[:, :prefix] = False
    return seen


def expected(batch, *, scale=None, sinks=None, softcap=None, masks=None, **rules):
    """o [T, HQ, DV] and LSE [T, HQ] in float64; masks: one per sequence."""
    HQ, D = batch.q.shape[1:]
    group = HQ // batch.k.shape[1]
    scale = D**-0.5 if scale is None else scale
    rows = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
    cached = torch.tensor([0, *batch.prefix]).cumsum(0).tolist()
    outputs, lses = [], []
    for n in range(len(batch.lengths)):
        new, old = slice(rows[n], rows[n + 1]), slice(cached[n], cached[n + 1])
        k = torch.cat([batch.prefix_k[old].double(), batch.k[new].double()])
        v = torch.cat([batch.prefix_v[old].double(), batch.v[new].double()])
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = scale * torch.einsum("thd,jhd->htj", batch.q[new].double(), k)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        mask = None if masks is None else masks[n]
        scores = scores.masked_fill(~visible(batch, n, mask=mask, **rules), -INF)
        extra = torch.full((HQ, 1, 1), -INF, dtype=torch.float64)
        if sinks is not None:
            extra = sinks.double().view(HQ, 1, 1)
        logits = torch.cat([scores, extra.expand(-1, scores.shape[1], -1)], dim=2)
        lse = torch.logsumexp(logits, dim=2)
        weights = torch.exp(scores - lse.masked_fill(lse == -INF, 0.0)[..., None])
        outputs.append(torch.einsum("htj,jhd->thd", weights, v))
        lses.append(lse.t())
    return torch.cat(outputs), torch.cat(lses)


# Rounding of the stored output, in units of its size; float32 also bounds the arithmetic.
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def expect_close(found, want, rounding=None, lse_error=1e-6):
    """Every row near: the error of each row against its own size, and the LSE against itself."""
    (o, lse), (o_want, lse_want) = found, want
    assert o.shape == o_want.shape
    assert lse.dtype in (torch.float32, torch.float64)
    seen = lse_want.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert torch.equal(lse[~seen].double(), lse_want[~seen])
    assert bool(o.isfinite().all())
    if not o.numel():
        return
    rounding = ROUNDING[o.dtype] if rounding is None else rounding
    error = (o.double() - o_want).abs().amax(-1)
    size = o_want.abs().amax(-1).clamp_min(1.0)
    assert float((error / size).max()) < rounding
    if seen.any():
        error = (lse.double() - lse_want)[seen].abs() / lse_want[seen].abs().clamp_min(10.0)
        assert float(error.max()) < lse_error
