"""The public functions of the gated delta rule."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from headstart.ops.gated_delta_rule import spec
from headstart.ops.gated_delta_rule.cache import CacheSlots
from headstart.ops.gated_delta_rule.gate import Gate
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.ops.gated_delta_rule.signature import signature
from headstart.ops.gated_delta_rule.spec import GatedDelta
from headstart.ops.gated_delta_rule.torch_op import traced_rule
from headstart.runtime import dispatch
from headstart.runtime.checks import (
    all_in_memory,
    expect_device,
    expect_dtype,
    expect_last_contiguous,
    expect_no_gradients,
    expect_shape,
    expect_tensor,
    in_memory,
    shown,
)
from headstart.runtime.precision import full_float32
from headstart.runtime.torch_ops import traced
from headstart.runtime.workspace import Workspace

if TYPE_CHECKING:
    from jaxtyping import Float

_LOG = Gate.log()


def gated_delta_rule(
    q: Float[torch.Tensor, "*lead H K"],
    k: Float[torch.Tensor, "*lead H K"],
    v: Float[torch.Tensor, "*lead HV V"],
    g: Float[torch.Tensor, "*lead HV"] | Float[torch.Tensor, "*lead HV K"] | None,
    beta: Float[torch.Tensor, "*lead HV"] | None,
    *,
    schedule: Schedule | Sequence[int] | None = None,
    state: torch.Tensor | Pool | CacheSlots | None = None,
    gate: Gate = _LOG,
    snapshots: torch.dtype | Pool | CacheSlots | None = None,
    return_state: bool = False,
    scale: float | None = None,
    qk_l2norm: bool = False,
    reproducible: bool | None = None,
    implementation: str | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> GatedDelta:
    """Linear attention with a decaying, self-correcting state, over a packed batch of sequences.

    Per value head, with state S [K, V] (Gated Delta Networks, arXiv 2412.06464):

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale S_t^T q_t

    Value head j reads key head j // (HV // H).

    Parameters
    ----------
    q, k: [T, H, K], sequences end to end; float32, bfloat16 or float16, any strides but a
        contiguous last dimension. [B, L, H, K] (v, g, beta alike) are B sequences of length L.
    v: [T, HV, V], HV a multiple of H, in q's dtype.
    g: [T, HV], or [T, HV, K] per channel (KDA: exp(g) scales the rows of S); any float dtype,
        read as float32; what it holds is the gate's matter. None: no decay.
    beta: [T, HV], any float dtype, read as float32. None: 1.
    schedule: a `Schedule`, or the lengths of sequences that start at position 0. None: one
        sequence.
    state: the states before the call: a tensor [N, HV, K, V] (read only), a `Pool` (in place), or
        `cache.at(slots)` (canonical, in place; needs a Schedule). None: zeros.
    gate: how g and beta are to be read.
    snapshots: where the schedule's snapshots go: a dtype (returned packed [M, HV, K, V], sequence
        by sequence, rising positions), a `Pool` with write_slots [M], or `cache.at(slots)` with M
        slots. None: they are not kept.
    return_state: return the new states [N, HV, K, V], float32 unless `state` is a tensor of another
        dtype. Not with a Pool or a cache.
    scale: factor of o; None: K**-0.5.
    qk_l2norm: normalise q and k to x rsqrt(sum(x^2) + 1e-6) over K first.
    reproducible: make the bits of a row depend on its own sequence and positions alone, not on the
        batch, the number of heads or the steps (steps cut on the 64-token grid with a plain state,
        anywhere with a cache). None: with a cache.
    implementation: "reference", "torch", ...; None: the first that accepts. "hopper" copies q, k, v
        or out once more where their rows do not begin and step by multiples of 16 bytes.
    workspace: scratch to use; None: one of this thread and stream.
    out: tensor that receives o.

    Returns
    -------
    GatedDelta(o, state, snapshots): o [T, HV, V] (or [B, L, HV, V]) in q's dtype, rows past the
    last sequence 0.

    Raises
    ------
    ValueError: a wrong argument, by name. Declined: no implementation runs the call.

    >>> import torch, headstart
    >>> q = k = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # [T, H, K] = [2, 1, 2]
    >>> v = torch.tensor([[[3.0]], [[5.0]]])
    >>> headstart.gated_delta_rule(q, k, v, None, None, scale=1.0, return_state=True).state
    tensor([[[[3.],
              [5.]]]])
    """
    if traced(q):
        return traced_rule(
            "gated_delta_rule", q, k, v, g, beta, schedule, state, gate, snapshots, return_state,
            scale, qk_l2norm, reproducible, implementation, workspace, out,
        )  # fmt: skip
    seen = signature(
        q, k, v, g, beta, schedule, state, gate, snapshots, return_state, scale, qk_l2norm,
        reproducible, workspace, out,
    )  # fmt: skip
    if seen is not None:
        result = dispatch.again(_CHUNKED, seen, implementation, workspace, schedule=schedule)
        if result is not dispatch.MISSED:
            return result
    call = spec.bind(
        q, k, v, g, beta, schedule, state, gate, snapshots, return_state, scale, qk_l2norm,
        reproducible, workspace, out,
    )  # fmt: skip
    return dispatch.anew(_CHUNKED, seen, call, implementation)


def recurrent_gated_delta_rule(
    q: Float[torch.Tensor, "*lead H K"],
    k: Float[torch.Tensor, "*lead H K"],
    v: Float[torch.Tensor, "*lead HV V"],
    g: Float[torch.Tensor, "*lead HV"] | Float[torch.Tensor, "*lead HV K"] | None,
    beta: Float[torch.Tensor, "*lead HV"] | None,
    *,
    schedule: Schedule | Sequence[int] | None = None,
    state: torch.Tensor | Pool | None = None,
    gate: Gate = _LOG,
    return_state: bool = False,
    scale: float | None = None,
    qk_l2norm: bool = False,
    implementation: str | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> GatedDelta:
    """`gated_delta_rule` token by token on plain states, as others decode: no chunk, no promise.

    Arguments, result and errors as for `gated_delta_rule`; no caches and no snapshots.

    >>> import torch, headstart
    >>> q = torch.ones(1, 1, 1)
    >>> float(headstart.recurrent_gated_delta_rule(q, q, 2 * q, None, None).o)
    2.0
    """
    if traced(q):
        return traced_rule(
            "recurrent_gated_delta_rule", q, k, v, g, beta, schedule, state, gate, None,
            return_state, scale, qk_l2norm, False, implementation, workspace, out,
        )  # fmt: skip
    seen = signature(
        q, k, v, g, beta, schedule, state, gate, None, return_state, scale, qk_l2norm, False,
        workspace, out,
    )  # fmt: skip
    if seen is not None:
        result = dispatch.again(_RECURRENT, seen, implementation, workspace, schedule=schedule)
        if result is not dispatch.MISSED:
            return result
    call = _bind_recurrent(
        q, k, v, g, beta, schedule, state, gate, return_state, scale, qk_l2norm, workspace, out
    )
    return dispatch.anew(_RECURRENT, seen, call, implementation)


def _bind_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    schedule: Schedule | Sequence[int] | None,
    state: torch.Tensor | Pool | None,
    gate: Gate,
    return_state: bool,
    scale: float | None,
    qk_l2norm: bool,
    workspace: Workspace | None,
    out: torch.Tensor | None,
) -> spec.GatedDeltaCall:
    if isinstance(state, CacheSlots):
        raise ValueError("state: expected a tensor or a Pool; a cache needs gated_delta_rule")
    return spec.bind(
        q,
        k,
        v,
        g,
        beta,
        schedule=schedule,
        state=state,
        gate=gate,
        snapshots=None,
        return_state=return_state,
        scale=scale,
        qk_l2norm=qk_l2norm,
        reproducible=False,
        workspace=workspace,
        out=out,
    )


class ChunkMap(NamedTuple):
    """L [N, HV, K, K] and b [N, HV, K, V] of the affine map S_out = L S_in + b."""

    L: torch.Tensor
    b: torch.Tensor


def chunk_map(
    k: Float[torch.Tensor, "T H K"],
    v: Float[torch.Tensor, "T HV V"],
    g: Float[torch.Tensor, "T HV"] | Float[torch.Tensor, "T HV K"] | None,
    beta: Float[torch.Tensor, "T HV"] | None,
    *,
    schedule: Schedule | Sequence[int],
    gate: Gate = _LOG,
    qk_l2norm: bool = False,
) -> ChunkMap:
    """What the tokens of each sequence do to its state: S_out = L S_in + b.

    The rule is affine in the state, so segments of a long sequence can be computed side by side (on
    several ranks too) and joined by `compose`. Arguments as for `gated_delta_rule`; float32 results
    (float64 from float64 inputs).

    >>> import torch, headstart
    >>> k, v = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[3.0]]])
    >>> L, b = headstart.chunk_map(k, v, None, None, schedule=[1])
    >>> L.flatten().tolist(), b.flatten().tolist()
    ([0.0, 0.0, 0.0, 1.0], [3.0, 0.0])
    """
    # What the two calls below would say of q, which is not theirs to name.
    expect_shape("k", k, "[T, H, K]", (None, None, None))
    expect_dtype("k", k, spec.STATE_DTYPES)
    expect_last_contiguous("k", k)
    T, _, K = k.shape
    expect_shape("v", v, "[T, HV, V]", (T, None, None))
    expect_no_gradients("chunk_map", k=k, v=v, g=g, beta=beta)
    k, v, g, beta = all_in_memory(k=k, v=v, g=g, beta=beta)
    if not isinstance(schedule, Schedule):
        schedule = Schedule(schedule, device=k.device)
    N, HV = schedule.slot_count(schedule.N, 0), v.shape[1]
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    # Columns of V never mix: L is what becomes of the identity where no value comes in.
    silence = v.new_zeros(1, 1, K).expand(T, HV, K)
    unit = torch.eye(K, dtype=wide, device=k.device).expand(N, HV, K, K)
    implementation = "reference" if wide == torch.float64 else None
    results = [
        gated_delta_rule(
            k,
            k,
            values,
            g,
            beta,
            schedule=schedule,
            state=state,
            gate=gate,
            qk_l2norm=qk_l2norm,
            return_state=True,
            reproducible=True if k.device.type == "cpu" else None,
            implementation=implementation,
        ).state
        for values, state in ((silence, unit), (v, None))
    ]
    return ChunkMap(*results)  # type: ignore[arg-type]


def compose(
    first: ChunkMap | tuple[torch.Tensor, torch.Tensor],
    second: ChunkMap | tuple[torch.Tensor, torch.Tensor],
) -> ChunkMap:
    """The map of `first` and then `second`: (L2 L1, L2 b1 + b2).

    L [..., K, K] and b [..., K, V] in one float dtype, on one device. ValueError if one does not
    fit.

    >>> import torch, headstart
    >>> double = (2 * torch.eye(1), torch.ones(1, 1))
    >>> L, b = headstart.compose(double, double)
    >>> float(L), float(b)
    (4.0, 3.0)
    """
    (L1, b1), (L2, b2) = _map("first", first), _map("second", second)
    if L1.dim() < 2 or L1.shape[-1] != L1.shape[-2]:
        raise ValueError(f"first: L: expected [..., K, K], got {list(L1.shape)}")
    expect_dtype("first: L", L1, spec.STATE_DTYPES)
    V = b1.shape[-1] if b1.dim() else None
    for name, L, b in (("first", L1, b1), ("second", L2, b2)):
        for part, words, tensor, shape in (
            ("L", "[..., K, K]", L, L1.shape),
            ("b", "[..., K, V]", b, (*L1.shape[:-1], V)),
        ):
            expect_shape(f"{name}: {part}", tensor, words, shape)
            expect_dtype(f"{name}: {part}", tensor, (L1.dtype,))
            expect_device(f"{name}: {part}", tensor, L1.device, "first: L")
            expect_no_gradients("compose", **{f"{name}: {part}": tensor})
            in_memory(f"{name}: {part}", tensor)
    with full_float32():
        return ChunkMap(L2 @ L1, L2 @ b1 + b2)


def _map(name: str, pair: object) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{name}: expected a pair (L, b), got {shown(pair)}")
    return expect_tensor(f"{name}: L", pair[0]), expect_tensor(f"{name}: b", pair[1])


_HERE = "headstart.ops.gated_delta_rule"
_CHUNKED = dispatch.register(
    dispatch.Operation(
        name="gated_delta_rule",
        bind=spec.bind,
        places={
            "hopper": f"{_HERE}.hopper.call:IMPLEMENTATION",
            "triton": f"{_HERE}.triton.call:IMPLEMENTATION",
            "torch": f"{_HERE}.decomposed:IMPLEMENTATION",
            "reference": f"{_HERE}.reference:IMPLEMENTATION",
        },
        function=gated_delta_rule,
        written=operator.attrgetter("written"),
        changed=operator.attrgetter("changed"),
    )
)
_RECURRENT = dispatch.register(
    dispatch.Operation(
        name="recurrent_gated_delta_rule",
        bind=_bind_recurrent,
        places={
            "triton": f"{_HERE}.triton.recurrent:IMPLEMENTATION",
            "torch": f"{_HERE}.decomposed:TOKEN_BY_TOKEN",
            "reference": f"{_HERE}.reference:IMPLEMENTATION",
        },
        function=recurrent_gated_delta_rule,
        written=operator.attrgetter("written"),
    )
)
