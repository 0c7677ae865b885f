"""What a model calls, as cases: from a first prompt to decode, drafts and a prefix hit.

A profile is what `headstart bundle` compiles for and what `headstart.warmup` readies.

>>> "qwen3-next-80b" in PROFILES, len(profile("gpt-oss-20b")) > 8
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch

from headstart.evidence.cases import catalogue, delta_block
from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.cases.extend_attention import NOSINK, AttentionCase
from headstart.evidence.cases.gated_delta_rule import CHUNK, DeltaCase
from headstart.evidence.cases.record import Case, Draws
from headstart.runtime.bundle_programs import Known, Program, programs_of
from headstart.runtime.declined import Declined
from headstart.runtime.rehearsal import rehearsing
from headstart.runtime.static import Target
from headstart.runtime.tables import Key, configurations_of, tables_for, using

CATALOGUE = "catalogue"


@dataclass(frozen=True, kw_only=True)
class SoftmaxLayer(AttentionCase):
    """A case as the layers of a model call it: sinks are weights, in its dtype.

    With layout "rows" the caches of transformers call it too.
    """

    def _arguments(self, draws: Draws, dtype: torch.dtype) -> dict[str, Any]:
        call = super()._arguments(draws, dtype)
        return call | {"sinks": draws.place(call["sinks"], dtype)} if self.sinks else call

    def in_rows_of_its_own(self) -> Iterator[dict[str, Any]]:
        """The calls on keys [N, most, HK, D], new ones included: token by token, head by head."""
        from headstart import ExtendPlan, KVCache

        q = torch.empty(self.tokens, self.HQ, self.D, dtype=self.torch_dtype, device="meta")
        ends = [new + cached for new, cached in zip(self.lengths, self.cached, strict=True)]
        shape = len(ends), max(ends), self.HK, self.D
        plan = ExtendPlan.from_padded(
            list(self.lengths), ends, max(ends), new_in_cache=True, device="meta"
        )
        for order in (0, 1, 2, 3), (0, 2, 1, 3):
            k, v = (q.new_empty([shape[i] for i in order]).permute(order) for _ in range(2))
            call = {"q": q, "k": None, "v": None, "plan": plan, "cache": KVCache(k, v)}
            sinks = {"sinks": q.new_empty(self.HQ)} if self.sinks else {}
            yield call | sinks | {"window": self.window}


def _linear(H: int, HV: int, dtype: str = "bfloat16") -> Iterator[Case]:
    """Linear layers of K = V = 128, in batches that take every form a launch can have."""
    sizes: dict[str, Any] = {"H": H, "HV": HV, "dtype": dtype, "why": "a model's linear layer"}
    for name, lengths in (
        ("one", (1,)),
        ("drafts", (4,)),
        ("alone", (15,)),
        ("two-chunks", (111,)),
        ("short", (512,)),
        ("middle", (4500,)),
        ("spans", (6000,)),
        ("long", (65_536,)),
        ("ragged", (21, 7033, 3709, 400)),
        ("ragged-long", (20, 50_000, 8000)),
        ("decode", (1,) * 64),
        ("verify", (4,) * 24),
        ("mixed", (1,) * 8 + (2048,)),
        ("batch", (512,) * 8),
        ("many", (64,) * 20),
        ("many-long", (64,) * 600),
        ("batch-long", (4096,) * 16),
    ):
        starts = (100,) * len(lengths)
        case = DeltaBlockCase(id=f"layer-{name}", lengths=lengths, starts=starts, **sizes)
        yield case
        if max(lengths) <= 4:
            yield replace(case, id=case.id + "-drafts", drafts=True)
        else:
            yield replace(case, id=case.id + "-kept", snapshot_every=64, snapshot_dtype="float32")
        plain = DeltaCase(id=f"plain-{name}", lengths=lengths, **sizes)
        yield plain
        yield replace(plain, id=plain.id + "-none", state="none")
    # Snapshots asked for where no border lies: there is nothing to copy in bulk to.
    yield DeltaBlockCase(
        id="layer-within-kept", lengths=(46,), starts=(81,), snapshot_every=64,
        snapshot_dtype="float32", **sizes,
    )  # fmt: skip


def _softmax(
    HQ: int,
    HK: int,
    D: int,
    windows: tuple[int | None, ...] = (None,),
    sinks: bool = False,
    dtype: str = "bfloat16",
    pages: tuple[int, ...] = (16, 64),
) -> Iterator[Case]:
    """Softmax layers: prompts without a cache, on rows, on slots and on pages of these sizes."""
    for window in windows:
        make = partial(
            SoftmaxLayer, HQ=HQ, HK=HK, D=D, sinks=sinks, dtype=dtype, window=window,
            why="a model's softmax layer",
        )  # fmt: skip
        for name, lengths, prefixes in (
            ("one", (1,), (100,)),
            ("deep", (3,), (16_384,)),
            ("short", (512,), (8192,)),
            ("mixed", (1,) * 8 + (2048,), (100,) * 9),
        ):
            yield make(id=f"{name}-whole", lengths=lengths)
            yield make(id=f"{name}-rows", lengths=lengths, prefixes=prefixes)
            for size in (1, *pages):
                yield make(
                    id=f"{name}-paged-{size}",
                    lengths=lengths,
                    prefixes=prefixes,
                    layout="slots" if size == 1 else "pages",
                    page_size=size,
                    new_in_cache=True,
                    # Tables that PyTorch makes of lists, as those of this package's own caches.
                    index_dtype="int64" if size == CHUNK else "int32",
                )


PROFILES: dict[str, Callable[[], Iterator[Case]]] = {
    CATALOGUE: lambda: (
        case
        for case in catalogue(small=False)
        if case.op != "model" and not case.id.endswith(NOSINK)
    ),
    "qwen3-next-80b": lambda: chain(_linear(16, 32), _softmax(16, 2, 256)),
    "qwen3.5-9b-like": lambda: chain(_linear(16, 32), _softmax(16, 4, 256)),
    "gpt-oss-20b": lambda: _softmax(64, 8, 64, (128, None), sinks=True),
    "tiny-qwen3-next": lambda: chain(
        _linear(2, 4, "float32"), _softmax(4, 2, 128, dtype="float32", pages=(64,))
    ),
    "tiny-gpt-oss": lambda: _softmax(
        8, 2, 64, (128, None), sinks=True, dtype="float32", pages=(64,)
    ),
}
"""Name -> its cases; the models are those of the catalogue, "catalogue" all of its other cases but
the siblings without sinks, which exist for arms that know none."""


PROCESSORS = {
    "cuda:80": 108, "cuda:89": 142, "cuda:90": 132, "cuda:100": 148, "cuda:120": 170,
    "hip:gfx942": 304, "hip:gfx950": 256, "hip:gfx1151": 40,
}  # fmt: skip
"""Multiprocessors (compute units) of the usual device of a target, which some forms depend on."""


@cache
def profile(name: str) -> tuple[Case, ...]:
    """The cases of a profile; ValueError for one that does not exist."""
    if name not in PROFILES:
        raise ValueError(f"models: expected some of {list(PROFILES)}, got {name!r}")
    return tuple(PROFILES[name]())


def calls(case: Case) -> Iterator[Callable[[], object]]:
    """The calls of a case on meta tensors, for a rehearsal: attention's in both its orders."""
    import headstart

    if isinstance(case, DeltaBlockCase):
        block = case.blank_block("meta")
        # Checkpoints keep the gates' parameters in float32 or in the model's dtype.
        kept = {name: block[name].to(case.torch_dtype) for name in ("a_log", "dt_bias")}
        for layer in (block, block | kept):
            yield partial(delta_block.run, layer)
            yield from _uncached(case, layer)
            if layer["schedule"].M:
                yield from _kept_in_slots(case, layer)
        return
    arguments = case.blank("meta")
    yield partial(getattr(headstart, case.op), **arguments)
    if isinstance(case, AttentionCase):
        yield partial(headstart.extend_attention, **arguments, reproducible=True)
        if case.new_in_cache:
            k = torch.empty(case.tokens, case.HK, case.D, dtype=case.torch_dtype, device="meta")
            v = torch.empty(case.tokens, case.HK, case.value_size, dtype=k.dtype, device="meta")
            slots = torch.empty(case.tokens, dtype=torch.int64, device="meta")
            yield partial(headstart.write_kv, k, v, arguments["cache"], slots)
    if isinstance(case, SoftmaxLayer) and case.layout == "rows":
        for arguments in case.in_rows_of_its_own():
            yield partial(headstart.extend_attention, **arguments)
            yield partial(headstart.extend_attention, **arguments, reproducible=True)


