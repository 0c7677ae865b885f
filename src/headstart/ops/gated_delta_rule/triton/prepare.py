"""Per chunk and value head, whatever does not depend on the state before the chunk.

    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)    T = (I + A)^-1
    U = T beta v      W = T beta Gamma_i0 k      P = scale tril((q_i . k_j) Gamma_ij)

[Gated Delta Networks, arXiv 2412.06464.] Stored in q's dtype as tiles of 64 rows; beside them, per
row in float32, Gamma_i0 and Gamma_Ci. A row that holds no token is a row of zeros with log decay 0.
From the first row on that is not finite, rows count as empty here and Gamma_i0 is NaN, which later
makes those outputs and all later states NaN and leaves earlier rows alone.
"""

import triton
import triton.language as tl

from headstart.ops.gated_delta_rule.triton.gates import (
    decay_sums,
    gamma,
    last_row,
    log_decay,
    strength,
)
from headstart.ops.gated_delta_rule.triton.inverse import unit_lower_inverse

VARYING = ("first_item",)


@triton.jit
def normalised(x):
    """x rsqrt(sum(x^2) + 1e-6) over the last axis, in float32."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def gathered(new_rows, tail_rows, new, old, columns, NORMALISE: tl.constexpr, CACHED: tl.constexpr):
    """Rows of this call, normalised where asked, and rows of the tail; 0 where there is none."""
    x = tl.load(new_rows, mask=new[:, None] & columns, other=0.0)
    if NORMALISE:
        x = normalised(x.to(tl.float32)).to(x.dtype)
    if CACHED:
        x = tl.where(old[:, None], tl.load(tail_rows, mask=old[:, None] & columns, other=0.0), x)
    return x


@triton.jit
def precise_dot(x, y, PRECISION: tl.constexpr):
    """x y of float32 x and y in its dtype: x as two words, for its rounding would be the largest."""
    dtype = y.dtype
    if dtype == tl.float32:
        found = tl.dot(x, y, input_precision=PRECISION)
    else:
        high = x.to(dtype)
        found = tl.dot((x - high.to(tl.float32)).to(dtype), y)
        found = tl.dot(high, y, found)
    return found


@triton.jit
def diagonal(x):
    """The diagonal of x [64, 64]."""
    rows = tl.arange(0, 64)
    return tl.sum(tl.where(rows[:, None] == rows[None, :], x, 0.0), 1)


@triton.jit
def prepare_kernel(
    q,
    k,
    v,
    g,
    beta,
    a_log,
    dt_bias,
    sequences,
    items,
    slots,
    position,
    tail_k,
    tail_v,
    tail_decay,
    tail_beta,
    W,
    U,
    P,
    q_tiles,
    k_tiles,
    from_start,
    to_end,
    log_decays,
    strengths,
    base,
    first_item,
    scale,
    lower_bound,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    position_slot,
    tail_k_slot,
    tail_k_head,
    tail_v_slot,
    tail_v_head,
    tail_decay_slot,
    tail_decay_head,
    tail_beta_slot,
    tail_beta_head,
    tail_rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    HAS_G: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
    CACHED: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (value head, item)."""
    head = tl.program_id(0)
    local = tl.program_id(1)
    item = first_item + local
    key_head = head // (HV // H)
    n = tl.load(items + item * 4)
    if n < 0:
        return
    low = tl.load(items + item * 4 + 1)
    row = tl.load(sequences + n * 8)
    start = tl.load(sequences + n * 8 + 1)
    end = start + tl.load(sequences + n * 8 + 2)
    dtype = k.dtype.element_ty
    rows = tl.arange(0, 64)
    at = low + rows
    new = (at >= start) & (at < end)
    source = row + at - start
    source = tl.where(new, source, 0).to(tl.int64)
    old = new
    ring = rows
    slot = tl.full((), 0, tl.int64)
    if CACHED:
        slot = tl.load(slots + n).to(tl.int64)
        held = (slot >= 0) & (start > 0)
        slot = tl.maximum(slot, 0)
        P0 = start // 64 * 64
        if held:
            P0 = tl.load(position + slot * position_slot + head)
        if item == tl.load(sequences + n * 8 + 4):
            tl.store(base + n * HV + head, P0)
        if low + 64 <= P0:
            return
        old = held & (at >= P0) & (at < start)
        ring = (at % tail_rows).to(tl.int32)
    ck = tl.arange(0, BK)
    cv = tl.arange(0, BV)
    k_rows = k + source[:, None] * k_token + key_head * k_head + ck[None, :]
    v_rows = v + source[:, None] * v_token + head * v_head + cv[None, :]
    q_rows = q + source[:, None] * q_token + key_head * q_head + ck[None, :]
    k_tail = tail_k + slot * tail_k_slot + key_head * tail_k_head + ring[:, None] * K + ck[None, :]
    v_tail = tail_v + slot * tail_v_slot + head * tail_v_head + ring[:, None] * V + cv[None, :]
    in_k = ck[None, :] < K
    in_v = cv[None, :] < V
    decay = tl.zeros((64,), tl.float32)
    if HAS_G:
        decay = tl.load(g + source * g_token + head * g_head, mask=new, other=0.0).to(tl.float32)
        rate = 0.0
        bias = 0.0
        if GATE == "raw" or GATE == "bounded":
            rate = tl.exp(tl.load(a_log + head).to(tl.float32))
            if HAS_BIAS:
                bias = tl.load(dt_bias + head).to(tl.float32)
        decay = tl.where(new, log_decay(decay, rate, bias, lower_bound, GATE), 0.0)
    b = tl.where(new, 1.0, 0.0)
    if HAS_BETA:
        b = tl.load(beta + source * beta_token + head * beta_head, mask=new, other=0.0)
        b = tl.where(new, strength(b.to(tl.float32), BETA), 0.0)
    if CACHED:
        # Rows of the tail: log decay and beta are already formed.
        decays = tail_decay + slot * tail_decay_slot + head * tail_decay_head + ring
        decay = tl.where(old, tl.load(decays, mask=old, other=0.0), decay)
        betas = tail_beta + slot * tail_beta_slot + head * tail_beta_head + ring
        b = tl.where(old, tl.load(betas, mask=old, other=0.0), b)
    tile = (local * HV + head).to(tl.int64)
    lead = head % (HV // H) == 0
    key_square = (local * H + key_head).to(tl.int64) * (64 * BK) + rows[:, None] * BK + ck[None, :]
    if CACHED:
        tl.store(log_decays + tile * 64 + rows, decay)
        tl.store(strengths + tile * 64 + rows, b)

    # From the first row that is not finite on, rows count as empty.
    vv = gathered(v_rows, v_tail, new, old, in_v, False, CACHED)
    spoiled = diagonal(tl.dot(vv, tl.trans(vv), input_precision=PRECISION))
    kk = gathered(k_rows, k_tail, new, old, in_k, NORMALISE, CACHED)
    if TILES and lead:
        tl.store(k_tiles + key_square, kk)
    square = tl.dot(kk, tl.trans(kk), input_precision=PRECISION)
    spoiled = ((spoiled + diagonal(square) + b) * 0.0 != 0.0) | (decay != decay)
    clean = tl.min(tl.where(spoiled, rows, 64), 0)
    decay = tl.where(rows < clean, decay, 0.0)
    b = tl.where(rows < clean, b, 0.0)

    high, low_word, cuts = decay_sums(decay)
    begin = gamma(high, low_word, cuts, 0.0, 0.0, 0)
    stop = gamma(
        last_row(high, rows, 63),
        last_row(low_word, rows, 63),
        last_row(cuts, rows, 63),
        high,
        low_word,
        cuts,
    )
    tl.store(from_start + tile * 64 + rows, tl.where(rows < clean, begin, float("nan")))
    tl.store(to_end + tile * 64 + rows, stop)
    G = gamma(
        high[:, None],
        low_word[:, None],
        cuts[:, None],
        high[None, :],
        low_word[None, :],
        cuts[None, :],
    )
    i = rows[:, None]
    j = rows[None, :]
    A = tl.where((i > j) & (i < clean), square * G * b[:, None], 0.0)

    qq = gathered(q_rows, q_rows, new, new, in_k, NORMALISE, False)
    if TILES and lead:
        tl.store(q_tiles + key_square, qq)
    p = tl.dot(qq, tl.trans(kk), input_precision=PRECISION)
    p = tl.where((i >= j) & (j < clean), p * (G * scale), 0.0)
    tl.store(P + tile * 4096 + i * 64 + j, p.to(dtype))

    if dtype == tl.float32:
        T = unit_lower_inverse(A, tl.float32, PRECISION)
    else:
        T = unit_lower_inverse(A, tl.float16, PRECISION)
    T = T * b[None, :]
    # Read again rather than kept in registers through the inverse.
    new = new & (rows < clean)
    old = old & (rows < clean)
    vv = gathered(v_rows, v_tail, new, old, in_v, False, CACHED)
    u = precise_dot(T, vv, PRECISION)
    tl.store(U + tile * (64 * BV) + rows[:, None] * BV + cv[None, :], u.to(dtype))
    kk = gathered(k_rows, k_tail, new, old, in_k, NORMALISE, CACHED)
    w = precise_dot(T * begin[None, :], kk, PRECISION)
    tl.store(W + tile * (64 * BK) + rows[:, None] * BK + ck[None, :], w.to(dtype))
