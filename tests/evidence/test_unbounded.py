"""The arm of attention's kernels without bounds: what is taken out, what it says, where it runs."""

from pathlib import Path

import pytest
import torch

import headstart
from headstart.evidence import cases
from headstart.evidence.arms.sources import Sources
from headstart.evidence.arms.unbounded import EDITS, tiling, without_bounds
from headstart.evidence.benching import bench_case
from headstart.evidence.timing import Ceilings

SOURCE = Path(headstart.__file__).parent


def test_bounds_are_taken_out_of_both_kernels_and_of_nothing_else():
    changed = set()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if without_bounds(name, path.read_text()) != path.read_text():
            changed.add(name)
    assert changed == {f"ops/extend_attention/triton/{name}.py" for name in EDITS}


def test_a_kernel_that_has_changed_is_told():
    with pytest.raises(ValueError, match=r"unbounded: expected .* once in ops/.*/extend.py"):
        without_bounds("ops/extend_attention/triton/extend.py", "end = tl.cdiv(count, BN)")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("gdn-1x1-small", "bounds are those of attention's kernels"),
        ("oss-512-on-512-win-small", "only in Triton's interpreter"),
    ],
)
def test_it_declines_what_has_no_bounds_and_where_no_kernel_runs(case, says):
    with Sources(["torch", "unbounded"]) as sources:
        result = bench_case(
            cases.get(case), ["torch", "unbounded"], sources, device=torch.device("cpu"),
            rounds=3, noise_floor=False, ceilings=Ceilings(copy_rate=1e9, matmul_rate=1e10),
        )  # fmt: skip
    first, other = result.arms
    assert (first.status, other.status) == ("timed", "declined")
    assert says in other.sentence


def test_only_two_kinds_of_it_are_known():
    with pytest.raises(ValueError, match="after unbounded:, got 'unbounded:torch'"):
        Sources(["unbounded:torch"])


def test_its_tiles_are_those_of_the_kernel():
    case = cases.get("oss-16k-win")
    for reproducible in (False, True):
        rows, keys = tiling(case, torch.device("meta"), reproducible=reproducible)
        assert rows * case.HQ // case.HK == 64
        assert keys == 32
