"""The checks that judge builds, by name: values against float64, neighbours, bits, transcripts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

import torch

import headstart
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.gated_delta_rule import DeltaCase
from headstart.evidence.cases.record import Draws
from headstart.evidence.mutants.cases import ATTENTIONS, NEIGHBOURLY, RULES
from headstart.evidence.mutants.record import Verdict
from headstart.evidence.oracles import attention, convolution, delta
from headstart.evidence.poison import poison, poisoned_memory
from headstart.evidence.verify import bits, verify_case
from headstart.evidence.verify.computing import compute
from headstart.evidence.verify.figures import Measured, Meter
from headstart.evidence.verify.tolerances import Tolerance, tolerance
from headstart.evidence.verify.transcript import verify_transcript


class Check(Protocol):
    """Judges the build that this process has loaded."""

    def run(self, implementation: str, device: str) -> Verdict:
        """The verdict; an exception is one too."""
        ...


class Refused(Exception):
    """The build declines what it should compute."""


@dataclass(frozen=True)
class Values:
    """Every output of a case against the truth, or against a neighbour.

    On a device bfloat16 and float16 are looked at as well: kernels differ by dtype.
    """

    case: Any
    against: str = "reference"

    def run(self, implementation: str, device: str) -> Verdict:
        """Verify the case."""
        found = verify_case(self.case, implementation, against=self.against, device=device)
        if found.declined is not None:
            raise Refused(found.declined)
        return Verdict(
            check="",
            failure="; ".join(found.failures[:2]) or None,
            excess=found.excess,
            cosine_passes=found.cosine_passes,
        )


@dataclass(frozen=True)
class Bits:
    """One check of the promise in one form, by torch.equal."""

    op: str
    form: str
    check: str

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare bits."""
        make, _, _ = bits.CHECKS[self.op]
        same = bits.Comparison()
        with poisoned_memory(), torch.inference_mode():
            getattr(make(self.form, implementation, torch.device(device)), self.check)(same)
        if not same.differing:
            return Verdict(check="")
        words = f"{same.differing} of {same.compared} tensors differ, the first: {same.where}"
        return Verdict(check="", failure=words, excess=float("inf"))


@dataclass(frozen=True)
class Replays:
    """Transcripts of an engine, replayed in float64."""

    form: str
    seeds: tuple[int, ...]
    turns: int = 40

    def run(self, implementation: str, device: str) -> Verdict:
        """Replay until one fails."""
        excess = 0.0
        for seed in self.seeds:
            found = verify_transcript(
                implementation, self.form, seed, turns=self.turns, device=device
            )
            excess = max(excess, found.excess)
            if found.failure is not None:
                return Verdict(
                    check="",
                    failure=f"seed {seed}: {found.failure}",
                    excess=excess if excess > 1 else float("inf"),
                )
        return Verdict(check="", excess=excess)


