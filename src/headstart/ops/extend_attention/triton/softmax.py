"""An online softmax over tiles of scores, in units in which a weight is exp2(x - m).

    m' = max(m, max f s),   p = exp2(f s - m'),   l' = l exp2(m - m') + sum p,
    acc' = acc exp2(m - m') + p v;      at the end   o = acc / l,   LSE = m ln 2 + log l

f > 0 is the scale with log2(e) in it. A hidden score is -inf; a row with nothing but hidden scores
has m' = m, p = 0 and a factor of exactly 1: its bits do not change. While m is -inf, 0 stands for
it in the exponents. m is kept as rounded and every multiply-add is spelled out, so that contraction
by a compiler can neither make inf - inf nor other bits in one loop than in another.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite(m):
    """m, and 0 where nothing was seen yet."""
    return tl.where(m == NOTHING, 0.0, m)


@triton.jit
def column(x):
    """A number as it is; numbers of rows [BM] as a column."""
    found = x
    if isinstance(x, tl.tensor):  # noqa: SIM102
        if len(x.shape) == 1:
            found = x[:, None]
    return found


@triton.jit
def top(m, b_s, factor):
    """m with one more tile of scores [BM, BN]; factor: a number, or one a row [BM]."""
    return tl.maximum(m, tl.max(b_s, 1) * factor)


@triton.jit
def weights(m, m_new, l, b_s, factor):  # noqa: E741
    """Of a tile of scores [BM, BN] its weights, what earlier sums shrink by [BM], and l.

    m_new: what `top` says of them.
    """
    m_safe = finite(m_new)
    b_p = tl.math.exp2(tl.fma(b_s, column(factor), -m_safe[:, None]))  # [BM, BN]
    decay = tl.math.exp2(m - m_safe)
    return b_p, decay, tl.fma(l, decay, tl.sum(b_p, 1))


@triton.jit
def weigh(m, l, b_s, factor):  # noqa: E741
    """One tile of scores [BM, BN]: its weights, what earlier sums shrink by [BM], and m and l."""
    m_new = top(m, b_s, factor)
    b_p, decay, l = weights(m, m_new, l, b_s, factor)  # noqa: E741
    return b_p, decay, m_new, l


@triton.jit
def weigh_two(m, l, b_s, b_s_next, factor):  # noqa: E741
    """Two tiles side by side as one; factor: a number."""
    m_new = tl.maximum(m, tl.maximum(tl.max(b_s, 1), tl.max(b_s_next, 1)) * factor)
    m_safe = finite(m_new)
    b_p = tl.math.exp2(tl.fma(b_s, factor, -m_safe[:, None]))
    b_p_next = tl.math.exp2(tl.fma(b_s_next, factor, -m_safe[:, None]))
    decay = tl.math.exp2(m - m_safe)
    return b_p, b_p_next, decay, m_new, tl.fma(l, decay, tl.sum(b_p, 1) + tl.sum(b_p_next, 1))


@triton.jit
def add_values(acc, decay, b_p, b_v, PRECISION: tl.constexpr):
    """Sums [BM, BDV], shrunk by decay [BM], and the values [BN, BDV] by their weights [BM, BN]."""
    return tl.dot(b_p.to(b_v.dtype), b_v, acc * decay[:, None], input_precision=PRECISION)


@triton.jit
def absorb(acc, m, l, b_s, b_v, factor, PRECISION: tl.constexpr):  # noqa: E741
    """One tile of scores and values into acc, m and l."""
    b_p, decay, m, l = weigh(m, l, b_s, factor)  # noqa: E741
    return add_values(acc, decay, b_p, b_v, PRECISION), m, l


@triton.jit
def join(acc, m, l, acc_next, m_next, l_next):  # noqa: E741
    """The state of all keys so far and that of the next block of keys as one."""
    m_new = tl.maximum(m, m_next)
    m_safe = finite(m_new)
    decay, share = tl.math.exp2(m - m_safe), tl.math.exp2(m_next - m_safe)
    l_new = tl.fma(l, decay, l_next * share)
    acc = tl.fma(acc, decay[:, None], acc_next * share[:, None])
    return acc, m_new, l_new


@triton.jit
def finish(m, l, sink):  # noqa: E741
    """The factor that turns acc into o, and the LSE; sink: -inf where there is none.

    In natural units, so that a row without keys gives the sink itself.
    """
    m_natural = m * LN2
    top = tl.maximum(m_natural, sink)
    top_safe = finite(top)
    share = tl.exp(m_natural - top_safe)
    total = tl.fma(l, share, tl.exp(sink - top_safe))
    seen = total != 0.0
    safe = tl.where(seen, total, 1.0)
    return tl.where(seen, share / safe, 0.0), tl.where(seen, top + tl.log(safe), NOTHING)


@triton.jit
def tanh(x):
    """tanh without loss of digits near 0 [Cephes]."""
    z = x * x
    near = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    near = tl.fma(near, z, -5.37397155531e-2)
    near = tl.fma(near, z, 1.33314422036e-1)
    near = tl.fma(near, z, -3.33332819422e-1)
    near = tl.fma(near * z, x, x)
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))
