"""Peers as their sources describe them: their parameters, layouts and conventions, our arithmetic.

Parameters are named as in fla 0.6.0, FlashInfer 0.7.4, FlashQLA 0.1.3, flash-attn-4 4.0.0b36 and
SGLang 0.5.23, so that an adapter which passes a name that a peer lacks fails here too.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import silu, softplus

import headstart

# The gated delta rule


def recurrence(q, k, v, g, beta, lengths, state):
    """o and the final states [N, HV, K, V] of packed rows, token by token in float32."""
    found = headstart.gated_delta_rule(
        q, k, v, g, beta,
        schedule=headstart.Schedule(lengths, device=q.device),
        state=state,
        return_state=True,
        implementation="reference",
    )  # fmt: skip
    return found.o, found.state


def fla_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
):  # fmt: skip
    """[B, L, ...], or B = 1 with cu_seqlens; log decay; states [N, HV, K, V]."""
    if cu_seqlens is not None:
        assert q.shape[0] == 1
        assert cu_seqlens.dtype == torch.int64
        lengths = cu_seqlens.diff().tolist()
    else:
        lengths = [q.shape[1]] * q.shape[0]
    o, state = recurrence(*(x.flatten(0, 1) for x in (q, k, v, g, beta)), lengths, initial_state)
    return o.view(v.shape), state if output_final_state else None


def fla_recurrent(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
    output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
):  # fmt: skip
    """As `fla_rule`, without what only chunks need."""
    assert gk is None
    assert gv is None
    return fla_rule(q, k, v, g, beta, scale, initial_state, output_final_state,
                    cu_seqlens=cu_seqlens)  # fmt: skip


def flash_qla(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, head_first=False,
):  # fmt: skip
    """bfloat16 or float16, heads of 128."""
    assert q.dtype in (torch.bfloat16, torch.float16)
    longs = None if cu_seqlens is None else cu_seqlens.long()
    return fla_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens=longs)


def flashinfer_prefill(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, use_qk_l2norm_in_kernel=False, output=None, output_state=None,
    state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0,
    use_cp="auto", state_indices=None, _cp_chunk_len=None, backend="auto", max_seqlen=None,
):  # fmt: skip
    """Packed rows; the decay itself; value-major states; a tuple only with the final state."""
    assert all(rows.is_contiguous() for rows in (q, k, v, g, beta))
    assert g.dtype == beta.dtype == torch.float32
    assert initial_state is None or initial_state.is_contiguous()
    lengths = cu_seqlens.diff().tolist()
    assert -(-len(q) // len(lengths)) <= max_seqlen <= len(q)
    assert max(lengths) == max_seqlen
    before = None if initial_state is None else initial_state.transpose(-1, -2).contiguous()
    o, state = recurrence(q, k, v, g.log(), beta, lengths, before)
    output.copy_(o)
    if not output_final_state:
        return output
    output_state.copy_(state.transpose(-1, -2))
    return output, output_state


def _raw_gates(A_log, a, dt_bias, b):
    assert A_log.dtype == torch.float32
    assert dt_bias.dtype in (torch.bfloat16, torch.float32)
    return -A_log.exp() * softplus(a.float() + dt_bias), b.float().sigmoid()


def flashinfer_decode(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True,
    initial_state=None, initial_state_indices=None, output_state_indices=None,
):  # fmt: skip
    """One token of each sequence; value-major states, changed in place; raw gates."""
    assert not use_qk_l2norm
    assert q.shape[1] == 1
    g, beta = _raw_gates(A_log, a, dt_bias, b)
    o, after = fla_rule(q, k, v, g, beta, scale, state.transpose(-1, -2).contiguous(), True)
    state.copy_(after.transpose(-1, -2))
    output.copy_(o)
    return output, state


def flashinfer_mtp(
    q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None,
    output=None, intermediate_states_buffer=None, ssm_state_indices=None,
    disable_state_update=None, use_qk_l2norm=True,
):  # fmt: skip
    """Some tokens of each sequence; states are only read."""
    assert disable_state_update is True
    assert not use_qk_l2norm
    assert q.shape[1] > 1
    assert initial_state.dtype == torch.float32
    g, beta = _raw_gates(A_log, a, dt_bias, b)
    before = initial_state[initial_state_indices.long()].transpose(-1, -2).contiguous()
    o, _ = fla_rule(q, k, v, g, beta, scale, before, True)
    output.copy_(o)
    return output, initial_state


# What SGLang puts around the rule


def sglang_convolution(
    x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices=None,
    has_initial_state=None, activation="silu", pad_slot_id=-1, validate_data=False,
    block_table=None,
):  # fmt: skip
    """x [channels, T], channels next to each other; histories [slots, channels, width - 1]."""
    assert x.stride(0) == 1
    assert bias is None
    assert seq_lens_cpu == query_start_loc.diff().tolist()
    out, width = torch.empty_like(x), weight.shape[1]
    for n, (a, b) in enumerate(pairwise(query_start_loc.tolist())):
        history = conv_states[int(cache_indices[n])]
        old = history if has_initial_state[n] else torch.zeros_like(history)
        rows = torch.cat([old, x[:, a:b]], dim=1)
        taps = rows.float().unfold(1, width, 1) * weight.float()[:, None]
        out[:, a:b] = silu(taps.sum(-1)).to(x.dtype)
        history.copy_(rows[:, -(width - 1) :])
    return out


def sglang_split(mixed_qkv, num_q_heads, num_k_heads, num_v_heads, head_q, head_k, head_v):
    """[1, T, heads, size] of each, contiguous."""
    sizes = (num_q_heads, head_q), (num_k_heads, head_k), (num_v_heads, head_v)
    parts = mixed_qkv.split([heads * size for heads, size in sizes], dim=-1)
    return [part.reshape(1, -1, *shape) for part, shape in zip(parts, sizes, strict=True)]


def sglang_prepare(q, k, v, eps=1e-6):
    """q and k normalised and rounded, v contiguous."""
    assert q.shape == k.shape
    normed = [
        (x.float() / (x.float().square().sum(-1, keepdim=True) + eps).sqrt()).to(x.dtype)
        for x in (q, k)
    ]
    return *normed, v.contiguous()


def sglang_gates(A_log, a, b, dt_bias, beta=1.0, threshold=20.0):
    """[1, T, HV] float32, beta rounded as b is."""
    g, weights = _raw_gates(A_log, a, dt_bias, b)
    return g[None], weights.to(b.dtype).float()[None]


def sglang_norm(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False,
    eps=1e-6,
):  # fmt: skip
    """Rows [T HV, V]; written over x."""
    assert activation == "swish"
    assert bias is None
    wide = x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return x.copy_(wide * silu(g.float()))


# Softmax attention


def attention(q, k, v, radius=None, sinks=None):
    """One sequence whose queries are the last of its keys; a query sees `radius` keys before it."""
    new, keys = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * q.shape[-1] ** -0.5
    own = torch.arange(keys - new, keys)[:, None]
    distance = own - torch.arange(keys)
    hidden = distance < 0
    if radius is not None:
        hidden |= distance > radius
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, new, 1)
        scores = torch.cat([scores, column], -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., :keys], v).to(q.dtype)


def _packed(q, k, v, q_borders, k_borders, radius, sinks):
    parts = [
        attention(q[a:b], k[c:d], v[c:d], radius, sinks)
        for (a, b), (c, d) in zip(pairwise(q_borders), pairwise(k_borders), strict=True)
    ]
    return torch.cat(parts)


def flash_attn_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
):  # fmt: skip
    """Windows inclusive on both sides, queries aligned with the last keys; o and an LSE."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    borders = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(borders[0]))
    assert max_seqlen_k == max(b - a for a, b in pairwise(borders[1]))
    left, right = window_size
    assert right in (None, 0)
    return _packed(q, k, v, *borders, left, learnable_sink), None


