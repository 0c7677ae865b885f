"""The gated delta rule one token at a time in float64: what every implementation is held against.

Nothing of headstart is used here.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def wide(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor in float64."""
    return tensor.detach().to(torch.float64).cpu().numpy()


def normalised(x: np.ndarray) -> np.ndarray:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def raw_decay(
    x: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> np.ndarray:
    """Log decay of a projection x [T, HV] or [T, HV, K]."""
    projection, rate = wide(x), np.exp(wide(a_log))
    if dt_bias is not None:
        projection = projection + wide(dt_bias)
    if projection.ndim == 3:
        rate = rate[:, None]
    if lower_bound is not None:
        return lower_bound * sigmoid(rate * projection)
    return -rate * np.logaddexp(0.0, projection)


@dataclass
class Replay:
    """Outputs [T, HV, V], and the state [HV, K, V] after each count of tokens asked for."""

    o: Any
    states: dict[int, Any]

    @property
    def state(self) -> Any:
        """The state after the last token."""
        return self.states[max(self.states)]


def replay(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state: Any = None,
    keep: Collection[int] = (),
    device: torch.device | str | None = None,
) -> Replay:
    """One sequence, token by token.

    q, k: [T, H, K], v: [T, HV, V]; tensors in any float dtype, or float64 arrays.
    g: log decay [T, HV] or [T, HV, K], or None. beta: [T, HV], or None.
    qk_l2norm: normalise q and k first; k is then rounded to its dtype again, as the rounding points
        have it.
    state: [HV, K, V] before the first token, or None.
    keep: counts of tokens after which the state is kept; that after the last one always is.
    device: None computes with NumPy; else with torch on that device, and returns tensors there.

    >>> x = torch.ones(1, 1, 1)
    >>> replay(x, x, 2 * x, None, None).o.item()
    2.0
    """
    dtype = k.dtype
    q, k, v = (x if isinstance(x, np.ndarray) else wide(x) for x in (q, k, v))
    T, HV, V = v.shape
    K = q.shape[-1]
    if qk_l2norm:
        q, k = normalised(q), wide(torch.from_numpy(normalised(k)).to(dtype))
    q, k = (x.repeat(HV // q.shape[1], axis=1) for x in (q, k))
    factor = K**-0.5 if scale is None else scale
    g = np.zeros((T, HV)) if g is None else g if isinstance(g, np.ndarray) else wide(g)
    beta = (
        np.ones((T, HV)) if beta is None else beta if isinstance(beta, np.ndarray) else wide(beta)
    )
    decay = np.exp(g if g.ndim == 3 else g[..., None])
    if isinstance(state, torch.Tensor):
        state = wide(state)
    S = np.zeros((HV, K, V)) if state is None else np.array(state, dtype=np.float64)
    o: Any = np.empty((T, HV, V))
    rows: list[Any] = [q[:, :, None], k[:, :, None], v, decay[..., None], beta[..., None], S, o]
    if device is not None:
        rows = [torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in rows]
    with np.errstate(invalid="ignore", over="ignore"):
        q, k, v, decay, beta, S, o = rows
        states = _walk(q, k, v, decay, beta, S, o, factor, set(keep))
    return Replay(o, states)


def _walk(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, S: Any, o: Any, scale: float, keep: set[int]
) -> dict[int, Any]:
    """The recurrence on arrays of either library; q, k [T, HV, 1, K], decay [T, HV, K or 1, 1]."""
    columns = k.swapaxes(-1, -2)  # [T, HV, K, 1]
    multiply: Any = np.multiply if isinstance(S, np.ndarray) else torch.mul
    # In place: fresh arrays of a state's size would be mapped and unmapped for every token.
    rank_one = S + 0.0
    states = {}
    for t in range(len(v)):
        if t in keep:
            states[t] = S + 0.0
        S *= decay[t]
        error = v[t] - (k[t] @ S)[:, 0]
        S += multiply(columns[t], (beta[t] * error)[:, None], out=rank_one)
        o[t] = scale * (q[t] @ S)[:, 0]
    states[len(v)] = S
    return states


def chunked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    *,
    scale: float,
    state: np.ndarray | None = None,
    size: int = 64,
) -> Replay:
    """The same by chunks of `size` tokens: a second derivation, for a decay per head.

    Arguments in float64, q and k [T, HV, K] as `replay` has them after repeating. Gamma_ij is the
    exponential of a sum over (j, i] alone, so that no -inf outside of it enters.
    """
    T, HV, V = v.shape
    S = np.zeros((HV, q.shape[-1], V)) if state is None else np.array(state, dtype=np.float64)
    o = np.empty((T, HV, V))
    for first in range(0, T, size):
        rows = slice(first, min(first + size, T))
        Q, K, X = (x[rows].swapaxes(0, 1) for x in (q, k, v))  # [HV, C, .]
        G, B = g[rows].T, beta[rows].T  # [HV, C]
        C = G.shape[1]
        gamma = np.zeros((HV, C, C))
        for i in range(C):
            # Sums over (j, i] for every j <= i, from the right: nothing is subtracted.
            sums = np.cumsum(np.concatenate([np.zeros((HV, 1)), G[:, i:0:-1]], axis=1), axis=1)
            gamma[:, i, : i + 1] = np.exp(sums[:, ::-1])
        start = np.exp(np.cumsum(G, axis=1))[..., None]
        A = np.tril(B[..., None] * (K @ K.swapaxes(1, 2)) * gamma, -1)
        inner = np.linalg.solve(np.eye(C) + A, B[..., None] * (X - start * (K @ S)))
        o[rows] = (
            scale * (start * (Q @ S) + np.tril((Q @ K.swapaxes(1, 2)) * gamma) @ inner)
        ).swapaxes(0, 1)
        S = start[:, -1:] * S + (gamma[:, -1, :, None] * K).swapaxes(1, 2) @ inner
    return Replay(o, {T: S})
