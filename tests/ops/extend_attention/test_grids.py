"""The size of a launch changes nothing: few processors, or more blocks than most devices hold."""

import pytest
import torch
from tests.implementations import KERNELS
from tests.ops.extend_attention.oracle import draw, expect_close, expected
from tests.ops.extend_attention.test_kernels import run

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not KERNELS, reason="kernels run in the interpreter or on a GPU"),
]


def test_a_smaller_device_gives_the_same_bits():
    """Fewer programs take more tiles each, to and fro; a part of a device is such a one."""
    batch = draw([130, 1, 40], [100, 200, 0], 4, 2, 16, seed=1)
    first, *others = (
        run((16, 16, 64), batch.arguments(), programs, reproducible=True)
        for programs in (1, 3, 1000)
    )
    expect_close(first, expected(batch))
    for other in others:
        assert torch.equal(other[0], first[0])
        assert torch.equal(other[1], first[1])


@pytest.mark.parametrize("reproducible", [False, True])
def test_more_than_a_thousand_blocks(reproducible):
    """Configurations have failed at such grids alone."""
    batch = draw([1, 0] * 520, [0, 1, 3, 5] * 260, 1, 1, 16, seed=2)
    found = run((16, 16, 64), batch.arguments(), reproducible=reproducible)
    expect_close(found, expected(batch))