@dataclass(frozen=True)
class AttentionOptions:
    """What cases cannot say: scale, softcap, no causal rule, reproducible; float64 judges."""

    case: AttentionCase
    options: dict[str, Any] = field(default_factory=dict)
    sink: float | None = None
    blind: bool = False
    """Whether every third row sees no key, by a custom mask."""

    def _mask(self, n: int, device: str) -> torch.Tensor | None:
        """What the rows of sequence n see [length, keys], where it is not the causal rule."""
        length, cached = self.case.lengths[n], self.case.cached[n]
        seen = torch.ones(length, cached + length, dtype=torch.bool, device=device)
        if self.blind:
            seen.tril_(cached)[::3] = False
            return seen
        return None if self.options.get("causal", True) else seen

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare o and LSE of every key head."""
        call = self.case.inputs(0, device)
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
class RuleOptions:
    """What cases cannot say: gates, normalisation of queries and keys, scale; float64 judges."""

    kind: str
    beta: str = "value"
    per_channel: bool = False
    bounded: bool = False
    size: float = 1.0

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare o and the state of one sequence of 130 tokens."""
        T, H, HV, K, V = 130, 2, 4, 32, 16
        draws = Draws(7, "cpu")
        rows = {
            "q": draws.normal("q", T, H, K),
            "k": draws.normal("k", T, H, K),
            "v": draws.normal("v", T, HV, V),
        }
        shape = (T, HV, K) if self.per_channel else (T, HV)
        x, b = self.size * draws.normal("g", *shape), draws.normal("beta", T, HV)
        # Rates fall as projections grow, or a large one forgets all whatever its value.
        a_log = 2 * draws.uniform("a", HV) - 1 - 1.5 * math.log(self.size)
        bias = draws.normal("bias", *shape[1:])
        g, gate = -x.abs(), headstart.Gate.log(beta=self.beta)
        decay = delta.wide(g)
        bound = -5.0 if self.bounded else None
        if self.kind == "linear":
            g, gate = torch.sigmoid(x), headstart.Gate.linear(beta=self.beta)
            decay = delta.wide(g.double().log())
        if self.kind == "raw":
            gate = headstart.Gate.raw(a_log.to(device), bias.to(device), bound, beta=self.beta)
            g, decay = x, delta.raw_decay(x, a_log, bias, bound)
        strength = delta.wide(torch.sigmoid(b.double()))
        if self.beta == "value":
            b = torch.sigmoid(b)
            strength = delta.wide(b)
        if self.beta == "logit2":
            strength = 2 * strength
        given: dict[str, Any] = {
            name: tensor.to(device) for name, tensor in (rows | {"g": g, "beta": b}).items()
        }
        with poisoned_memory(), torch.inference_mode():
            found = headstart.gated_delta_rule(
                **given, gate=gate, qk_l2norm=True, scale=0.3, return_state=True,
                implementation=implementation,
            )  # fmt: skip
        q, k, v = rows.values()
        truth = delta.replay(q, k, v, decay, strength, scale=0.3, qk_l2norm=True, keep=())
        assert found.state is not None
        # Keys normalised in float32 are off by a rounding each, which 130 tokens add up.
        asked = tolerance("gated_delta_rule", "o", "float32", "float32", implementation)
        asked = asked.times(4.0, "keys and gates are formed in float32")
        return compared(
            {
                "o": (found.o, torch.from_numpy(truth.o)),
                "state": (found.state.flatten(2), torch.from_numpy(truth.state)[None].flatten(2)),
            },
            asked,
        )


@dataclass(frozen=True)
class Pools:
    """Plain states in a pool whose layout, presence and slots to write are not the usual ones."""

    layout: str
    present: bool = True

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare o and every slot of the pool."""
        case = RULES["rule pool"]
        (call,) = case.steps(0, device)
        memory = call["state"].tensor
        memory = memory.mT.contiguous() if self.layout == "vk" else memory
        before = memory.clone()
        read, write, present = [9, 4], [2, 7], [True, self.present]
        call["state"] = headstart.Pool(memory, read, write, present, self.layout)
        with poisoned_memory(), torch.inference_mode():
            o = headstart.gated_delta_rule(**call, implementation=implementation).o
        rows = [call[name].split(case.lengths) for name in ("q", "k", "v", "g", "beta")]
        outputs, after = [], before.double()
        for n, sequence in enumerate(zip(*rows, strict=True)):
            old = before[read[n]].mT if self.layout == "vk" else before[read[n]]
            found = delta.replay(*sequence, state=old if present[n] else None)
            outputs.append(torch.from_numpy(found.o))
            new = torch.from_numpy(found.state).to(after)
            after[write[n]] = new.mT if self.layout == "vk" else new
        asked = tolerance("gated_delta_rule", "o", "float32", "float32", implementation)
        outputs = {
            "o": (o, torch.cat(outputs)),
            "states": (memory.flatten(2), after.flatten(2)),
        }
        return compared(outputs, asked)


@dataclass(frozen=True)
class ManySpans:
    """A case with scratch for one chunk of a sequence at a time, as long prompts have it."""

    case: DeltaCase

    def run(self, implementation: str, device: str) -> Verdict:
        """Verify the case."""
        with mock.patch("headstart.ops.gated_delta_rule.triton.scratch.SCRATCH", 0):
            return Values(self.case).run(implementation, device)


@dataclass(frozen=True)
class FarSlot:
    """A slot whose first element lies past 2**31 in its pool (8.8 GB on a device)."""

    slots: int = 2100
    stride: int = 2**20

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare o and the state."""
        case = RULES["rule pool"]
        (call,) = case.steps(0, device)
        shape = call["state"].tensor.shape[1:]
        buffer = torch.zeros(self.slots * self.stride, device=device)
        strides = (self.stride, *torch.empty(shape, device="meta").stride())
        memory = buffer.as_strided((self.slots, *shape), strides)
        slots = [self.slots - 1, 3]
        for slot, old in zip(slots, call["state"].tensor[:2], strict=True):
            memory[slot] = old
        before = memory[slots].clone()
        call["state"] = headstart.Pool(memory, slots)
        with torch.inference_mode():
            o = headstart.gated_delta_rule(**call, implementation=implementation).o
        rows = [call[name].split(case.lengths) for name in ("q", "k", "v", "g", "beta")]
        found = [
            delta.replay(*sequence, state=old) for *sequence, old in zip(*rows, before, strict=True)
        ]
        asked = tolerance("gated_delta_rule", "o", "float32", "float32", implementation)
        truth = torch.cat([torch.from_numpy(one.o) for one in found])
        after = torch.stack([torch.from_numpy(one.state) for one in found])
        return compared(
            {"o": (o, truth), "states": (memory[slots].flatten(2), after.flatten(2))}, asked
        )


