"""Extend attention, its merge and `write_kv` as ops of PyTorch: see `runtime/torch_ops.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.plan import ExtendPlan
from headstart.runtime import torch_ops
from headstart.runtime.checks import expect_no_gradients, expect_tensor, shown
from headstart.runtime.handles import found, handle_of
from headstart.runtime.workspace import Workspace

_SCALES = "Tensor? k_scale, float? host_k_scale, Tensor? v_scale, float? host_v_scale"
_EXTEND = (
    "(Tensor q, Tensor? k, Tensor? v, Tensor plan, Tensor? cache_k, Tensor? cache_v, "
    f"{_SCALES}, float? scale, SymInt? window, Tensor? sinks, float? softcap, Tensor? custom_mask, "
    "bool causal, str part, bool return_lse, bool reproducible, str? implementation, "
    "Tensor? workspace, Tensor(a!)? out, Tensor(b!)? out_lse) -> (Tensor o, Tensor lse)"
)
_MERGE = (
    "(Tensor[] o, Tensor[] lse, Tensor? sinks, str? implementation, Tensor(a!)? out, "
    "Tensor(b!)? out_lse) -> (Tensor o, Tensor lse)"
)
_WRITE = (
    "(Tensor k, Tensor v, Tensor(a!) cache_k, Tensor(b!) cache_v, "
    f"{_SCALES}, Tensor? slots, SymInt[]? host_slots, str? implementation) -> ()"
)
_PASSED = (
    "q", "k", "v", "scale", "window", "sinks", "softcap", "custom_mask", "causal", "part",
    "return_lse", "reproducible", "implementation",
)  # fmt: skip


def traced_extend(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, plan: Any, cache: Any,
    workspace: Workspace | None, out: Any, return_lse: bool, part: str, **passed: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`extend_attention` of a call that is traced."""
    expect_tensor("q", q)
    expect_no_gradients("extend_attention", q=q, k=k, v=v, sinks=passed["sinks"])
    if not isinstance(plan, ExtendPlan):
        raise ValueError(f"plan: expected an ExtendPlan, got {type(plan).__name__}")
    if v is None and cache is None:
        raise ValueError("k, v: expected tensors, or a cache that holds the keys, got None")
    o, lse = out if isinstance(out, (tuple, list)) else (out, None)
    made, made_lse = torch.ops.headstart.extend_attention(
        q, k, v, plan=handle_of(plan), **_flat_cache(cache), return_lse=return_lse, part=part,
        workspace=handle_of(workspace), out=o, out_lse=lse, **passed,
    )  # fmt: skip
    o = made if o is None else o
    lse = made_lse if lse is None else lse
    return (o, lse) if return_lse or part != "all" else o


def _run_extend(function: Callable[..., Any], **given: Any) -> Any:
    o, lse = given["out"], given["out_lse"]
    result = function(
        plan=found(ExtendPlan, given["plan"]),
        cache=_cache(given),
        workspace=found(Workspace, given["workspace"]),
        out=o if lse is None else (o, lse),
        **{name: given[name] for name in _PASSED},
    )
    made, made_lse = result if isinstance(result, tuple) else (result, None)
    return torch_ops.present(made, made if o is None else None, made_lse if lse is None else None)


def _fake_extend(q: torch.Tensor, v: torch.Tensor | None, **given: Any) -> tuple[torch.Tensor, ...]:
    values = given["cache_v"] if v is None else v
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    partial = given["part"] != "all"
    o = lse = None
    if given["out"] is None:
        shape = *q.shape[:2], values.shape[-1]
        o = q.new_empty(shape, dtype=wide if partial else q.dtype)
    if given["out_lse"] is None and (partial or given["return_lse"]):
        lse = q.new_empty(q.shape[:2], dtype=wide)
    return torch_ops.present(q, o, lse)


def traces_merge(parts: Any) -> bool:
    """Whether a call on these parts is traced; parts that are none are for the eager call to tell.

    >>> traces_merge(None)
    False
    """
    pair = parts[0] if isinstance(parts, (list, tuple)) and parts else None
    return torch_ops.traced(pair[0] if isinstance(pair, (list, tuple)) and pair else None)


def traced_merge(
    parts: Any, sinks: torch.Tensor | None, implementation: str | None, out: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attention` of a call that is traced."""
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError(f"parts: expected at least one pair (o, lse), got {shown(parts)}")
    for o, lse in parts:
        expect_no_gradients("merge_attention", parts=o, lse=lse, sinks=sinks)
    o, lse = (None, None) if out is None else out
    made = torch.ops.headstart.merge_attention(
        [part[0] for part in parts], [part[1] for part in parts], sinks,
        implementation=implementation, out=o, out_lse=lse,
    )  # fmt: skip
    return made if out is None else (out[0], out[1])


def _run_merge(
    function: Callable[..., Any],
    o: list[torch.Tensor],
    lse: list[torch.Tensor],
    sinks: torch.Tensor | None,
    **given: Any,
) -> Any:
    out = None if given["out"] is None else (given["out"], given["out_lse"])
    parts = list(zip(o, lse, strict=True))
    result = function(parts, sinks, implementation=given["implementation"], out=out)
    return result if out is None else torch_ops.present(out[0], None, None)


def _fake_merge(
    o: Sequence[torch.Tensor], lse: Sequence[torch.Tensor], **given: Any
) -> tuple[torch.Tensor, ...]:
    if given["out"] is not None:
        return torch_ops.present(o[0], None, None)
    return o[0].new_empty(o[0].shape), lse[0].new_empty(lse[0].shape)


def traced_write(
    k: torch.Tensor, v: torch.Tensor, cache: Any, slots: Any, implementation: str | None
) -> None:
    """`write_kv` of a call that is traced."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache: expected a KVCache, got {type(cache).__name__}")
    expect_no_gradients("write_kv", k=k, v=v, cache_k=cache.k, cache_v=cache.v)
    tensor, listed = (slots, None) if isinstance(slots, torch.Tensor) else (None, list(slots))
    torch.ops.headstart.write_kv(
        k, v, **_flat_cache(cache), slots=tensor, host_slots=listed, implementation=implementation
    )


def _run_write(
    function: Callable[..., None], k: torch.Tensor, v: torch.Tensor, **given: Any
) -> None:
    slots = given["slots"] if given["host_slots"] is None else given["host_slots"]
    function(k, v, _cache(given), slots, implementation=given["implementation"])


def _fake_write(**given: Any) -> None:
    return None


def _flat_cache(cache: Any) -> dict[str, Any]:
    if cache is not None and not isinstance(cache, KVCache):
        raise ValueError(f"cache: expected a KVCache, got {type(cache).__name__}")
    flat: dict[str, Any] = {}
    for name in ("k_scale", "v_scale"):
        scale = None if cache is None else getattr(cache, name)
        tensor = isinstance(scale, torch.Tensor)
        flat[name], flat[f"host_{name}"] = (scale, None) if tensor else (None, scale)
    held = (None, None) if cache is None else (cache.k, cache.v)
    return {"cache_k": held[0], "cache_v": held[1], **flat}


def _cache(given: dict[str, Any]) -> KVCache | None:
    if given["cache_k"] is None:
        return None
    scales = [
        given[f"host_{name}"] if given[name] is None else given[name]
        for name in ("k_scale", "v_scale")
    ]
    return KVCache(given["cache_k"], given["cache_v"], *scales)


torch_ops.define("extend_attention", _EXTEND, _run_extend, _fake_extend)
torch_ops.define("merge_attention", _MERGE, _run_merge, _fake_merge)
torch_ops.define("write_kv", _WRITE, _run_write, _fake_write)
