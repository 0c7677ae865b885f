"""The convolution's part of the promise: a row's bits depend on its own inputs alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

import headstart

Same = Callable[[torch.Tensor, torch.Tensor, str], None]
DRAFTS = 16
CUTS = ([64], [100], [1, 2, 63, 65], [*range(60, 70)], [31, 62, 93, 124])
CONVOLUTION_FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32, "width": 4, "activation": "silu"},
    "bfloat16": {"dtype": torch.bfloat16, "width": 4, "activation": "silu"},
    "float16, width 3, no activation": {"dtype": torch.float16, "width": 3, "activation": None},
}


class Convolution:
    """One sequence of the short causal convolution and the ways to compute it."""

    tokens, channels = 330, 72

    def __init__(self, form: str, implementation: str, device: torch.device) -> None:
        options = CONVOLUTION_FORMS[form]
        self.dtype, self.width, self.device = options["dtype"], options["width"], device
        self.call = functools.partial(
            headstart.causal_conv1d, implementation=implementation, activation=options["activation"]
        )
        self.x = self.draw(self.tokens, seed=1)
        self.weight = self.draw(self.channels, seed=2, columns=self.width)
        self.bias = self.draw(self.channels, seed=3, columns=1).flatten()

    def draw(self, rows: int, seed: int, columns: int = channels) -> torch.Tensor:
        """Values [rows, columns] of a seed."""
        at = torch.Generator().manual_seed(seed)
        return torch.randn(rows, columns, generator=at).to(self.device, self.dtype)

    def cache(self, slots: int = 2) -> Any:
        """An empty cache."""
        return headstart.DeltaCache(
            slots, H=1, HV=1, K=16, V=16, conv_channels=self.channels, conv_width=self.width,
            dtype=self.dtype, draft_tokens=DRAFTS, device=self.device,
        )  # fmt: skip

    def schedule(self, lengths: list[int], **options: Any) -> Any:
        """A schedule on the convolution's device."""
        return headstart.Schedule(lengths, device=self.device, **options)

    def step(self, start: int, stop: int, cache: Any, slot: int = 0) -> torch.Tensor:
        """Outputs of tokens start to stop."""
        schedule = self.schedule([stop - start], start_positions=start)
        x = self.x[start:stop]
        return self.call(x, self.weight, self.bias, schedule=schedule, state=cache.at([slot])).y

    def cold(self) -> torch.Tensor:
        """Outputs of the whole sequence, alone."""
        return self.call(self.x, self.weight, self.bias).y

    def splits(self, same: Same) -> None:
        """Steps cut anywhere, histories in a cache."""
        y = self.cold()
        for cuts in CUTS:
            cache = self.cache()
            for start, stop in itertools.pairwise([0, *cuts, self.tokens]):
                same(self.step(start, stop, cache), y[start:stop], f"cut at {cuts}: from {start}")

    def plain(self, same: Same) -> None:
        """The same steps, histories in plain tensors."""
        y = self.cold()
        for cuts in CUTS:
            state = None
            for start, stop in itertools.pairwise([0, *cuts, self.tokens]):
                found = self.call(
                    self.x[start:stop], self.weight, self.bias, state=state, return_state=True
                )
                state = found.state
                same(found.y, y[start:stop], f"cut at {cuts}: from {start}")
            assert state is not None
            same(state, self.x[None, 1 - self.width :], f"cut at {cuts}: history")

    def hits(self, same: Same) -> None:
        """A snapshot slot copied, and a snapshot loaded, at every position of the grid."""
        y, cache = self.cold(), self.cache(8)
        schedule = self.schedule([self.tokens], snapshot_every=64)
        positions = schedule.snapshot_positions[0]
        slots = list(range(2, 2 + len(positions)))
        keep = {"schedule": schedule, "state": cache.at([0])}
        self.call(self.x, self.weight, self.bias, snapshots=cache.at(slots), **keep)
        packed = self.call(self.x, self.weight, self.bias, snapshots=self.dtype, **keep).snapshots
        assert packed is not None
        for n, position in enumerate(positions):
            cache.copy([slots[n]], [1])
            loaded = self.cache()
            loaded.load([1], [position], torch.zeros(1, 1, 16, 16), packed[n : n + 1])
            for how, restored in (("copied", cache), ("loaded", loaded)):
                for start, stop in ((position, position + 5), (position + 5, self.tokens)):
                    found = self.step(start, stop, restored, 1)
                    same(found, y[start:stop], f"{how} at {position}: from {start}")

    def batches(self, same: Same) -> None:
        """Other sequences before, after and around it; rows as a slice of a packed projection."""
        y = self.cold()
        for lengths in ([1], [64, 0, 200], [5, 130, 1, 1]):
            others = [self.draw(length, seed=10 + n) for n, length in enumerate(lengths)]
            for place in (0, len(others)):
                batch = [*others[:place], self.x, *others[place:]]
                sizes = [len(rows) for rows in batch]
                first, rows = sum(sizes[:place]), torch.cat(batch)
                projection = torch.cat([rows[:, :24], rows, rows[:, :8]], dim=1)
                slice_of_it = projection[:, 24 : 24 + self.channels]
                for how, x in (("rows", rows), ("a slice of a projection", slice_of_it)):
                    y_of_all = self.call(x, self.weight, self.bias, schedule=self.schedule(sizes)).y
                    found = y_of_all[first : first + self.tokens]
                    same(found, y, f"{how} at place {place} beside {lengths}")

    def heads(self, same: Same) -> None:
        """Ranks that hold the channels of some of the heads."""
        y = self.cold()
        for mine in (slice(0, 36), slice(36, 72), slice(24, 40), slice(71, 72)):
            part = self.call(self.x[:, mine], self.weight[mine], self.bias[mine]).y
            same(part, y[:, mine], f"channels {mine.start} to {mine.stop}")

    def drafts(self, same: Same) -> None:
        """Drafts of which some stay, wrong or NaN ones rolled back by passing a smaller start."""
        y, wrong = self.cold(), self.draw(self.tokens, seed=99)
        cache, at = self.cache(), 50
        self.step(0, at, cache)
        for turn in itertools.count():
            count = min(DRAFTS, self.tokens - at)
            if not count:
                break
            right = (turn * 5 + 3) % (count + 1)
            rows = torch.cat([self.x[at : at + right], wrong[at + right : at + count]])
            if turn % 3 == 1:
                rows[right:] = torch.nan
            schedule = self.schedule([count], start_positions=at, drafts=True)
            found = self.call(
                rows, self.weight, self.bias, schedule=schedule, state=cache.at([0])
            ).y
            same(found[:right], y[at : at + right], f"{right} of {count} drafts kept at {at}")
            at += right
