"""How near outputs and states are to the oracle, and how near they must be."""

import numpy as np
import torch
from tests.implementations import KERNELS

from headstart.evidence.oracles import delta
from headstart.evidence.oracles.delta import Replay, normalised, raw_decay, sigmoid, wide

__all__ = ["Replay", "normalised", "raw_decay", "replay", "sigmoid", "wide"]


class Expected(np.ndarray):
    """Float64 values that know the dtype of the inputs they were computed from, None for arrays."""

    inputs: torch.dtype | None = None

    def __array_finalize__(self, other) -> None:
        self.inputs = getattr(other, "inputs", None)


def replay(q, k, *rest, **options) -> Replay:
    """`delta.replay`, whose results know the dtype of k."""

    def marked(values: np.ndarray) -> Expected:
        found = values.view(Expected)
        found.inputs = k.dtype if isinstance(k, torch.Tensor) else None
        return found

    found = delta.replay(q, k, *rest, **options)
    states = {position: marked(state) for position, state in found.states.items()}
    return Replay(marked(found.o), states)


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
# The same for kernels on matrix units: they round the operands of every product to the dtype of
# the inputs, the state, the inverse, what it multiplies and v_new among them (four or five
# roundings of 2^-9 or 2^-12), and form float32 products from three of TF32.
ROUNDED_OPERANDS = {
    torch.float32: (2e-6, 2e-5),
    torch.float16: (1.2e-3, 1e-2),
    torch.bfloat16: (8e-3, 8e-2),
}


def tolerance(dtype: torch.dtype, expected: np.ndarray) -> tuple[float, float]:
    """Of a result stored in dtype."""
    found = TOLERANCE[dtype]
    if KERNELS and isinstance(expected, Expected) and expected.inputs in ROUNDED_OPERANDS:
        found = max(found, ROUNDED_OPERANDS[expected.inputs])
    return found


def expect_close(o: torch.Tensor, expected: np.ndarray, *, slack: float = 1.0) -> None:
    """Outputs agree with the oracle as far as their dtype allows: as a whole and row by row."""
    most, row = tolerance(o.dtype, expected)
    if not expected.size:
        assert o.shape == expected.shape
        return
    assert relative(o, expected) <= slack * most
    assert worst_row(o, expected) <= slack * row


def expect_state(state, expected, *, slack: float = 1.0) -> None:
    """States agree with the oracle as far as float32 arithmetic and their own dtype allow."""
    assert relative(state, expected) <= slack * tolerance(state.dtype, expected)[0]
