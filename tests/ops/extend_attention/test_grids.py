"""The size of a launch changes nothing: few processors, or more blocks than most devices hold."""

import pytest
import torch
from tests.implementations import DEVICE, KERNELS, by_name
from tests.ops.extend_attention.oracle import ROUNDING, draw, expect_close, expected
from tests.ops.extend_attention.test_caches import stored
from tests.ops.extend_attention.test_kernels import run

import headstart

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


KINDS = {
    "full": ({}, None),
    "window": ({"window": 60}, None),
    "window, scattered keys": ({"window": 60}, "slots"),
    "mask": ({}, "pages of 64"),
    "reproducible": ({"reproducible": True}, "pages of 64"),
    "reproducible, window": ({"reproducible": True, "window": 60}, None),
}
"""What a configuration is chosen by besides sizes and dtype -> options, and where a prefix lies."""


@pytest.mark.skipif(DEVICE == "cpu", reason="as many programs take minutes in the interpreter")
@pytest.mark.parametrize("size", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_configuration_over_a_thousand_blocks(size, dtype, kind):
    """As the device's rule or table has it; a program for each sequence and head at least."""
    options, layout = KINDS[kind]
    prefix = [(0, 130, 7, 64)[n % 4] for n in range(40)] if layout else None
    batch = draw([(1, 33, 70)[n % 3] for n in range(40)], prefix, 28, 28, size, dtype=dtype, seed=6)
    arguments = stored(batch, layout, False) if layout else batch.arguments()
    rules = {name: value for name, value in options.items() if name != "reproducible"}
    if kind == "mask":
        at = torch.Generator().manual_seed(6)
        sizes = zip(batch.lengths, batch.prefix, strict=True)
        rules["masks"] = [torch.rand(n, p + n, generator=at) < 0.5 for n, p in sizes]
        options = {"custom_mask": torch.cat([mask.flatten() for mask in rules["masks"]])}
    attend = by_name(headstart.extend_attention, "triton")
    found = attend(**arguments, **options, return_lse=True)
    # Matrix units cut sums of float32 products off, a little every 8 channels.
    lse_error = 1e-6 * max(1, size / 128)
    expect_close(found, expected(batch, **rules), max(2 * ROUNDING[dtype], 1e-5), lse_error)
