"""Sums over a row are taken in one order whatever a call switches on: cross-compiled, no GPU."""

import re

import pytest
from tests.implementations import KERNELS

from headstart.runtime.static import TARGETS

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(KERNELS, reason="compiles, which the interpreter's process cannot")

SUM = re.compile(r"arith\.addf .*\n.*tt\.reduce\.return .*\n.*\(tensor<\d+x\d+xf32, (#\w+)>\) -> ")
"""A reduction by addition; where a maximum is taken does not matter."""

PRODUCT = r"{} = #ttg\.nvidia_mma<\{{(.*), warpsPerCTA = \[(\d+), (\d+)\],(.*)\}}>"
PARKED = re.compile(r"tt\.(load|store) .*tensor<(\d+)x512x!tt\.ptr<f32>, (#\w+)>")
"""Loads and stores of sums [BDV / 8, BM * 8] of tiles of 64 rows: which, rows, layout."""
SCATTERED = ("", "-pages")


def compiled(name, target):
    """The code that shows layouts, and warps, of a program of `headstart static`."""
    from headstart.evidence.static.worker import compile_kernel
    from headstart.ops.extend_attention.triton.static import kernels

    (kernel,) = [kernel for kernel in kernels(TARGETS[target]) if kernel.name == name]
    return compile_kernel(kernel, TARGETS[target]).asm["ttgir"], kernel.num_warps


def product(code):
    """How products that are summed lie: all but the warps, then warps along rows and along keys."""
    (name,) = set(SUM.findall(code))
    (found,) = re.findall(PRODUCT.format(name), code)
    before, rows, keys, behind = found
    return (before, behind), rows, keys


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
@pytest.mark.parametrize("switch", ["", "-mask", "-win", "-fp8"])
def test_the_reproducible_kernel_reduces_scores_where_products_leave_them(target, switch):
    """A custom mask once moved the sums into the layout in which its entries are loaded."""
    code, _ = compiled(f"unified-D64-bf16{switch}", target)
    layouts = SUM.findall(code)
    assert len(layouts) >= 2
    assert set(layouts) == {"#mma"}


def test_rows_of_scattered_keys_are_summed_as_all_others():
    """More rows to a tile and more warps, each of which takes whole rows of the same product."""
    (code, warps), (other, more) = (compiled(f"unified-D128-bf16{x}", "cuda:90") for x in SCATTERED)
    assert (warps, more) == (4, 8)
    (first, rows, keys), (second, more_rows, more_keys) = map(product, (code, other))
    assert first == second
    assert (rows, more_rows, keys, more_keys) == ("4", "8", "1", "1")


@pytest.mark.parametrize("name", ["unified-D128-bf16", "unified-D128-mqa-bf16"])
def test_a_loop_that_runs_through_the_ends_of_blocks_parks_nothing(name):
    code, _ = compiled(name, "cuda:90")
    assert not PARKED.search(code)


def test_sums_are_parked_as_threads_hold_them():
    """Whole where a block ends and in parts where it is joined: no sum goes to another thread."""
    code, _ = compiled("unified-D128-bf16-decode", "cuda:90")
    stored = set(PARKED.findall(code))
    assert {kind for kind, *_ in stored} == {"load", "store"}
    assert {rows for _, rows, _ in stored} == {"4", "16"}
    (layout,) = {found for *_, found in stored}
    (lies,) = re.findall(rf"{layout} = #ttg\.blocked<\{{(.*)\}}>", code)
    assert lies.startswith("sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4]")
