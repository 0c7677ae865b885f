"""Loops over the tiles that `visible` names give the bits of loops over all tiles.

The other build is this package's source with its bounds taken out (an arm of `headstart bench`), so
that both know one thing alone by other means: which tiles hold a key that some row sees. What a
kernel is compiled for is drawn a few times, and each of these a few batches, which compile nothing
new.
"""

import importlib.util
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.implementations import INTERPRETED, KERNELS
from tests.ops.extend_attention.oracle import ROUNDING, Batch, draw, expect_close, expected
from tests.ops.extend_attention.test_caches import FP8, LAYOUTS, stored
from tests.ops.extend_attention.test_kernels import run

from headstart.evidence.arms.unbounded import without_bounds

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not KERNELS, reason="kernels run in the interpreter or on a GPU"),
]

FOLDER = "headstart.ops.extend_attention.triton"
BATCHES = 4
"""Drawn for what a kernel is compiled for."""
DRAWS = {"extend": 140, "unified": 68}
SHARE = BATCHES if INTERPRETED else 1
"""One of how many draws runs: the interpreter is slow."""
PLACES = ["", *LAYOUTS, "pages of 32"]
"""Where a prefix lies; "": there is none."""
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED)


@pytest.fixture(scope="module")
def unbounded(tmp_path_factory):
    """Kernel -> its build without bounds."""
    found = {}
    for name in DRAWS:
        module = importlib.import_module(f"{FOLDER}.{name}")
        place = Path(module.__file__)
        source = without_bounds(f"ops/extend_attention/triton/{name}.py", place.read_text())
        assert source != place.read_text()
        path = tmp_path_factory.mktemp("unbounded") / f"{name}_unbounded.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        built = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = built
        spec.loader.exec_module(built)
        found[name] = getattr(built, f"{name}_kernel")
    return found


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for.

    config: rows and keys of a tile, keys of a piece. layout: one of PLACES.
    listed: whether prefix keys lie at positions of their own. covers: what a custom mask covers.
    """

    config: tuple[int, int, int]
    heads: tuple[int, int]
    size: int
    dtype: torch.dtype
    layout: str
    new_in_cache: bool
    float8: bool
    listed: bool
    part: str
    covers: str
    causal: bool
    windowed: bool
    softcap: bool
    sinks: bool


def kind_of(kernel: str, seed: int) -> Kind:
    """One that the kernel takes: the reproducible one, keys that are runs of positions alone."""
    at = random.Random(f"{kernel} {seed}")
    HK = at.choice([1, 2])
    layout = PLACES[seed % len(PLACES)]
    float8 = bool(layout) and at.random() < 0.3
    # A reproducible call reads all its keys from a cache of another dtype, or none.
    inside = bool(layout) and (at.random() < 0.5 or (float8 and kernel == "unified"))
    part = at.choice(["all"] * 4 + ["prefix", "extend"])
    return Kind(
        config=at.choice([(64, 32, 64), (128, 64, 128), (64, 64, 256)]),
        heads=(HK * at.choice([1, 2, 3, 8]), HK),
        size=at.choice([16, 24, 64]),
        dtype=at.choice(DTYPES),
        layout=layout,
        new_in_cache=inside,
        float8=float8,
        listed=bool(layout) and at.random() < 0.2 and kernel == "extend",
        part=part,
        covers=at.choice(["", "", "all", "new"]),
        causal=at.random() < 0.8,
        windowed=at.random() < 0.5,
        softcap=at.random() < 0.3,
        sinks=part == "all" and at.random() < 0.4,
    )


def batch_of(kind: Kind, seed: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Arguments, options, and what they give in float64."""
    at = random.Random(seed)
    lengths = [at.choice([0, 1, 2, 31, 64, 65, 90]) for _ in range(at.choice([1, 2, 3]))]
    lengths[-1] = max(lengths[-1], 1)
    prefix = [at.choice([0, 1, 33, 64, 100, 129, 260]) * bool(kind.layout) for _ in lengths]
    starts = [at.choice([0, 0, 5, 64, 70]) for _ in lengths]
    gaps = [at.choice([0, 0, 1, 40, 128]) for _ in lengths]
    positions = [start + torch.arange(count) for start, count in zip(starts, prefix, strict=True)]
    if kind.listed:  # every other position
        positions = [2 * position for position in positions]
    query_start = [
        (int(position[-1]) + 1 if len(position) else start) + gap
        for position, start, gap in zip(positions, starts, gaps, strict=True)
    ]
    plan: dict[str, Any] = {"query_start": query_start, "mask_covers": kind.covers or "all"}
    plan |= {"key_positions": torch.cat(positions)} if kind.listed else {"key_start": starts}
    batch = draw(
        lengths, prefix, *kind.heads, kind.size, dtype=kind.dtype, seed=seed,
        query_start=query_start, positions=positions,
    )  # fmt: skip
    options: dict[str, Any] = {"causal": kind.causal, "part": kind.part}
    if kind.windowed:
        options["window"] = at.choice([1, 15, 64, 65, 128, 300])
    if kind.softcap:
        options["softcap"] = 5.0
    if kind.sinks:
        options["sinks"] = torch.linspace(-2, 2, kind.heads[0])
    rules = dict(options)
    if kind.covers:
        dice = torch.Generator().manual_seed(seed)
        columns = [p * (kind.covers == "all") + n for n, p in zip(lengths, prefix, strict=True)]
        rules["masks"] = [
            torch.rand(n, c, generator=dice) < at.choice([0.05, 0.5])
            for n, c in zip(lengths, columns, strict=True)
        ]
        rules["covers"] = kind.covers
        options["custom_mask"] = torch.cat([mask.flatten() for mask in rules["masks"]])
    if not kind.layout:
        return batch.arguments(**plan), options, expected(batch, **rules)
    held: dict[str, Any] = {}
    if kind.float8:
        batch = in_float8(batch)
        held = {"dtype": FP8, "k_scale": 0.25, "v_scale": 0.25}
    arguments = stored(batch, kind.layout, kind.new_in_cache, options=plan, **held)
    return arguments, options, expected(batch, **rules)


