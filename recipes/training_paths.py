"""Layers for training that stand in for transformers' own and give the same results.

gpt-oss: the eager path holds all scores, 8.6 GB a layer at 16,384 tokens; here memory grows with
the length. Qwen3-Next: the reference rule writes its output in place chunk by chunk, whose
backward is quadratic in the chunks, and kernels with a backward exist only where their own
dependencies do; here one scan carries the state and the rest is batched over chunks. The tests
compare all of them with transformers.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_next import modeling_qwen3_next

NAME = "headstart_training"
CHUNK = 64


def use(model: PreTrainedModel) -> None:
    """Let this process train `model` with the functions of this module."""
    if model.config.model_type == "qwen3_next":
        modeling_qwen3_next.torch_chunk_gated_delta_rule = gated_delta_rule
        modeling_qwen3_next.causal_conv1d_fn = causal_convolution
        return
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
    query, key, value = (functional.pad(x, (0, 8, 1, 0)) for x in (query, key, value))
    query = query.index_fill(3, torch.tensor(size, device=query.device), 1.0)
    channel = functional.one_hot(torch.tensor(size, device=query.device), size + 8).to(key.dtype)
    sink_key = (sinks / scaling).to(key.dtype)[:, None] * channel  # [HQ, D + 8]
    key = torch.cat([sink_key.expand(batch, heads, -1)[:, :, None], key[:, :, 1:]], dim=2)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out[:, :, 1:, :size]


def windowed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    scaling: float,
    window: int,
) -> torch.Tensor:
    """Attention within a window: blocks of `window` queries see their own keys and those before."""
    length = query.shape[2]
    tail = -length % window
    query, key, value = (
        functional.pad(x, (0, 0, 0, tail)).unflatten(2, (-1, window)) for x in (query, key, value)
    )
    key, value = (
        torch.cat([functional.pad(x, (0, 0, 0, 0, 1, -1)), x], dim=3) for x in (key, value)
    )
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
    """Run every expert on every token: for a few small ones, and no size depends on the routing."""
    experts = module.num_experts
    tokens = hidden_states.expand(experts, -1, -1)
    gate_up = torch.bmm(tokens, module.gate_up_proj) + module.gate_up_proj_bias[:, None]
    out = torch.bmm(module._apply_gate(gate_up), module.down_proj) + module.down_proj_bias[:, None]
    shares = torch.zeros_like(hidden_states[:, :experts], dtype=top_k_weights.dtype)
    shares = shares.scatter(1, top_k_index, top_k_weights)
    return torch.einsum("eth,te->th", out, shares.to(out.dtype)).to(hidden_states.dtype)


def causal_convolution(
    hidden_states: torch.Tensor,  # [B, channels, L]
    weight: torch.Tensor,  # [channels, width]
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """Depthwise causal convolution and SiLU as a sum of shifted products."""
    if bias is not None or activation != "silu":
        raise ValueError("training convolution: expected no bias and SiLU")
    length, width = hidden_states.shape[-1], weight.shape[-1]
    rows = functional.pad(hidden_states.transpose(1, 2), (0, 0, width - 1, 0))
    weight = weight.to(rows.dtype)
    out = sum(rows[:, i : i + length] * weight[:, i] for i in range(width))
    return functional.silu(out).transpose(1, 2)


def gated_delta_rule(
    query: torch.Tensor,  # [B, L, H or HV, K]
    key: torch.Tensor,
    value: torch.Tensor,  # [B, L, HV, V]
    g: torch.Tensor,  # [B, L, HV]
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Chunked gated delta rule of whole sequences in float32, from an empty state."""
    if initial_state is not None or output_final_state or not use_qk_l2norm_in_kernel:
        raise ValueError("training rule: expected no states and normalised queries and keys")
    with torch.autocast(query.device.type, enabled=False):
        return _gated_delta_rule(query, key, value, g, beta).to(value.dtype), None


def _gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    length, heads, size = value.shape[1], value.shape[2], key.shape[3]
    query, key = (l2_normalised(x).repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    query, key, value, g, beta = (
        by_chunk(x) for x in (query * size**-0.5, key, value, g[..., None], beta[..., None])
    )
    decay = g[..., 0].cumsum(-1)  # [B, HV, chunks, C]
    keep = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~keep, float("-inf")).exp()
    from_start = decay.exp()[..., None]
    to_end = (decay[..., -1:] - decay).exp()[..., None]

    system = (beta * key @ key.transpose(-1, -2) * between).tril(-1)
    system = system + torch.eye(CHUNK, device=g.device)
    right = torch.cat([beta * value, beta * from_start * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([value.shape[-1], size], dim=-1)

    update = (to_end * key).transpose(-1, -2)
    shrink = decay[..., -1].exp()[..., None, None]
    state = torch.zeros_like(update[:, :, 0, :, :1] * value[:, :, 0, :1])
    states, new_values = [], []
    for chunk in range(value.shape[2]):
        states.append(state)
        new_values.append(u[:, :, chunk] - w[:, :, chunk] @ state)
        state = shrink[:, :, chunk] * state + update[:, :, chunk] @ new_values[-1]
    scores = query @ key.transpose(-1, -2) * between
    out = from_start * query @ torch.stack(states, 2) + scores @ torch.stack(new_values, 2)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2)


def l2_normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def by_chunk(x: torch.Tensor) -> torch.Tensor:
    """[B, L, HV, n] -> float32 [B, HV, chunks, C, n], zeros behind the end."""
    x = functional.pad(x.float().transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(2, (-1, CHUNK))
