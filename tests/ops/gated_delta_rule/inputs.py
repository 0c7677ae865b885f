"""Inputs as real models produce them: normalised keys, decays of every strength, outliers in v."""

import os
from dataclasses import dataclass, replace

import torch
from tests.ops.gated_delta_rule import oracle

INF = float("inf")


@dataclass(frozen=True)
class Inputs:
    """q, k [T, H, K], v [T, HV, V], log decay g [T, HV] or [T, HV, K], beta [T, HV] float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None

    def __iter__(self):
        return iter((self.q, self.k, self.v, self.g, self.beta))

    def __getitem__(self, rows) -> "Inputs":
        """The same for some of the rows, or of the rows and heads as (rows, heads, value heads)."""
        if not isinstance(rows, tuple):
            return Inputs(*(None if x is None else x[rows] for x in self))
        rows, heads, value_heads = rows
        q, k = self.q[rows, heads], self.k[rows, heads]
        rest = (None if x is None else x[rows, value_heads] for x in (self.v, self.g, self.beta))
        return Inputs(q, k, *rest)

    def __len__(self) -> int:
        return len(self.q)

    def but(self, **changes) -> "Inputs":
        """These inputs with some tensors replaced."""
        return replace(self, **changes)

    def clone(self) -> "Inputs":
        return Inputs(*(None if x is None else x.clone() for x in self))

    @property
    def sizes(self) -> dict[str, int]:
        """H, HV, K, V by name, as DeltaCache takes them."""
        (_, H, K), (_, HV, V) = self.q.shape, self.v.shape
        return {"H": H, "HV": HV, "K": K, "V": V}


def draw(
    T, H=1, HV=2, K=16, V=16, *, dtype=torch.float32, seed=0, per_channel=False, unit=True
) -> Inputs:
    """T tokens; unit=False leaves q and k unnormalised (for qk_l2norm=True).

    HEADSTART_TEST_HEAD_SIZE=128 draws heads of that size instead, for kernels of one head size.
    """
    K, V = (int(os.environ.get("HEADSTART_TEST_HEAD_SIZE", size)) for size in (K, V))
    at = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, T, H, K, generator=at)
    if unit:
        q, k = (x / (x.norm(dim=-1, keepdim=True) + 1e-9) for x in (q, k))
    v = torch.randn(T, HV, V, generator=at)
    v = torch.where(torch.rand(v.shape, generator=at) < 0.002, 25 * v.sign(), v)
    channels = (K,) if per_channel else ()
    strength = torch.rand(HV, generator=at) * 16 * (torch.arange(HV) % 4 != 3)
    x = torch.randn(T, HV, *channels, generator=at)
    g = -torch.nn.functional.softplus(x - 5) * strength.view(HV, *(1 for _ in channels))
    beta = torch.rand(T, HV, generator=at)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), g, beta)


def late_forget(x: Inputs, *, seed=0, chunk=64) -> Inputs:
    """x with a -inf or a -316 at a random late row of every chunk."""
    at = torch.Generator().manual_seed(seed)
    g = x.g.clone()
    for c, first in enumerate(range(0, len(g), chunk)):
        row = first + int(torch.randint(chunk // 2, chunk, (), generator=at))
        if row < len(g):
            g[row] = -INF if c % 2 else -316.0
    return x.but(g=g)


def packed(*sequences: Inputs) -> Inputs:
    """Sequences end to end."""
    return Inputs(*(None if x[0] is None else torch.cat(x) for x in zip(*sequences, strict=True)))


def replay(x: Inputs, **kwargs) -> oracle.Replay:
    """The oracle's run of one sequence."""
    return oracle.replay(*x, **kwargs)
