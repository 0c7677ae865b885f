"""The arguments of softmax extend attention, checked once for every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.locate import Consecutive, Paged
from headstart.ops.extend_attention.plan import ExtendPlan
from headstart.runtime.checks import (
    FLOATS,
    all_in_memory,
    checking,
    expect_choice,
    expect_device,
    expect_dtype,
    expect_finite,
    expect_flag,
    expect_int,
    expect_last_contiguous,
    expect_no_gradients,
    expect_number,
    expect_own_memory,
    expect_shape,
    expect_tensor,
    in_float32,
    shown,
)
from headstart.runtime.workspace import Workspace

PARTS = ("all", "prefix", "extend")
DTYPES = (*FLOATS, torch.float64)


@dataclass(frozen=True, eq=False)
class ExtendCall:
    """A checked call of `extend_attention`; q [T, HQ, D], k [T, HK, D], v [T, HK, DV]."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    plan: ExtendPlan
    cache: KVCache | None
    HK: int
    DV: int
    scale: float
    window: int | None
    sinks: torch.Tensor | None
    softcap: float | None
    custom_mask: torch.Tensor | None
    causal: bool
    part: str
    return_lse: bool
    reproducible: bool
    workspace: Workspace | None
    out: torch.Tensor | None
    out_lse: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.q.device

    @property
    def HQ(self) -> int:  # noqa: N802
        """Query heads."""
        return self.q.shape[1]

    @property
    def D(self) -> int:  # noqa: N802
        """Query and key head size."""
        return self.q.shape[2]

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of o: q's, but at least float32 for a partial."""
        return self.q.dtype if self.part == "all" else _at_least_float32(self.q.dtype)

    @property
    def lse_dtype(self) -> torch.dtype:
        """Dtype of the LSE: float32, or float64 for float64 inputs."""
        return _at_least_float32(self.q.dtype)

    @property
    def written(self) -> tuple[int, ...]:
        """Rows of o, and of the LSE if it is returned, that kernels write: all of them."""
        T = self.q.shape[0]
        return (T, T) if self.return_lse or self.part != "all" else (T,)

    def keys(self, n: int) -> range:
        """Which of sequence n's keys (prefix, then new) belong to the part."""
        prefix, length = self.plan.prefix[n], self.plan.lengths[n]
        begin = prefix if self.part == "extend" else 0
        return range(begin, prefix if self.part == "prefix" else prefix + length)

    def mask(self, n: int) -> torch.Tensor | None:
        """Sequence n's custom mask as a bool tensor [length, mask columns], or None."""
        if self.custom_mask is None:
            return None
        plan = self.plan
        sizes = [plan.lengths[m] * plan.mask_columns(m) for m in range(n + 1)]
        begin = sum(sizes[:-1])
        rows = self.custom_mask[begin : begin + sizes[-1]]
        return rows.view(plan.lengths[n], plan.mask_columns(n)) != 0

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The caller's tensors for o and LSE, or fresh ones; rows of no sequence are filled."""
        T, HQ = self.q.shape[:2]
        o, lse = self.out, self.out_lse
        if o is None:
            o = torch.empty(T, HQ, self.DV, dtype=self.out_dtype, device=self.device)
        if lse is None:
            lse = torch.empty(T, HQ, dtype=self.lse_dtype, device=self.device)
        o[self.plan.T :] = 0
        lse[self.plan.T :] = -torch.inf
        return o, lse

    def result(
        self, o: torch.Tensor, lse: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What the public function returns."""
        return (o, lse) if self.return_lse or self.part != "all" else o


def bind(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    plan: ExtendPlan,
    cache: KVCache | None,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    custom_mask: torch.Tensor | None,
    causal: bool,
    part: str,
    return_lse: bool,
    reproducible: bool,
    workspace: Workspace | None,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
) -> ExtendCall:
    """Check the arguments of `extend_attention`; raises ValueError naming the first wrong one."""
    expect_tensor("q", q)
    if q.dim() != 3 or min(q.shape[1:]) < 1:
        raise ValueError(f"q: expected [T, HQ, D] with HQ, D >= 1, got {list(q.shape)}")
    expect_dtype("q", q, DTYPES)
    expect_last_contiguous("q", q)
    if not isinstance(plan, ExtendPlan):
        raise ValueError(f"plan: expected an ExtendPlan, got {type(plan).__name__}")
    if q.shape[0] < plan.T:
        raise ValueError(f"plan: expected at most T = {q.shape[0]} new tokens, got {plan.T}")
    if q.device.type != "meta" and not _same_device(plan.device, q.device):
        raise ValueError(f"plan: expected device {q.device} (that of q), got {plan.device}")
    expect_choice("part", part, PARTS)
    if cache is not None and not isinstance(cache, KVCache):
        raise ValueError(f"cache: expected a KVCache, got {type(cache).__name__}")
    HK, DV = _expect_keys(q, k, v, plan, cache, part)
    expect_no_gradients("extend_attention", q=q, k=k, v=v, sinks=sinks)
    if window is not None:
        words = "None or a count of keys (the query's own included)"
        window = expect_int("window", window, 1, words=words)
    if sinks is not None:
        expect_shape("sinks", sinks, "[HQ]", (q.shape[1],))
        expect_dtype("sinks", sinks, DTYPES)
        expect_device("sinks", sinks, q.device, "q")
        if part != "all":
            raise ValueError(
                f'sinks: expected None with part="{part}" (merge_attention adds them, once)'
            )
    if custom_mask is not None:
        expect_tensor("custom_mask", custom_mask)
        expect_dtype("custom_mask", custom_mask, (torch.bool, torch.uint8))
        entries = sum(plan.lengths[n] * plan.mask_columns(n) for n in range(plan.N))
        expect_shape("custom_mask", custom_mask, "[entries of all sequences]", (entries,))
        expect_device("custom_mask", custom_mask, q.device, "q")
    o, lse = _expect_out(q, DV, part, out)
    _expect_no_other_gradients(cache, o, lse)
    _expect_workspace(workspace, q)
    q, k, v = all_in_memory(q=q, k=k, v=v)
    sinks, custom_mask = all_in_memory(sinks=sinks, custom_mask=custom_mask)
    held = {} if cache is None else {"the cache's k": cache.k, "the cache's v": cache.v}
    for name, result, other in (("out", o, {"out[1]": lse}), ("out[1]", lse, {})):
        if result is not None:
            expect_own_memory(name, result, q=q, k=k, v=v, **held, **other)
    call = ExtendCall(
        q=q,
        k=None if plan.new_in_cache else k,
        v=None if plan.new_in_cache else v,
        plan=plan,
        cache=cache,
        HK=HK,
        DV=DV,
        scale=_scale(scale, q.shape[2]),
        window=window,
        sinks=sinks,
        softcap=_softcap(softcap),
        custom_mask=custom_mask,
        causal=expect_flag("causal", causal),
        part=part,
        return_lse=expect_flag("return_lse", return_lse),
        reproducible=expect_flag("reproducible", reproducible),
        workspace=workspace,
        out=o,
        out_lse=lse,
    )
    if checking() and q.device.type != "meta":
        _check_values(call)
    return call


def _expect_no_other_gradients(cache: KVCache | None, *out: torch.Tensor | None) -> None:
    """Gradients of arguments that are no plain inputs."""
    results = dict(zip(("out", "out[1]"), out, strict=True))
    expect_no_gradients("extend_attention", **results)
    if cache is not None:
        named = ("cache.k", cache.k), ("cache.v", cache.v)
        scales = ("k_scale", cache.k_scale), ("v_scale", cache.v_scale)
        held = {name: x for name, x in (*named, *scales) if isinstance(x, torch.Tensor)}
        expect_no_gradients("extend_attention", **held)


def _expect_keys(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    plan: ExtendPlan,
    cache: KVCache | None,
    part: str,
) -> tuple[int, int]:
    """HK and DV, from k and v or from the cache."""
    T, HQ, D = q.shape
    needs_new = part != "prefix" and not plan.new_in_cache
    needs_cache = plan.needs_cache and (plan.new_in_cache or part != "extend")
    if plan.new_in_cache and not (k is None and v is None):
        raise ValueError(
            "k, v: expected None, since the plan says that new keys are in the cache, "
            f"got {shown((k, v))}"
        )
    if needs_new and (k is None or v is None):
        raise ValueError(
            "k, v: expected tensors, since the plan's new keys are not in the cache, "
            f"got {shown((k, v))}"
        )
    if (k is None) != (v is None):
        raise ValueError(f"k, v: expected both or neither, got {shown((k, v))}")
    if needs_cache and cache is None:
        raise ValueError("cache: expected a KVCache, since the plan reads keys from it, got None")
    if k is not None and v is not None:
        expect_shape("k", k, "[T, HK, D]", (T, None, D))
        expect_shape("v", v, "[T, HK, DV]", (T, k.shape[1], None))
        for name, tensor in (("k", k), ("v", v)):
            expect_dtype(name, tensor, (q.dtype,))
            expect_device(name, tensor, q.device, "q")
            expect_last_contiguous(name, tensor)
        if min(k.shape[1], v.shape[2]) < 1:
            name, tensor = ("k", k) if k.shape[1] < 1 else ("v", v)
            raise ValueError(f"{name}: expected HK, DV >= 1, got {list(tensor.shape)}")
        HK, DV = k.shape[1], v.shape[2]
    elif cache is not None:
        HK, DV = cache.HK, cache.v.shape[-1]
    else:
        raise ValueError(
            "cache: expected a KVCache, since without k and v it says HK, DV, got None"
        )
    if HQ % HK:
        raise ValueError(f"q: expected HQ a multiple of HK = {HK}, got HQ = {HQ}")
    if cache is not None and needs_cache:
        expect_shape("cache.k", cache.k, "[..., HK, D]", (*cache.k.shape[:-2], HK, D))
        expect_shape("cache.v", cache.v, "[..., HK, DV]", (*cache.v.shape[:-2], HK, DV))
        expect_device("cache.k", cache.k, q.device, "q")
        cache.expect_in_memory()
        _expect_layout(plan, cache)
    return HK, DV


def _expect_layout(plan: ExtendPlan, cache: KVCache) -> None:
    """Raise unless pages or rows of the cache are those of the plan."""
    where = plan.slots
    if isinstance(where, Paged) and cache.k.dim() == 4 and cache.page_size != where.page_size:
        raise ValueError(
            f"cache: expected pages of {where.page_size} rows, as the plan says, "
            f"got {cache.page_size}"
        )
    row = where.row if isinstance(where, Consecutive) else None
    if row is not None and cache.k.dim() == 4 and cache.page_size != row:
        raise ValueError(
            f"cache: expected [B, max_length, HK, D] with max_length = {row}, got {cache.page_size}"
        )
    if isinstance(where, Consecutive) or (plan.device.type == "cpu" and cache.device.type == "cpu"):
        plan.validate(cache)


def _same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two names can mean one device; without an index any of its type may be meant."""
    same_index = one.index == other.index or None in (one.index, other.index)
    return one.type == other.type and same_index


def _scale(scale: float | None, D: int) -> float:
    if scale is None:
        return D**-0.5
    return expect_number("scale", scale, "None or a finite number of float32", in_float32)


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    words = "None or a finite number > 0 of float32"
    return expect_number("softcap", softcap, words, lambda cap: cap > 0 and in_float32(cap))


def _expect_out(
    q: torch.Tensor,
    DV: int,
    part: str,
    out: torch.Tensor | Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if out is None:
        return None, None
    o, lse = (out, None) if isinstance(out, torch.Tensor) else _pair("out", out)
    wide = _at_least_float32(q.dtype)
    expect_output(
        "out", o, "[T, HQ, DV]", (*q.shape[:2], DV), q, q.dtype if part == "all" else wide
    )
    if lse is not None:
        expect_output("out[1]", lse, "[T, HQ]", q.shape[:2], q, wide)
    return o, lse


def expect_output(
    name: str,
    tensor: torch.Tensor,
    words: str,
    shape: Sequence[int],
    like: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Raise unless `tensor` can take a result of this shape and dtype."""
    expect_shape(name, tensor, words, shape)
    expect_dtype(name, tensor, (dtype,))
    expect_device(name, tensor, like.device, "q")
    expect_own_memory(name, tensor)


def _pair(name: str, values: object) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise ValueError(f"{name}: expected a tensor or a pair (o, lse), got {shown(values)}")
    return expect_tensor(f"{name}[0]", values[0]), expect_tensor(f"{name}[1]", values[1])


def _expect_workspace(workspace: Workspace | None, q: torch.Tensor) -> None:
    if workspace is None:
        return
    if not isinstance(workspace, Workspace):
        raise ValueError(f"workspace: expected a Workspace, got {type(workspace).__name__}")
    if q.device.type != "meta" and not _same_device(workspace.device, q.device):
        raise ValueError(f"workspace: expected device {q.device}, got {workspace.device}")


def _check_values(call: ExtendCall) -> None:
    """The checks of HEADSTART_CHECK=1 that look at values."""
    rows = slice(0, call.plan.T)
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        if tensor is not None:
            expect_finite(name, tensor[rows])
    if call.sinks is not None and bool((call.sinks.isnan() | call.sinks.isposinf()).any()):
        raise ValueError("sinks: expected finite logits or -inf, got NaN or inf")
    if call.plan.needs_cache and call.cache is not None and call.part != "extend":
        call.plan.validate(call.cache)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
