"""The token-by-token form on plain states, as others decode: a state is read and written once.

    S <- exp(g) S    u = beta (v - S^T k)    S <- S + k u^T    o = scale S^T q        (float32)

[Gated Delta Networks, arXiv 2412.06464.] S is kept in registers, transposed [BV, K]; columns of V
never mix.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headstart.ops.gated_delta_rule.chunk_table import chunk_table
from headstart.ops.gated_delta_rule.passes.gates import log_decay, strength
from headstart.ops.gated_delta_rule.passes.launch import start, state_arguments, step_arguments
from headstart.ops.gated_delta_rule.spec import GatedDelta, GatedDeltaCall
from headstart.ops.gated_delta_rule.steps import sequence_steps
from headstart.ops.gated_delta_rule.stores import Stores
from headstart.ops.gated_delta_rule.triton.call import declines
from headstart.ops.gated_delta_rule.triton.scan import store_state
from headstart.runtime.checks import checking
from headstart.runtime.dispatch import Implementation
from headstart.runtime.launcher import current

COLUMNS = 32
"""Columns of V that one program holds; not measured yet."""
WARPS = 4
SLOTS = ["read_slots", "write_slots", "present"]


@triton.jit(do_not_specialize_on_alignment=SLOTS)
def recurrent_kernel(
    q,
    k,
    v,
    o,
    g,
    beta,
    a_log,
    dt_bias,
    sequences,
    old_state,
    read_slots,
    present,
    new_state,
    write_slots,
    scale,
    lower_bound,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    o_token,
    o_head,
    g_token,
    g_head,
    g_channel,
    beta_token,
    beta_head,
    bias_head,
    bias_channel,
    old_n,
    old_h,
    old_k,
    old_v,
    new_n,
    new_h,
    new_k,
    new_v,
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
    PER_CHANNEL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_READ: tl.constexpr,
    HAS_PRESENT: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_WRITE: tl.constexpr,
):
    """One program per (block of V, value head, sequence)."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    n = tl.program_id(2)
    key_head = head // (HV // H)
    first = tl.load(sequences + n * 8)
    length = tl.load(sequences + n * 8 + 2)
    if tl.load(sequences + n * 8 + 5) < 0:
        return  # an entry that a capacity has room for
    ck = tl.arange(0, BK)
    cv = block * BV + tl.arange(0, BV)
    in_k = ck < K
    in_v = cv < V

    S = tl.zeros((BV, BK), tl.float32)
    if HAS_STATE:
        slot = n.to(tl.int64)
        if HAS_READ:
            slot = tl.load(read_slots + n).to(tl.int64)
        there = slot >= 0
        if HAS_PRESENT:
            there = there & (tl.load(present + n) != 0)
        if there:
            at = old_state + slot * old_n + head * old_h
            S = tl.load(
                at + ck[None, :] * old_k + cv[:, None] * old_v,
                mask=in_v[:, None] & in_k[None, :],
                other=0.0,
            ).to(tl.float32)

    rate = 0.0
    bias = 0.0
    if GATE == "raw" or GATE == "bounded":
        rate = tl.exp(tl.load(a_log + head).to(tl.float32))
        if HAS_BIAS:
            if PER_CHANNEL:
                at = dt_bias + head * bias_head + ck * bias_channel
                bias = tl.load(at, mask=in_k, other=0.0).to(tl.float32)
            else:
                bias = tl.load(dt_bias + head * bias_head).to(tl.float32)
    for t in tl.range(0, length, num_stages=1):
        row = (first + t).to(tl.int64)
        qq = tl.load(q + row * q_token + key_head * q_head + ck, mask=in_k, other=0.0)
        kk = tl.load(k + row * k_token + key_head * k_head + ck, mask=in_k, other=0.0)
        vv = tl.load(v + row * v_token + head * v_head + cv, mask=in_v, other=0.0).to(tl.float32)
        qf = qq.to(tl.float32)
        kf = kk.to(tl.float32)
        if NORMALISE:
            qf = qf * tl.rsqrt(tl.sum(qf * qf, 0) + 1e-6)
            kf = (kf * tl.rsqrt(tl.sum(kf * kf, 0) + 1e-6)).to(kk.dtype).to(tl.float32)
        b = 1.0
        if HAS_BETA:
            b = tl.load(beta + row * beta_token + head * beta_head).to(tl.float32)
            b = strength(b, BETA)
        if HAS_G:
            if PER_CHANNEL:
                at = g + row * g_token + head * g_head + ck * g_channel
                x = tl.load(at, mask=in_k, other=0.0).to(tl.float32)
                decay = tl.exp(log_decay(x, rate, bias, lower_bound, GATE))
                S = S * tl.where(in_k, decay, 0.0)[None, :]
            else:
                x = tl.load(g + row * g_token + head * g_head).to(tl.float32)
                S = S * tl.exp(log_decay(x, rate, bias, lower_bound, GATE))
        u = (vv - tl.sum(S * kf[None, :], 1)) * b
        S = S + u[:, None] * kf[None, :]
        out = tl.sum(S * qf[None, :], 1) * scale
        tl.store(o + row * o_token + head * o_head + cv, out.to(o.dtype.element_ty), mask=in_v)

    if HAS_NEW:
        write = n.to(tl.int64)
        if HAS_WRITE:
            write = tl.load(write_slots + n).to(tl.int64)
        if write >= 0:
            store_state(S, new_state + write * new_n + head * new_h, ck, cv, K, V, new_k, new_v)


def run(call: GatedDeltaCall) -> GatedDelta:
    """Compute the call token by token, whatever the lengths."""
    if checking():
        sequence_steps(call)  # raises where a slot does not exist
    stores = Stores.allocate(call, torch.float32)
    count = call.schedule.slot_count(call.schedule.N, 0)
    if count:
        _, HV, _, V = call.sizes
        table = chunk_table(call.schedule, cached=False, drafting=False)
        given = step_arguments(call, stores.o) | state_arguments(call, stores)
        given |= {"sequences": table.sequences, "BV": COLUMNS}
        with current(call.device):
            start(recurrent_kernel, (-(-V // COLUMNS), HV, count), given, WARPS)
    return stores.result


IMPLEMENTATION = Implementation("triton", declines, run)
