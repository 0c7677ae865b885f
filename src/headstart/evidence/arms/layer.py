"""SGLang's Triton convolution, and a whole linear layer as it runs it, around FlashInfer's rule."""

from __future__ import annotations

from itertools import accumulate

import torch

from headstart.evidence.arms import Arm, peer
from headstart.evidence.cases.convolution import BLOCK, ConvolutionCase
from headstart.evidence.cases.delta_block import DeltaBlockCase

KERNELS = "sglang.kernels.ops"
MOST_FUSED = 8192
"""Channels that its kernel which splits q, k and v takes; wider ones are copied one by one."""


def build_convolution(case: ConvolutionCase, device: torch.device, seed: int) -> Arm:
    """The convolution alone, from empty histories of its pool."""
    (convolve,) = peer(f"{KERNELS}.mamba.causal_conv1d_triton", "causal_conv1d_fn")
    call, count = case.inputs(seed, device), len(case.lengths)
    x, weight = call["x"], call["weight"]
    borders = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=device)
    histories = x.new_zeros(count, case.channels, case.width - 1)
    options = {
        "cache_indices": torch.arange(count, dtype=torch.int32, device=device),
        "has_initial_state": torch.zeros(count, dtype=torch.bool, device=device),
        "activation": "silu",
    }
    return Arm(
        "sglang",
        lambda: convolve(x.T, weight, None, histories, borders, list(case.lengths), **options).T,
        lambda y: {"convolution": y.unflatten(1, (-1, BLOCK))},
        note="writes histories to a pool besides",
    )


def build(case: DeltaBlockCase, device: torch.device, seed: int) -> Arm:
    """Convolution, split, normalised q and k, gates, the rule between pool and pool, gated norm.

    Histories and states stand in pools of their own, one slot a sequence.
    """
    (convolve,) = peer(f"{KERNELS}.mamba.causal_conv1d_triton", "causal_conv1d_fn")
    (split,) = peer(f"{KERNELS}.attention.triton_gdn_fused_proj", "fused_qkv_split_gdn_prefill")
    (prepare,) = peer(f"{KERNELS}.attention.fla.l2norm", "gdn_prefill_qkv_prepare_fwd")
    (gates,) = peer(f"{KERNELS}.attention.linear.fused_gdn_gating", "fused_gdn_gating")
    (norm,) = peer(f"{KERNELS}.attention.fla.fused_norm_gate", "rms_norm_gated")
    (rule,) = peer("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    (block,) = case.steps(seed, device)
    mixed, z, H, HV, K, V = block["mixed"], block["z"], case.H, case.HV, case.K, case.V
    borders = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=device)
    cu_seqlens = borders.long()
    slots = torch.arange(len(case.lengths), dtype=torch.int32, device=device)
    rows = slots.long()
    held = torch.tensor([start > 0 for start in case.positions], device=device)
    before = case.initial_histories(seed).transpose(1, 2).to(device, mixed.dtype).contiguous()
    histories = before.clone()
    drawn = case.initial_states(seed)
    assert drawn is not None  # a layer's case starts from a cache
    states_before = drawn.transpose(-1, -2).contiguous().to(device)
    states_before[~held] = 0.0
    states = states_before.clone()

    def call() -> torch.Tensor:
        convolved = convolve(
            mixed.T, block["weight"], None, histories, borders, list(case.lengths),
            cache_indices=slots, has_initial_state=held, activation="silu",
        ).T  # fmt: skip
        if case.channels <= MOST_FUSED:
            q, k, v = split(convolved, H, H, HV, K, K, V)
        else:
            parts = convolved.split((H * K, H * K, HV * V), dim=-1)
            q, k, v = (
                part.view(1, -1, heads, size)
                for part, heads, size in zip(parts, (H, H, HV), (K, K, V), strict=True)
            )
        q, k, v = prepare(q[0], k[0], v[0])
        g, beta = gates(block["a_log"], block["a"], block["b"], block["dt_bias"])
        o, after = rule(
            q, k, v, g=g[0].exp(), beta=beta[0].float(), initial_state=states[rows],
            output_final_state=True, cu_seqlens=cu_seqlens, output=torch.empty_like(v),
            output_state=torch.empty_like(states_before), max_seqlen=max(case.lengths),
        )  # fmt: skip
        states.index_copy_(0, rows, after)
        return norm(o.view(-1, V), z.view(-1, V), block["norm"], None, "swish", eps=1e-6)

    def restore() -> None:
        histories.copy_(before)
        states.copy_(states_before)

    return Arm(
        "sglang",
        call,
        lambda normed: {"norm": normed.view(-1, HV, V)},
        restore,
        note="histories and states in pools; FlashInfer's rule",
    )
