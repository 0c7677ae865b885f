"""The public functions of softmax extend attention."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headstart.ops.extend_attention import merge_spec, spec, write_spec
from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.plan import ExtendPlan
from headstart.ops.extend_attention.signature import signature, write_signature
from headstart.ops.extend_attention.torch_op import (
    traced_extend,
    traced_merge,
    traced_write,
    traces_merge,
)
from headstart.runtime import dispatch
from headstart.runtime.torch_ops import traced
from headstart.runtime.workspace import Workspace

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, UInt8


def extend_attention(
    q: Float[torch.Tensor, "T HQ D"],
    k: Float[torch.Tensor, "T HK D"] | None,
    v: Float[torch.Tensor, "T HK DV"] | None,
    *,
    plan: ExtendPlan,
    cache: KVCache | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Float[torch.Tensor, " HQ"] | None = None,
    softcap: float | None = None,
    custom_mask: Bool[torch.Tensor, " entries"] | UInt8[torch.Tensor, " entries"] | None = None,
    causal: bool = True,
    part: str = "all",
    return_lse: bool = False,
    reproducible: bool = False,
    implementation: str | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Grouped-query softmax attention of new tokens over their cached prefixes and themselves.

    For a row at absolute position p (query_start + t), over the keys j it sees:

        s_j = scale q . k_j,  then s_j = softcap tanh(s_j / softcap) if there is a softcap
        Z = exp(sink) + sum_j exp(s_j),   o = sum_j exp(s_j) v_j / Z,   lse = log Z

    It sees the key at position r iff r <= p (causal) and r > p - window: a window of W means W
    keys, the row's own included. Query head h reads key head h // (HQ // HK). A row that sees no
    key gives 0 and -inf, or the sink.

    Parameters
    ----------
    q: [T, HQ, D], sequences end to end; float32, bfloat16 or float16 (float64: reference only),
        any strides but a contiguous last dimension.
    k, v: the new tokens' [T, HK, D] and [T, HK, DV], in q's dtype; HQ a multiple of HK. None when
        the plan says they are in the cache (or part="prefix").
    plan: an `ExtendPlan`; shared by all layers of a forward.
    cache: a `KVCache`, needed where the plan has cached keys.
    scale: factor of q . k; None: D**-0.5. 0.0 is a scale.
    window: keys a row sees at most, its own included; None: no window.
    sinks: [HQ], any float dtype: a logit per head in natural units, neither scaled nor capped,
        that joins the denominator once.
    softcap: c in c tanh(s / c), after the scale and before the mask.
    custom_mask: bool or uint8, for every sequence row-major [new, prefix + new] (or [new, new],
        as the plan's mask_covers says), concatenated. It replaces the causal rule and may look
        ahead; the window still applies.
    causal: False: all keys of the sequence, down to the window's lower bound.
    part: "all", or a partial over the "prefix" or the new keys ("extend"): float32, without sinks,
        LSE always; `merge_attention` joins them.
    return_lse: return (o, lse).
    reproducible: make a row's bits depend on its own sequence and positions alone: not on the
        batch, the heads held, the steps, the page layout. Keys and values must be finite: one that
        is not may reach rows of its tile that do not see it.
    implementation: "reference", "torch", ...; None: the first that accepts.
    workspace: scratch to use; None: one of this thread and stream.
    out: tensor for o, or a pair for (o, lse); it must not overlap an input.

    Returns
    -------
    o [T, HQ, DV] in q's dtype (float32 for a partial); with return_lse or for a partial (o, lse),
    lse [T, HQ] natural, float32. Rows at or past the plan's last length are 0 and -inf.

    Raises
    ------
    ValueError: an argument does not fit, with its name, what was expected and what came.
    Declined: the named implementation, or every one, cannot run the call, with its reason.

    >>> import headstart
    >>> q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    >>> cache = headstart.KVCache(torch.randn(5, 2, 16), torch.randn(5, 2, 16))
    >>> plan = headstart.ExtendPlan.from_lengths([3], [5], device="cpu")
    >>> o, lse = headstart.extend_attention(
    ...     q, k, v, plan=plan, cache=cache, window=4, sinks=torch.zeros(4), return_lse=True
    ... )
    >>> o.shape, lse.shape
    (torch.Size([3, 4, 16]), torch.Size([3, 4]))
    """
    if traced(q):
        return traced_extend(
            q, k, v, plan, cache, workspace, out, return_lse, part, scale=scale, window=window,
            sinks=sinks, softcap=softcap, custom_mask=custom_mask, causal=causal,
            reproducible=reproducible, implementation=implementation,
        )  # fmt: skip
    seen = signature(
        q, k, v, plan, cache, scale, window, sinks, softcap, custom_mask, causal, part, return_lse,
        reproducible, workspace, out,
    )  # fmt: skip
    if seen is not None:
        result = dispatch.again(EXTEND_ATTENTION, seen, implementation, workspace, plan.prepared)
        if result is not dispatch.MISSED:
            return result
    call = spec.bind(
        q, k, v, plan, cache, scale, window, sinks, softcap, custom_mask, causal, part, return_lse,
        reproducible, workspace, out,
    )  # fmt: skip
    return dispatch.anew(
        EXTEND_ATTENTION, seen, call, implementation, plan.prepared, lambda: plan.held
    )


