"""Gates and decay sums of a chunk for many heads at once: what `prepare` and `scan` scale with.

    Gamma_ij = exp(sum of the log decays of rows j < m <= i) = exp2(high_i - high_j + low_i - low_j)

Running sums count whole units of 2^-48 log 2, so no order of adding changes a bit, and are kept as
two float32 words: a difference of sums is as exact as its own size allows. exp of a log decay below
CUT, -inf included, is 0 in float32, as is exp2(-FAR): such a row adds -FAR, which a difference
either holds or cancels exactly, so -inf and -316 cost no other entry a digit. Row i of every result
looks at rows <= i alone. A row that holds no token has log decay 0 and beta 0; `clean` of a head is
its first row whose gates are not finite, 64 if there is none.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.ops.gated_delta_rule.passes.gates import log_decay, strength

VARYING = ["first_item"]
SLOTS = ["slots"]
CUT = tl.constexpr(-104.0)
FAR = tl.constexpr(256.0)
LOG2E = tl.constexpr(1.4426950408889634)
UNITS = tl.constexpr(2.0**48)
"""Of a sum, in one power of two; 64 rows of FAR leave int64 one bit."""


@triton.jit
def units(decay):
    """A log decay as what it adds to a running sum."""
    step = tl.where(decay < CUT, -FAR, decay.to(tl.float64) * LOG2E)
    # What is not finite counts as FAR; it spoils its row, and rows from it on.
    return (tl.where(step < FAR, step, FAR) * UNITS).to(tl.int64)


@triton.jit
def words(total):
    """A running sum in powers of two, as two float32 words."""
    total = total.to(tl.float64) * (1.0 / UNITS)
    high = total.to(tl.float32)
    rest = (total - high.to(tl.float64)).to(tl.float32)
    return high, rest


@triton.jit
def not_finite(decay, b):
    """Whether a row's gates spoil it; a decay of -inf does not."""
    return (b * 0.0 != 0.0) | (decay != decay) | (decay == float("inf"))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def decays_kernel(
    g,
    beta,
    a_log,
    dt_bias,
    sequences,
    items,
    slots,
    position,
    tail_decay,
    tail_beta,
    sums,
    from_start,
    to_end,
    strengths,
    clean,
    log_decays,
    base,
    first_item,
    lower_bound,
    g_token,
    g_head,
    beta_token,
    beta_head,
    position_slot,
    tail_decay_slot,
    tail_decay_head,
    tail_beta_slot,
    tail_beta_head,
    tail_rows,
    HV: tl.constexpr,
    BH: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    HAS_G: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CACHED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per (block of BH value heads, item). sums [items, 2, HV, 64]."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    heads = tl.program_id(0) * BH + tl.arange(0, BH)
    local = tl.program_id(1)
    item = first_item + local
    n = tl.load(items + item * 3)
    if n < 0:
        return
    low = tl.load(items + item * 3 + 1)
    row = tl.load(sequences + n * 8)
    start = tl.load(sequences + n * 8 + 1)
    end = start + tl.load(sequences + n * 8 + 2)
    rows = tl.arange(0, 64)
    at = low + rows
    there = heads[None, :] < HV
    new = ((at >= start) & (at < end))[:, None] & there
    first_row = (row + low - start).to(tl.int64)

    decay = tl.zeros((64, BH), tl.float32)
    if HAS_G:
        pointers = g + first_row * g_token + rows[:, None] * g_token + heads[None, :] * g_head
        decay = tl.load(pointers, mask=new, other=0.0).to(tl.float32)
        rate = tl.zeros((1, BH), tl.float32)
        bias = tl.zeros((1, BH), tl.float32)
        if GATE == "raw" or GATE == "bounded":
            known = heads < HV
            rate = tl.exp(tl.load(a_log + heads, mask=known, other=0.0).to(tl.float32))[None, :]
            if HAS_BIAS:
                bias = tl.load(dt_bias + heads, mask=known, other=0.0).to(tl.float32)[None, :]
        decay = tl.where(new, log_decay(decay, rate, bias, lower_bound, GATE), 0.0)
    b = tl.where(new, 1.0, 0.0)
    if HAS_BETA:
        pointers = beta + first_row * beta_token
        pointers += rows[:, None] * beta_token + heads[None, :] * beta_head
        b = tl.load(pointers, mask=new, other=0.0).to(tl.float32)
        b = tl.where(new, strength(b, BETA), 0.0)
    if CACHED:
        slot = tl.load(slots + n).to(tl.int64)
        held = (slot >= 0) & (start > 0)
        slot = tl.maximum(slot, 0)
        stands = tl.full((BH,), 0, tl.int32) + start // 64 * 64
        if held:
            stands = tl.load(position + slot * position_slot + heads, mask=heads < HV, other=0)
        if item == tl.load(sequences + n * 8 + 4):
            tl.store(base + n * HV + heads, stands, mask=heads < HV)
        old = held & (at < start)[:, None] & (at[:, None] >= stands[None, :]) & there
        ring = (at % tail_rows)[:, None]
        pointers = tail_decay + slot * tail_decay_slot + heads[None, :] * tail_decay_head + ring
        decay = tl.where(old, tl.load(pointers, mask=old, other=0.0), decay)
        pointers = tail_beta + slot * tail_beta_slot + heads[None, :] * tail_beta_head + ring
        b = tl.where(old, tl.load(pointers, mask=old, other=0.0), b)

    tile = local.to(tl.int64) * (HV * 64)
    square = heads[None, :] * 64 + rows[:, None]
    tl.store(strengths + tile + square, b, mask=there)
    if CACHED:
        tl.store(log_decays + tile + square, decay, mask=there)
    first = tl.min(tl.where(not_finite(decay, b), rows[:, None], 64), 0)
    tl.store(clean + local * HV + heads, first, mask=heads < HV)

    high, rest = words(tl.cumsum(units(decay), 0))
    tl.store(sums + 2 * tile + square, high, mask=there)
    tl.store(sums + 2 * tile + HV * 64 + square, rest, mask=there)
    begin = tl.where(rows[:, None] < first[None, :], tl.exp2(high + rest), float("nan"))
    tl.store(from_start + tile + square, begin, mask=there)
    last_high = tl.sum(tl.where(rows[:, None] == 63, high, 0.0), 0)
    last_rest = tl.sum(tl.where(rows[:, None] == 63, rest, 0.0), 0)
    left = (last_high[None, :] - high) + (last_rest[None, :] - rest)
    tl.store(to_end + tile + square, tl.exp2(left), mask=there)
