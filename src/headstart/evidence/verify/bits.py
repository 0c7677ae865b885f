"""The promise itself: equal bits however tokens arrived and whatever came beside them.

Every check computes one sequence cold and alone, then again under a change that must not show, and
compares with `torch.equal`: outputs, states, snapshots and LSE.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch.nn.functional import normalize, softplus

import headstart
from headstart.evidence.compiling import compiled
from headstart.evidence.poison import poisoned_memory
from headstart.evidence.runs import Record
from headstart.evidence.verify.convolution_bits import CONVOLUTION_FORMS, DRAFTS, Convolution
from headstart.evidence.verify.tolerances import WIDE
from headstart.evidence.workers import spread
from headstart.runtime.bundle_programs import Program, programs_of
from headstart.runtime.dispatch import Declined
from headstart.runtime.launcher import processors, target_of
from headstart.runtime.rehearsal import rehearsing

Rows = dict[str, torch.Tensor]
FORMS: dict[str, tuple[torch.dtype, bool, dict[str, Any]]] = {
    "float32": (torch.float32, False, {}),
    "bfloat16, normalised": (torch.bfloat16, False, {"qk_l2norm": True}),
    "float16, per channel": (torch.float16, True, {"qk_l2norm": True}),
}
"""Name -> dtype, decay per channel, arguments of the gated delta rule."""


class Bits(Record):
    """What became of one check.

    compared: tensors that were compared. differing: of these, with other bits.
    where: the first that differs. declined: the sentence why it could not run.
    """

    op: str
    check: str
    form: str
    implementation: str
    device: str
    compared: int = 0
    differing: int = 0
    where: str = ""
    declined: str | None = None

    @property
    def passed(self) -> bool:
        """Whether all bits are equal."""
        return not self.differing


class Comparison:
    """Counts what differs."""

    def __init__(self) -> None:
        self.compared = self.differing = 0
        self.where = ""

    def __call__(self, found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        """Compare two tensors by their bits."""
        self.compared += 1
        if not torch.equal(found, expected):
            self.differing += 1
            self.where = self.where or where


# The gated delta rule


class Rule:
    """One sequence of the gated delta rule and the ways to compute it."""

    def __init__(self, form: str, implementation: str, device: torch.device) -> None:
        self.dtype, self.per_channel, self.arguments = FORMS[form]
        self.device, small = device, implementation in WIDE
        self.sizes = (1, 2, 32, 24) if small else (1, 2, 128, 128)
        self.tokens = 140 if implementation == "reference" else 330
        self.call = functools.partial(headstart.gated_delta_rule, implementation=implementation)
        self.rows = self.draw(self.tokens, seed=1, forget=True)

    def draw(
        self,
        tokens: int,
        seed: int,
        *,
        forget: bool = False,
        sizes: tuple[int, int, int, int] | None = None,
    ) -> Rows:
        """Tokens as models produce them; `forget` puts a -inf or -316 late in every chunk."""
        H, HV, K, V = sizes or self.sizes
        at = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, tokens, H, K, generator=at)
        if "qk_l2norm" not in self.arguments:
            q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        shape = (tokens, HV, K) if self.per_channel else (tokens, HV)
        g = -softplus(torch.randn(shape, generator=at) - 4) * 8
        for chunk in range(0, tokens if forget else 0, 64):
            late = chunk + int(torch.randint(40, 64, (), generator=at))
            if late < tokens:
                g[late] = -torch.inf if chunk // 64 % 2 else -316.0
        rows = {
            "q": q.to(self.dtype),
            "k": k.to(self.dtype),
            "v": torch.randn(tokens, HV, V, generator=at).to(self.dtype),
            "g": g,
            "beta": torch.rand(tokens, HV, generator=at),
        }
        return {name: tensor.to(self.device) for name, tensor in rows.items()}

    def cache(self, slots: int = 4, sizes: tuple[int, int, int, int] | None = None) -> Any:
        """An empty cache."""
        H, HV, K, V = sizes or self.sizes
        return headstart.DeltaCache(
            slots, H=H, HV=HV, K=K, V=V, per_channel=self.per_channel, dtype=self.dtype,
            draft_tokens=DRAFTS, device=self.device,
        )  # fmt: skip

    def schedule(self, lengths: list[int], **options: Any) -> Any:
        """A schedule on the rule's device."""
        return headstart.Schedule(lengths, device=self.device, **options)

    def step(
        self, start: int, stop: int, cache: Any, slot: int = 0, rows: Rows | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Bring tokens start to stop; outputs, and every snapshot on the grid by position."""
        rows = {name: x[start:stop] for name, x in (rows or self.rows).items()}
        schedule = self.schedule([stop - start], start_positions=start, snapshot_every=64)
        found = self.call(
            **rows, schedule=schedule, state=cache.at([slot]), snapshots=torch.float32,
            **self.arguments,
        )  # fmt: skip
        assert found.snapshots is not None
        return found.o, dict(zip(schedule.snapshot_positions[0], found.snapshots, strict=True))

    def cold(self) -> tuple[torch.Tensor, dict[int, torch.Tensor], torch.Tensor]:
        """Outputs, snapshots and the state of a cold prefill."""
        cache = self.cache()
        o, kept = self.step(0, self.tokens, cache)
        return o, kept, cache.export([0])[1]

    def splits(self, same: Comparison) -> None:
        """Steps cut on the grid, off it, and one token at a time over a border."""
        o, kept, state = self.cold()
        last = self.tokens
        for cuts in ([64], [64, 128], [100], [1, 2, 63, 65], [*range(60, 70)], [31, 62, 93, 124]):
            cache, name = self.cache(), f"cut at {cuts}"
            for start, stop in itertools.pairwise([0, *cuts, last]):
                found, snapshots = self.step(start, stop, cache)
                same(found, o[start:stop], f"{name}: o from {start}")
                for position, value in snapshots.items():
                    same(value, kept[position], f"{name}: snapshot at {position}")
            same(cache.export([0])[1], state, f"{name}: state")

    def plain(self, same: Comparison) -> None:
        """Plain states between steps cut on the grid."""
        o, _, _ = self.cold()
        state = None
        for start, stop in itertools.pairwise([0, 64, 128, self.tokens]):
            rows = {name: x[start:stop] for name, x in self.rows.items()}
            found = self.call(
                **rows, schedule=self.schedule([stop - start], start_positions=start), state=state,
                return_state=True, reproducible=True, **self.arguments,
            )  # fmt: skip
            state = found.state
            same(found.o, o[start:stop], f"o from {start}")

    def hits(self, same: Comparison) -> None:
        """A snapshot slot copied, and a snapshot loaded, at every position of the grid."""
        o, kept, state = self.cold()
        source, slots = self.cache(8), list(range(2, 2 + len(kept)))
        self.call(
            **self.rows, schedule=self.schedule([self.tokens], snapshot_every=64),
            state=source.at([0]), snapshots=source.at(slots), **self.arguments,
        )  # fmt: skip
        for slot, position in zip(slots, kept, strict=True):
            source.copy([slot], [1])
            loaded = self.cache(2)
            loaded.load([1], [position], kept[position][None])
            for how, cache in (("copied", source), ("loaded", loaded)):
                cuts = sorted({position, min(position + 5, self.tokens), self.tokens})
                for start, stop in itertools.pairwise(cuts):
                    found, _ = self.step(start, stop, cache, 1)
                    same(found, o[start:stop], f"{how} at {position}: o from {start}")
                same(cache.export([1])[1], state, f"{how} at {position}: state")

    def batches(self, same: Comparison) -> None:
        """Other sequences before, after and around it, in scattered slots."""
        o, _, state = self.cold()
        for lengths in ([1], [64, 0, 200], [5, 130, 1, 1]):
            others = [self.draw(length, seed=10 + n) for n, length in enumerate(lengths)]
            for place in (0, len(others)):
                batch = [*others[:place], self.rows, *others[place:]]
                sizes = [len(rows["q"]) for rows in batch]
                rows = {name: torch.cat([one[name] for one in batch]) for name in self.rows}
                cache = self.cache(8)
                slots = [7 - n for n in range(len(batch))]
                found = self.call(
                    **rows, schedule=self.schedule(sizes), state=cache.at(slots), **self.arguments
                )
                first, name = sum(sizes[:place]), f"at place {place} beside {lengths}"
                same(found.o[first : first + self.tokens], o, f"{name}: o")
                same(cache.export([7 - place])[1], state, f"{name}: state")

    def heads(self, same: Comparison) -> None:
        """Ranks with 8/16, 4/8, 2/8 and fewer heads of 16/32 and 16/64."""
        K, V = self.sizes[2:]
        for H, HV, mine, values in (
            (16, 32, slice(8, 16), slice(16, 32)),
            (16, 32, slice(4, 8), slice(8, 16)),
            (16, 64, slice(2, 4), slice(8, 16)),
            (16, 32, slice(15, 16), slice(30, 32)),
        ):
            sizes = (H, HV, K, V)
            rows = self.draw(100, seed=H + HV, sizes=sizes)
            part = {
                name: x[:, mine if name in "qk" else values].contiguous()
                for name, x in rows.items()
            }
            fewer = (mine.stop - mine.start, values.stop - values.start, K, V)
            whole, alone = self.cache(1, sizes), self.cache(1, fewer)
            name = f"{fewer[0]}/{fewer[1]} of {H}/{HV}"
            for start, stop in ((0, 70), (70, 71), (71, 100)):
                o, _ = self.step(start, stop, whole, rows=rows)
                found, _ = self.step(start, stop, alone, rows=part)
                same(found, o[:, values], f"{name}: o from {start}")
            same(alone.export([0])[1], whole.export([0])[1][:, values], f"{name}: state")

    def drafts(self, same: Comparison) -> None:
        """Drafts of which some stay, wrong or NaN ones rolled back by passing a smaller start."""
        o, _, state = self.cold()
        wrong = self.draw(self.tokens, seed=99)
        cache, at, turn = self.cache(), 0, 0
        self.step(0, 50, cache)
        at = 50
        while at < self.tokens:
            count = min(DRAFTS, self.tokens - at)
            right = (turn * 5 + 3) % (count + 1)
            rows = {
                name: torch.cat([x[at : at + right], wrong[name][at + right : at + count]])
                for name, x in self.rows.items()
            }
            if turn % 3 == 1 and right < count:
                rows["v"][right:] = torch.nan
            found = self.call(
                **rows, schedule=self.schedule([count], start_positions=at, drafts=True),
                state=cache.at([0]), **self.arguments,
            )  # fmt: skip
            same(found.o[:right], o[at : at + right], f"{right} of {count} drafts kept at {at}")
            at, turn = at + right, turn + 1
        self.step(self.tokens, self.tokens, cache)  # closes the last drafts
        same(cache.export([0])[1], state, "state")


# Softmax attention


class Attention:
    """One sequence of softmax attention and the ways to compute it."""

    def __init__(self, form: str, implementation: str, device: torch.device) -> None:
        self.options, self.device = ATTENTION_FORMS[form], device
        self.dtype = self.options["dtype"]
        long = self.options["long"]
        self.HQ, self.HK, self.D = 16, 2, 128 if long else 64
        T, middle = (LONG, 4096) if long and device.type != "cpu" else (200, 128)
        self.tokens = T
        self.cuts = [0, 1, 64, 65, T - 8, T - 1, T], [0, middle - 1, middle, T]
        self.run = functools.partial(headstart.extend_attention, implementation=implementation)
        at = torch.Generator().manual_seed(1)
        q = 2 * torch.randn(self.tokens, self.HQ, self.D, generator=at)
        k, v = torch.randn(2, self.tokens, self.HK, self.D, generator=at)
        self.q, self.k, self.v = (x.to(self.dtype).to(device) for x in (q, k, v))
        self.sinks = torch.linspace(-3, 3, self.HQ).to(device)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        *,
        heads: slice = slice(None),
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o and LSE, reproducible."""
        if self.options["sinks"]:
            options["sinks"] = self.sinks[heads]
        o, lse = self.run(
            q, k, v, window=self.options["window"], reproducible=True, return_lse=True, **options
        )
        return o, lse  # type: ignore[return-value]

    def cold(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o and LSE of a cold prefill."""
        plan = headstart.ExtendPlan.from_lengths([self.tokens], device=self.device)
        return self.attend(self.q, self.k, self.v, plan=plan)

    def pages(self, same: Comparison) -> None:
        """Steps on shuffled pages of 1, 16 and 64 rows, new keys in the cache or beside it."""
        o, lse = self.cold()
        for size, inside in itertools.product((1, 16, 64), (False, True)):
            for cuts in self.cuts:
                name = f"pages of {size}, new keys {'in' if inside else 'beside'} the cache"
                for start, found in self._paged(size, inside, cuts):
                    rows = slice(start, start + len(found[0]))
                    same(found[0], o[rows], f"{name}: o from {start}")
                    same(found[1], lse[rows], f"{name}: LSE from {start}")

    def _paged(
        self, size: int, inside: bool, cuts: list[int]
    ) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        pages = -(-self.tokens // size)
        table = torch.randperm(pages + 4, generator=torch.Generator().manual_seed(size))[:pages]
        shape = (pages + 4, size, self.HK, self.D)
        memory = [
            torch.full(shape, torch.nan, dtype=self.dtype, device=self.device) for _ in range(2)
        ]
        cache = headstart.KVCache(*memory)

        def write(start: int, stop: int) -> None:
            at = torch.arange(start, stop)
            for store, new in zip(memory, (self.k, self.v), strict=True):
                store[table[at // size], at % size] = new[start:stop]

        for start, stop in itertools.pairwise(cuts):
            plan = headstart.ExtendPlan.from_pages(
                [stop - start], [stop], table[None].to(self.device), size, new_in_cache=inside
            )
            k, v = self.k[start:stop], self.v[start:stop]
            if inside:
                write(start, stop)
                k = v = None
            yield start, self.attend(self.q[start:stop], k, v, plan=plan, cache=cache)
            if not inside:
                write(start, stop)

    def batches(self, same: Comparison) -> None:
        """Other sequences before and after it."""
        o, lse = self.cold()
        for before, after in ((70, 0), (0, 130), (1, 64)):
            rows = [
                torch.cat([x.flip(0)[:before], x, x.flip(0)[:after]])
                for x in (self.q, self.k, self.v)
            ]
            plan = headstart.ExtendPlan.from_lengths(
                [before, self.tokens, 0, after], device=self.device
            )
            found = self.attend(*rows, plan=plan)
            mine = slice(before, before + self.tokens)
            same(found[0][mine], o, f"between {before} and {after} tokens: o")
            same(found[1][mine], lse, f"between {before} and {after} tokens: LSE")

    def heads(self, same: Comparison) -> None:
        """Ranks that hold 8/1, 4/1 or fewer of 16/2 heads."""
        o, lse = self.cold()
        plan = headstart.ExtendPlan.from_lengths([self.tokens], device=self.device)
        for heads in (slice(8, 16), slice(4, 8), slice(11, 12), slice(0, 3)):
            key = heads.start // (self.HQ // self.HK)
            k, v = (x[:, key : key + 1].contiguous() for x in (self.k, self.v))
            found = self.attend(self.q[:, heads].contiguous(), k, v, plan=plan, heads=heads)
            same(found[0], o[:, heads], f"heads {heads.start} to {heads.stop}: o")
            same(found[1], lse[:, heads], f"heads {heads.start} to {heads.stop}: LSE")


def _form(
    dtype: torch.dtype, window: int | None = None, sinks: bool = False, long: bool = False
) -> dict[str, Any]:
    return {"dtype": dtype, "window": window, "sinks": sinks, "long": long}


LONG = 9000
"""Tokens of a long form on a GPU: blocks in which a reproducible kernel reduces keys end and are
joined in it, in one program and by pieces. On a CPU forms are of one length."""
ATTENTION_FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": _form(torch.bfloat16),
    "bfloat16, window, sinks": _form(torch.bfloat16, 100, sinks=True),
    "float32, sinks": _form(torch.float32, sinks=True),
    "bfloat16, long": _form(torch.bfloat16, long=True),
    "bfloat16, long window": _form(torch.bfloat16, 3000, sinks=True, long=True),
}

CHECKS: dict[str, tuple[type, dict[str, Any], tuple[str, ...]]] = {
    "gated_delta_rule": (
        Rule,
        FORMS,
        ("splits", "plain", "hits", "batches", "heads", "drafts"),
    ),
    "extend_attention": (Attention, ATTENTION_FORMS, ("pages", "batches", "heads")),
    "causal_conv1d": (
        Convolution,
        CONVOLUTION_FORMS,
        ("splits", "plain", "hits", "batches", "heads", "drafts"),
    ),
}
"""Operation -> (what computes it, forms, names of the checks)."""


def verify_bits(
    op: str,
    implementation: str,
    *,
    device: torch.device | str = "cpu",
    jobs: int = 1,
    told: Callable[[Bits], None] = lambda one: None,
) -> list[Bits]:
    """Every check of an operation under one implementation, in every form.

    jobs: processes that share the checks; on a GPU, that compile what they launch beforehand.
    told: hears of each check as it ends.

    >>> found = verify_bits("extend_attention", "torch")
    >>> all(one.passed for one in found), {one.check for one in found} == {"pages", "batches",
    ...                                                                    "heads"}
    (True, True)
    """
    place, found = torch.device(device), []
    on_gpu = place.type == "cuda" and implementation not in WIDE
    calls = [functools.partial(_bits, op, implementation, place, *which) for which in _checks(op)]
    with compiled(_programs(op, implementation, place), jobs) if on_gpu else nullcontext():
        for one in spread(calls, 1 if place.type == "cuda" else min(jobs, len(calls))):
            found.append(one)
            told(one)
    return found


def _checks(op: str) -> list[tuple[str, str]]:
    """(form, name) of every check of an operation."""
    _, forms, names = CHECKS[op]
    return list(itertools.product(forms, names))


def _bits(op: str, implementation: str, device: torch.device, form: str, name: str) -> Bits:
    one = Bits(op=op, check=name, form=form, implementation=implementation, device=str(device))
    same, make = Comparison(), CHECKS[op][0]
    try:
        with poisoned_memory(), torch.inference_mode():
            getattr(make(form, implementation, device), name)(same)
    except Declined as reason:
        return one.model_copy(update={"declined": str(reason)})
    return one.model_copy(update=vars(same))


def _programs(op: str, implementation: str, device: torch.device) -> dict[str, Program]:
    """What the checks of an operation launch on a GPU, by key."""
    make, found = CHECKS[op][0], {}
    for form, name in _checks(op):
        with (
            rehearsing(target_of(device), processors(device)) as rehearsal,
            suppress(Declined),
            torch.inference_mode(),
        ):
            getattr(make(form, implementation, torch.device("meta")), name)(lambda *_: None)
        found |= programs_of(rehearsal)
    return found
