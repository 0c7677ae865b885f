"""What headstart computes in place of a model's own layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import StaticLayer

from headstart import Gate, KVCache
from headstart.integrations.transformers.caches import HybridCache
from headstart.integrations.transformers.delta_layer import DeltaLayer
from headstart.integrations.transformers.pages import PagedLayer
from headstart.integrations.transformers.uncompiled import uncompiled

if TYPE_CHECKING:
    from headstart.integrations.transformers.adapters import Adapter
    from headstart.integrations.transformers.forward import Forward

COPIED = 64
"""New tokens of a sequence from which on the keys of transformers' caches, which lie head by head,
are copied: kernels take rows that lie token by token in whole tiles."""


def padding_mask(
    *, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **_: Any
) -> torch.Tensor | None:
    """The mask function that transformers calls (AttentionMaskInterface): padding, as it came.

    Causality and windows are the plan's matter, which knows the lengths.
    """
    if use_vmap:
        raise ValueError(
            "attention_mask: expected causal or sliding attention, got a mask function of the "
            "caller's own, which headstart does not serve"
        )
    return attention_mask


@uncompiled
def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls (AttentionInterface).

    query [B, HQ, L, D], key and value [B, HK, rows, D] -> [B, L, HQ, DV]. The padding mask has been
    read when the decoder's forward began; sliding_window counts keys, the query's own included.
    """
    adapter: Adapter | None = getattr(module, "headstart", None)
    if adapter is None:
        raise ValueError("model: attention 'headstart' needs enable(model)")
    if dropout:
        raise ValueError(f"dropout: expected 0, got {dropout}; headstart serves inference only")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ValueError("is_causal: expected causal attention, got attention to all tokens")
    if output_attentions:
        raise ValueError("output_attentions: expected False, since no weights are ever stored")
    forward = adapter.forward(query.shape[0], query.shape[2])
    kind = "full_attention" if sliding_window is None else "sliding_attention"
    cache = forward.cache
    layer = None if cache is None else cache.layers[module.layer_idx]
    q = forward.rows(query.transpose(1, 2))
    place: dict[str, Any] = {"reproducible": adapter.reproducible}
    if isinstance(layer, PagedLayer):
        pages = layer.pages
        memory = pages.pool.memory(module.layer_idx, key, value)
        k, v = (forward.rows(x.transpose(1, 2)) for x in (key, value))
        adapter.write(kind, k=k, v=v, cache=memory, slots=pages.slots)
        place = {"k": None, "v": None, "plan": pages.plan, "cache": memory, "reproducible": True}
    elif layer is None:
        k, v = (forward.rows(x.transpose(1, 2)) for x in (key, value))
        place |= {"k": k, "v": v, "plan": forward.plan()}
    else:
        total, rows = forward.past + forward.length, key.shape[2]
        if rows > total and not isinstance(layer, StaticLayer):
            raise ValueError(
                f"past_key_values: expected at most {total} keys in layer {module.layer_idx}, got "
                f"{rows} (reset() of older transformers keeps the keys); start a new cache"
            )
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        if forward.length >= COPIED:
            k, v = k.contiguous(), v.contiguous()
        memory = KVCache(k, v)
        place |= {"k": None, "v": None, "plan": forward.padded_plan(key.shape[2]), "cache": memory}
    o = adapter.call(
        module.layer_idx,
        kind,
        "extend_attention",
        q=q,
        scale=scaling,
        window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
        **place,
    )
    if isinstance(layer, PagedLayer):
        layer.whole = True
    return forward.padded(o), None


@uncompiled
def linear_attention(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """The forward of a gated-delta-rule layer of Qwen3-Next or Qwen3.5.

    hidden_states [B, L, hidden size] -> the same; the output at padding is zero.
    """
    adapter: Adapter = module.headstart
    forward = adapter.forward(*hidden_states.shape[:2])
    mixed, z, b, a = _projections(module, forward.rows(hidden_states))
    convolution = module.conv1d
    layer, rule, history = _places(module, forward, mixed, adapter)

    def call(operation: str, **arguments: Any) -> Any:
        return adapter.call(module.layer_idx, "linear_attention", operation, **arguments)

    convolved = call(
        "causal_conv1d",
        x=mixed,
        weight=convolution.weight.squeeze(1),
        bias=convolution.bias,
        activation=module.activation,
        **history,
    )
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    q, k, v = convolved.y.split(sizes, dim=-1)
    attended = call(
        "gated_delta_rule",
        q=q.unflatten(-1, (-1, module.head_k_dim)),
        k=k.unflatten(-1, (-1, module.head_k_dim)),
        v=v.unflatten(-1, (-1, module.head_v_dim)),
        g=a,
        beta=b,
        gate=Gate.raw(module.A_log, module.dt_bias, beta="logit"),
        qk_l2norm=True,
        **rule,
    )
    if layer is not None:
        schedule = rule["schedule"]
        layer.advance(forward, any(schedule.drafts))
        if schedule.M:
            layer.keep(schedule.snapshot_positions, attended.snapshots, convolved.snapshots)
    normed = call(
        "rms_norm_gated",
        x=attended.o,
        weight=module.norm.weight,
        gate=z.view_as(attended.o),
        eps=module.layer_norm_epsilon,
        activation=module.activation,
    )
    return forward.padded(module.out_proj(normed.flatten(1)))


def _places(
    module: Any, forward: Forward, mixed: torch.Tensor, adapter: Adapter
) -> tuple[DeltaLayer | None, dict[str, Any], dict[str, Any]]:
    """The cache's layer, and where state and history of this step lie, as arguments."""
    cache = forward.cache
    if cache is None:
        schedule = forward.schedule()
        return (
            None,
            {"schedule": schedule, "reproducible": adapter.reproducible},
            {"schedule": schedule},
        )
    layer: DeltaLayer = cache.layers[module.layer_idx]
    memory = layer.prepare(
        forward.batch,
        H=module.num_k_heads,
        HV=module.num_v_heads,
        K=module.head_k_dim,
        V=module.head_v_dim,
        conv_channels=mixed.shape[-1],
        conv_width=module.conv_kernel_size,
        dtype=mixed.dtype,
        device=mixed.device,
    )
    drafts = layer.drafts(forward.length)
    wanted = cache.wanted(forward) if isinstance(cache, HybridCache) and not drafts else None
    place = {
        "schedule": forward.schedule(wanted, drafts),
        "state": memory.at(range(forward.batch)),
    }
    if wanted is None:
        return layer, place, place
    return layer, place | {"snapshots": torch.float32}, place | {"snapshots": mixed.dtype}


def _projections(
    module: Any, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of hidden states [T, hidden size]: q, k, v [T, channels], z [T, HV V], b and a [T, HV]."""
    if not len(rows):  # no sizes can be told from nothing
        one = _projections(module, rows.new_zeros(1, rows.shape[1]))
        return one[0][:0], one[1][:0], one[2][:0], one[3][:0]
    if hasattr(module, "in_proj_qkvz"):
        # The model's own splitting wants a batch.
        q, k, v, z, b, a = (
            x[0]
            for x in module.fix_query_key_value_ordering(
                module.in_proj_qkvz(rows[None]), module.in_proj_ba(rows[None])
            )
        )
        return torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1), z.flatten(1), b, a
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    mixed, z, b, a = (getattr(module, name)(rows) for name in names)
    return mixed, z, b, a