def sglang_extend(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices,
    custom_mask, is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None,
    logit_cap=0.0, skip_prefix_custom_mask=True, sliding_window_size=-1, sinks=None,
):  # fmt: skip
    """New keys packed, cached ones by slot; sizes of windows at or below 0 mean none."""
    assert is_causal
    assert custom_mask is None
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert max_len_extend == int(qo_indptr.diff().max())
    radius = sliding_window_size if sliding_window_size > 0 else None
    for n, (a, b) in enumerate(pairwise(qo_indptr.tolist())):
        held = kv_indices[int(kv_indptr[n]) : int(kv_indptr[n + 1])]
        assert radius is None or len(held) <= radius
        k, v = (torch.cat([memory[held], new[a:b]])
                for memory, new in ((k_buffer, k_extend), (v_buffer, v_extend)))  # fmt: skip
        o_extend[a:b] = attention(q_extend[a:b], k, v, radius, sinks)


def sglang_unified(
    q, o, k_buffer, v_buffer, k_scale, v_scale, qo_indptr, kv_indptr, kv_indices, prefix_lens,
    max_len_extend, custom_mask=None, mask_indptr=None, sm_scale=None, logit_cap=0.0,
    is_causal=True, sliding_window_size=-1, sinks=None, window_start_pos=None,
):  # fmt: skip
    """All keys by slot, the first of them at its position; queries are the last of the keys."""
    assert is_causal
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert max_len_extend == int(qo_indptr.diff().max())
    radius = sliding_window_size if sliding_window_size > 0 else None
    assert (window_start_pos is None) == (radius is None)
    for n, (a, b) in enumerate(pairwise(qo_indptr.tolist())):
        held = kv_indices[int(kv_indptr[n]) : int(kv_indptr[n + 1])]
        assert len(held) == int(prefix_lens[n]) + b - a
        assert radius is None or int(prefix_lens[n]) <= radius
        o[a:b] = attention(q[a:b], k_buffer[held], v_buffer[held], radius, sinks)


class FlashInferRagged:
    """The ragged prefill wrapper: planned, then run."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
        custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        """Windows count the keys before a query's own; -1: none."""
        assert causal
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type)
        self.borders = qo_indptr.tolist(), kv_indptr.tolist()
        self.radius = None if window_left < 0 else window_left

    def run(self, q, k, v):
        """Attend as planned."""
        assert self.shape == (q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype)
        return _packed(q, k, v, *self.borders, self.radius, None)
