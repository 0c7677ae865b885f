"""Checks of softmax extend attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import headstart
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.record import Draws
from headstart.evidence.mutants.cases import ATTENTIONS, NEIGHBOURLY
from headstart.evidence.mutants.record import Verdict
from headstart.evidence.mutants.verdicts import Bits, Check, Values, compared, judged
from headstart.evidence.oracles import attention
from headstart.evidence.poison import poison, poisoned_memory
from headstart.evidence.tile_bounds import brute_force
from headstart.evidence.verify.figures import Meter
from headstart.evidence.verify.tolerances import tolerance
from headstart.ops.extend_attention.locate import Listed, Paged

ROOM, ROOM_ON_DEVICE = 200, 1_000_000
"""Tokens of a capacity: on a device tiles of the first wave run at once, and only what later ones
write stays over a row's own result."""


@dataclass(frozen=True)
class AttentionOptions:
    """What cases cannot say: scale, softcap, no causal rule, reproducible; float64 judges."""

    case: AttentionCase
    options: dict[str, Any] = field(default_factory=dict)
    sink: float | None = None
    blind: bool = False
    """Whether every third row sees no key, by a custom mask."""
    updated: bool = False
    """Whether the plan described another forward before, in memory with room for this one."""
    strided: str = ""
    """Of which cached tensors, "k" and "v", the elements of a row lie apart."""

    def _mask(self, n: int, device: str) -> torch.Tensor | None:
        """What the rows of sequence n see [length, keys], where it is not the causal rule."""
        length, cached = self.case.lengths[n], self.case.cached[n]
        seen = torch.ones(length, cached + length, dtype=torch.bool, device=device)
        if self.blind:
            seen.tril_(cached)[::3] = False
            return seen
        return None if self.options.get("causal", True) else seen

    def _updated(self, plan: headstart.ExtendPlan, device: str) -> headstart.ExtendPlan:
        size, slots, inside = self.case.page_size, plan.slots, self.case.new_in_cache
        tokens = ROOM if device == "cpu" else ROOM_ON_DEVICE
        room: dict[str, Any] = {"capacity": (4, tokens, 400), "device": device}
        if self.case.layout == "pages":
            before = headstart.ExtendPlan.from_pages(
                [1], [2], [[0]], size, new_in_cache=inside, **room
            )
            both = [old + new for old, new in zip(plan.prefix, plan.lengths, strict=True)]
            assert isinstance(slots, Paged)
            return before.update_(plan.lengths, both, slots.table, size, new_in_cache=inside)
        before = headstart.ExtendPlan.from_slots([1], [0, 1], [0], new_in_cache=inside, **room)
        assert isinstance(slots, Listed)
        return before.update_(plan.lengths, slots.indptr, slots.indices, new_in_cache=inside)

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare o and LSE of every key head."""
        call = self.case.inputs(0, device)
        if self.updated:
            call["plan"] = self._updated(call["plan"], device)
        if self.strided:
            kept = {name: getattr(call["cache"], name) for name in "kv"}
            for name in self.strided:
                kept[name] = torch.stack([kept[name], kept[name] + 1], -1)[..., 0]
            call["cache"] = headstart.KVCache(**kept)
        if self.blind:
            masks = [self._mask(n, device) for n in range(len(self.case.lengths))]
            call["custom_mask"] = torch.cat([m.flatten() for m in masks if m is not None])
        if self.sink is not None:
            call["sinks"] = torch.full_like(call["sinks"], self.sink)
        shape = (*call["q"].shape[:2], self.case.value_size)
        out = tuple(poison(torch.empty(size, device=device)) for size in (shape, shape[:2]))
        with poisoned_memory(), torch.inference_mode():
            o, lse = headstart.extend_attention(
                **call,
                **self.options,
                out=(out[0], out[1]),
                return_lse=True,
                implementation=implementation,
            )
        meters = {"o": Meter("o", o), "LSE": Meter("LSE", lse[..., None], unit=1.0)}
        ratio = self.case.HQ // self.case.HK
        for head in range(self.case.HK):
            mine = slice(head * ratio, (head + 1) * ratio)
            truth = self._truth(call, head, mine)
            for name, values in truth.items():
                meters[name].add(mine, values)
        return judged(
            [
                meter.measured(tolerance(self.case.op, name, "float32", "float32", implementation))
                for name, meter in meters.items()
            ]
        )

    def _truth(self, call: dict[str, Any], head: int, mine: slice) -> dict[str, torch.Tensor]:
        outputs, lses, row = [], [], 0
        for n, rows in enumerate(self.case.cache_rows()):
            length, cached = self.case.lengths[n], self.case.cached[n]
            keys = []
            for name in "kv":
                new = call[name]
                parts = [] if new is None else [new[row : row + length, head]]
                if "cache" in call:
                    memory = getattr(call["cache"], name)
                    parts.insert(0, memory.reshape(-1, *memory.shape[-2:])[rows, head])
                keys.append(torch.cat(parts))
            o, lse = attention.attend(
                call["q"][row : row + length, mine],
                *keys,
                positions=torch.arange(cached, cached + length, device=keys[0].device),
                scale=self.options.get("scale"),
                softcap=self.options.get("softcap"),
                window=self.case.window,
                sinks=call["sinks"][mine] if "sinks" in call else None,
                mask=self._mask(n, keys[0].device.type),
            )
            outputs.append(o)
            lses.append(lse)
            row += length
        return {"o": torch.cat(outputs), "LSE": torch.cat(lses)[..., None]}


@dataclass(frozen=True)
class Positions:
    """Queries and prefix keys at positions that do not follow from lengths.

    key_start, query_start: of both sequences. scattered: prefix keys at every third position.
    covers: a drawn custom mask over "all" keys, or the "new" ones; "": none.
    """

    key_start: int
    query_start: int
    window: int | None = None
    scattered: bool = False
    covers: str = ""
    reproducible: bool = False

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare o and LSE against a literal mask."""
        lengths, prefixes, HQ, HK, D = (40, 9), (50, 20), 4, 2, 32
        draws = Draws(2, "cpu")
        q = 2 * draws.normal("q", sum(lengths), HQ, D)
        k, v = draws.normal("k", sum(lengths), HK, D), draws.normal("v", sum(lengths), HK, D)
        stored = [draws.normal(name, sum(prefixes), HK, D) for name in ("old k", "old v")]
        step = 3 if self.scattered else 1
        places = [self.key_start + step * torch.arange(count) for count in prefixes]
        options: dict[str, Any] = {"query_start": self.query_start}
        if self.scattered:
            options["key_positions"] = torch.cat(places).tolist()
        else:
            options["key_start"] = self.key_start
        more: dict[str, Any] = {"reproducible": True} if self.reproducible else {}
        masks: list[torch.Tensor | None] = [None, None]
        if self.covers:
            options["mask_covers"] = self.covers
            masks = [
                draws.uniform(f"mask {n}", new, new + (old if self.covers == "all" else 0)) < 0.5
                for n, (new, old) in enumerate(zip(lengths, prefixes, strict=True))
            ]
            flat = torch.cat([mask.flatten() for mask in masks if mask is not None])
            more["custom_mask"] = flat.to(device)
        plan = headstart.ExtendPlan.from_lengths(lengths, prefixes, device=device, **options)
        cache = headstart.KVCache(*(x.to(device) for x in stored))
        with poisoned_memory(), torch.inference_mode():
            o, lse = headstart.extend_attention(
                q.to(device), k.to(device), v.to(device), plan=plan, cache=cache,
                window=self.window, return_lse=True, implementation=implementation, **more,
            )  # fmt: skip
        parts = zip(
            q.split(lengths), k.split(lengths), v.split(lengths), places,
            *(x.split(prefixes) for x in stored), masks, strict=True,
        )  # fmt: skip
        truths = [self._truth(*part) for part in parts]
        meters = {"o": Meter("o", o), "LSE": Meter("LSE", lse[..., None], unit=1.0)}
        meters["o"].add(slice(0, None), torch.cat([one for one, _ in truths]))
        meters["LSE"].add(slice(0, None), torch.cat([one for _, one in truths])[..., None])
        return judged(
            [
                meter.measured(
                    tolerance("extend_attention", name, "float32", "float32", implementation)
                )
                for name, meter in meters.items()
            ]
        )

    def _truth(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        places: torch.Tensor,
        old_k: torch.Tensor,
        old_v: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.query_start + torch.arange(len(q))
        position = torch.cat([places, own])
        seen = position <= own[:, None]
        if mask is not None:
            seen[:, -mask.shape[1] :] = mask
        if self.window is not None:
            seen &= position > own[:, None] - self.window
        ratio = q.shape[1] // k.shape[1]
        heads = [
            attention.attend(
                q[:, head * ratio : (head + 1) * ratio],
                torch.cat([old_k, k])[:, head],
                torch.cat([old_v, v])[:, head],
                positions=own,
                mask=seen,
            )
            for head in range(k.shape[1])
        ]
        return torch.cat([o for o, _ in heads], 1), torch.cat([lse for _, lse in heads], 1)


@dataclass(frozen=True)
class TileBounds:
    """The bounds of key tiles against literal masks, on a part of what `verify tiles` counts."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Count violations, which no tolerance excuses."""
        counts = brute_force([(16, 32)], [None, 1, 20, 40], [0, 33, 64], [1, 40])
        violations = sum(count.violations for count in counts)
        if not violations:
            return Verdict(check="")
        return Verdict(check="", failure=f"{violations} violating tiles", excess=float("inf"))


@dataclass(frozen=True)
class CacheWrites:
    """Rows written into a cache: rounded, or scaled and saturated, to their slots, nowhere else."""

    dtype: torch.dtype
    paged: bool = True

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare the stored bytes."""
        draws = Draws(4, "cpu")
        scaled = self.dtype == torch.float8_e4m3fn
        size = 400 if scaled else 1
        k, v = size * draws.normal("k", 6, 2, 16), size * draws.normal("v", 6, 2, 16)
        scale = torch.tensor([0.5, 2.0])
        slots = [17, 3, -1, 0, 30, 16]
        shape = (2, 16, 2, 16) if self.paged else (32, 2, 16)
        memory = [torch.zeros(shape, device=device).to(self.dtype) for _ in range(2)]
        scales = {f"{name}_scale": scale.to(device) for name in "kv"} if scaled else {}
        cache = headstart.KVCache(*memory, **scales)
        headstart.write_kv(k.to(device), v.to(device), cache, slots, implementation=implementation)
        found = {}
        for name, rows, store in zip("kv", (k, v), memory, strict=True):
            right = torch.zeros(32, 2, 16).to(self.dtype)
            if scaled:
                rows = (rows / scale.view(-1, 1)).clamp(-448.0, 448.0)
            stored = rows.to(self.dtype)
            for slot, row in zip(slots, stored.view(torch.uint8), strict=True):
                if slot >= 0:
                    right.view(torch.uint8)[slot] = row
            written = store.reshape(32, 2, 16).cpu().view(torch.uint8)
            found[name] = (written.float(), right.view(torch.uint8).double())
        return compared(found, tolerance("gated_delta_rule", "history", "float32", "float32"))


_OP = "extend_attention"
_SOME, _WINDOW = ATTENTIONS["attention"], ATTENTIONS["attention window"]
ATTENTION_CHECKS: dict[str, Check] = {
    **{name: Values(case) for name, case in ATTENTIONS.items()},
    **{
        f"bits of attention {check}{words}": Bits(_OP, form, check)
        for check in ("pages", "batches", "heads")
        for words, form in (
            ("", "float32, sinks"), (" in a window", "bfloat16, window, sinks"),
        )
    },
    "attention softcap": AttentionOptions(_SOME, {"softcap": 4.0}),
    "attention softcap window": AttentionOptions(_WINDOW, {"softcap": 4.0}),
    "attention scale of 0": AttentionOptions(_SOME, {"scale": 0.0}),
    "attention low sinks": AttentionOptions(_WINDOW, sink=-120.0),
    "attention blind rows": AttentionOptions(_SOME, sink=-120.0, blind=True),
    "attention without the causal rule": AttentionOptions(_SOME, {"causal": False}),
    "attention without the causal rule, window": AttentionOptions(_WINDOW, {"causal": False}),
    "attention updated pages": AttentionOptions(ATTENTIONS["attention pages"], updated=True),
    "attention updated slots": AttentionOptions(ATTENTIONS["attention slots"], updated=True),
    "attention strided keys": AttentionOptions(_SOME, strided="k"),
    "attention strided values": AttentionOptions(_SOME, strided="v"),
    "attention strided pages": AttentionOptions(ATTENTIONS["attention pages"], strided="kv"),
    "reproducible attention": AttentionOptions(_SOME, {"reproducible": True}),
    "reproducible window": AttentionOptions(_WINDOW, {"reproducible": True}),
    "reproducible pages": AttentionOptions(
        ATTENTIONS["attention pages hold all"], {"reproducible": True}
    ),
    "reproducible pages, masked": AttentionOptions(
        ATTENTIONS["attention pages hold all"], {"reproducible": True}, blind=True
    ),
    "reproducible softcap": AttentionOptions(_SOME, {"reproducible": True, "softcap": 4.0}),
    "reproducible softcap window": AttentionOptions(
        _WINDOW, {"reproducible": True, "softcap": 4.0}
    ),
    "reproducible deep prefix": AttentionOptions(
        ATTENTIONS["attention deep prefix"], {"reproducible": True}
    ),
    "attention trimmed prefix": Positions(key_start=37, query_start=87),
    "attention after a gap": Positions(key_start=5, query_start=100, window=70),
    "attention beside its prefix": Positions(key_start=20, query_start=60),
    "attention at its prefix's last key": Positions(key_start=11, query_start=60),
    "attention before its prefix's last key": Positions(key_start=12, query_start=60),
    "attention beside its prefix, window": Positions(key_start=20, query_start=60, window=15),
    "attention masked": Positions(0, 60, covers="all"),
    "attention masked new keys": Positions(12, 62, covers="new"),
    "attention masked new keys, window": Positions(12, 62, window=30, covers="new"),
    "reproducible trimmed prefix": Positions(37, 87, reproducible=True),
    "reproducible after a gap": Positions(5, 100, window=70, reproducible=True),
    "reproducible across a block's end": Positions(4000, 4100, reproducible=True),
    "reproducible masked": Positions(0, 60, covers="all", reproducible=True),
    "reproducible masked new keys": Positions(12, 62, covers="new", reproducible=True),
    "reproducible long window": AttentionOptions(
        ATTENTIONS["attention long window"], {"reproducible": True}
    ),
    "attention scattered keys": Positions(key_start=2, query_start=90, scattered=True),
    "attention scattered keys, window": Positions(2, 90, window=40, scattered=True),
    "cache writes": CacheWrites(torch.float8_e4m3fn),
    "cache writes of 16 bits": CacheWrites(torch.bfloat16, paged=False),
    "cache writes of 32 bits": CacheWrites(torch.float32),
    "tile bounds": TileBounds(),
}  # fmt: skip
"""Name -> check, for every implementation on every device."""
NEIGHBOUR_CHECKS: dict[str, Check] = {
    name: Values(case, against) for name, (against, case) in NEIGHBOURLY.items() if case.op == _OP
}
"""The same for the reference, which would judge itself."""
