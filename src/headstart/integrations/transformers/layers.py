"""What headstart computes in place of a model's own layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headstart import Gate, KVCache
from headstart.integrations.transformers.caches import DeltaLayer, HybridCache, PagedLayer

if TYPE_CHECKING:
    from headstart.integrations.transformers.adapters import Adapter


@dataclass(frozen=True)
class KeyRange:
    """What the mask of a softmax layer comes down to: which rows of the padded keys it sees.

    first: index of the first key row among all rows the cache has seen.
    """

    first: int
    attention_mask: torch.Tensor | None


def key_range(
    *, kv_offset: int = 0, attention_mask: torch.Tensor | None = None, **_: Any
) -> KeyRange:
    """The mask function that transformers calls (AttentionMaskInterface)."""
    return KeyRange(int(kv_offset), attention_mask)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: KeyRange | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls (AttentionInterface).

    query [B, HQ, L, D], key and value [B, HK, rows, D] -> [B, L, HQ, DV].
    """
    adapter: Adapter = module.headstart
    if dropout:
        raise ValueError(f"dropout: expected 0, got {dropout}; headstart serves inference only")
    if isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"attention_mask: expected [B, tokens], got {list(attention_mask.shape)}; "
            "headstart derives masks from lengths"
        )
    forward = adapter.forward(query.shape[0], query.shape[2])
    options: dict[str, Any] = {
        "scale": scaling,
        "window": sliding_window,
        "sinks": s_aux,
        "softcap": softcap,
    }
    q = forward.rows(query.transpose(1, 2))
    cache = forward.cache
    layer = cache.layers[module.layer_idx] if isinstance(cache, HybridCache) else None
    if isinstance(layer, PagedLayer):
        ends = [s + n for s, n in zip(forward.starts, forward.lengths, strict=True)]
        assert layer.pages is not None
        options["plan"] = layer.plan(forward.lengths, ends, query.device)
        options |= {"cache": layer.pages.cache, "reproducible": True}
        k = v = None
    elif forward.packed is not None and key.shape[2] == query.shape[2]:
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        options |= {"plan": forward.packed_plan(), "reproducible": adapter.reproducible}
    else:
        k = v = None
        first = attention_mask.first if isinstance(attention_mask, KeyRange) else 0
        options["plan"] = forward.padded_plan(first, key.shape[2])
        options["cache"] = KVCache(key.transpose(1, 2), value.transpose(1, 2))
        options["reproducible"] = adapter.reproducible
    kind = "full_attention" if sliding_window is None else "sliding_attention"
    o = adapter.call(module.layer_idx, kind, "extend_attention", q=q, k=k, v=v, **options)
    return forward.padded(o), None


def linear_attention(module: Any) -> Callable[..., torch.Tensor]:
    """A forward for one gated-delta-rule layer of Qwen3-Next or Qwen3.5."""

    def forward(
        hidden_states: torch.Tensor,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        cache_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """[B, L, hidden size] -> the same; the cache's layer becomes headstart's at first use."""
        return _linear(module, hidden_states, cache if cache is not None else cache_params)

    return forward


def _linear(module: Any, hidden_states: torch.Tensor, cache: Any) -> torch.Tensor:
    adapter: Adapter = module.headstart
    forward = adapter.forward(*hidden_states.shape[:2])
    mixed, z, b, a = (forward.rows(x) for x in _projections(module, hidden_states))
    place: dict[str, Any] = {"schedule": forward.schedule(None, cache is not None)}
    extra: dict[str, Any] = {}
    if cache is not None:
        layer = _delta_layer(cache, module.layer_idx)
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
        wanted = cache.wanted(forward) if isinstance(cache, HybridCache) else None
        if wanted is not None and any(wanted):
            slots = layer.snapshot_slots(wanted)
            assert layer.slots is not None
            memory = layer.slots.cache  # it may have grown
            place["schedule"] = forward.schedule(wanted, True)
            place["snapshots"] = memory.at(slots)
        place["state"] = memory.at(layer.rows)
    else:
        extra["reproducible"] = adapter.reproducible

    def call(operation: str, **arguments: Any) -> Any:
        return adapter.call(module.layer_idx, "linear_attention", operation, **arguments)

    convolution = module.conv1d
    y = call(
        "causal_conv1d",
        x=mixed,
        weight=convolution.weight.squeeze(1),
        bias=convolution.bias,
        activation=module.activation,
        **place,
    ).y
    q, k, v = y.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    o = call(
        "gated_delta_rule",
        q=q.unflatten(-1, (-1, module.head_k_dim)),
        k=k.unflatten(-1, (-1, module.head_k_dim)),
        v=v.unflatten(-1, (-1, module.head_v_dim)),
        g=a,
        beta=b,
        gate=Gate.raw(module.A_log, module.dt_bias, beta="logit"),
        qk_l2norm=True,
        **place,
        **extra,
    ).o
    norm = module.norm
    o = call(
        "rms_norm_gated",
        x=o,
        weight=norm.weight,
        gate=z.view_as(o),
        eps=getattr(norm, "variance_epsilon", module.layer_norm_epsilon),
        activation=module.activation,
    )
    return module.out_proj(forward.padded(o.flatten(1)))


def _projections(
    module: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The packed q, k, v [B, L, channels], and z, b, a."""
    if hasattr(module, "in_proj_qkvz"):
        q, k, v, z, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
        )
        return torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1), z.flatten(2), b, a
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    mixed, z, b, a = (getattr(module, name)(hidden_states) for name in names)
    return mixed, z, b, a


def _delta_layer(cache: Any, index: int) -> DeltaLayer:
    """The cache's layer, replaced by one with canonical states while it is still empty."""
    layer = cache.layers[index]
    if isinstance(layer, DeltaLayer):
        return layer
    if _filled(layer):
        raise ValueError(
            "past_key_values: the model's own path has filled this cache; headstart needs a new one"
        )
    cache.layers[index] = DeltaLayer()
    return cache.layers[index]


def _filled(layer: Any) -> bool:
    before = getattr(layer, "has_previous_state", False)
    return any(before.values()) if isinstance(before, dict) else bool(before)
