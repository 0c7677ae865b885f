"""Sequences as they live in an engine, against a float64 replay of everything that happened.

A seeded driver steps, decodes, verifies k drafts and accepts j, keeps snapshots, evicts them,
reuses dirty slots, restores, preempts, moves states out and in, and cancels. Tokens form a tree: a
node is one token after one past, so it must give the same bits whenever it is computed again, and
it knows its own truth. Decays of -inf and -316 fall late in chunks; drafts run over borders.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import headstart
from headstart import DeltaCache, Schedule
from headstart.evidence.oracles import delta as oracle
from headstart.evidence.poison import poisoned_memory
from headstart.evidence.runs import Record
from headstart.evidence.verify.tolerances import WIDE
from headstart.evidence.workers import spread
from headstart.runtime.dispatch import Declined

SIZES = (1, 2, 16, 24)
"""H, HV, K, V, all different."""
CHANNELS, WIDTH, DRAFTS = 6, 4, 7
SLOTS, LIVE = 12, 5
POOL = 1024
"""Inputs to draw from."""
FORMS = {
    "float32": (torch.float32, {}, False, 2e-6, 4e-6),
    "bfloat16, normalised": (torch.bfloat16, {"qk_l2norm": True}, False, 1e-2, 1e-3),
    "float16, per channel": (torch.float16, {"qk_l2norm": True}, True, 2e-3, 1e-4),
}
"""Name -> dtype, arguments, per channel, most relative error of a row and of a state. A key
normalised in float32 may round to the other neighbour than one normalised in float64."""


class Broken(Exception):
    """A transcript in which something was not as the replay says, or had other bits than before."""


class Transcript(Record):
    """What became of one transcript.

    events: how often each kind of event happened. rows: outputs compared with the replay.
    excess: the largest error in units of its tolerance.
    failure: the sentence that ended it, or None.
    """

    implementation: str
    form: str
    convolution: bool
    seed: int
    device: str
    turns: int
    rows: int
    events: dict[str, int]
    excess: float
    failure: str | None = None


@dataclass(eq=False)
class Token:
    """One token after one past: its inputs, the truth about it, and the bits it gave first."""

    inputs: dict[str, torch.Tensor]
    x: np.ndarray
    state: np.ndarray
    o: np.ndarray
    y: np.ndarray
    seen: torch.Tensor | None = None
    seen_y: torch.Tensor | None = None


@dataclass(eq=False)
class Sequence:
    """A request: the tokens in its slot, and those it has yet to bring (a prompt, a replay)."""

    slot: int
    tokens: list[Token] = field(default_factory=list)
    todo: list[Token] = field(default_factory=list)
    position: int = 0
    end: int = 0
    highest: int = 0

    @property
    def oldest_history(self) -> int:
        """The first position whose convolution history no draft has overwritten."""
        return self.highest - DRAFTS


class Engine:
    """Runs one transcript; raises `Broken`.

    rule, convolve: `gated_delta_rule` and `causal_conv1d` of one implementation; without the latter
        the cache has no convolution.
    slack: factor of the tolerances, for arithmetic that rounds its operands.
    """

    def __init__(
        self,
        rule: Callable[..., Any],
        convolve: Callable[..., Any] | None,
        form: str,
        seed: int,
        *,
        sizes: tuple[int, int, int, int] = SIZES,
        device: torch.device | str = "cpu",
        slack: float = 1.0,
    ) -> None:
        self.device, self.sizes, self.slack = torch.device(device), sizes, slack
        self.events, self.rows, self.excess = Counter(), 0, 0.0
        self.dirty: set[int] = set()
        self.dtype, self.arguments, self.per_channel, self.row, self.most = FORMS[form]
        self.rule, self.convolve = rule, convolve
        self.dice, self.at = random.Random(seed), torch.Generator().manual_seed(seed)
        self.weight = torch.randn(CHANNELS, WIDTH, generator=self.at).to(self.dtype)
        self.weight64 = oracle.wide(self.weight).T
        self.pool, self.grown = self.draw(), 0
        self.truths = {name: oracle.wide(tensor) for name, tensor in self.pool.items()}
        if self.arguments.get("qk_l2norm"):
            self.truths["q"] = oracle.normalised(self.truths["q"])
            k = torch.from_numpy(oracle.normalised(self.truths["k"])).to(self.dtype)
            self.truths["k"] = oracle.wide(k)
        self.cache = self.new_cache(SLOTS)
        self.live: list[Sequence] = []
        self.snapshots: dict[int, list[Token]] = {}
        self.preempted: list[list[Token]] = []
        self.away: list[tuple[list[Token], tuple]] = []
        self.free = list(range(SLOTS))

    def new_cache(self, slots: int) -> DeltaCache:
        """An empty cache of the transcript's sizes."""
        H, HV, K, V = self.sizes
        return DeltaCache(
            slots, H=H, HV=HV, K=K, V=V, per_channel=self.per_channel, dtype=self.dtype,
            conv_channels=CHANNELS if self.convolve else 0, conv_width=WIDTH,
            draft_tokens=DRAFTS, device=self.device,
        )  # fmt: skip

    # Tokens

    def draw(self) -> dict[str, torch.Tensor]:
        """The inputs of POOL tokens."""
        H, HV, K, V = self.sizes
        q, k = torch.randn(2, POOL, H, K, generator=self.at)
        if "qk_l2norm" not in self.arguments:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        shape = (POOL, HV, K) if self.per_channel else (POOL, HV)
        return {
            "q": q.to(self.dtype),
            "k": k.to(self.dtype),
            "v": torch.randn(POOL, HV, V, generator=self.at).to(self.dtype),
            "g": -(torch.rand(shape, generator=self.at) ** 4),
            "beta": torch.rand(POOL, HV, generator=self.at),
            "x": torch.randn(POOL, CHANNELS, generator=self.at).to(self.dtype),
        }

    def grow(self, past: list[Token]) -> Token:
        """A new token after `past`, with its truth."""
        at, self.grown = self.grown % POOL, self.grown + 1
        inputs = {name: tensor[at] for name, tensor in self.pool.items()}
        truths: dict[str, Any] = {name: array[at : at + 1] for name, array in self.truths.items()}
        if len(past) % 64 >= 32 and self.dice.random() < 0.08:
            inputs["g"] = inputs["g"].clone()
            inputs["g"][self.dice.randrange(self.sizes[1])] = self.dice.choice(
                [-float("inf"), -316.0]
            )
            truths["g"] = oracle.wide(inputs["g"])[None]
        x = truths.pop("x")
        truth = oracle.replay(**truths, state=past[-1].state if past else None)
        window = np.concatenate([*(token.x for token in past[-WIDTH + 1 :]), x])
        y = (self.weight64[-len(window) :] * window).sum(0)
        return Token(inputs, x, truth.state, truth.o[0], y * oracle.sigmoid(y))

    # What can happen

    def start(self) -> None:
        """A new request: fresh, or one that shares a prefix with a kept snapshot."""
        if len(self.live) == LIVE or not self.free:
            return
        sequence = Sequence(self.free.pop(self.dice.randrange(len(self.free))))
        if self.preempted and self.dice.random() < 0.6:
            wanted = self.preempted.pop()
        elif self.snapshots and self.dice.random() < 0.7:
            wanted = list(self.dice.choice(list(self.snapshots.values())))
        else:
            wanted = []
        for _ in range(self.dice.choice([0, 1, 30, 100]) if wanted else 1):
            wanted.append(self.grow(wanted))
        hits = [
            (len(kept), slot)
            for slot, kept in self.snapshots.items()
            if len(kept) < len(wanted) and wanted[: len(kept)] == kept
        ]
        if hits:
            hit, slot = max(hits)
            self.cache.copy([slot], [sequence.slot])
            self.events["restored"] += 1
            sequence.position = sequence.end = sequence.highest = hit
            sequence.tokens = wanted[:hit]
        sequence.todo = wanted[len(sequence.tokens) :]
        self.live.append(sequence)

    def come_back(self) -> None:
        """A state that was moved out returns to some slot."""
        if not self.away or not self.free or len(self.live) == LIVE:
            return
        tokens, stored = self.away.pop()
        sequence = Sequence(self.free.pop(), tokens, [], *[len(tokens)] * 3)
        self.cache.load([sequence.slot], *stored)
        self.live.append(sequence)

    def leave(self) -> None:
        """Cancel or preempt a request, or move its state out; its slot stays dirty."""
        if not self.live:
            return
        sequence = self.live.pop(self.dice.randrange(len(self.live)))
        self.events["left"] += 1
        how = self.dice.choice(["cancel", "cancel and reset", "preempt", "preempt", "move"])
        if how == "cancel and reset":
            self.cache.reset([sequence.slot])
        elif how == "preempt":
            self.preempted.append(sequence.tokens + sequence.todo)
            self.events["preempted"] += 1
        elif how == "move" and sequence.end and sequence.position >= sequence.oldest_history:
            stored = self.cache.export([sequence.slot])
            self.expect(stored[0].tolist() == [sequence.position], "an export has another position")
            self.away.append((sequence.tokens[: sequence.position], stored))
            self.events["moved out"] += 1
        self.free.append(sequence.slot)

    def evict(self) -> None:
        """Give the slot of a snapshot back."""
        if self.snapshots:
            slot = self.dice.choice(list(self.snapshots))
            del self.snapshots[slot]
            self.events["evicted"] += 1
            self.free.append(slot)

    def go_back(self) -> None:
        """Drop some of the last tokens: regenerate."""
        if self.live:
            sequence = self.dice.choice(self.live)
            oldest = sequence.position
            if self.convolve:  # its history reaches back over the drafts, not over the tail
                oldest = max(oldest, sequence.oldest_history)
            if oldest < len(sequence.tokens):
                del sequence.tokens[self.dice.randint(oldest, len(sequence.tokens)) :]
                self.events["went back"] += 1
                sequence.todo = []

    def call(self) -> None:
        """One forward of some of the live requests."""
        chosen = [sequence for sequence in self.live if self.dice.random() < 0.8]
        self.dice.shuffle(chosen)
        plans = [self.plan(sequence) for sequence in chosen]
        slots = [sequence.slot for sequence in chosen]
        if self.dice.random() < 0.2:  # a request that nobody keeps
            past: list[Token] = []
            for _ in range(self.dice.choice([1, 70])):
                past.append(self.grow(past))
            chosen.append(Sequence(-1))
            plans.append((past, False, [], len(past)))
            slots.append(-1)
        kept, targets = [], []
        for _, _, positions, _ in plans:
            room = len(self.free) - len(targets) - 1
            kept.append(positions[: max(room, 0)])
            targets += [self.free[len(targets) + n] for n in range(len(kept[-1]))]
        schedule = Schedule(
            [len(tokens) for tokens, *_ in plans],
            start_positions=[len(sequence.tokens) for sequence in chosen],
            drafts=[drafts for _, drafts, *_ in plans],
            snapshot_positions=kept,
            device=self.device,
        )
        self.forward(plans, schedule, slots, targets)
        targets = iter(targets)
        for sequence, (tokens, drafts, _, accepted), positions in zip(
            chosen, plans, kept, strict=True
        ):
            start = len(sequence.tokens)
            sequence.end = start + len(tokens)
            sequence.highest = max(sequence.highest if start else 0, sequence.end)
            sequence.position = (start if drafts else sequence.end) // 64 * 64
            path = sequence.tokens + tokens
            self.events["decoded" if len(tokens) == 1 and not drafts else "stepped"] += not drafts
            self.events["drafted"] += drafts
            self.events["drafts dropped"] += len(tokens) - accepted
            self.events["slot reused"] += start == 0 and sequence.slot in self.dirty
            self.events["snapshots"] += len(positions)
            self.dirty.add(sequence.slot)
            for position in positions:
                slot = next(targets)
                self.free.remove(slot)
                self.snapshots[slot] = path[:position]
            sequence.tokens = path[: start + accepted]

    def plan(self, sequence: Sequence) -> tuple[list[Token], bool, list[int], int]:
        """(tokens, whether drafts, snapshot positions, how many tokens stay)."""
        start = len(sequence.tokens)
        drafts = not sequence.todo and start > 0 and self.dice.random() < 0.5
        count = self.dice.randint(1, DRAFTS) if drafts else self.dice.choice([0, 1, 1, 20, 64, 90])
        tokens = sequence.todo[:count]
        sequence.todo = sequence.todo[count:]
        if not drafts and count == 1 and not tokens:
            tokens = [self.grow(sequence.tokens)]
        elif drafts or (not tokens and count):
            for _ in range(count):
                tokens.append(self.grow(sequence.tokens + tokens))
        stop = start + len(tokens)
        opening = start // 64 * 64
        legal = [] if drafts else list(range(opening + 64, stop + 1, 64))
        if opening >= sequence.oldest_history or not self.convolve:
            legal = [opening, *legal]
        positions = [p for p in legal if p > 0 and self.dice.random() < 0.4]
        return tokens, drafts, positions, self.dice.randint(0, count) if drafts else len(tokens)

    def forward(
        self, plans: list[Any], schedule: Schedule, slots: list[int], targets: list[int]
    ) -> None:
        """The layer: convolution, then the rule; every row against its truth and its bits."""
        tokens = [token for brought, *_ in plans for token in brought]
        rows = {
            name: torch.stack([token.inputs[name] for token in tokens]) if tokens else pool[:0]
            for name, pool in self.pool.items()
        }
        self.spoil(plans, rows)
        finite = rows["v"].isfinite().flatten(1).all(1).tolist()
        rows = {name: tensor.to(self.device) for name, tensor in rows.items()}
        state, keep = self.cache.at(slots), self.cache.at(targets)
        x, y = rows.pop("x"), None
        if self.convolve:
            weight = self.weight.to(self.device)
            y = self.convolve(x, weight, schedule=schedule, state=state, snapshots=keep).y.cpu()
        found = self.rule(*rows.values(), schedule=schedule, state=state, snapshots=keep,
                          **self.arguments).o.cpu()  # fmt: skip
        wide, wide_y = oracle.wide(found), None if y is None else oracle.wide(y)
        row = 0
        for brought, *_ in plans:
            for token in brought:
                if finite[row]:  # a spoiled draft spoils those after it, which are spoiled too
                    token.seen = self.same(token.seen, found[row], wide[row], token.o)
                    if y is not None and wide_y is not None:
                        token.seen_y = self.same(token.seen_y, y[row], wide_y[row], token.y)
                row += 1

    def spoil(self, plans: list[Any], rows: dict[str, torch.Tensor]) -> None:
        """NaN in some drafts that will be dropped."""
        row = 0
        for brought, drafts, _, accepted in plans:
            if drafts and accepted < len(brought) and self.dice.random() < 0.2:
                for name in ("k", "v", "g", "beta", "x"):
                    rows[name][row + accepted : row + len(brought)] = torch.nan
            row += len(brought)

    def same(
        self, seen: torch.Tensor | None, found: torch.Tensor, wide: np.ndarray, truth: np.ndarray
    ) -> torch.Tensor:
        """A row agrees with its truth, and with the bits it had before."""
        self.rows += 1
        most = self.row * (1 + np.abs(truth).max()) * truth.size**0.5
        self.near(wide, truth, most, "a row")
        same = seen is None or torch.equal(seen, found)
        self.expect(same, "a row has other bits than when it was computed before")
        return found

    def near(self, found: np.ndarray, truth: np.ndarray, most: float, what: str) -> None:
        """Raise unless the distance is at most `most`; a NaN is not."""
        ratio = float(np.linalg.norm(found - truth)) / (most * self.slack)
        self.expect(ratio <= 1, f"{what} is off by {ratio:.3g} times its tolerance")
        self.excess = max(self.excess, ratio)

    @staticmethod
    def expect(condition: bool, sentence: str) -> None:
        """Raise `Broken` unless the condition holds."""
        if not condition:
            raise Broken(sentence)

    # Afterwards

    def check(self, slot: int, path: list[Token], kept: bool) -> None:
        """The exported state and history are those of the path; the history, if still kept."""
        positions, states, histories = self.cache.export([slot])
        self.expect(
            positions.tolist() == [len(path)],
            f"slot {slot} stands at {positions.tolist()}, not at {len(path)}",
        )
        truth = path[-1].state if path else np.zeros(self.sizes[1:])
        most = self.most * (1 + float(np.linalg.norm(truth)))
        self.near(oracle.wide(states[0]), truth, most, "a state")
        if histories is not None:
            window = [token.inputs["x"] for token in path[-WIDTH + 1 :]]
            pad = [torch.zeros(CHANNELS, dtype=self.dtype)] * (WIDTH - 1 - len(window))
            histories = histories.cpu()
            right = torch.equal(histories[0].to(self.dtype), torch.stack(pad + window))
            excused = not kept and bool(histories.isnan().any())
            self.expect(right or excused, f"slot {slot} holds another history")

    def settle(self) -> None:
        """Everything that is kept, once more: truth, history, and the bits of a cold prefill."""
        self.live = [sequence for sequence in self.live if sequence.end]  # the others hold nothing
        for sequence in self.live:
            kept = sequence.position >= sequence.oldest_history
            self.check(sequence.slot, sequence.tokens[: sequence.position], kept)
        for slot, path in self.snapshots.items():
            self.check(slot, path, True)
        kept = [(s.slot, s.tokens, s.position) for s in self.live]
        kept += [(slot, path, len(path)) for slot, path in self.snapshots.items()]
        for slot, path, position in kept:
            state = self.cache.export([slot])[1]
            path = path if len(path) >= position else path[:position]
            cold = self.cache
            self.cache = self.new_cache(1)
            schedule = Schedule([len(path)], device=self.device)
            self.forward([(path, False, [], 0)], schedule, [0], [])
            if len(path) // 64 * 64 == position:
                cold_state = self.cache.export([0])[1]
                self.expect(
                    torch.equal(cold_state, state), "a state has other bits than a cold prefill's"
                )
            self.cache = cold