def _uncached(case: DeltaBlockCase, block: dict[str, Any]) -> Iterator[Callable[[], object]]:
    """A layer's convolution and rule where the model has no cache."""
    import headstart

    lengths, mixed = list(case.lengths), block["mixed"]
    yield partial(headstart.causal_conv1d, mixed, block["weight"], schedule=lengths)
    rule = delta_block.rule_arguments(block, mixed) | {"schedule": lengths, "state": None}
    rule.pop("snapshots", None)
    yield partial(headstart.gated_delta_rule, **rule)


def _kept_in_slots(case: DeltaBlockCase, block: dict[str, Any]) -> Iterator[Callable[[], object]]:
    """A layer's convolution and rule that keep states in slots of a cache, ready to be hit."""
    import headstart

    count, mixed = block["schedule"].M, block["mixed"]
    memory = headstart.DeltaCache(
        count, H=case.H, HV=case.HV, K=case.K, V=case.V, conv_channels=case.channels,
        conv_width=case.conv_width, dtype=case.torch_dtype, device="meta",
    )  # fmt: skip
    kept = {"snapshots": memory.at(range(count))}
    step = {name: block[name] for name in ("schedule", "state")}
    yield partial(headstart.causal_conv1d, mixed, block["weight"], **step, **kept)
    yield partial(headstart.gated_delta_rule, **delta_block.rule_arguments(block, mixed) | kept)


