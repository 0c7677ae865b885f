"""One model under several arms: all prepared and compared first, then prefilled in turn."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from headstart.evidence.arms import Arm
from headstart.evidence.arms.sources import NOISE
from headstart.evidence.benching import Entry, TooLate, expect_alive, giving_up
from headstart.evidence.models.arms import ARMS, Stand
from headstart.evidence.models.building import Built
from headstart.evidence.models.records import ATTENTION, REST, ModelArm, ModelResult, Routed
from headstart.evidence.models.witness import Witness
from headstart.evidence.paired import compare, orders
from headstart.evidence.prefill.runs import Run
from headstart.evidence.prefill.timing import peak_memory
from headstart.evidence.stages import Stage, profile
from headstart.runtime.checks import dtype_name

DIFFERENCE = {torch.float32: 1e-4}
"""Most that an attention layer's outputs may differ from the first arm's, relatively, by dtype."""
HALF_DIFFERENCE = 0.05
"""The same for 16-bit weights: some paths round scores, or their logarithms, to 16 bits."""

Progress = Callable[[str], None]


class Prepared(Entry):
    """An arm that was asked for, and what its first prefill and the rounds said."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.served = ""
        self.cold_ms: float | None = None
        self.difference: float | None = None
        self.same_token: bool | None = None
        self.routed: tuple[Routed, ...] = ()
        self.peak: int | None = None
        self.ttft_ms: list[float] = []
        self.splits: list[dict[str, float]] = []
        self.kernels: tuple[Stage, ...] = ()
        self.kernel_us: float | None = None

    def keep(self, run: Run, stand: Stand) -> None:
        """Note what a round measured."""
        self.ttft_ms.append(1000 * run.seconds)
        split = {kind: 1000 * seconds for kind, seconds in run.by_kind.items()}
        split[REST] = max(1000 * run.seconds - sum(split.values()), 0.0)
        self.splits.append(split)
        if stand.device.type == "cuda":
            self.peak = max(self.peak or 0, peak_memory(stand.device))


def expect_arms(names: Sequence[str]) -> None:
    """ValueError unless all are arms, each once.

    >>> expect_arms(["headstart", "fastest"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: arms: expected some of ['headstart', 'reproducible', ...], each once, got 'fastest'
    """
    for at, name in enumerate(names):
        if name not in ARMS or name in names[:at]:
            raise ValueError(f"arms: expected some of {list(ARMS)}, each once, got {name!r}")
    if not names:
        raise ValueError(f"arms: expected some of {list(ARMS)}, each once, got none")


def bench_model(
    built: Built,
    names: Sequence[str],
    *,
    prompt_tokens: int,
    step: int | None = None,
    rounds: int = 7,
    seed: int = 0,
    noise_floor: bool = True,
    profiled: bool = False,
    limit: float | None = None,
    progress: Progress = lambda words: None,
    told: Callable[[ModelResult], None] = lambda found: None,
) -> ModelResult:
    """Prefill a prompt of random tokens under every arm, `rounds` times in turn.

    The first prefill of an arm is its cold one. In its second one each attention layer is held to
    the first arm's, on equal inputs.

    Parameters
    ----------
    step: tokens of a step, None: the whole prompt.
    noise_floor: enter the first arm a second time.
    profiled: profile one prefill of each arm after the rounds.
    limit: seconds for preparing all arms; one that is not prepared then is given up, and those
        after it with it. None: no limit. For the main thread of a process alone.
    told: hears after every round what was found so far.

    Raises ValueError for unknown arms and where the model has no positions for so many tokens;
    `DeviceLost` where an arm has cost the process its device.
    """
    expect_arms(names)
    config = built.loaded.config
    if not 1 <= prompt_tokens <= config.max_position_embeddings:
        raise ValueError(
            f"prompt-tokens: expected 1 to {config.max_position_embeddings} "
            f"(max_position_embeddings of {built.loaded.name}), got {prompt_tokens}"
        )
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (prompt_tokens,), generator=source).tolist()
    stand = Stand(built.loaded, ids, step)
    entries = [Prepared(name) for name in names]
    progress("what all arms share")
    _warm_shared(stand)
    try:
        _prepare(stand, entries, limit, progress)
        base = next((entry for entry in entries if entry.arm is not None), None)
        if noise_floor and base is not None:
            again = Prepared(NOISE)
            again.arm, again.served = base.arm, base.served
            entries.insert(entries.index(base) + 1, again)
        for done in _timed(stand, entries, rounds, progress):
            told(_found(built, stand, entries, seed, done))
        for entry in entries if profiled else ():
            if entry.arm is not None and entry.name != NOISE:
                progress(f"profiling {entry.name}")
                found = profile(entry.arm, stand.device, times=1)
                entry.kernels, entry.kernel_us = found["stages"], found["device_us"]
    finally:
        stand.turn_to("")
    return _found(built, stand, entries, seed, rounds)


