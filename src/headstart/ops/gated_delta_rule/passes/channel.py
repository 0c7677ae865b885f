"""`prepare` for a decay per channel: per chunk and value head, whatever does not depend on S.

    A = strict_lower(beta_i sum_c k_ic k_jc Gamma_ijc)      T = (I + A)^-1
    P = scale tril(sum_c q_ic k_jc Gamma_ijc)
    stored beside them: Gamma_i0 q, Gamma_i0 k, Gamma_Ci k and, per channel in float32, Gamma_C0

[Kimi Linear, arXiv 2510.26692.] Gamma depends on the channel, so the keys carry it: exp(G_i - G_j)
= exp(G_i - G_b) exp(G_b - G_j) with a border b between, both exponents <= 0. The border of (i, j)
lies between the two neighbouring blocks of 1, 2, 4, ... 32 rows that hold i and j: six products of
[64, K], each keeping the pairs of one size. One tile serves both sides of a product, since a row is
either right or left of its border. Sums start anew in every block, so that a row's sums look at no
later row than its border, and nothing is ever subtracted: -inf is exact.
`clean` is the first row that is not finite; from there on rows count as empty here and
`from_start` is NaN, not 1, which later makes those outputs and all later states NaN and leaves
earlier rows alone.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headstart.ops.gated_delta_rule.passes.gates import log_decay, strength
from headstart.ops.gated_delta_rule.passes.inverse import TAME, unit_lower_inverse

VARYING = ["first_item"]
SLOTS = ["slots"]
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class ChannelConfig:
    """How `prepare_channels_kernel` is built: columns at a time, warps."""

    BC: int
    warps: int


def channel_configuration(dtype: torch.dtype, backend: str, warp_size: int) -> ChannelConfig:
    """The one configuration for a dtype on a kind of device ("cuda" or "hip", lanes of a warp).

    Rows of 128 bytes on NVIDIA. What AMD gets comes from static figures (no vector spills for
    16-bit inputs, 20 KiB of LDS) and has not run.
    """
    if backend == "hip":
        return ChannelConfig(BC=32, warps=4 if warp_size == 64 else 16)
    return ChannelConfig(BC=32 if dtype == torch.float32 else 64, warps=8)


@triton.jit
def not_finite(x):
    """1 for every row of x that holds a NaN or an infinity, else 0."""
    return tl.max(tl.where(x.to(tl.float32) * 0.0 != 0.0, 1, 0), 1)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def prepare_channels_kernel(
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
    T,
    P,
    q_tiles,
    k_tiles,
    k_starts,
    v_tiles,
    clean,
    from_start,
    whole_decay,
    keys,
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
    g_channel,
    beta_token,
    beta_head,
    bias_head,
    bias_channel,
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
    BC: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    HAS_G: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
    CACHED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (value head, item); BC columns at a time."""
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
    source = tl.where(new, row + at - start, 0).to(tl.int64)
    old = new & (rows < 0)
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
    tile = (local * HV + head).to(tl.int64)
    begins = tile * (64 * BK)
    cc = tl.arange(0, BC)
    # Where each row begins; columns are added in the loops, which keeps whole tiles of pointers out
    # of registers.
    k_rows = source * k_token + key_head * k_head
    q_rows = source * q_token + key_head * q_head
    v_rows = source * v_token + head * v_head
    g_rows = source * g_token + head * g_head
    k_tail = slot * tail_k_slot + key_head * tail_k_head + ring * K
    v_tail = slot * tail_v_slot + head * tail_v_head + ring * V
    g_tail = slot * tail_decay_slot + head * tail_decay_head + ring * K

    b = tl.where(new, 1.0, 0.0)
    if HAS_BETA:
        b = tl.load(beta + source * beta_token + head * beta_head, mask=new, other=0.0)
        b = tl.where(new, strength(b.to(tl.float32), BETA), 0.0)
    if CACHED:
        betas = tail_beta + slot * tail_beta_slot + head * tail_beta_head + ring
        b = tl.where(old, tl.load(betas, mask=old, other=0.0), b)
    tl.store(strengths + tile * 64 + rows, b)
    spoiled = tl.where(b * 0.0 != 0.0, 1, 0)
    for c in tl.range(0, BV, BC, num_stages=1):
        in_v = (c + cc)[None, :] < V
        vv = tl.load(v + v_rows[:, None] + (c + cc)[None, :], mask=new[:, None] & in_v, other=0.0)
        if CACHED:
            vv += tl.load(
                tail_v + v_tail[:, None] + (c + cc)[None, :], mask=old[:, None] & in_v, other=0.0
            )
        spoiled |= not_finite(vv)
        v_tile = v_tiles + tile * (64 * BV) + rows[:, None] * BV
        tl.store(v_tile + (c + cc)[None, :], vv, mask=(c + cc)[None, :] < BV)

    k_norm = tl.full((64,), 1.0, tl.float32)
    q_norm = tl.full((64,), 1.0, tl.float32)
    if NORMALISE:
        k_norm = tl.zeros((64,), tl.float32)
        q_norm = tl.zeros((64,), tl.float32)
        for c in tl.range(0, BK, BC, num_stages=1):
            taken = new[:, None] & ((c + cc)[None, :] < K)
            x = tl.load(k + k_rows[:, None] + (c + cc)[None, :], mask=taken, other=0.0).to(
                tl.float32
            )
            k_norm += tl.sum(x * x, 1)
            x = tl.load(q + q_rows[:, None] + (c + cc)[None, :], mask=taken, other=0.0).to(
                tl.float32
            )
            q_norm += tl.sum(x * x, 1)
        k_norm = tl.rsqrt(k_norm + 1e-6)
        q_norm = tl.rsqrt(q_norm + 1e-6)

    rate = 0.0
    if GATE == "raw" or GATE == "bounded":
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    # Decays are needed again only where the chunk becomes the tail.
    kept = low >= tl.load(sequences + n * 8 + 6)
    lead = head % (HV // H) == 0
    i = rows[:, None]
    j = rows[None, :]
    A = tl.zeros((64, 64), tl.float32)
    p = tl.zeros((64, 64), tl.float32)
    own = tl.zeros((64,), tl.float32)
    norms = tl.zeros((64,), tl.float32)
    for c in tl.range(0, BK, BC, num_stages=1):
        in_k = (c + cc)[None, :] < K
        taken = new[:, None] & in_k
        held_rows = old[:, None] & in_k
        decay = tl.zeros((64, BC), tl.float32)
        if HAS_G:
            decay = tl.load(
                g + g_rows[:, None] + ((c + cc) * g_channel)[None, :], mask=taken, other=0.0
            ).to(tl.float32)
            bias = 0.0
            if HAS_BIAS:
                bias = tl.load(
                    dt_bias + head * bias_head + (c + cc)[None, :] * bias_channel,
                    mask=in_k,
                    other=0.0,
                ).to(tl.float32)
            decay = tl.where(taken, log_decay(decay, rate, bias, lower_bound, GATE), 0.0)
        if CACHED:
            kept_decay = tl.load(
                tail_decay + g_tail[:, None] + (c + cc)[None, :], mask=held_rows, other=0.0
            )
            decay = tl.where(held_rows, kept_decay, decay)
            if kept:
                tl.store(log_decays + begins + rows[:, None] * BK + (c + cc)[None, :], decay)
        spoiled |= tl.max(tl.where(decay != decay, 1, 0), 1)
        kk = tl.load(k + k_rows[:, None] + (c + cc)[None, :], mask=taken, other=0.0)
        qq = tl.load(q + q_rows[:, None] + (c + cc)[None, :], mask=taken, other=0.0)
        if NORMALISE:
            kk = (kk.to(tl.float32) * k_norm[:, None]).to(dtype)
            qq = (qq.to(tl.float32) * q_norm[:, None]).to(dtype)
        if CACHED:
            kept_k = tl.load(
                tail_k + k_tail[:, None] + (c + cc)[None, :], mask=held_rows, other=0.0
            )
            kk = tl.where(held_rows, kept_k, kk)
            if kept & lead:
                key_tile = (local * H + key_head).to(tl.int64)
                tl.store(keys + key_tile * (64 * BK) + rows[:, None] * BK + (c + cc)[None, :], kk)
        spoiled |= not_finite(kk)
        own += tl.sum(qq.to(tl.float32) * kk.to(tl.float32), 1)
        norms += tl.sum(kk.to(tl.float32) * kk.to(tl.float32), 1)

        # In units of log 2, within blocks that grow: up to and with each row; after it.
        before = decay * LOG2E
        after = tl.zeros((64, BC), tl.float32)
        for level in tl.range(0, 6, num_stages=1):
            right = ((i >> level) & 1) == 1
            reach = tl.exp2(tl.where(right, before, after))
            k_side = (kk.to(tl.float32) * reach).to(dtype)
            q_side = (qq.to(tl.float32) * reach).to(dtype)
            pairs = (i > j) & (((i ^ j) >> level) == 1)
            found = tl.dot(k_side, tl.trans(k_side), input_precision=PRECISION)
            A += tl.where(pairs, found, 0.0)
            found = tl.dot(q_side, tl.trans(k_side), input_precision=PRECISION)
            p += tl.where(pairs, found, 0.0)
            # The total of the neighbour, as its row in the same place sums it.
            neighbour = tl.broadcast_to(i ^ (1 << level), (64, BC))
            other = tl.gather(before + after, neighbour, 0)
            before = tl.where(right, other + before, before)
            after = tl.where(right, after, after + other)
        reach = tl.exp2(before)
        tl.store(
            q_tiles + begins + rows[:, None] * BK + (c + cc)[None, :],
            (qq.to(tl.float32) * reach).to(dtype),
        )
        tl.store(
            k_starts + begins + rows[:, None] * BK + (c + cc)[None, :],
            (kk.to(tl.float32) * reach).to(dtype),
        )
        tl.store(
            k_tiles + begins + rows[:, None] * BK + (c + cc)[None, :],
            (kk.to(tl.float32) * tl.exp2(after)).to(dtype),
        )
        # The last row's sum is the chunk's.
        total = tl.sum(tl.where(i == 63, reach, 0.0), 0)
        tl.store(whole_decay + tile * BK + c + cc, total)

    # From the first row that is not finite on, rows count as empty.
    first = tl.min(tl.where(spoiled != 0, rows, 64), 0)
    p = tl.where(i == j, own[:, None], p)
    p = tl.where((i >= j) & (j < first), p * scale, 0.0)
    tl.store(P + tile * 4096 + i * 64 + j, p.to(dtype))
    A = tl.where((i > j) & (i < first), A * b[:, None], 0.0)
    wild = tl.max(tl.where(rows < first, norms * b, 0.0), 0) > TAME
    inverse, grown = unit_lower_inverse(A, wild, dtype, PRECISION)
    tl.store(T + tile * 4096 + i * 64 + j, inverse)
    first = tl.minimum(first, grown)
    tl.store(clean + tile, first)
    tl.store(from_start + tile * 64 + rows, tl.where(rows < first, 1.0, float("nan")))
