"""Calls of every form that a registered op has, on tensors of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import headstart
from headstart import DeltaCache, ExtendPlan, Gate, KVCache, Pool, Schedule, Workspace

H, HV, K, V = 1, 2, 64, 64
T, LENGTHS = 75, (70, 5)
FLOAT8 = torch.float8_e4m3fn


@dataclass
class World:
    """What calls read and change, made anew for each; random, but the same each time."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    changed: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = torch.Generator().manual_seed(6)

    def some(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.source)
        return values.to(dtype=dtype or self.dtype, device=self.device)

    def rows(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, log decay and strength."""
        q, k, v = self.some(T, H, K), self.some(T, H, K), self.some(T, HV, V)
        return q, k, v, -self.some(T, HV).abs(), self.some(T, HV)

    def schedule(self) -> Schedule:
        return Schedule(LENGTHS, snapshot_positions=[[64], [0]], device=self.device)

    def cache(self) -> DeltaCache:
        sizes = {"H": H, "HV": HV, "K": K, "V": V, "conv_channels": 6, "draft_tokens": 4}
        cache = DeltaCache(6, **sizes, dtype=self.dtype, device=self.device)
        self.changed |= cache.tensors
        return cache

    def kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that the call changes."""
        self.changed[name] = tensor
        return tensor

    def kv_cache(self) -> KVCache:
        k, v = self.some(4, 16, 2, 64), self.some(4, 16, 2, 64)
        return KVCache(self.kept("k", k), self.kept("v", v))

    def plan(self) -> ExtendPlan:
        return ExtendPlan.from_pages(
            [5, 3], [25, 10], torch.tensor([[3, 1], [2, 0]], device=self.device), 16,
            new_in_cache=False,
        )  # fmt: skip


Form = Callable[[World], Callable[[], Any]]
FORMS: dict[str, Form] = {}
"""name -> what makes a call of this form in a world; objects are made outside of the call."""


def form(make: Form) -> Form:
    FORMS[make.__name__] = make
    return make


HOW: dict[str, Any] = {"gate": Gate.log(beta="logit"), "qk_l2norm": True}


@form
def rule_plain(world: World) -> Callable[[], Any]:
    rows = world.rows()
    return lambda: headstart.gated_delta_rule(*rows, **HOW, return_state=True)


@form
def rule_lengths(world: World) -> Callable[[], Any]:
    rows, workspace = world.rows(), Workspace(world.device)
    return lambda: headstart.gated_delta_rule(
        *rows, **HOW, schedule=list(LENGTHS), return_state=True, workspace=workspace
    )


@form
def rule_returned(world: World) -> Callable[[], Any]:
    rows, schedule = world.rows(), world.schedule()
    state, out = world.some(2, HV, K, V), world.kept("out", world.some(T, HV, V))
    gate = Gate.raw(world.some(HV), world.some(HV), beta="logit2")
    return lambda: headstart.gated_delta_rule(
        *rows, gate=gate, qk_l2norm=True, schedule=schedule, state=state, return_state=True,
        snapshots=torch.float16, out=out,
    )  # fmt: skip


@form
def rule_pool(world: World) -> Callable[[], Any]:
    rows, schedule = world.rows(), world.schedule()
    pool = world.kept("pool", world.some(6, HV, K, V))
    kept = torch.tensor([4, 5], device=world.device)
    return lambda: headstart.gated_delta_rule(
        *rows, **HOW, schedule=schedule, state=Pool(pool, [0, 1], [2, 3], [True, False]),
        snapshots=Pool(pool, write_slots=kept),
    )  # fmt: skip


@form
def rule_two_pools(world: World) -> Callable[[], Any]:
    rows, schedule = world.rows(), world.schedule()
    pool = world.kept("pool", world.some(3, HV, V, K))
    other = world.kept("other", world.some(3, HV, K, V))
    return lambda: headstart.gated_delta_rule(
        *rows, **HOW, schedule=schedule, state=Pool(pool, [0, 1], layout="vk"),
        snapshots=Pool(other, write_slots=[1, -1]),
    )  # fmt: skip


@form
def rule_cache(world: World) -> Callable[[], Any]:
    rows, schedule, cache = world.rows(), world.schedule(), world.cache()
    return lambda: headstart.gated_delta_rule(
        *rows, **HOW, schedule=schedule, state=cache.at([0, 1]), snapshots=cache.at([2, 3])
    )


@form
def rule_two_caches(world: World) -> Callable[[], Any]:
    rows, schedule, cache = world.rows(), world.schedule(), world.cache()
    other = DeltaCache(2, H=H, HV=HV, K=K, V=V, dtype=world.dtype, device=world.device)
    world.changed |= {f"other {name}": tensor for name, tensor in other.tensors.items()}
    slots = torch.tensor([5, 0], device=world.device)
    return lambda: headstart.gated_delta_rule(
        *rows, **HOW, schedule=schedule, state=cache.at(slots), snapshots=other.at([1, 0])
    )


@form
def rule_batch(world: World) -> Callable[[], Any]:
    rows = [torch.stack([x, x.flip(0)]) for x in world.rows()]
    return lambda: headstart.gated_delta_rule(*rows, **HOW, return_state=True)


@form
def recurrent(world: World) -> Callable[[], Any]:
    rows, pool = world.rows(), world.kept("pool", world.some(3, HV, K, V))
    return lambda: headstart.recurrent_gated_delta_rule(*rows, **HOW, state=Pool(pool, [1]))


@form
def convolution_returned(world: World) -> Callable[[], Any]:
    x, weight, schedule = world.some(T, 6), world.some(6, 4), world.schedule()
    return lambda: headstart.causal_conv1d(
        x, weight, schedule=schedule, return_state=True, snapshots=x.dtype, activation=None
    )


@form
def convolution_cache(world: World) -> Callable[[], Any]:
    x, weight, bias = world.some(T, 6), world.some(6, 4), world.some(6)
    schedule, cache = world.schedule(), world.cache()
    out = world.kept("out", world.some(T, 6))
    return lambda: headstart.causal_conv1d(
        x, weight, bias, schedule=schedule, state=cache.at([0, 1]), snapshots=cache.at([2, 3]),
        out=out,
    )  # fmt: skip


@form
def norm(world: World) -> Callable[[], Any]:
    x, weight, gate = world.some(T, HV, V), world.some(V), world.some(T, HV, V)
    return lambda: headstart.rms_norm_gated(x, weight, gate, eps=1e-5, activation="sigmoid")


def _new_rows(world: World) -> tuple[torch.Tensor, ...]:
    return world.some(8, 4, 64), world.some(8, 2, 64), world.some(8, 2, 64)


@form
def attention(world: World) -> Callable[[], Any]:
    q, k, v = _new_rows(world)
    plan, cache, sinks = world.plan(), world.kv_cache(), world.some(4)
    return lambda: headstart.extend_attention(
        q, k, v, plan=plan, cache=cache, window=9, sinks=sinks, return_lse=True
    )


@form
def attention_out(world: World) -> Callable[[], Any]:
    q, k, v = _new_rows(world)
    plan, cache, workspace = world.plan(), world.kv_cache(), Workspace(world.device)
    out = world.kept("out", world.some(8, 4, 64))
    return lambda: headstart.extend_attention(
        q, k, v, plan=plan, cache=cache, reproducible=True, workspace=workspace, out=out
    )


@form
def attention_parts(world: World) -> Callable[[], Any]:
    q, k, v = _new_rows(world)
    plan, cache, sinks = world.plan(), world.kv_cache(), world.some(4)

    def call() -> Any:
        how: dict[str, Any] = {"plan": plan, "cache": cache}
        prefix = headstart.extend_attention(q, k, v, **how, part="prefix")
        new = headstart.extend_attention(q, k, v, **how, part="extend")
        return headstart.merge_attention([prefix, new], sinks)

    return call


@form
def write(world: World) -> Callable[[], Any]:
    _, k, v = _new_rows(world)
    cache, slots = world.kv_cache(), torch.arange(3, 11, device=world.device)
    return lambda: headstart.write_kv(k, v, cache, slots)


@form
def write_float8(world: World) -> Callable[[], Any]:
    _, k, v = _new_rows(world)
    stores = [
        world.kept(name, torch.zeros(16, 2, 64, device=world.device).to(FLOAT8))
        for name in ("k", "v")
    ]
    cache = KVCache(*stores, 0.5, torch.full((1,), 2.0, device=world.device))
    slots = [3, -1, *range(4, 10)]
    return lambda: headstart.write_kv(k, v, cache, slots)


class Seen(TorchDispatchMode):
    """Keeps the registered ops that are called, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "headstart":
            self.ops.append((func, args))
        return func(*args, **(kwargs or {}))


def ops_of(call: Callable[[], Any]) -> list[tuple[Any, tuple]]:
    """The registered ops that a call is compiled to, each with its arguments."""
    seen: list[tuple[Any, tuple]] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with Seen() as mode:
                result = graph(*args)
            seen.extend(mode.ops)
            return result

        return run

    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)()
    return seen


def outcome(world: World, result: Any) -> list[torch.Tensor]:
    """Results of a call, and what it changed."""
    results = result if isinstance(result, tuple) else (result,)
    return [x.clone() for x in (*results, *world.changed.values()) if x is not None]


def same_bits(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(some, others, strict=True)
    )
