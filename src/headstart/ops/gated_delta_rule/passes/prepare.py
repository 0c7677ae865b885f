"""Per chunk and value head, whatever does not depend on the state before the chunk.

    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)    T = (I + A)^-1
    P = scale tril((q_i . k_j) Gamma_ij)

[Gated Delta Networks, arXiv 2412.06464.] Value heads that read one key head share its products.
T and P are stored in q's dtype as tiles of 64 rows; the scan applies T to beta (v - Gamma_i0 k S),
which takes fewer bytes than T beta v and T beta Gamma_i0 k and rounds no more. Betas and the sums
in Gamma come from `decays`. A row that holds no token is a row of zeros. `clean` becomes the first
row of the chunk that is not finite, 64 if there is none: from there on rows count as empty here and
Gamma_i0 is NaN, which later makes those outputs and all later states NaN and leaves earlier rows
alone.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: SIM102 (an outer test of a constant is decided when the kernel is compiled)

import triton
import triton.language as tl

from headstart.ops.gated_delta_rule.passes.inverse import TAME, unit_lower_inverse

VARYING = ["first_item", "together"]
SLOTS = ["slots"]


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
def first_spoiled(x):
    """The first row of x [64, n] that is not finite; 64 if there is none."""
    spoiled = tl.sum(x.to(tl.float32) * 0.0, 1) != 0.0
    return tl.min(tl.where(spoiled, tl.arange(0, 64), 64), 0)


@triton.jit
def store_tile(x, tile, values, DESCRIBED: tl.constexpr):
    """Store values [64, 64] as a tile of x [tiles * 64, 64], a descriptor or a pointer."""
    if DESCRIBED:
        x.store([tile * 64, 0], values)
    else:
        rows = tl.arange(0, 64)
        begins = tile.to(tl.int64) * 4096
        tl.store(x + begins + rows[:, None] * 64 + rows[None, :], values)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def prepare_kernel(
    q,
    k,
    v,
    sequences,
    items,
    slots,
    tail_k,
    tail_v,
    T,
    P,
    q_tiles,
    k_tiles,
    v_tiles,
    sums,
    from_start,
    strengths,
    clean,
    base,
    first_item,
    together,
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
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (`together` value heads of a key head, item); T and P may be descriptors.

    TILES: gathered, normalised rows of q, k and v are kept for the scan.
    """
    first_head = tl.program_id(0) * together
    local = tl.program_id(1)
    item = first_item + local
    key_head = first_head // (HV // H)
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
        # The heads of a slot stand at one position.
        stands = tl.load(base + n * HV + first_head)
        if low + 64 <= stands:
            return
        old = held & (at >= stands) & (at < start)
        ring = (at % tail_rows).to(tl.int32)
    k_rows = k + first_row * k_token + key_head * k_head + rows[:, None] * k_token
    q_rows = q + first_row * q_token + key_head * q_head + rows[:, None] * q_token
    k_tail = tail_k + slot * tail_k_slot + key_head * tail_k_head + ring[:, None] * K
    lead = first_head % (HV // H) == 0
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
        if TILES:
            if lead:
                tl.store(k_tiles + key_tile + columns, kk)
                tl.store(q_tiles + key_tile + columns, qq)
        products = tl.dot(kk, tl.trans(kk), products, input_precision=PRECISION)
        p = tl.dot(qq, tl.trans(kk), p, input_precision=PRECISION)
    # [64, 1]: sums to a scalar of what comes from tensor memory must not begin with a vector.
    norms = tl.sum(tl.where(i == j, products, 0.0), 1, keep_dims=True)
    # A sum over all tells whether to look for the row.
    clean_key = tl.full((), 64, tl.int32)
    if tl.sum(products * 0.0) != 0.0:
        for c in tl.static_range(0, BK, BC):
            columns = (c + tl.arange(0, BC))[None, :]
            kk = gathered(
                k_rows + columns, k_tail + columns, new, old, columns < K, k_norms, CACHED
            )
            clean_key = tl.minimum(clean_key, first_spoiled(kk))
        clean_key = tl.minimum(clean_key, tl.min(tl.where(norms * 0.0 != 0.0, i, 64)))

    for head in tl.range(first_head, first_head + together, num_stages=1):
        tile = local * HV + head
        square = tile.to(tl.int64) * 64
        clean_row = tl.minimum(clean_key, tl.load(clean + tile))
        v_rows = v + first_row * v_token + head * v_head + rows[:, None] * v_token
        v_tail = tail_v + slot * tail_v_slot + head * tail_v_head + ring[:, None] * V
        for c in tl.static_range(0, BV, BC):
            columns = (c + tl.arange(0, BC))[None, :]
            vv = gathered(v_rows + columns, v_tail + columns, new, old, columns < V, None, CACHED)
            if TILES:
                begins = tile.to(tl.int64) * (64 * BV) + rows[:, None] * BV
                tl.store(v_tiles + begins + columns, vv)
            if tl.sum(vv.to(tl.float32) * 0.0) != 0.0:
                clean_row = tl.minimum(clean_row, first_spoiled(vv))
        kept = rows < clean_row
        b = tl.where(kept, tl.load(strengths + square + rows), 0.0)
        two = square + tile // HV * (HV * 64)
        high = tl.load(sums + two + rows)
        rest = tl.load(sums + two + HV * 64 + rows)
        G = tl.exp2((high[:, None] - high[None, :]) + (rest[:, None] - rest[None, :]))
        scores = tl.where((i >= j) & kept[None, :], p * (G * scale), 0.0)
        store_tile(P, tile, scores.to(dtype), DESCRIBED)
        A = tl.where((i > j) & kept[:, None], products * G * b[:, None], 0.0)
        wild = tl.max(tl.where(kept[:, None], norms * b[:, None], 0.0)) > TAME
        inverse, grown = unit_lower_inverse(A, wild, dtype, PRECISION)
        store_tile(T, tile, inverse, DESCRIBED)
        clean_row = tl.minimum(clean_row, grown)
        if clean_row < 64:
            tl.store(clean + tile, clean_row)
            tl.store(from_start + square + rows, float("nan"), mask=rows >= clean_row)