@dataclass(frozen=True)
class Reach:
    """What the calls of profiles launch on a target.

    programs: by key. asked: key -> the first case that launches it.
    declined: case -> the sentences why no kernel computes one of its calls.
    """

    programs: dict[str, Program]
    asked: dict[str, str]
    declined: dict[str, str]


def reach(
    target: Target,
    names: Sequence[str] = (),
    processors: int | None = None,
    tables: Sequence[Mapping[Key, Any]] | None = None,
) -> Reach:
    """The programs that the calls of these profiles (none given: of all) launch on a target.

    processors: those of the device, where it is not the usual one of its target. tables: the
    configurations that apply there, of each kind of device; None: the rule's alone, and those of
    every table for the target.
    """
    if tables is None:
        tables = [{}, *(configurations_of(table.by_key) for table in tables_for(target.name))]
    found = Reach({}, {}, {})
    known: Known = {}
    for name, case in [(model, case) for model in names or PROFILES for case in profile(model)]:
        for call in calls(case):
            asked: dict[Key, Any] = {}
            for i, rows in enumerate(tables):
                if i and all(rows.get(key, answer) == answer for key, answer in asked.items()):
                    continue  # nothing that the first one does not launch
                with using(rows), rehearsing(target, processors or PROCESSORS[target.name]) as run:
                    try:
                        call()
                    except Declined as sentences:
                        found.declined[f"{name}: {case.id}"] = str(sentences)
                asked = asked or run.asked
                for key, program in programs_of(run, known).items():
                    found.programs.setdefault(key, program)
                    found.asked.setdefault(key, f"{name}: {case.id}")
    return found
