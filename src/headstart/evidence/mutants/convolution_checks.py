"""Checks of the short convolution, of its histories and of the gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import headstart
from headstart.evidence.cases.record import Draws
from headstart.evidence.mutants.record import Verdict
from headstart.evidence.mutants.verdicts import Bits, Check, compared
from headstart.evidence.oracles import convolution
from headstart.evidence.poison import poison, poisoned_memory
from headstart.evidence.verify.tolerances import tolerance


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
    """A new sequence in a slot of a cache that a longer one has used, in two steps."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare the second sequence's outputs."""
        draws, channels, width = Draws(6, "cpu"), 24, 4
        weight = draws.normal("weight", channels, width)
        cache = headstart.DeltaCache(
            2, H=1, HV=1, K=16, V=16, conv_channels=channels, conv_width=width,
            dtype=torch.float32, draft_tokens=4, device=device,
        )  # fmt: skip
        first, second = draws.normal("first", 90, channels), draws.normal("second", 12, channels)
        outputs = []
        for x, start in ((first, 0), (second[:9], 0), (second[9:], 9)):
            schedule = headstart.Schedule([len(x)], start_positions=start, device=device)
            found = headstart.causal_conv1d(
                x.to(device), weight.to(device), state=cache.at([1]), schedule=schedule,
                implementation=implementation,
            )  # fmt: skip
            outputs.append(found.y)
        asked = tolerance("gated_delta_rule", "convolution", "float32", "float32", implementation)
        y, truth = torch.cat(outputs[1:]), convolution.convolve(second, weight)
        return compared({"convolution": (y[:, None], truth[:, None])}, asked)


@dataclass(frozen=True)
class NoTokens:
    """A step that brings nothing, as when all of a batch wait."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare the histories, which stay."""
        before = Draws(14, "cpu").normal("before", 2, 3, 24)
        with poisoned_memory(), torch.inference_mode():
            found = headstart.causal_conv1d(
                torch.empty(0, 24, device=device), torch.ones(24, 4, device=device),
                schedule=headstart.Schedule([0, 0], device=device), state=before.to(device),
                return_state=True, implementation=implementation,
            )  # fmt: skip
        assert found.state is not None
        exact = tolerance("gated_delta_rule", "history", "float32", "float32")
        return compared({"state": (found.state, before)}, exact)


@dataclass(frozen=True)
class Norms:
    """The gated norm in both of its activations.

    rows, heads: of x.
    """

    rows: int = 9
    heads: int = 3

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare outputs."""
        draws, eps = Draws(5, "cpu"), 0.01
        shape = (self.rows, self.heads, 48)
        x, gate = draws.normal("x", *shape) / 4, draws.normal("gate", *shape)
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
class BatchedOutputs:
    """[B, L, channels], and outputs of the caller's whose rows pack, and whose rows do not."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare both."""
        B, L, channels, width = 2, 9, 24, 3
        draws = Draws(9, "cpu")
        x, weight = draws.normal("x", B, L, channels), draws.normal("weight", channels, width)
        outs = {
            "packed": poison(torch.empty(B, L, channels, device=device)),
            "apart": poison(torch.empty(B, L + 2, channels, device=device))[:, :L],
        }
        with poisoned_memory(), torch.inference_mode():
            for out in outs.values():
                headstart.causal_conv1d(
                    x.to(device), weight.to(device), activation=None, out=out,
                    implementation=implementation,
                )  # fmt: skip
        truth = torch.cat([convolution.convolve(rows, weight, activation=None) for rows in x])
        asked = tolerance("gated_delta_rule", "convolution", "float32", "float32", implementation)
        found = {name: (out.flatten(0, 1)[:, None], truth[:, None]) for name, out in outs.items()}
        return compared(found, asked)