@dataclass(frozen=True)
class ChunkForm:
    """A case's outputs against the chunk form in float64, a second derivation of the rule."""

    case: DeltaCase

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare o and the states."""
        computed = compute(self.case, implementation, device=device)
        (call,) = self.case.steps()
        states = self.case.initial_states()
        ratio = self.case.HV // self.case.H
        outputs, kept = [], []
        for n, rows in enumerate(
            zip(*(call[name].split(self.case.lengths) for name in ("q", "k", "v", "g", "beta")),
                strict=True)
        ):  # fmt: skip
            q, k, v, g, beta = (delta.wide(x) for x in rows)
            found = delta.chunked(
                q.repeat(ratio, axis=1), k.repeat(ratio, axis=1), v, g, beta,
                scale=self.case.K**-0.5, state=None if states is None else delta.wide(states[n]),
            )  # fmt: skip
            outputs.append(torch.from_numpy(found.o))
            kept.append(torch.from_numpy(found.state))
        asked = tolerance("gated_delta_rule", "o", "float32", "float32", implementation)
        truth = {"o": torch.cat(outputs), "state": torch.stack(kept).flatten(2)}
        return compared(
            {name: (computed.outputs[name].values, truth[name]) for name in truth}, asked
        )


@dataclass(frozen=True)
class Convolutions:
    """The short convolution on plain states: outputs, states and snapshots of ragged sequences."""

    lengths: tuple[int, ...] = (2, 0, 1, 130, 40)
    channels: int = 40
    width: int = 4
    snapshots: bool = True

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare all outputs."""
        draws, N = Draws(3, "cpu"), len(self.lengths)
        x = draws.normal("x", sum(self.lengths), self.channels)
        weight = draws.normal("weight", self.channels, self.width)
        bias = draws.normal("bias", self.channels)
        before = draws.normal("before", N, self.width - 1, self.channels)
        schedule = headstart.Schedule(list(self.lengths), snapshot_every=64, device=device)
        with poisoned_memory(), torch.inference_mode():
            found = headstart.causal_conv1d(
                x.to(device), weight.to(device), bias.to(device), schedule=schedule,
                state=before.to(device), return_state=True, snapshots=torch.float32,
                out=poison(torch.empty(x.shape, device=device)), implementation=implementation,
            )  # fmt: skip
        parts = list(zip(x.split(list(self.lengths)), before, strict=True))
        outputs = [convolution.convolve(rows, weight, bias, before=old) for rows, old in parts]
        ends = [convolution.history(rows, len(rows), self.width, old) for rows, old in parts]
        kept = [
            convolution.history(rows, position, self.width, old)
            for rows, old in parts
            for position in range(64, len(rows) + 1, 64)
        ]
        assert found.state is not None
        assert found.snapshots is not None
        exact = tolerance("gated_delta_rule", "history", "float32", "float32")
        asked = tolerance("gated_delta_rule", "convolution", "float32", "float32", implementation)
        first = compared({"convolution": (found.y[:, None], torch.cat(outputs)[:, None])}, asked)
        if first.failure is not None:
            return first
        copies = {
            "state": (found.state.flatten(1)[:, None], torch.stack(ends).flatten(1)[:, None]),
            "snapshots": (
                found.snapshots.flatten(1)[:, None], torch.stack(kept).flatten(1)[:, None],
            ),
        }  # fmt: skip
        second = compared(copies, exact)
        return second if second.failure is not None else first


