"""The gated delta rule one token at a time in float64: what every implementation is held against.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Nothing of headstart is used here. Tensors come in any float dtype and are read as they are, so an
error measured against this oracle is the error after the inputs were rounded to their dtype.
"""

from dataclasses import dataclass

import numpy as np
import torch


def wide(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor in float64."""
    return tensor.detach().to(torch.float64).cpu().numpy()


def normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def raw_decay(x, a_log, dt_bias=None, lower_bound=None) -> np.ndarray:
    """Log decay of a projection x [T, HV] or [T, HV, K]."""
    x, rate = wide(x), np.exp(wide(a_log))
    if dt_bias is not None:
        x = x + wide(dt_bias)
    if x.ndim == 3:
        rate = rate[:, None]
    if lower_bound is not None:
        return lower_bound * sigmoid(rate * x)
    return -rate * np.logaddexp(0.0, x)


@dataclass
class Replay:
    """Outputs [T, HV, V], and the state [HV, K, V] after each count of tokens asked for."""

    o: np.ndarray
    states: dict[int, np.ndarray]

    @property
    def state(self) -> np.ndarray:
        """The state after the last token."""
        return self.states[max(self.states)]


def replay(q, k, v, g, beta, *, scale=None, qk_l2norm=False, state=None, keep=()) -> Replay:
    """One sequence: q, k [T, H, K], v [T, HV, V], log decay g [T, HV] or [T, HV, K] or None, beta
    [T, HV] or None, state [HV, K, V] or None; tensors or float64 arrays.

    k that is normalised here is rounded to its dtype again, as the rounding points have it.
    """
    dtype = k.dtype
    q, k, v = (x if isinstance(x, np.ndarray) else wide(x) for x in (q, k, v))
    T, HV, V = v.shape
    K = q.shape[-1]
    if qk_l2norm:
        q, k = normalised(q), wide(torch.from_numpy(normalised(k)).to(dtype))
    q, k = (x.repeat(HV // q.shape[1], axis=1) for x in (q, k))
    if scale is None:
        scale = K**-0.5
    g = np.zeros((T, HV)) if g is None else g if isinstance(g, np.ndarray) else wide(g)
    beta = (
        np.ones((T, HV)) if beta is None else beta if isinstance(beta, np.ndarray) else wide(beta)
    )
    decay = np.exp(g if g.ndim == 3 else g[..., None])
    S = np.zeros((HV, K, V)) if state is None else np.array(state, dtype=np.float64)
    o, states = np.empty((T, HV, V)), {}
    with np.errstate(invalid="ignore", over="ignore"):
        for t in range(T):
            if t in keep:
                states[t] = S.copy()
            S = decay[t, :, :, None] * S
            error = v[t] - (k[t, :, None] @ S)[:, 0]
            S = S + k[t, :, :, None] * (beta[t, :, None] * error)[:, None]
            o[t] = scale * (q[t, :, None] @ S)[:, 0]
    states[T] = S
    return Replay(o, states)


def relative(found: torch.Tensor, expected: np.ndarray) -> float:
    """Relative L2 error; a NaN anywhere is infinite. An expected 0 asks for 0."""
    found = wide(found)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not np.isfinite(found).all():
        return np.inf
    norm = np.linalg.norm(expected)
    distance = np.linalg.norm(found - expected)
    return float(distance / norm) if norm else (0.0 if distance == 0 else np.inf)


def last_half(found: torch.Tensor, expected: np.ndarray) -> float:
    """Relative L2 error of the last half of the tokens, where drift shows."""
    half = len(expected) // 2
    return relative(found[half:], expected[half:])


def worst_row(found: torch.Tensor, expected: np.ndarray) -> float:
    """Largest error of one (token, head) row, relative to the root mean square row of its head.

    A single wrong row hides in a mean; it does not hide here.
    """
    if not expected.size:
        return 0.0
    error = np.linalg.norm(wide(found) - expected, axis=-1)
    if not np.isfinite(error).all():
        return np.inf
    typical = np.sqrt((expected**2).sum(-1).mean(0))
    return float((error / np.maximum(typical, 1e-30)).max())


# dtype -> relative L2 error and worst row, for float32 arithmetic that rounds once at the end.
TOLERANCE = {
    torch.float64: (1e-13, 1e-12),
    torch.float32: (1e-6, 1e-5),
    torch.float16: (4e-4, 5e-3),
    torch.bfloat16: (3e-3, 4e-2),
}


def expect_close(o: torch.Tensor, expected: np.ndarray, *, slack: float = 1.0) -> None:
    """Outputs agree with the oracle as far as their dtype allows: as a whole and row by row."""
    most, row = TOLERANCE[o.dtype]
    if not expected.size:
        assert o.shape == expected.shape
        return
    assert relative(o, expected) <= slack * most
    assert worst_row(o, expected) <= slack * row


def expect_state(state, expected, *, slack: float = 1.0) -> None:
    """States agree with the oracle as far as float32 arithmetic and their own dtype allow."""
    most = TOLERANCE[state.dtype][0]
    assert relative(state, expected) <= slack * most
