"""Blackwell's tensor memory is small, and what does not fit there compiles to a trap: no GPU."""

import pytest
import torch
from tests.implementations import KERNELS

from headstart.runtime.static import TARGETS

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(KERNELS, reason="compiles, which the interpreter's process cannot")

COLUMNS = 512
"""Of 32 bits, in each of the 128 lanes of a multiprocessor."""

FLOAT = torch.float32


@pytest.mark.parametrize(
    ("K", "name"),
    [
        (64, "scan"),
        (64, "prepare"),
        (128, "scan"),
        (128, "scan_channels"),
        (128, "scan_maps"),
        (256, "prepare"),
    ],
)
def test_products_of_float32_fit_in_tensor_memory(K, name):
    """Each is three, and each of those three has sums of its own there."""
    from headstart.evidence.static.worker import compile_kernel
    from headstart.ops.gated_delta_rule.triton.static import kernels

    target = TARGETS["cuda:100"]
    (kernel,) = [
        kernel
        for kernel in kernels(target, [(K, K, FLOAT)])
        if kernel.name == f"{name}-K{K}-V{K}-fp32"
    ]
    assert compile_kernel(kernel, target).metadata.tmem_size <= COLUMNS
