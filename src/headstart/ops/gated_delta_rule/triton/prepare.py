"""Per chunk and value head, whatever does not depend on the state before the chunk.

    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)    T = (I + A)^-1
    U = T beta v      W = T beta Gamma_i0 k      P = scale tril((q_i . k_j) Gamma_ij)

[Gated Delta Networks, arXiv 2412.06464.] Stored in q's dtype as tiles of 64 rows. Betas and the
sums in Gamma come from `decays`. A row that holds no token is a row of zeros. From the first row on
that is not finite, rows count as empty here and Gamma_i0 is NaN, which later makes those outputs
and all later states NaN and leaves earlier rows alone.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from headstart.ops.gated_delta_rule.triton.inverse import unit_lower_inverse

VARYING = ("first_item",)


@triton.jit
def gathered(new_rows, tail_rows, new, old, columns, norms, CACHED: tl.constexpr):
    """Columns of the rows of this call, times norms, and of the tail; 0 where there is none."""
    x = tl.load(new_rows, mask=new[:, None] & columns, other=0.0)
    if norms is not None:
        x = (x.to(tl.float32) * norms[:, None]).to(x.dtype)
    if CACHED:
        x = tl.where(old[:, None], tl.load(tail_rows, mask=old[:, None] & columns, other=0.0), x)
    return x


@triton.jit
def inverse_norms(x, new, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr):
    """rsqrt(sum(x^2) + 1e-6) of rows at x [64, 1], BC columns at a time."""
    squares = tl.zeros((64,), tl.float32)
    for c in tl.static_range(0, BK, BC):
        columns = c + tl.arange(0, BC)
        part = tl.load(x + columns[None, :], mask=new[:, None] & (columns < K)[None, :], other=0.0)
        part = part.to(tl.float32)
        squares += tl.sum(part * part, 1)
    return tl.rsqrt(squares + 1e-6)


@triton.jit
def precise_dot(x, y, PRECISION: tl.constexpr):
    """x y of float32 x and y in its dtype; x as two words, or its rounding would be the largest."""
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
    sequences,
    items,
    slots,
    tail_k,
    tail_v,
    W,
    U,
    P,
    q_tiles,
    k_tiles,
    sums,
    from_start,
    strengths,
    clean_rows,
    base,
    first_item,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    tail_k_slot,
    tail_k_head,
    tail_v_slot,
    tail_v_head,
    tail_rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    NORMALISE: tl.constexpr,
    CACHED: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (value head, item); W, U and P are descriptors."""
    head = tl.program_id(0)
    local = tl.program_id(1)
    item = first_item + local
    key_head = head // (HV // H)
    n = tl.load(items + item * 3)
    if n < 0:
        return
    low = tl.load(items + item * 3 + 1)
    row = tl.load(sequences + n * 8)
    start = tl.load(sequences + n * 8 + 1)
    end = start + tl.load(sequences + n * 8 + 2)
    dtype = k.dtype.element_ty
    rows = tl.arange(0, 64)
    at = low + rows
    new = (at >= start) & (at < end)
    first_row = (row + low - start).to(tl.int64)
    old = new
    ring = rows
    slot = tl.full((), 0, tl.int64)
    if CACHED:
        slot = tl.load(slots + n).to(tl.int64)
        held = (slot >= 0) & (start > 0)
        slot = tl.maximum(slot, 0)
        stands = tl.load(base + n * HV + head)
        if low + 64 <= stands:
            return
        old = held & (at >= stands) & (at < start)
        ring = (at % tail_rows).to(tl.int32)
    k_rows = k + first_row * k_token + key_head * k_head + rows[:, None] * k_token
    v_rows = v + first_row * v_token + head * v_head + rows[:, None] * v_token
    q_rows = q + first_row * q_token + key_head * q_head + rows[:, None] * q_token
    k_tail = tail_k + slot * tail_k_slot + key_head * tail_k_head + ring[:, None] * K
    v_tail = tail_v + slot * tail_v_slot + head * tail_v_head + ring[:, None] * V
    tile = local * HV + head
    square = tile.to(tl.int64) * 64
    lead = head % (HV // H) == 0
    key_tile = (local * H + key_head).to(tl.int64) * (64 * BK) + rows[:, None] * BK
    i = rows[:, None]
    j = rows[None, :]
    k_norms = None
    q_norms = None
    if NORMALISE:
        k_norms = inverse_norms(k_rows, new, K, BK, BC)
        q_norms = inverse_norms(q_rows, new, K, BK, BC)

    products = tl.zeros((64, 64), tl.float32)
    p = tl.zeros((64, 64), tl.float32)
    for c in tl.static_range(0, BK, BC):
        columns = (c + tl.arange(0, BC))[None, :]
        there = columns < K
        kk = gathered(k_rows + columns, k_tail + columns, new, old, there, k_norms, CACHED)
        qq = gathered(q_rows + columns, q_rows, new, new, there, q_norms, False)
        if TILES and lead:
            tl.store(k_tiles + key_tile + columns, kk)
            tl.store(q_tiles + key_tile + columns, qq)
        products = tl.dot(kk, tl.trans(kk), products, input_precision=PRECISION)
        p = tl.dot(qq, tl.trans(kk), p, input_precision=PRECISION)
    spoiled = diagonal(products)
    sizes = tl.zeros((64, 64), tl.float32)
    for c in tl.static_range(0, BV, BC):
        columns = (c + tl.arange(0, BC))[None, :]
        vv = gathered(v_rows + columns, v_tail + columns, new, old, columns < V, None, CACHED)
        sizes = tl.dot(vv, tl.trans(vv), sizes, input_precision=PRECISION)
    spoiled += diagonal(sizes)
    clean = tl.min(tl.where(spoiled * 0.0 != 0.0, rows, 64), 0)
    clean = tl.minimum(clean, tl.load(clean_rows + tile))
    kept = rows < clean
    b = tl.where(kept, tl.load(strengths + square + rows), 0.0)
    begin = tl.load(from_start + square + rows)
    if clean < 64:
        tl.store(from_start + square + rows, tl.where(kept, begin, float("nan")))
    begin = tl.where(kept, begin, 0.0)
    two = square + tile // HV * (HV * 64)
    high = tl.load(sums + two + rows)
    rest = tl.load(sums + two + HV * 64 + rows)
    G = tl.exp2((high[:, None] - high[None, :]) + (rest[:, None] - rest[None, :]))
    p = tl.where((i >= j) & (j < clean), p * (G * scale), 0.0)
    P.store([tile * 64, 0], p.to(dtype))
    A = tl.where((i > j) & (i < clean), products * G * b[:, None], 0.0)
    if dtype == tl.float32:
        T = unit_lower_inverse(A, tl.float32, PRECISION)
    else:
        T = unit_lower_inverse(A, tl.float16, PRECISION)

    # k and v are read again, without spoiled rows (0 * NaN is NaN), not kept through the inverse.
    new = new & kept
    old = old & kept
    T = T * b[None, :]
    for c in tl.static_range(0, BV, BC):
        columns = (c + tl.arange(0, BC))[None, :]
        vv = gathered(v_rows + columns, v_tail + columns, new, old, columns < V, None, CACHED)
        U.store([tile * 64, c], precise_dot(T, vv, PRECISION).to(dtype))
    T = T * begin[None, :]
    for c in tl.static_range(0, BK, BC):
        columns = (c + tl.arange(0, BC))[None, :]
        kk = gathered(k_rows + columns, k_tail + columns, new, old, columns < K, k_norms, CACHED)
        W.store([tile * 64, c], precise_dot(T, kk, PRECISION).to(dtype))