def merge_attention(
    parts: Sequence[tuple[Float[torch.Tensor, "T HQ DV"], Float[torch.Tensor, "T HQ"]]],
    sinks: Float[torch.Tensor, " HQ"] | None = None,
    *,
    implementation: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention results over disjoint sets of keys into one, and add the sinks, once.

        lse = log(exp(sink) + sum_i exp(lse_i)),   o = sum_i exp(lse_i - lse) o_i

    (0, -inf) is the identity: parts that saw no key change nothing. The plan is not known here: a
    row past its last length gets (0, sink), not (0, -inf).

    Parameters
    ----------
    parts: one or more pairs (o [T, HQ, DV], lse [T, HQ] natural float32), as part="prefix" and
        part="extend" give them; o of any float dtype, the same for all.
    sinks: [HQ], any float dtype, natural units.
    implementation: "reference", "torch", ...; None: the first that accepts.
    out: pair (o, lse) to fill; o may have another float dtype. It may be one of the parts.

    Returns
    -------
    (o, lse): o in the dtype of the parts (or of out), lse float32.

    Raises
    ------
    ValueError: an argument does not fit.

    >>> o, lse = torch.ones(1, 1, 2), torch.zeros(1, 1)
    >>> nothing = torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf)
    >>> merge_attention([(o, lse), nothing, (3 * o, lse)])
    (tensor([[[2., 2.]]]), tensor([[0.6931]]))
    """
    if traces_merge(parts):
        return traced_merge(parts, sinks, implementation, out)
    call = merge_spec.bind(parts, sinks, out=out)
    return dispatch.run(MERGE_ATTENTION, call, implementation)


def write_kv(
    k: Float[torch.Tensor, "T HK D"],
    v: Float[torch.Tensor, "T HK DV"],
    cache: KVCache,
    slots: Sequence[int] | Int[torch.Tensor, " T"],
    *,
    implementation: str | None = None,
) -> None:
    """Store the keys and values of T tokens in the slots of a cache, in place.

    Stores round to nearest even. A float8 cache stores x / scale, saturated at 448.

    Parameters
    ----------
    k, v: [T, HK, D] and [T, HK, DV], float32, bfloat16 or float16, any strides.
    cache: a `KVCache` whose slots share no memory, with each other or with k and v.
    slots: a list or an int32 / int64 tensor [T]; a negative slot is not written. Slots that are
        written must differ from each other.
    implementation: "reference", "torch", ...; None: the first that accepts.

    Raises
    ------
    ValueError: an argument does not fit; a slot outside the cache or given twice, which slots on a
        device are checked for under HEADSTART_CHECK=1 only.

    >>> cache = KVCache(torch.zeros(8, 1, 2), torch.zeros(8, 1, 2))
    >>> write_kv(torch.ones(2, 1, 2), torch.ones(2, 1, 2), cache, [5, -1])
    >>> cache.k[:, 0, 0].tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    """
    if traced(k):
        traced_write(k, v, cache, slots, implementation)
        return
    seen = write_signature(k, v, cache, slots)
    if seen is None or dispatch.again(WRITE_KV, seen, implementation) is dispatch.MISSED:
        dispatch.anew(WRITE_KV, seen, write_spec.bind(k, v, cache, slots), implementation)


_HERE = "headstart.ops.extend_attention"

EXTEND_ATTENTION = dispatch.register(
    dispatch.Operation(
        name="extend_attention",
        bind=spec.bind,
        places={
            "triton": f"{_HERE}.triton.call:IMPLEMENTATION",
            "torch": f"{_HERE}.decomposed:IMPLEMENTATION",
            "reference": f"{_HERE}.reference:IMPLEMENTATION",
        },
        function=extend_attention,
        written=operator.attrgetter("written"),
    )
)

MERGE_ATTENTION = dispatch.register(
    dispatch.Operation(
        name="merge_attention",
        bind=merge_spec.bind,
        places={
            "triton": f"{_HERE}.triton.call:MERGE",
            "torch": f"{_HERE}.decomposed:MERGE",
            "reference": f"{_HERE}.reference:MERGE",
        },
        function=merge_attention,
    )
)

WRITE_KV = dispatch.register(
    dispatch.Operation(
        name="write_kv",
        bind=write_spec.bind,
        places={
            "triton": f"{_HERE}.triton.call:WRITE",
            "torch": f"{_HERE}.decomposed:WRITE",
            "reference": f"{_HERE}.reference:WRITE",
        },
        function=write_kv,
        written=lambda call: (0,),
        changed=lambda call: (call.cache.k, call.cache.v),
    )
)
