"""Loops over the tiles that `visible` names give the bits of loops over all tiles.

The other build is this package's source with its bounds taken out, so that both know one thing
alone by other means: which tiles hold a key that some row sees.
"""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
from tests.implementations import INTERPRETED, KERNELS
from tests.ops.extend_attention.oracle import ROUNDING, draw, expect_close, expected
from tests.ops.extend_attention.test_kernels import run

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not KERNELS, reason="kernels run in the interpreter or on a GPU"),
]

FOLDER = "headstart.ops.extend_attention.triton"
UNBOUNDED = {
    "extend": (
        ("tl.maximum(lower // BN, limits[0])", "limits[0]"),
        ("tl.minimum((upper + BN - 1) // BN,", "tl.minimum(tl.cdiv(count, BN),"),
        ("    end = tl.where(lower < upper, end, begin)\n", ""),
    ),
    "unified": (
        (
            "upper = tl.where(old_seen | new_seen, upper, lower)",
            """upper = tl.maximum(old_run[0] + old_run[1], new_run[0] + new_run[1])
            lower = tl.where(old_run[1] > 0, old_run[0], new_run[0])""",
        ),
    ),
}  # fmt: skip
"""Kernel -> what takes its bounds out."""
DRAWS = {"extend": 139, "unified": 68}
SHARE = 12 if INTERPRETED else 1
"""One of how many draws runs: the interpreter is slow."""


@pytest.fixture(scope="module")
def unbounded(tmp_path_factory):
    """Kernel -> its build without bounds."""
    found = {}
    for name, edits in UNBOUNDED.items():
        module = importlib.import_module(f"{FOLDER}.{name}")
        source = Path(module.__file__).read_text()
        for old, new in edits:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        path = tmp_path_factory.mktemp("unbounded") / f"{name}_unbounded.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        built = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = built
        spec.loader.exec_module(built)
        found[name] = getattr(built, f"{name}_kernel")
    return found


def drawn(seed):
    """A configuration, a batch and options that fit each other."""
    at = random.Random(seed)
    lengths = [at.choice([0, 1, 2, 31, 64, 65, 90]) for _ in range(at.choice([1, 2, 3]))]
    prefix = [at.choice([0, 1, 33, 64, 100, 129, 260]) for _ in lengths]
    HK = at.choice([1, 2])
    HQ, D = HK * at.choice([1, 2, 3, 8]), at.choice([16, 24, 64])
    dtype = at.choice([torch.float32, torch.float16])
    options = {"causal": at.random() < 0.8}
    if at.random() < 0.5:
        options["window"] = at.choice([1, 15, 64, 65, 128, 300])
    if at.random() < 0.3:
        options["softcap"] = 5.0
    if at.random() < 0.3:
        options["sinks"] = torch.linspace(-2, 2, HQ)
    config = at.choice([(64, 32, 64), (128, 64, 128), (64, 64, 256)])
    return config, draw(lengths, prefix, HQ, HK, D, dtype=dtype, seed=seed), options


@pytest.mark.parametrize(
    ("kernel", "seed"),
    [(kernel, seed) for kernel, count in DRAWS.items() for seed in range(0, count, SHARE)],
)
def test_bounded_loops_give_the_bits_of_unbounded_ones(monkeypatch, unbounded, kernel, seed):
    config, batch, options = drawn(seed)
    arguments = batch.arguments()
    reproducible = kernel == "unified"
    found = run(config, arguments, reproducible=reproducible, **options)
    module = importlib.import_module(f"{FOLDER}.{kernel}")
    monkeypatch.setattr(module, f"{kernel}_kernel", unbounded[kernel])
    every = run(config, arguments, reproducible=reproducible, **options)
    assert torch.equal(found[0], every[0])
    assert torch.equal(found[1], every[1])
    expect_close(found, expected(batch, **options), 2 * ROUNDING[found[0].dtype])