def _found(
    built: Built, stand: Stand, entries: Sequence[Prepared], seed: int, rounds: int
) -> ModelResult:
    base = next((entry for entry in entries if entry.arm is not None), None)
    return ModelResult(
        model=built.loaded.name,
        source=built.source,
        weights=built.weights,
        cut=built.cut,
        layers=dict(Counter(built.loaded.kinds)),
        weight_bytes=built.bytes,
        device=str(stand.device),
        dtype=dtype_name(built.loaded.model.dtype),
        prompt_tokens=len(stand.ids),
        step=stand.step,
        steps=stand.steps,
        seed=seed,
        rounds=rounds,
        arms=tuple(_result(entry, base) for entry in entries),
    )


@torch.inference_mode()
def _warm_shared(stand: Stand) -> None:
    """Run a feed-forward layer and the head once: their first calls are no arm's cold start."""
    model = stand.loaded.model
    length = min(stand.step or len(stand.ids), len(stand.ids))
    rows = torch.zeros(1, length, stand.loaded.config.hidden_size, device=stand.device)
    rows = rows.to(model.dtype).normal_()
    model.get_decoder().layers[-1].mlp(rows)
    model.get_output_embeddings()(rows[:, -1]).argmax().item()


def _prepare(
    stand: Stand, entries: Sequence[Prepared], limit: float | None, progress: Progress
) -> None:
    witness = Witness(stand.loaded.model.get_decoder().layers, len(stand.ids) // 2)
    first: Run | None = None
    until = None if limit is None else time.time() + limit
    for entry in entries:
        progress(f"the first prefill of {entry.name}")
        run: Run | None = None
        try:
            with giving_up(until):
                prepare = functools.partial(_cold, stand, entry, witness)
                run = entry.attempt("preparing", stand.device, prepare)
        except TooLate:
            entry.fail("failed", f"was not prepared within {limit:g} s of all arms")
        if run is None:
            if stand.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        first = first or run
        _judge(entry, run, first)


def _cold(stand: Stand, entry: Prepared, witness: Witness) -> Run:
    """The first prefill of an arm, and one more that settles what is left to settle."""
    arm = entry.arm = stand.arm(entry.name)
    arm.restore()
    run: Run = arm.call()
    entry.cold_ms = 1000 * run.seconds
    entry.served, entry.routed = stand.served(), stand.routed()
    arm.restore()
    if witness.complete:
        with witness.later() as differences:
            arm.call()
        entry.difference = float(torch.stack(differences).max())
    else:
        with witness.first():
            arm.call()
        entry.difference = 0.0
    return run


def _judge(entry: Prepared, run: Run, first: Run) -> None:
    """What an arm computed against the first one, and its calls against layers times steps."""
    entry.same_token = run.token == first.token
    most = DIFFERENCE.get(run.hidden.dtype, HALF_DIFFERENCE)
    lost = [one for one in entry.routed if not one.complete]
    if not bool(run.hidden.isfinite().all()):
        entry.fail("wrong", "hidden states are not finite")
    elif not (entry.difference or 0.0) <= most:
        entry.fail(
            "wrong",
            f"an attention layer differs by {entry.difference:.3g} from the first arm's on the "
            f"same inputs, > {most:g}",
        )
    elif lost:
        words = (
            f"{one.kind}: {sum(one.calls.values())} calls of {one.operation}, not {one.expected}"
            for one in lost
        )
        entry.fail("wrong", "; ".join(words))


def _timed(
    stand: Stand, entries: Sequence[Prepared], rounds: int, progress: Progress
) -> Iterator[int]:
    """Rounds of prefills under every arm that is left; how many are done, after each."""
    running: list[tuple[Prepared, Arm]] = [
        (entry, entry.arm) for entry in entries if entry.arm is not None
    ]
    try:
        for index, order in enumerate(orders(len(running), rounds if running else 0)):
            progress(f"round {index + 1} of {rounds}")
            for at in order:
                entry, arm = running[at]
                arm.restore()
                entry.keep(arm.call(), stand)
            yield index + 1
    except RuntimeError as error:
        expect_alive(stand.device, "timing", error)
        raise


def _result(entry: Prepared, base: Prepared | None) -> ModelArm:
    if entry.arm is None or base is None:
        return ModelArm(
            arm=entry.name,
            status=entry.status,
            sentence=entry.sentence,
            served=entry.served,
            cold_ms=entry.cold_ms,
            difference=entry.difference,
            same_token=entry.same_token,
            routed=entry.routed,
        )
    middle = median(entry.ttft_ms)
    kinds = dict.fromkeys(kind for split in entry.splits for kind in split)
    split = {kind: median(one.get(kind, 0.0) for one in entry.splits) for kind in kinds}
    left = sum(spent for kind, spent in split.items() if kind not in ATTENTION)
    return ModelArm(
        arm=entry.name,
        status="timed",
        served=entry.served,
        cold_ms=entry.cold_ms,
        ttft_ms=tuple(entry.ttft_ms),
        median_ms=middle,
        ratio=None if entry is base else compare(entry.ttft_ms, base.ttft_ms),
        split_ms=split,
        bound=sum(split.values()) / left if left else None,
        peak_bytes=entry.peak,
        difference=entry.difference,
        same_token=entry.same_token,
        routed=entry.routed,
        kernels=entry.kernels,
        kernel_us=entry.kernel_us,
    )
