"""Minutes of many short sequences from several threads: the same bits, no hang, no memory lost.

A lap is a random batch on dirty slots of a cache that outlives it: convolution, rule and attention
bring it in two steps, keep snapshots, draft, and bring it once more in the default mode. Some of
its sequences then come again cold and alone, with the drafts as a step, and from a snapshot: their
bits must be those of the batch. Every thread has a stream, caches and scratch of its own. Now and
then all of them stop, and what the process holds is counted.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headstart
from headstart import DeltaCache, ExtendPlan, KVCache, Schedule, Workspace
from headstart.evidence.compiling import compiled
from headstart.evidence.poison import poisoned_memory
from headstart.evidence.runs import Record
from headstart.evidence.timing import synchronize
from headstart.evidence.verify.tolerances import WIDE
from headstart.runtime.bundle_programs import Program, programs_of
from headstart.runtime.dispatch import Declined
from headstart.runtime.launcher import processors, target_of
from headstart.runtime.rehearsal import rehearsing

SEQUENCES = (1, 3, 16, 64, 200)
LENGTHS = (0, 1, 1, 2, 5, 31, 64, 65, 90, 130)
"""Of a step; each sequence has two."""
LONGEST = 4
"""Most tokens of one sequence, in equal shares of a step: many sequences are short ones."""
MOST = 2048
"""New tokens of a step."""
ALONE = 3
"""Sequences of a lap that come again alone."""
CHANNELS, DRAFTS, PAGE = 24, 4, 16
NEAR = 2e-2
"""Most relative L2 between the default mode and the promised bits, in 16 bits."""
REHEARSED = 6
"""Laps that tell what is to be compiled for a GPU; later ones ask for little more."""
SPELLS = 12
"""How often all threads stop."""
PATIENCE = 300.0
"""Seconds beyond a spell after which threads are taken to hang: first laps compile."""
TENTH, HOST_ROOM, DEVICE_ROOM = 0.1, 64 * 2**20, 2**20
"""What memory may grow by in the second half: a process by a tenth and some bytes, for what its
allocators keep; a device by some bytes, beside scratch that has met a larger batch."""


class Broken(Exception):
    """Other bits than before, or values far from those of the default mode."""


class Sample(Record):
    """What the process held when all threads had stopped, `seconds` after the first lap.

    host_bytes: resident. device_bytes: of tensors on a GPU; 0 on a CPU. scratch_bytes: of these (on
    a CPU of the former) in the threads' workspaces.
    """

    seconds: float
    laps: int
    host_bytes: int
    device_bytes: int
    scratch_bytes: int


class Soak(Record):
    """What became of one implementation.

    laps: of all threads; sequences: theirs that brought a token. calls: by operation. compared:
    tensors whose bits were. failure: the sentence that ended it, or None.
    """

    implementation: str
    device: str
    seed: int
    threads: int
    seconds: float
    laps: int
    sequences: int
    calls: dict[str, int]
    compared: int
    samples: tuple[Sample, ...]
    failure: str | None

    @property
    def growth(self) -> dict[str, int]:
        """Bytes gained from the middle to the end, by field of a sample; empty without any."""
        names = ("host_bytes", "device_bytes", "scratch_bytes")
        held = {name: _ends(self.samples, name) for name in names}
        return {name: ends[1] - ends[0] for name, ends in held.items() if ends}

    @property
    def cells(self) -> tuple[str, ...]:
        """In words: implementation, seconds, laps, sequences, calls, compared, memory, verdict."""
        memory = ("host_bytes", "device_bytes", "scratch_bytes")
        return (
            self.implementation,
            f"{self.seconds:.0f}",
            *(f"{n:,}" for n in (self.laps, self.sequences, sum(self.calls.values()),
                                 self.compared)),
            *(_change(self.samples, name) for name in memory),
            "FAIL" if self.failures else "pass",
        )  # fmt: skip

    @property
    def failures(self) -> list[str]:
        """What was not right, a sentence each."""
        found = [] if self.failure is None else [self.failure]
        if not self.samples:
            return found
        gained, last = self.growth, self.samples[-1]
        if gained["host_bytes"] > TENTH * last.host_bytes + HOST_ROOM:
            found.append(f"host bytes: {gained['host_bytes']:,} more at the end than in the middle")
        beside = gained["device_bytes"] - gained["scratch_bytes"]
        if last.device_bytes and beside > DEVICE_ROOM:
            found.append(f"device bytes: {beside:,} more at the end than in the middle, "
                         "beside scratch")  # fmt: skip
        return found


def _ends(samples: tuple[Sample, ...], name: str) -> tuple[int, ...]:
    """What a field held in the middle and at the end."""
    ends = (samples[(len(samples) - 1) // 2], samples[-1]) if samples else ()
    return tuple(getattr(sample, name) for sample in ends)


def _change(samples: tuple[Sample, ...], name: str) -> str:
    """MiB in the middle and at the end."""
    return " to ".join(f"{held / 2**20:,.1f}" for held in _ends(samples, name)) or "-"


class Life:
    """What one thread has for itself, and its laps."""

    def __init__(self, implementation: str, device: torch.device, number: int, seed: int) -> None:
        self.device, self.number, self.seed = device, number, seed
        wide = implementation in WIDE
        self.dtype = torch.float32 if wide else (torch.bfloat16, torch.float16)[number % 2]
        if not wide and device.type == "cpu":  # Triton's interpreter
            self.dtype = torch.float16
        size = 24 if wide else 128 if implementation == "hopper" else 64
        self.H, self.HV, self.K = 1, 2, size
        self.HQ, self.HK, self.D = 4, 2, min(size, 64)
        self.most = 300 if device.type == "cpu" else MOST
        self.laps = self.sequences = self.compared = 0
        self.calls: Counter[str] = Counter()
        self.workspace = Workspace(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        beside = "triton" if implementation == "hopper" else implementation
        self.rule = self._counted(headstart.gated_delta_rule, implementation, scratch=True)
        self.convolve = self._counted(headstart.causal_conv1d, beside)
        self.attend = self._counted(headstart.extend_attention, beside, scratch=True)
        self.write = self._counted(headstart.write_kv, beside)
        self.slots = max(SEQUENCES) + 2 * self.most // 64 + 2
        self.cache = DeltaCache(
            self.slots, H=1, HV=2, K=size, V=size, conv_channels=CHANNELS, dtype=self.dtype,
            draft_tokens=DRAFTS, device=device,
        )  # fmt: skip
        pages = self.most // PAGE + max(SEQUENCES)
        shape = (pages, PAGE, self.HK, self.D)
        self.kv = KVCache(*(torch.zeros(shape, dtype=self.dtype, device=device) for _ in "kv"))
        at = torch.Generator().manual_seed(seed + number)
        self.weight = torch.randn(CHANNELS, 4, generator=at).to(device, self.dtype)
        self.sinks = torch.linspace(-2, 2, self.HQ).to(device)

    def _counted(
        self, function: Callable[..., Any], implementation: str, scratch: bool = False
    ) -> Callable[..., Any]:
        own = {"workspace": self.workspace} if scratch else {}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[function.__name__] += 1
            return function(*args, **kwargs, **own, implementation=implementation)

        return call

    def spell(self, until: float) -> None:
        """Laps until a time of `time.monotonic`, at least one."""
        on_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with torch.inference_mode(), on_stream:
            while True:
                self.lap(random.Random(f"{self.seed} {self.number} {self.laps}"))
                self.laps += 1
                if time.monotonic() >= until:
                    break
            if self.stream is not None:
                self.stream.synchronize()

    def lap(self, dice: random.Random) -> None:
        """One batch, and some of its sequences again; raises `Broken`."""
        batch = Drawn(self, dice)
        self.sequences += sum(total > 0 for total in batch.total)
        batch.delta()
        batch.attention()


class Drawn:
    """A batch of a lap: two steps of each sequence, packed step after step."""

    def __init__(self, life: Life, dice: random.Random) -> None:
        self.life, self.dice = life, dice
        self.first, self.second = self._lengths(), []
        self.second = self._lengths(len(self.first))
        self.total = [a + b for a, b in zip(self.first, self.second, strict=True)]
        at = torch.Generator().manual_seed(dice.randrange(2**31))
        self.at = at
        eligible = [n for n, total in enumerate(self.total) if total]
        self.alone = dice.sample(eligible, min(ALONE, len(eligible)))

    def _lengths(self, count: int | None = None) -> list[int]:
        count = self.dice.choice(SEQUENCES) if count is None else count
        left, found = self.life.most, []
        lengths = [length for length in LENGTHS if length * count <= LONGEST * left]
        for _ in range(count):
            length = self.dice.choice(lengths)
            found.append(length if length <= left else 0)
            left -= found[-1]
        return found

    def some(self, *shape: int) -> torch.Tensor:
        """Random rows of the lap's dtype."""
        return torch.randn(shape, generator=self.at).to(self.life.device, self.life.dtype)

    def steps(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of whole sequences, packed: those of the first step, those of the second."""
        sizes = [n for pair in zip(self.first, self.second, strict=True) for n in pair]
        parts = rows.split(sizes)
        return torch.cat(parts[::2]), torch.cat(parts[1::2])

    def mine(self, n: int) -> slice:
        """The rows of sequence n among those of whole sequences."""
        begin = sum(self.total[:n])
        return slice(begin, begin + self.total[n])

    def same(self, found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        """Raise `Broken` unless the bits are equal; a rehearsal has none."""
        self.life.compared += 1
        if self.life.device.type == "meta":
            return
        if not torch.equal(found, wanted):
            raise Broken(f"{self._name}: {what} has other bits alone than in its batch")

    def near(self, found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        """Raise `Broken` unless values are near: the default mode promises no bits."""
        if self.life.device.type == "meta":
            return
        off = float((found.float() - wanted.float()).norm())
        if not off <= NEAR * float(wanted.float().norm()):
            raise Broken(f"{self._name}: {what} of the default mode is off by {off:.3g}")

    @property
    def _name(self) -> str:
        return f"thread {self.life.number}, lap {self.life.laps}"

    # Convolution and rule

    def delta(self) -> None:
        """Both steps on dirty slots with snapshots, drafts on top, and what comes again."""
        life, N, T = self.life, len(self.first), sum(self.total)
        drawn = T + N * DRAFTS
        g = -(torch.rand(drawn, life.HV, generator=self.at) ** 4)
        beta = torch.rand(drawn, life.HV, generator=self.at)
        both = [
            self.some(drawn, life.H, life.K), self.some(drawn, life.H, life.K),
            self.some(drawn, life.HV, life.K), g.to(life.device), beta.to(life.device),
            self.some(drawn, CHANNELS),
        ]  # fmt: skip
        rows, guesses = [x[:T] for x in both], [x[T:] for x in both]
        free = self.dice.sample(range(1, life.slots), life.slots - 1)
        slots = [free.pop() for _ in range(N)]
        starts, outputs, kept = [0] * N, [], []
        for step, lengths in enumerate((self.first, self.second)):
            schedule = Schedule(
                lengths, start_positions=starts, snapshot_every=64, device=life.device
            )
            positions = schedule.snapshot_positions
            targets = [[free.pop() for _ in mine] for mine in positions]
            kept += [
                (n, position, slot)
                for n, (mine, to) in enumerate(zip(positions, targets, strict=True))
                for position, slot in zip(mine, to, strict=True)
            ]
            brought = [self.steps(x)[step] for x in rows]
            listed = [slot for mine in targets for slot in mine]
            outputs.append(self.forward(brought, schedule, slots, listed))
            starts = [a + b for a, b in zip(starts, lengths, strict=True)]
        states = life.cache.export(slots)[1]
        drafts = Schedule([DRAFTS] * N, start_positions=starts, drafts=True, device=life.device)
        guessed = self.forward(guesses, drafts, slots, [])
        o, y = (self.whole(first, second) for first, second in zip(*outputs, strict=True))
        for n in self.alone:
            mine, total = self.mine(n), self.total[n]
            brought = [x[mine] for x in rows]
            self.again(brought, 0, (o[mine], y[mine]), "")
            self.same(life.cache.export([0])[1][0], states[n], "a state")
            own = slice(n * DRAFTS, (n + 1) * DRAFTS)
            wanted = guessed[0][own], guessed[1][own]
            self.again([x[own] for x in guesses], total, wanted, " of drafts")
            hits = [(position, slot) for m, position, slot in kept if m == n and position < total]
            if hits:
                position, slot = self.dice.choice(hits)
                life.cache.copy([slot], [0])
                rest = [x[position:] for x in brought]
                self.again(rest, position, (o[mine][position:], y[mine][position:]), " after a hit")
                self.same(life.cache.export([0])[1][0], states[n], "a state after a hit")
        plain = life.rule(
            *rows[:5], schedule=Schedule(self.total, device=life.device), qk_l2norm=True
        )
        self.near(plain.o, o, "o of the rule")

    def forward(
        self, rows: list[torch.Tensor], schedule: Schedule, slots: list[int], targets: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o and the convolution of one step."""
        life = self.life
        *rows, x = rows
        how = {"schedule": schedule, "state": life.cache.at(slots)}
        how["snapshots"] = life.cache.at(targets) if targets else None
        y = life.convolve(x, life.weight, **how).y
        return life.rule(*rows, **how, qk_l2norm=True).o, y

    def again(
        self,
        rows: list[torch.Tensor],
        start: int,
        wanted: tuple[torch.Tensor, torch.Tensor],
        where: str,
    ) -> None:
        """Bring rows to slot 0, alone in a step without drafts, and compare."""
        device = self.life.device
        schedule = Schedule([len(rows[0])], start_positions=[start], device=device)
        o, y = self.forward(rows, schedule, [0], [])
        self.same(o, wanted[0], f"o of the rule{where}")
        self.same(y, wanted[1], f"the convolution{where}")

    def whole(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Rows of whole sequences from those of both steps."""
        pairs = zip(first.split(self.first), second.split(self.second), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    # Attention

    def attention(self) -> None:
        """Both steps on shuffled pages, with sinks and perhaps a window, and what comes again."""
        life, T, N = self.life, sum(self.total), len(self.first)
        q = 2 * self.some(T, life.HQ, life.D)
        k, v = (self.some(T, life.HK, life.D) for _ in "kv")
        how: dict[str, Any] = {"sinks": life.sinks, "window": self.dice.choice([None, 100])}
        pages = [-(-length // PAGE) for length in self.first]
        order = torch.tensor(self.dice.sample(range(len(life.kv.k)), sum(pages)), dtype=torch.int32)
        table = torch.zeros(N, max([*pages, 1]), dtype=torch.int32)
        slots = []
        for n, mine in enumerate(order.split(pages)):
            table[n, : len(mine)] = mine
            position = torch.arange(self.first[n])
            slots.append(table[n].long()[position // PAGE] * PAGE + position % PAGE)
        (q1, q2), (k1, k2), (v1, v2) = (self.steps(x) for x in (q, k, v))
        first = ExtendPlan.from_lengths(self.first, device=life.device)
        second = ExtendPlan.from_pages(
            self.second, self.total, table.to(life.device), PAGE, new_in_cache=False
        )
        promised = {**how, "reproducible": True}
        life.write(k1, v1, life.kv, torch.cat(slots).to(life.device))
        o1 = life.attend(q1, k1, v1, plan=first, **promised)
        o2 = life.attend(q2, k2, v2, plan=second, cache=life.kv, **promised)
        o = self.whole(o1, o2)
        for n in self.alone:
            mine = self.mine(n)
            plan = ExtendPlan.from_lengths([self.total[n]], device=life.device)
            found = life.attend(q[mine], k[mine], v[mine], plan=plan, **promised)
            self.same(found, o[mine], "o of attention")
        found = life.attend(q2, k2, v2, plan=second, cache=life.kv, **how)
        self.near(found, o2, "o of attention")


@dataclass
class _Spell:
    """A thread's laps until a time, and the error that ended them."""

    life: Life
    until: float
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.life.spell(self.until)
        except BaseException as error:
            self.error = error


def soak(
    implementation: str,
    *,
    device: torch.device | str = "cpu",
    seconds: float = 600.0,
    threads: int = 4,
    seed: int = 0,
    jobs: int = 1,
    told: Callable[[Sample], None] = lambda sample: None,
) -> Soak:
    """Run laps for so many seconds, counted from when every thread has done one.

    jobs: processes that compile what laps launch on a GPU beforehand. told: hears of every sample.
    Raises `Declined` where the implementation cannot run them at all.

    >>> found = soak("torch", seconds=0.2, threads=2)
    >>> found.failure, found.laps >= 2, found.compared > 0
    (None, True, True)
    """
    place = torch.device(device)
    on_gpu = place.type == "cuda" and implementation not in WIDE
    programs = _programs(implementation, place, seed, threads) if on_gpu else {}
    lives = [Life(implementation, place, number, seed) for number in range(threads)]
    synchronize(place)  # their streams wait for nothing that this thread's still fills
    samples: list[Sample] = []
    with compiled(programs, jobs) if on_gpu else nullcontext(), poisoned_memory():
        failure, began = _spell(lives, 0.0), time.monotonic()
        while failure is None:
            samples.append(_sample(lives, place, time.monotonic() - began))
            told(samples[-1])
            if samples[-1].seconds >= seconds:
                break
            failure = _spell(lives, seconds / SPELLS)
    return Soak(
        implementation=implementation,
        device=str(place),
        seed=seed,
        threads=threads,
        seconds=time.monotonic() - began,
        laps=sum(life.laps for life in lives),
        sequences=sum(life.sequences for life in lives),
        calls=dict(sorted(sum((life.calls for life in lives), Counter()).items())),
        compared=sum(life.compared for life in lives),
        samples=tuple(samples),
        failure=failure,
    )


def _programs(
    implementation: str, device: torch.device, seed: int, threads: int
) -> dict[str, Program]:
    """What the first laps of threads of either dtype launch on a GPU, by key."""
    with rehearsing(target_of(device), processors(device)) as rehearsal, torch.inference_mode():
        for number in range(min(threads, 2)):
            life = Life(implementation, torch.device("meta"), number, seed)
            for lap in range(REHEARSED):
                life.lap(random.Random(f"{seed} {number} {lap}"))
    return programs_of(rehearsal)


def _spell(lives: list[Life], seconds: float) -> str | None:
    """Let all threads run for a while; what went wrong, or None."""
    spells = [_Spell(life, time.monotonic() + seconds) for life in lives]
    # Of a process that is over, none waits for a thread that hangs.
    running = [threading.Thread(target=spell.run, daemon=True) for spell in spells]
    for thread in running:
        thread.start()
    patient = time.monotonic() + seconds + PATIENCE
    for thread in running:
        thread.join(max(patient - time.monotonic(), 0.0))
    stuck = [n for n, thread in enumerate(running) if thread.is_alive()]
    if stuck:
        faulthandler.dump_traceback(sys.stderr)
        laps = ", ".join(f"thread {n} in lap {lives[n].laps}" for n in stuck)
        return f"hangs for {PATIENCE:g} s: {laps}"
    for spell in spells:
        if isinstance(spell.error, Declined):
            raise spell.error
        if isinstance(spell.error, Broken):
            return str(spell.error)
        if spell.error is not None:
            words = " ".join(f"{type(spell.error).__name__}: {spell.error}".split())[:300]
            return f"thread {spell.life.number}, lap {spell.life.laps}: {words}"
    return None


def _sample(lives: list[Life], device: torch.device, seconds: float) -> Sample:
    synchronize(device)
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        seconds=seconds,
        laps=sum(life.laps for life in lives),
        host_bytes=pages * 4096,
        device_bytes=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
        scratch_bytes=sum(life.workspace.bytes for life in lives),
    )
