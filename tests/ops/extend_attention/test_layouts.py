"""Sums over a row are taken in one order whatever a call switches on: cross-compiled, no GPU."""

import re

import pytest
from tests.implementations import KERNELS

from headstart.runtime.static import TARGETS

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(KERNELS, reason="compiles, which the interpreter's process cannot")

SUM = re.compile(r"arith\.addf .*\n.*tt\.reduce\.return .*\n.*\(tensor<\d+x\d+xf32, (#\w+)>\) -> ")
"""A reduction by addition; where a maximum is taken does not matter."""


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
@pytest.mark.parametrize("switch", ["", "-mask", "-win", "-fp8"])
def test_the_reproducible_kernel_reduces_scores_where_products_leave_them(target, switch):
    """A custom mask once moved the sums into the layout in which its entries are loaded."""
    from headstart.evidence.static.worker import compile_kernel
    from headstart.ops.extend_attention.triton.static import kernels

    name = f"unified-D64-bf16{switch}"
    (kernel,) = [kernel for kernel in kernels(TARGETS[target]) if kernel.name == name]
    code = compile_kernel(kernel, TARGETS[target]).asm["ttgir"]
    layouts = SUM.findall(code)
    assert len(layouts) >= 2
    assert set(layouts) == {"#mma"}
