"""Checks of the gated delta rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

import headstart
from headstart.evidence.cases.gated_delta_rule import CHUNK, DeltaCase
from headstart.evidence.cases.record import Draws
from headstart.evidence.mutants.cases import (
    NEIGHBOURLY,
    OF_128,
    RULES,
    SEGMENTED,
    SEGMENTED_128,
)
from headstart.evidence.mutants.record import Verdict
from headstart.evidence.mutants.verdicts import Bits, Check, Values, compared
from headstart.evidence.oracles import delta
from headstart.evidence.poison import poison, poisoned_memory
from headstart.evidence.verify.computing import compute
from headstart.evidence.verify.tolerances import tolerance
from headstart.evidence.verify.transcript import verify_transcript
from headstart.runtime import dispatch, launcher
from headstart.runtime.checks import dtype_name


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
class RuleOptions:
    """What cases cannot say: gates, normalisation of queries and keys, scale; float64 judges."""

    kind: str
    beta: str = "value"
    per_channel: bool = False
    bounded: bool = False
    size: float = 1.0
    decays: bool = True
    function: str = "gated_delta_rule"

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
        if not self.decays:  # whatever the gate would make of a decay
            g, decay = None, np.zeros_like(decay)
        strength = delta.wide(torch.sigmoid(b.double()))
        if self.beta == "value":
            b = torch.sigmoid(b)
            strength = delta.wide(b)
        if self.beta == "logit2":
            strength = 2 * strength
        given: dict[str, Any] = {
            name: tensor.to(device) for name, tensor in (rows | {"beta": b}).items()
        } | {"g": None if g is None else g.to(device)}
        with poisoned_memory(), torch.inference_mode():
            found = getattr(headstart, self.function)(
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
        """Verify the case; what calls with more scratch launched is not launched again."""
        prepared = dispatch.operations()["gated_delta_rule"].prepared
        with (
            mock.patch("headstart.ops.gated_delta_rule.passes.scratch.SCRATCH", 0),
            mock.patch.dict(prepared, clear=True),
        ):
            return Values(self.case).run(implementation, device)


@dataclass(frozen=True)
class Segments:
    """A case of one sequence, cut into segments of a chunk or two as few heads have them."""

    case: DeltaCase

    def run(self, implementation: str, device: str) -> Verdict:
        """Verify the case; what whole calls launched is not launched again."""
        prepared = dispatch.operations()["gated_delta_rule"].prepared
        rules = {"SEGMENTED": 2, "SEGMENT": 1, "LEAST": 2, "processors": lambda device: 64}
        with (
            mock.patch.multiple("headstart.ops.gated_delta_rule.passes.scratch", **rules),
            mock.patch.dict(prepared, clear=True),
        ):
            return Values(self.case).run(implementation, device)


@dataclass(frozen=True)
class Short:
    """Another check, in which Hopper's kernel of short sequences must have run.

    Else it would be silent about that kernel's faults: calls go there by host facts.
    """

    check: Check

    def run(self, implementation: str, device: str) -> Verdict:
        """Run the check; an error where nothing went to the kernel."""
        # Imported here, for it takes Triton.
        from headstart.ops.gated_delta_rule.hopper import short_call

        prepared = dispatch.operations()["gated_delta_rule"].prepared
        with (
            mock.patch.object(short_call, "launch", wraps=short_call.launch) as launch,
            mock.patch.dict(prepared, clear=True),
        ):
            verdict = self.check.run(implementation, device)
        if not launch.called:
            raise ValueError("the kernel of short sequences did not run")
        return verdict


@dataclass(frozen=True)
class Contraction:
    """Whether a case launches anything whose products and sums the compiler may contract.

    What is asked of the compiler, as bits do not show it where every path contracts alike.
    """

    case: DeltaCase

    def run(self, implementation: str, device: str) -> Verdict:
        """Look at what every launch asks for."""
        prepared = dispatch.operations()["gated_delta_rule"].prepared
        with (
            mock.patch.object(launcher, "start", wraps=launcher.start) as start,
            mock.patch.dict(prepared, clear=True),
            poisoned_memory(),
            torch.inference_mode(),
        ):
            for step in self.case.steps(0, device):
                headstart.gated_delta_rule(**step, implementation=implementation)
        if not start.called:
            raise ValueError("no kernel was launched")
        free = [
            call.args[0].__name__
            for call in start.call_args_list
            if call.kwargs.get("enable_fp_fusion", True)
        ]
        if not free:
            return Verdict(check="")
        words = f"{len(free)} launches may be contracted, the first of {free[0]}"
        return Verdict(check="", failure=words, excess=math.inf)


@dataclass(frozen=True)
class SpoiledNeighbours:
    """A case in which some sequences hold NaN alone: the others must not see them.

    Rows that take no part are weighed by zeros, which a NaN beside them shows.
    """

    case: DeltaCase
    spoiled: tuple[int, ...]

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare the bits of the others' rows and states with those beside sound neighbours."""
        kept = [n for n in range(len(self.case.lengths)) if n not in self.spoiled]
        sound = self._computed(kept, False, implementation, device)
        for name, values in self._computed(kept, True, implementation, device).items():
            if not torch.equal(values, sound[name]):
                words = f"{name} is another beside sequences of NaN"
                return Verdict(check="", failure=words, excess=math.inf)
        return Verdict(check="")

    def _computed(
        self, kept: list[int], spoil: bool, implementation: str, device: str
    ) -> dict[str, torch.Tensor]:
        *before, last = self.case.steps(0, device)
        state: Any = last.get("state")
        with poisoned_memory(), torch.inference_mode():
            for step in before:
                headstart.gated_delta_rule(**step, implementation=implementation)
            if spoil:
                for name in ("q", "k", "v", "g", "beta"):
                    parts = last[name].split(self.case.lengths)
                    for n in self.spoiled:
                        parts[n].fill_(torch.nan)
            found = headstart.gated_delta_rule(**last, implementation=implementation)
        if found.state is not None:
            states = {"state": found.state[kept]}
        else:
            slots = [state.slots[n] for n in kept]
            states = {name: x[slots] for name, x in state.cache.tensors.items()}
        outputs = found.o.split(self.case.lengths)
        return {**{f"o of sequence {n}": outputs[n] for n in kept}, **states}


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
class BatchedOutputs:
    """[B, L, ...] inputs, and outputs of the caller's whose rows pack, and whose rows do not."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare both."""
        B, L, H, HV, K, V = 2, 70, 2, 4, 32, 16
        draws = Draws(8, "cpu")
        rows = {
            "q": draws.normal("q", B, L, H, K) / K**0.5,
            "k": draws.normal("k", B, L, H, K) / K**0.5,
            "v": draws.normal("v", B, L, HV, V),
            "g": -draws.normal("g", B, L, HV).abs() / 10,
            "beta": draws.uniform("beta", B, L, HV),
        }
        given: dict[str, Any] = {name: x.to(device) for name, x in rows.items()}
        outs = {
            "packed": poison(torch.empty(B, L, HV, V, device=device)),
            "apart": poison(torch.empty(B, L + 3, HV, V, device=device))[:, :L],
        }
        with poisoned_memory(), torch.inference_mode():
            for out in outs.values():
                headstart.gated_delta_rule(**given, out=out, implementation=implementation)
        truth = torch.cat(
            [torch.from_numpy(delta.replay(*(x[n] for x in rows.values())).o) for n in range(B)]
        )
        asked = tolerance("gated_delta_rule", "o", "float32", "float32", implementation)
        return compared({name: (out.flatten(0, 1), truth) for name, out in outs.items()}, asked)


