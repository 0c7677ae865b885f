"""Gate parameters, and decay sums that neither overflow nor lose digits.

    log decay = g | log(g) | -exp(a_log) softplus(g + dt_bias) | lower sigmoid(exp(a_log)(g + dt_bias))
    beta = b | sigmoid(b) | 2 sigmoid(b)
    Gamma_ij = exp(sum of the log decays of rows j < m <= i)

A running sum is kept in units of log 2 as two float32 words (high + low, from one float64 sum), so
a difference of sums is as exact as its own size allows; a log decay below CUT, -inf included, never enters a sum:
it is counted, and an entry whose two counts differ is 0, as exp of such a sum is in float32. Row i
of every result looks at rows <= i alone.
"""

import triton
import triton.language as tl

CUT = tl.constexpr(-104.0)
"""exp of anything below is 0 in float32, subnormal numbers included."""


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


@triton.jit
def decay_sums(g):
    """Running sums of log2 decays over axis 0: high word, low word, count of cuts."""
    cut = g < CUT
    total = tl.cumsum(tl.where(cut, 0.0, g).to(tl.float64) * 1.4426950408889634, 0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    return high, low, tl.cumsum(cut.to(tl.int32), 0)


@triton.jit
def last_row(x, rows, LAST: tl.constexpr):
    """x[LAST] of a vector over `rows`."""
    return tl.sum(tl.where(rows == LAST, x, 0), 0)


@triton.jit
def gamma(high_i, low_i, cuts_i, high_j, low_j, cuts_j):
    """exp(sum_i - sum_j) of sums that broadcast, for i >= j."""
    between = (high_i - high_j) + (low_i - low_j)
    return tl.where(cuts_i == cuts_j, tl.exp2(between), 0.0)
