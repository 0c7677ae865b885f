"""Softmax attention and experts of gpt-oss for training, in memory that grows with the length.

transformers' eager path holds all scores, 8.6 GB a layer at 16,384 tokens. The functions here are
registered under names of their own (`use`) and give the same results; the tests compare them.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "headstart_training"


def use(model: PreTrainedModel) -> None:
    """Switch a gpt-oss model to these functions."""
    AttentionInterface.register(NAME, attention)
    ALL_EXPERTS_FUNCTIONS.register(NAME, all_experts)
    model.set_attn_implementation(NAME)
    model.set_experts_implementation(NAME)


def attention(
    module: nn.Module,
    query: torch.Tensor,  # [B, HQ, L, D]
    key: torch.Tensor,  # [B, HK, L, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,  # [HQ]
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention of whole, unpadded sequences from position 0."""
    if attention_mask is not None or s_aux is None or key.shape[2] != query.shape[2]:
        raise ValueError("training attention: expected whole sequences, no mask, and sinks")
    groups = query.shape[1] // key.shape[1]
    query, key = query.to(value.dtype), key.to(value.dtype)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if sliding_window is None:
        out = full(query, key, value, s_aux, scaling)
    else:
        out = windowed(query, key, value, s_aux, scaling, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def full(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Fused causal attention; the sink is one more key with value 0, before all others.

    A further channel carries it: 1 in every query, 0 in every key but the sink's, which holds
    sink / scaling there. Eight channels are added since fused kernels want multiples of eight. A
    query at the sink's own place, whose result is dropped, keeps the causal mask square.
    """
    batch, heads, _, size = query.shape
    query, key, value = (F.pad(x, (0, 8, 1, 0)) for x in (query, key, value))
    query = query.index_fill(3, torch.tensor(size, device=query.device), 1.0)
    channel = F.one_hot(torch.tensor(size, device=query.device), size + 8).to(key.dtype)
    sink_key = (sinks / scaling).to(key.dtype)[:, None] * channel  # [HQ, D + 8]
    key = torch.cat([sink_key.expand(batch, heads, -1)[:, :, None], key[:, :, 1:]], dim=2)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out[:, :, 1:, :size]


def windowed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    scaling: float,
    window: int,
) -> torch.Tensor:
    """Attention within a window: blocks of `window` queries see their own keys and the block before."""
    length = query.shape[2]
    tail = -length % window
    query, key, value = (F.pad(x, (0, 0, 0, tail)).unflatten(2, (-1, window)) for x in (query, key, value))
    key, value = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, -1)), x], dim=3) for x in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scaling  # [B, HQ, blocks, W, 2 W]
    row = torch.arange(window, device=query.device)[:, None]
    column = torch.arange(2 * window, device=query.device)
    seen = (column > row) & (column <= row + window)
    first = seen & (column >= window)
    seen = torch.cat([first[None], seen.expand(scores.shape[2] - 1, -1, -1)])
    scores = scores.masked_fill(~seen, float("-inf"))
    sink = sinks.float()[None, :, None, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1].to(value.dtype)
    return (weights @ value).flatten(2, 3)[:, :, :length]


def all_experts(
    module: nn.Module,
    hidden_states: torch.Tensor,  # [T, hidden]
    top_k_index: torch.Tensor,  # [T, k]
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Run every expert on every token: with four of them, cheaper than sorting tokens."""
    experts = module.num_experts
    tokens = hidden_states.expand(experts, -1, -1)
    gate_up = torch.bmm(tokens, module.gate_up_proj) + module.gate_up_proj_bias[:, None]
    out = torch.bmm(module._apply_gate(gate_up), module.down_proj) + module.down_proj_bias[:, None]
    shares = torch.zeros_like(hidden_states[:, :experts], dtype=top_k_weights.dtype)
    shares = shares.scatter(1, top_k_index, top_k_weights)
    return torch.einsum("eth,te->th", out, shares.to(out.dtype)).to(hidden_states.dtype)