def in_float8(batch: Batch) -> Batch:
    """The batch with keys and values that a float8 cache with scales of 1/4 holds exactly."""
    rows = (batch.k, batch.v, batch.prefix_k, batch.prefix_v)
    rows = ((4 * x.float()).to(FP8).to(x.dtype) / 4 for x in rows)
    return Batch(
        batch.lengths, batch.prefix, batch.q, *rows, batch.query_start, batch.positions
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "seed"),
    [(kernel, seed) for kernel, count in DRAWS.items() for seed in range(0, count, SHARE)],
)
def test_bounded_loops_give_the_bits_of_unbounded_ones(monkeypatch, unbounded, kernel, seed):
    kind = kind_of(kernel, seed // BATCHES)
    arguments, options, want = batch_of(kind, seed)
    options["reproducible"] = kernel == "unified"
    found = run(kind.config, arguments, **options)
    module = importlib.import_module(f"{FOLDER}.{kernel}")
    monkeypatch.setattr(module, f"{kernel}_kernel", unbounded[kernel])
    every = run(kind.config, arguments, **options)
    assert torch.equal(found[0], every[0])
    assert torch.equal(found[1], every[1])
    expect_close(found, want, 2 * ROUNDING[kind.dtype])


def test_the_draws_reach_every_kind_of_call():
    """Whatever moves the bounds or how tiles are read, in each kernel that takes it."""
    for kernel, count in DRAWS.items():
        kinds = [kind_of(kernel, seed) for seed in range(count // BATCHES)]
        assert len(set(kinds)) == len(kinds)
        for name in ("new_in_cache", "float8", "causal", "windowed", "softcap", "sinks"):
            assert {getattr(kind, name) for kind in kinds} == {True, False}, (kernel, name)
        assert {kind.covers for kind in kinds} == {"", "all", "new"}
        assert {kind.part for kind in kinds} == {"all", "prefix", "extend"}
        assert {kind.layout for kind in kinds} == set(PLACES)
        assert {kind.listed for kind in kinds} == {False, kernel == "extend"}