@dataclass(frozen=True)
class Pools:
    """Histories in a pool: read here, written there or nowhere, some of them not present."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare outputs and every slot, for states and for snapshots."""
        lengths, channels, width, slots = [70, 1, 9], 24, 4, 7
        draws = Draws(10, "cpu")
        x = draws.normal("x", sum(lengths), channels)
        weight = draws.normal("weight", channels, width)
        before = draws.normal("before", slots, width - 1, channels)
        read, write, present, kept = [5, 2, 1], [3, -1, 0], [True, True, False], [-1, 0]
        memory, target = before.clone().to(device), before.clone().to(device)
        schedule = headstart.Schedule(
            lengths, start_positions=[0, 63, 0], snapshot_every=64, device=device
        )
        with poisoned_memory(), torch.inference_mode():
            y = headstart.causal_conv1d(
                x.to(device), weight.to(device), schedule=schedule,
                state=headstart.Pool(memory, read, write, present),
                snapshots=headstart.Pool(target, write_slots=kept),
                implementation=implementation,
            ).y  # fmt: skip
        outputs, after, stored, taken = [], before.clone(), before.clone(), 0
        for n, rows in enumerate(x.split(lengths)):
            old = before[read[n]] if present[n] else torch.zeros(width - 1, channels)
            outputs.append(convolution.convolve(rows, weight, before=old))
            if write[n] >= 0:
                after[write[n]] = convolution.history(rows, len(rows), width, old)
            for position in schedule.snapshot_positions[n]:
                if kept[taken] >= 0:
                    since = position - schedule.starts[n]
                    stored[kept[taken]] = convolution.history(rows, since, width, old)
                taken += 1
        asked = tolerance("gated_delta_rule", "convolution", "float32", "float32", implementation)
        first = compared({"convolution": (y[:, None], torch.cat(outputs)[:, None])}, asked)
        if first.failure is not None:
            return first
        copies = {
            "states": (memory.flatten(1)[:, None], after.flatten(1)[:, None]),
            "snapshots": (target.flatten(1)[:, None], stored.flatten(1)[:, None]),
        }
        exact = tolerance("gated_delta_rule", "history", "float32", "float32")
        second = compared(copies, exact)
        return second if second.failure is not None else first


@dataclass(frozen=True)
class Capacity:
    """A step in a schedule with room for more: sequences, tokens and snapshots of nobody."""

    def run(self, implementation: str, device: str) -> Verdict:
        """Compare outputs, histories and snapshots; what nobody owns is zeros."""
        lengths, channels, width = [70, 9], 24, 4
        draws = Draws(13, "cpu")
        x, weight = draws.normal("x", 90, channels), draws.normal("weight", channels, width)
        schedule = headstart.Schedule([1], device=device, capacity=(4, 100, 3))
        schedule.update_(lengths, snapshot_every=64)
        with poisoned_memory(), torch.inference_mode():
            found = headstart.causal_conv1d(
                x.to(device), weight.to(device), schedule=schedule, return_state=True,
                snapshots=torch.float32, implementation=implementation,
            )  # fmt: skip
        parts = x[: sum(lengths)].split(lengths)
        outputs = [convolution.convolve(rows, weight) for rows in parts]
        asked = tolerance("gated_delta_rule", "convolution", "float32", "float32", implementation)
        truth = torch.cat([*outputs, torch.zeros(90 - sum(lengths), channels)])
        first = compared({"convolution": (found.y[:, None], truth[:, None])}, asked)
        if first.failure is not None:
            return first
        assert found.state is not None
        assert found.snapshots is not None
        sizes = [len(found.state), len(found.snapshots)]
        if sizes != [4, 3]:
            words = f"expected room for 4 states and 3 snapshots, got {sizes}"
            return Verdict(check="", failure=words, excess=float("inf"), cosine_passes=True)
        ends = torch.stack([convolution.history(rows, len(rows), width) for rows in parts])
        kept = convolution.history(parts[0], 64, width)[None]
        copies = {
            "state": (found.state[:2].flatten(1)[:, None], ends.flatten(1)[:, None]),
            "snapshots": (found.snapshots[:1].flatten(1)[:, None], kept.flatten(1)[:, None]),
        }
        exact = tolerance("gated_delta_rule", "history", "float32", "float32")
        second = compared(copies, exact)
        return second if second.failure is not None else first


CONVOLUTION_CHECKS: dict[str, Check] = {
    "convolution": Convolutions(),
    "convolution reused slots": ReusedSlots(),
    "convolution batched outputs": BatchedOutputs(),
    "convolution pool": Pools(),
    "convolution under a capacity": Capacity(),
    "convolution without tokens": NoTokens(),
    "norm": Norms(),
    "norm of a row": Norms(1, 1),
    **{
        f"bits of convolution {check}": Bits("causal_conv1d", "float32", check)
        for check in ("splits", "batches", "heads", "drafts")
    },
}
"""Name -> check."""