@dataclass(frozen=True)
class SpoiledRows:
    """A NaN in one token, in one argument at a time: what comes before it is as if it were not."""

    per_channel: bool = False
    row: int = 40
    T: int = 70
    K: int = 32
    V: int = 16
    dtype: torch.dtype = torch.float32

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare the rows before, and see that the rows after are NaN where they must be."""
        T, H, HV, K, V = self.T, 1, 2, self.K, self.V
        draws = Draws(11, "cpu")
        rows = {
            "q": draws.normal("q", T, H, K) / K**0.5,
            "k": draws.normal("k", T, H, K) / K**0.5,
            "v": draws.normal("v", T, HV, V),
            "g": -draws.normal("g", T, HV, *([K] if self.per_channel else [])).abs() / 10,
            "beta": draws.uniform("beta", T, HV),
        }
        rows |= {name: rows[name].to(self.dtype) for name in ("q", "k", "v")}
        truth = torch.from_numpy(delta.replay(*rows.values()).o)
        stored = dtype_name(self.dtype)
        asked = tolerance("gated_delta_rule", "o", stored, stored, implementation)
        worst = Verdict(check="")
        for name in rows:
            given = {other: x.clone().to(device) for other, x in rows.items()}
            given[name][self.row].fill_(torch.nan)
            with poisoned_memory(), torch.inference_mode():
                o = headstart.gated_delta_rule(**given, implementation=implementation).o
            before, after = o[: self.row], o[self.row :]
            found = compared({f"o before NaN in {name}": (before, truth[: self.row])}, asked)
            if name != "q" and not after.isnan().all():
                words = f"rows after NaN in {name} are finite"
                return Verdict(check="", failure=words, excess=float("inf"), cosine_passes=True)
            if found.failure is not None:
                return found
            worst = found if found.excess > worst.excess else worst
        return worst


@dataclass(frozen=True)
class Capacity:
    """A step in a schedule with room for more: sequences, tokens and snapshots of nobody."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare outputs, states and snapshots with those of a schedule without room."""
        lengths, T, H, HV, K, V = [70, 20], 100, 1, 2, 32, 16
        draws = Draws(12, "cpu")
        rows = {
            "q": draws.normal("q", T, H, K) / K**0.5,
            "k": draws.normal("k", T, H, K) / K**0.5,
            "v": draws.normal("v", T, HV, V),
            "g": -draws.normal("g", T, HV).abs() / 10,
            "beta": draws.uniform("beta", T, HV),
        }
        schedule = headstart.Schedule([1], device=device, capacity=(4, 256, 3))
        schedule.update_(lengths, snapshot_every=64)
        with poisoned_memory(), torch.inference_mode():
            found = headstart.gated_delta_rule(
                **{name: x.to(device) for name, x in rows.items()}, schedule=schedule,
                return_state=True, snapshots=torch.float32, implementation=implementation,
            )  # fmt: skip
        parts = [x[: sum(lengths)].split(lengths) for x in rows.values()]
        replays = [delta.replay(*part, keep=(64,)) for part in zip(*parts, strict=True)]
        outputs = [*(torch.from_numpy(one.o) for one in replays), torch.zeros(10, HV, V)]
        assert found.state is not None
        assert found.snapshots is not None
        asked = tolerance("gated_delta_rule", "o", "float32", "float32", implementation)
        states = torch.stack([torch.from_numpy(one.state) for one in replays])
        kept = torch.from_numpy(replays[0].states[64])[None]
        return compared(
            {
                "o": (found.o, torch.cat(outputs)),
                "state": (found.state[:2].flatten(2), states.flatten(2)),
                "snapshots": (found.snapshots[:1].flatten(2), kept.flatten(2)),
            },
            asked,
        )