@dataclass(frozen=True)
class ReusedSlots:
    """A new sequence in a slot of a cache that another one has used."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare the second sequence's outputs."""
        draws, channels, width = Draws(6, "cpu"), 24, 4
        weight = draws.normal("weight", channels, width)
        cache = headstart.DeltaCache(
            2, H=1, HV=1, K=16, V=16, conv_channels=channels, conv_width=width,
            dtype=torch.float32, draft_tokens=4, device=device,
        )  # fmt: skip
        for name in ("first", "second"):
            x = draws.normal(name, 30, channels)
            found = headstart.causal_conv1d(
                x.to(device), weight.to(device), state=cache.at([1]),
                schedule=headstart.Schedule([30], device=device), implementation=implementation,
            )  # fmt: skip
        asked = tolerance("gated_delta_rule", "convolution", "float32", "float32", implementation)
        truth = convolution.convolve(x, weight)
        return compared({"convolution": (found.y[:, None], truth[:, None])}, asked)


@dataclass(frozen=True)
class Norms:
    """The gated norm in both of its activations."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare outputs."""
        draws, eps = Draws(5, "cpu"), 0.01
        x, gate = draws.normal("x", 9, 3, 48) / 4, draws.normal("gate", 9, 3, 48)
        weight, found = draws.normal("weight", 48), {}
        for activation in ("silu", "sigmoid"):
            with poisoned_memory(), torch.inference_mode():
                y = headstart.rms_norm_gated(
                    x.to(device), weight.to(device), gate.to(device), eps, activation,
                    implementation=implementation,
                )  # fmt: skip
            truth = convolution.gated_norm(x, weight, gate, eps)
            if activation == "sigmoid":
                truth = truth / gate.double()
            found[activation] = (y, truth)
        return compared(found, tolerance("gated_delta_rule", "norm", "float32", "float32"))


