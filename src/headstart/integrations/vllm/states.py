"""The gated delta rule on vLLM's pools of states and convolution histories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from headstart import Gate, Pool, Schedule
from headstart.integrations.vllm.counting import STATISTICS, call

KIND = "linear_attention"


@dataclass(frozen=True)
class PlainStep:
    """The sequences of a step that bring no drafts: those with one token each come first.

    slots: [N] slot of each sequence, in both pools.
    present: bool [N], whether a sequence has a state already.
    whole, single, prefill: all N sequences, the first ones of one token, and the others.
    rows: [T] their rows among the tokens of the step; None: the first T.
    """

    slots: torch.Tensor
    present: torch.Tensor
    whole: Schedule
    single: Schedule
    prefill: Schedule
    rows: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        starts: Sequence[int],
        singles: int,
        slots: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> PlainStep:
        """Of N sequences: new tokens of each, those before them, and how many are single tokens."""
        device = slots.device
        present = [True] * singles + [start > 0 for start in starts[singles:]]
        return cls(
            slots,
            torch.tensor(present, dtype=torch.bool, device="cpu").to(device, non_blocking=True),
            Schedule(lengths, device=device),
            Schedule(lengths[:singles], start_positions=starts[:singles], device=device),
            Schedule(lengths[singles:], start_positions=starts[singles:], device=device),
            rows,
        )

    def run(
        self,
        core: DeltaCore,
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Compute the step's own rows: mixed [T, channels], b and a [T, HV], out [T, HV, V]."""
        before = core.histories[:, : core.width - 1]
        y = core.convolve(mixed, self.whole, Pool(before, self.slots, present=self.present))
        count = self.single.N
        for schedule, some in ((self.single, slice(count)), (self.prefill, slice(count, None))):
            if schedule.T:
                slots, present = self.slots[some], self.present[some]
                state = Pool(core.states, slots, present=present, layout="vk")
                core.rule(schedule, state, y[some], b[some], a[some], out=out[some])


class Turn(NamedTuple):
    """The tokens at one place among the drafts of their sequences.

    rows: their rows. first, read, write: slots of their sequences' histories, of the states
    before them and of those after them.
    """

    rows: torch.Tensor
    first: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    schedule: Schedule


@dataclass(frozen=True)
class DraftStep:
    """The sequences of a step that bring a known token and drafts, each state in a slot of its own.

    first: [N] int64, the slot of each sequence's history, and of the state after its first token.
    since: [N, 1] int64, tokens after the first that were accepted in the step before.
    whole: all N sequences.
    rows: [T] their rows among the tokens of the step; None: the first T.
    """

    first: torch.Tensor
    since: torch.Tensor
    whole: Schedule
    turns: list[Turn]
    rows: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        slots: torch.Tensor,
        accepted: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> DraftStep:
        """Of N sequences: new tokens of each, [N, drafts + 1] slots of the states after them, and
        [N] how many tokens of the step before were accepted, the known one included.
        """
        device = slots.device
        offsets = [0, *accumulate(lengths)]
        first, since = slots[:, 0].long(), (accepted.long() - 1)[:, None]
        read, turns = slots.gather(1, since)[:, 0], []
        for t in range(max(lengths, default=0)):
            live = [n for n, length in enumerate(lengths) if length > t]
            own = torch.tensor(live, device="cpu").to(device, non_blocking=True)
            at = torch.tensor([offsets[n] + t for n in live], device="cpu")
            at = at.to(device, non_blocking=True)
            one = Schedule([1] * len(live), device=device)
            turns.append(Turn(at, first[own], read[own], slots[own, t], one))
            read = slots[:, t]
        return cls(first, since, Schedule(lengths, device=device), turns, rows)

    def run(
        self,
        core: DeltaCore,
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Compute the step's own rows: mixed [T, channels], b and a [T, HV], out [T, HV, V]."""
        kept = core.width - 2  # inputs before the first new one that stay
        # The step before kept all its tokens: go back to the last that was accepted.
        places = self.since + torch.arange(kept + 1, device=mixed.device)
        before = core.histories[self.first[:, None], places]  # [N, width - 1, channels]
        y = core.convolve(mixed, self.whole, before)
        core.histories[self.first, :kept] = before[:, 1:]
        for t, turn in enumerate(self.turns):
            core.histories[turn.first, kept + t] = mixed[turn.rows]
            state = Pool(core.states, turn.read, write_slots=turn.write, layout="vk")
            rows = (x[turn.rows] for x in (y, b, a))
            out[turn.rows] = core.rule(turn.schedule, state, *rows)


@dataclass(frozen=True)
class DeltaCore:
    """A layer of the gated delta rule between its projections: convolution, gates and rule.

    weight: [channels, width] of the convolution; bias: [channels] or None.
    a_log, dt_bias: [HV] parameters of the decay.
    H, K, V: heads of q and k, and the head sizes.
    histories: pool [slots, width - 1 + drafts, channels], inputs of the convolution, oldest first.
    states: pool [slots, HV, V, K]; the slot strides of both are free.
    reproducible: make the bits of a sequence independent of its batch, and of its steps as long as
        they end on the 64-token grid (not with drafts).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    activation: str
    H: int
    K: int
    V: int
    histories: torch.Tensor
    states: torch.Tensor
    reproducible: bool = False

    @property
    def width(self) -> int:
        """Inputs of the convolution."""
        return self.weight.shape[1]

    def run(
        self,
        steps: Iterable[PlainStep | DraftStep],
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Compute a step of the engine: mixed [T, channels] (q, k, v), b and a [T, HV] (logits).

        Fills the rows of out [T, HV, V] that belong to a sequence, and updates both pools.
        """
        for step in steps:
            if step.rows is None:
                own = slice(step.whole.T)
                step.run(self, mixed[own], b[own], a[own], out[own])
            else:
                found = out.new_empty(step.whole.T, *out.shape[1:])
                step.run(self, mixed[step.rows], b[step.rows], a[step.rows], found)
                out[step.rows] = found
        STATISTICS.served[KIND] += 1

    def convolve(
        self, x: torch.Tensor, schedule: Schedule, state: torch.Tensor | Pool
    ) -> torch.Tensor:
        """The short convolution [T, channels] of x, after the histories in `state`."""
        return call(
            KIND,
            "causal_conv1d",
            x,
            self.weight,
            self.bias,
            schedule=schedule,
            state=state,
            activation=self.activation,
        ).y

    def rule(
        self,
        schedule: Schedule,
        state: Pool,
        y: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rule's output [T, HV, V] for convolved y [T, channels].

        Single tokens take the plain recurrence, which promises no bits.
        """
        keys = self.H * self.K
        q, k, v = y.split([keys, keys, y.shape[1] - 2 * keys], dim=1)
        rows = (
            q.unflatten(1, (self.H, self.K)),
            k.unflatten(1, (self.H, self.K)),
            v.unflatten(1, (-1, self.V)),
            a,
            b,
        )
        gate = Gate.raw(self.a_log, self.dt_bias, beta="logit")
        how = {"schedule": schedule, "state": state, "gate": gate, "qk_l2norm": True, "out": out}
        if schedule.T == schedule.N and not self.reproducible:
            return call(KIND, "recurrent_gated_delta_rule", *rows, **how).o
        return call(KIND, "gated_delta_rule", *rows, **how, reproducible=self.reproducible).o