@dataclass(frozen=True)
class NoTokens:
    """A step that brings nothing, as when all of a batch wait."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare the states, which stay."""
        before = Draws(14, "cpu").normal("before", 2, 4, 32, 16)
        rows = {"q": (2, 32), "k": (2, 32), "v": (4, 16), "g": (4,), "beta": (4,)}
        given: dict[str, Any] = {
            name: torch.empty(0, *shape, device=device) for name, shape in rows.items()
        }
        with poisoned_memory(), torch.inference_mode():
            found = headstart.gated_delta_rule(
                **given, schedule=headstart.Schedule([0, 0], device=device),
                state=before.to(device), return_state=True, implementation=implementation,
            )  # fmt: skip
        assert found.state is not None
        exact = tolerance("gated_delta_rule", "history", "float32", "float32")
        return compared({"state": (found.state.flatten(2), before.flatten(2))}, exact)


@dataclass(frozen=True)
class RefusedStates:
    """A cache is given states that are not finite: whoever hits them would read NaN ever after."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Load one, from the host: it must not be taken."""
        cache = headstart.DeltaCache(1, H=1, HV=1, K=16, V=16, dtype=torch.float32, device=device)
        state = torch.zeros(1, 1, 16, 16)
        state[0, 0, 3, 5] = torch.nan
        try:
            cache.load([0], [CHUNK], state)
        except ValueError as refused:
            if str(refused).startswith("states:"):
                return Verdict(check="")
            raise
        return Verdict(check="", failure="a state with a NaN is loaded", excess=math.inf)