@dataclass(frozen=True)
class CacheWrites:
    """Rows written into float8 pages: scaled, saturated, to their slots, and nowhere else."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare the stored bytes."""
        draws = Draws(4, "cpu")
        k, v = 400 * draws.normal("k", 6, 2, 16), 400 * draws.normal("v", 6, 2, 16)
        scale = torch.tensor([0.5, 2.0])
        slots = [17, 3, -1, 0, 30, 16]
        memory = [torch.zeros(2, 16, 2, 16).to(torch.float8_e4m3fn) for _ in range(2)]
        cache = headstart.KVCache(*memory, k_scale=scale, v_scale=scale)
        headstart.write_kv(k, v, cache, slots, implementation=implementation)
        found, expected = [], []
        for rows, store in zip((k, v), memory, strict=True):
            right = torch.zeros(32, 2, 16).to(torch.float8_e4m3fn).view(torch.uint8)
            stored = (rows / scale.view(-1, 1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            for slot, row in zip(slots, stored.view(torch.uint8), strict=True):
                if slot >= 0:
                    right[slot] = row
            found.append(store.view(torch.uint8).reshape(32, 2, 16).float())
            expected.append(right.double())
        exact = tolerance("gated_delta_rule", "history", "float32", "float32")
        return compared({"k": (found[0], expected[0]), "v": (found[1], expected[1])}, exact)


def compared(outputs: dict[str, tuple[torch.Tensor, torch.Tensor]], asked: Tolerance) -> Verdict:
    """A verdict on outputs [rows, heads, vector] beside their truths."""
    measured = []
    for name, (found, truth) in outputs.items():
        meter = Meter(name, found)
        meter.add(slice(0, None), truth)
        measured.append(meter.measured(asked))
    return judged(measured)


def judged(measured: list[Measured]) -> Verdict:
    """A verdict on figures."""
    failures = [words for one in measured for words in one.failures]
    return Verdict(
        check="",
        failure="; ".join(failures[:2]) or None,
        excess=max(one.excess for one in measured),
        cosine_passes=all(one.cosine_passes for one in measured),
    )


_RULE, _ATTENTION = "gated_delta_rule", "extend_attention"
_SOME = ATTENTIONS["attention"]
CHECKS: dict[str, Check] = {
    **{name: Values(case) for name, case in (RULES | ATTENTIONS).items()},
    **{name: Values(case, against) for name, (against, case) in NEIGHBOURLY.items()},
    "rule many spans": ManySpans(RULES["rule"]),
    "rule far slot": FarSlot(),
    "rule beside the chunk form": ChunkForm(RULES["rule"]),
    "rule hard decays beside the chunk form": ChunkForm(RULES["rule hard decays"]),
    "rule raw gates": RuleOptions("raw", "logit"),
    "rule overflowing gates": RuleOptions("raw", size=200.0),
    "rule transposed pool": Pools("vk"),
    "rule present slots": Pools("kv", present=False),
    "rule linear gates": RuleOptions("linear", "logit2"),
    "channels raw gates": RuleOptions("raw", "logit", per_channel=True),
    "channels bounded gates": RuleOptions("raw", "value", per_channel=True, bounded=True),
    **{
        f"bits of {check}{words}": Bits(_RULE, form, check)
        for check in ("splits", "plain", "hits", "batches", "heads", "drafts")
        for words, form in (
            ("", "float32"),
            (" normalised", "bfloat16, normalised"),
            (" per channel", "float16, per channel"),
        )
    },
    **{
        f"bits of attention {check}{words}": Bits(_ATTENTION, form, check)
        for check in ("pages", "batches", "heads")
        for words, form in (
            ("", "float32, sinks"), (" in a window", "bfloat16, window, sinks"),
        )
    },
    "transcripts": Replays("float32", (0, 3, 6)),
    "transcripts normalised": Replays("bfloat16, normalised", (1, 4)),
    "attention softcap": AttentionOptions(_SOME, {"softcap": 4.0}),
    "attention softcap window": AttentionOptions(ATTENTIONS["attention window"], {"softcap": 4.0}),
    "attention scale of 0": AttentionOptions(_SOME, {"scale": 0.0}),
    "attention low sinks": AttentionOptions(ATTENTIONS["attention window"], sink=-120.0),
    "attention blind rows": AttentionOptions(_SOME, sink=-120.0, blind=True),
    "attention without the causal rule": AttentionOptions(_SOME, {"causal": False}),
    "attention without the causal rule, window": AttentionOptions(
        ATTENTIONS["attention window"], {"causal": False}
    ),
    "reproducible attention": AttentionOptions(_SOME, {"reproducible": True}),
    "reproducible window": AttentionOptions(
        ATTENTIONS["attention window"], {"reproducible": True}
    ),
    "reproducible pages": AttentionOptions(
        ATTENTIONS["attention pages hold all"], {"reproducible": True}
    ),
    "reproducible softcap": AttentionOptions(_SOME, {"reproducible": True, "softcap": 4.0}),
    "reproducible softcap window": AttentionOptions(
        ATTENTIONS["attention window"], {"reproducible": True, "softcap": 4.0}
    ),
    "convolution": Convolutions(),
    "convolution reused slots": ReusedSlots(),
    "norm": Norms(),
    # Drawn decays nearly erase a state within a chunk: what becomes of the last one shows here.
    "rule mild decays": RuleOptions("log", size=0.02),
    "channels mild decays": RuleOptions("log", per_channel=True, size=0.02),
    "cache writes": CacheWrites(),
}  # fmt: skip
"""Name -> check."""
