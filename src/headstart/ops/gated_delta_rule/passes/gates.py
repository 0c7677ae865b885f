"""Gate parameters, elementwise in float32.

log decay = g | log(g) | -exp(a_log) softplus(g + dt_bias)
            | lower_bound sigmoid(exp(a_log) (g + dt_bias))
beta = b | sigmoid(b) | 2 sigmoid(b)
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """log(1 + x) for 0 <= x <= 1 without loss of digits near 0 [Kahan's quotient]."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))


@triton.jit
def softplus(x):
    """log(1 + exp(x))."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(g, rate, dt_bias, lower_bound, KIND: tl.constexpr):
    """Log decay of gate inputs in float32; rate = exp(a_log)."""
    if KIND == "linear":
        g = tl.log(g)
    if KIND == "raw":
        g = -rate * softplus(g + dt_bias)
    if KIND == "bounded":
        g = lower_bound * sigmoid(rate * (g + dt_bias))
    return g


@triton.jit
def strength(beta, KIND: tl.constexpr):
    """beta as a value."""
    if KIND == "logit":
        beta = sigmoid(beta)
    if KIND == "logit2":
        beta = 2.0 * sigmoid(beta)
    return beta
