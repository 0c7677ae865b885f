"""Histories as they live: any order of steps, drafts, rollbacks, snapshots, restores, evictions and
reuse, against a float64 replay of each sequence, and against its bits in one pass."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.implementations import examples
from tests.ops.convolution.oracle import assert_close, cache_of, draw, history, replay

from headstart import Pool, Schedule

SLOTS, CHANNELS = 5, 3
POOL, WEIGHT, BIAS = draw(997, CHANNELS)


class Slot:
    """What a slot holds: the inputs from position 0, and the oldest that is still in the ring."""

    def __init__(self, inputs=None, first=0):
        self.inputs = torch.zeros(0, CHANNELS) if inputs is None else inputs
        self.first = first

    @property
    def end(self):
        return len(self.inputs)

    def starts(self, width):
        """Legal starts."""
        oldest = self.first + width - 1 if self.first else 0
        return sorted({0, *range(oldest, self.end + 1)})


class Histories(RuleBasedStateMachine):
    convolve = None

    @initialize(width=st.sampled_from([2, 4]), drafts=st.sampled_from([0, 1, 5]))
    def begin(self, width, drafts):
        self.width, self.drafts, self.drawn = width, drafts, 0
        self.weight = WEIGHT[:, :width].contiguous()
        self.cache = cache_of(CHANNELS, width, SLOTS, drafts)
        self.slots = [Slot() for _ in range(SLOTS)]
        self.pool = torch.full((SLOTS, width - 1, CHANNELS), torch.nan)
        self.pooled = {}

    def draw_inputs(self, count):
        rows = (torch.arange(count) + self.drawn) % len(POOL)
        self.drawn += count
        return POOL[rows]

    def whole(self, inputs):
        return type(self).convolve(inputs, self.weight, BIAS).y

    @rule(data=st.data(), count=st.integers(1, 3))
    def step(self, data, count):
        slots = data.draw(st.permutations(range(SLOTS)))[:count]
        free = [slot for slot in range(SLOTS) if slot not in slots]
        lengths, starts, flags, positions = [], [], [], []
        for slot in slots:
            held = self.slots[slot]
            start = data.draw(st.sampled_from(held.starts(self.width)) | st.just(held.end))
            draft = self.drafts > 0 and data.draw(st.booleans())
            most = self.drafts if draft else data.draw(st.sampled_from([3, 80]))
            length = data.draw(st.integers(0, most))
            opening = start // 64 * 64
            allowed = [] if draft else list(range(start // 64 * 64 + 64, start + length + 1, 64))
            if opening == 0 or opening == start or opening >= held.first + self.width - 1:
                allowed = [opening, *allowed]
            kept = sorted(data.draw(st.sets(st.sampled_from(allowed)))) if allowed else []
            kept = kept[: len(free) - sum(map(len, positions))]
            lengths.append(length)
            starts.append(start)
            flags.append(draft)
            positions.append(kept)
        total = sum(map(len, positions))
        into_pool = data.draw(st.booleans())
        targets = data.draw(st.permutations(range(SLOTS)))[:total] if into_pool else free[:total]
        target = Pool(self.pool, write_slots=targets) if into_pool else self.cache.at(targets)
        new = [self.draw_inputs(length) for length in lengths]
        schedule = Schedule(
            lengths, start_positions=starts, drafts=flags, snapshot_positions=positions,
            device="cpu",
        )  # fmt: skip
        y = type(self).convolve(
            torch.cat(new), self.weight, BIAS, schedule=schedule, state=self.cache.at(slots),
            snapshots=target,
        ).y  # fmt: skip
        waiting = iter(targets)
        columns = self.width - 1 + self.drafts
        for slot, start, rows, part, kept in zip(
            slots, starts, new, y.split(lengths), positions, strict=True
        ):
            held = self.slots[slot]
            inputs = torch.cat([held.inputs[:start], rows])
            assert_close(part, replay(inputs, self.weight, BIAS)[start:])
            assert torch.equal(part, self.whole(inputs)[start:])
            first = max(held.first if start else 0, len(inputs) - columns)
            self.slots[slot] = Slot(inputs, first)
            for position in kept:
                place = next(waiting)
                if into_pool:
                    self.pooled[place] = history(inputs, position, self.width)
                else:
                    self.slots[place] = Slot(inputs[:position], max(0, position - self.width + 1))

    @rule(data=st.data(), slot=st.integers(0, SLOTS - 1))
    def start_where_inputs_are_gone(self, data, slot):
        held = self.slots[slot]
        legal = held.starts(self.width)
        wrong = [s for s in range(held.end + 4) if s not in legal]
        start = data.draw(st.sampled_from(wrong))
        schedule = Schedule([1], start_positions=start, device="cpu")
        with pytest.raises(ValueError, match="start_positions"):
            type(self).convolve(
                POOL[:1], self.weight, BIAS, schedule=schedule, state=self.cache.at([slot])
            )

    @rule(source=st.integers(0, SLOTS - 1), other=st.integers(0, SLOTS - 1))
    def copy(self, source, other):
        self.cache.copy([source], [other])
        self.slots[other] = Slot(self.slots[source].inputs, self.slots[source].first)

    @rule(slot=st.integers(0, SLOTS - 1))
    def evict(self, slot):
        self.cache.reset([slot])
        self.slots[slot] = Slot()

    @precondition(lambda self: self.pooled)
    @rule(data=st.data())
    def go_on_from_a_pool(self, data):
        """A plain state from a snapshot, ten tokens on."""
        slot = data.draw(st.sampled_from(sorted(self.pooled)))
        new = self.draw_inputs(10)
        y = type(self).convolve(new, self.weight, BIAS, state=Pool(self.pool, [slot])).y
        inputs = torch.cat([self.pooled[slot], new])
        assert torch.equal(y, self.whole(inputs)[self.width - 1 :])
        self.pooled[slot] = inputs[-self.width + 1 :]

    @invariant()
    def pool_and_ends_are_those_of_the_model(self):
        if not hasattr(self, "slots"):
            return
        ends = self.cache.tensors["history_end"].flatten().tolist()
        assert ends == [held.end for held in self.slots]
        for slot in range(SLOTS):
            wanted = self.pooled.get(slot)
            if wanted is None:
                assert self.pool[slot].isnan().all()
            else:
                assert torch.equal(self.pool[slot], wanted)


@pytest.mark.usefixtures("checked")
def test_transcripts(convolve):
    machine = type("Histories", (Histories,), {"convolve": staticmethod(convolve)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(30), stateful_step_count=25, deadline=None, derandomize=True
        ),
    )