def live(
    rule: Callable[..., Any],
    convolve: Callable[..., Any] | None,
    form: str,
    seed: int,
    turns: int,
    **options: Any,
) -> Engine:
    """Run a transcript of so many random events, and check once more what is left at the end."""
    engine = Engine(rule, convolve, form, seed, **options)
    run(engine, turns)
    return engine


def run(engine: Engine, turns: int) -> None:
    """Random events, calls most of all."""
    acts = [engine.call] * 10 + [engine.start] * 4 + [engine.leave, engine.evict]
    acts += [engine.come_back, engine.go_back]
    for _ in range(turns):
        engine.dice.choice(acts)()
    engine.settle()


def verify_transcript(
    implementation: str,
    form: str,
    seed: int,
    *,
    convolution: bool = True,
    turns: int = 40,
    device: torch.device | str = "cpu",
) -> Transcript:
    """One transcript under one implementation. Raises `Declined` where it cannot run one.

    Implementations that round the operands of their products get the head size that they are
    written for and ten times the tolerance; their bits must be equal all the same. One that has no
    convolution runs beside the portable one.

    >>> verify_transcript("torch", "float32", seed=0, turns=10).failure is None
    True
    """
    wide = implementation in WIDE
    size = 128 if implementation == "hopper" else 64
    beside = "triton" if implementation == "hopper" else implementation
    engine = Engine(
        functools.partial(headstart.gated_delta_rule, implementation=implementation),
        functools.partial(headstart.causal_conv1d, implementation=beside) if convolution else None,
        form,
        seed,
        sizes=SIZES if wide else (1, 2, size, size),
        device=device,
        slack=1.0 if wide else 10.0,
    )
    failure = None
    with poisoned_memory(), torch.inference_mode():
        try:
            run(engine, turns)
        except Broken as broken:
            failure = str(broken)
        except ValueError as error:
            # Everything the driver does is legal: a refusal is wrong too.
            failure = f"a legal call was refused: {error}"
    return Transcript(
        implementation=implementation,
        form=form,
        convolution=convolution,
        seed=seed,
        device=str(device),
        turns=turns,
        rows=engine.rows,
        events=dict(sorted(engine.events.items())),
        excess=engine.excess,
        failure=failure,
    )


PROBED = 20
"""Turns that show whether an implementation runs a form at all."""


def verify_transcripts(
    implementation: str,
    seed: int,
    count: int,
    *,
    processes: int = 1,
    turns: int = 40,
    told: Callable[[Transcript], None] = lambda found: None,
    **options: Any,
) -> tuple[list[Transcript], dict[str, str]]:
    """`count` transcripts from `seed` on, over all forms that an implementation runs in turn.

    processes: how many share the work, each with one thread. told: hears of each as it ends.
    options: of `verify_transcript`.
    Returns them, and why a form was left out, by form.
    """
    forms, declined = [], {}
    for form in FORMS:
        try:
            verify_transcript(implementation, form, seed, turns=min(turns, PROBED), **options)
            forms.append(form)
        except Declined as reason:
            declined[form] = str(reason)
    if not forms:
        return [], declined
    calls = (
        functools.partial(
            verify_transcript, implementation, forms[n % len(forms)], seed + n, turns=turns,
            **options,
        )
        for n in range(count)
    )  # fmt: skip
    found: list[Transcript] = []
    for one in spread(calls, min(processes, count)):
        found.append(one)
        told(one)
    return found, declined