_OP = "gated_delta_rule"
RULE_CHECKS: dict[str, Check] = {
    **{name: Values(case) for name, case in RULES.items()},
    "rule beside the chunk form": ChunkForm(RULES["rule"]),
    "rule hard decays beside the chunk form": ChunkForm(RULES["rule hard decays"]),
    "rule raw gates": RuleOptions("raw", "logit"),
    "rule overflowing gates": RuleOptions("raw", size=200.0),
    "rule linear gates": RuleOptions("linear", "logit2"),
    "rule without decay": RuleOptions("linear", "logit2", decays=False),
    # Drawn decays nearly erase a state within a chunk: what becomes of the last one shows here.
    "rule mild decays": RuleOptions("log", size=0.02),
    "rule transposed pool": Pools("vk"),
    "rule present slots": Pools("kv", present=False),
    "rule batched outputs": BatchedOutputs(),
    "rule without tokens": NoTokens(),
    "rule refused states": RefusedStates(),
    "rule spoiled rows": SpoiledRows(),
    "rule spoiled neighbours": SpoiledNeighbours(RULES["rule"], (1, 4)),
    "rule cache spoiled neighbours": SpoiledNeighbours(RULES["rule cache"], (1, 2)),
    "rule under a capacity": Capacity(),
    "channels spoiled rows": SpoiledRows(per_channel=True),
    "channels raw gates": RuleOptions("raw", "logit", per_channel=True),
    "channels bounded gates": RuleOptions("raw", "value", per_channel=True, bounded=True),
    "channels mild decays": RuleOptions("log", per_channel=True, size=0.02),
    **{
        f"bits of {check}{words}": Bits(_OP, form, check)
        for check in ("splits", "plain", "hits", "batches", "heads", "drafts")
        for words, form in (
            ("", "float32"),
            (" normalised", "bfloat16, normalised"),
            (" per channel", "float16, per channel"),
        )
    },
    "transcripts": Replays("float32", (0, 3, 6)),
    "transcripts normalised": Replays("bfloat16, normalised", (1, 4)),
}
"""Name -> check, for every implementation on every device."""
TOKEN_CHECKS: dict[str, Check] = {
    "rule token by token": RuleOptions("raw", "logit", function="recurrent_gated_delta_rule"),
    "channels token by token": RuleOptions(
        "raw", "logit2", per_channel=True, function="recurrent_gated_delta_rule"
    ),
}
"""The same for the token-by-token form, which kernels do not have."""
KERNEL_CHECKS: dict[str, Check] = {
    "rule many spans": ManySpans(RULES["rule"]),
    "rule segments": Segments(SEGMENTED),
    "rule contraction": Contraction(RULES["rule"]),
    "rule cache contraction": Contraction(RULES["rule cache"]),
}
"""The same for what only kernels have."""
DEVICE_CHECKS: dict[str, Check] = {
    "rule far slot": FarSlot(),
    **{
        name: Short(Values(case)) if name.startswith("rule short") else Values(case)
        for name, case in OF_128.items()
    },
    "rule many spans of 128": ManySpans(OF_128["rule of 128"]),
    "rule segments of 128": Segments(SEGMENTED_128),
    # Longer than what is computed in one launch.
    "rule spoiled rows of 128": SpoiledRows(T=140, K=128, V=128, dtype=torch.bfloat16),
    "rule spoiled neighbours of 128": SpoiledNeighbours(OF_128["rule of 128"], (1, 4)),
    "rule cache spoiled neighbours of 128": SpoiledNeighbours(OF_128["rule cache of 128"], (1, 2)),
    "channels spoiled neighbours of 128": SpoiledNeighbours(OF_128["channels of 128"], (1,)),
    "rule short spoiled neighbours of 128": Short(
        SpoiledNeighbours(OF_128["rule short of 128"], (1, 4))
    ),
    "rule short cache spoiled neighbours of 128": Short(
        SpoiledNeighbours(OF_128["rule short cache of 128"], (4,))
    ),
}
"""The same for what takes a device: its memory, or kernels that run nowhere else."""
NEIGHBOUR_CHECKS: dict[str, Check] = {
    name: Values(case, against) for name, (against, case) in NEIGHBOURLY.items() if case.op == _OP
}
"""The same for the reference, which would judge itself."""
