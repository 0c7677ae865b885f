"""Ways of the same sums: orders of a loop's turn, rows read in parts, queries read again."""

from unittest import mock

import pytest
import torch
from tests.implementations import DEVICE, KERNELS
from tests.ops.extend_attention.oracle import ROUNDING, draw, expect_close, expected
from tests.ops.extend_attention.test_kernels import run

from headstart import ExtendPlan, KVCache

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not KERNELS, reason="kernels run in the interpreter or on a GPU"),
]

PAGE = 32
HALF = torch.float16


def patched(name, found):
    """A function of the configuration as `call.py` sees it, with another result."""
    from headstart.ops.extend_attention.triton import call as kernels

    return mock.patch.object(kernels, name, return_value=found)


def in_pages(batch, prefix):
    """The arguments of a batch with one sequence whose prefix lies in shuffled pages."""
    pages = -(-(prefix + len(batch.q)) // PAGE)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[None].to(torch.int32)
    caches = []
    for old in (batch.prefix_k, batch.prefix_v):
        cache = torch.full((pages, PAGE, *old.shape[1:]), torch.nan, dtype=old.dtype)
        for page in range(-(-prefix // PAGE)):
            rows = old[page * PAGE : (page + 1) * PAGE]
            cache[table[0, page], : len(rows)] = rows
        caches.append(cache)
    total = prefix + len(batch.q)
    plan = ExtendPlan.from_pages([len(batch.q)], [total], table, PAGE, new_in_cache=False)
    return {"q": batch.q, "k": batch.k, "v": batch.v, "plan": plan, "cache": KVCache(*caches)}


@pytest.mark.parametrize("layout", ["rows", "pages"])
@pytest.mark.parametrize("options", [{}, {"window": 50}], ids=str)
def test_every_order_of_a_turn_has_the_same_bits(options, layout):
    """On prefixes of less than a tile, of whole tiles, and of one key more."""
    prefixes = (20, 64, 97) if layout == "rows" else (97,)
    batch = draw([24] * len(prefixes), prefixes, 4, 2, 64, dtype=HALF, seed=1)
    arguments = in_pages(batch, 97) if layout == "pages" else batch.arguments()
    found = []
    for order in ("", "early", "late", "ahead"):
        with patched("order", order):
            found.append(run((64, PAGE, 64), arguments, **options))
    expect_close(found[0], expected(batch, **options), 2 * ROUNDING[HALF])
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0])
        assert torch.equal(found[0][1], other[1])


@pytest.mark.parametrize("layout", ["rows", "pages"])
def test_a_loop_that_runs_through_the_ends_of_blocks_has_the_same_bits(layout):
    """Blocks of two tiles: joined one by one, while the loop runs, and by a launch behind it.

    "late" runs through their ends, the others end each. On a prefix that ends within a tile, with
    one, between tiles of a block and between blocks.
    """
    for prefix in (20, 64, 97, 128):
        if layout == "rows":
            batch = draw([prefix + 40], [0], 4, 2, 64, dtype=HALF, seed=1)
            arguments = batch.arguments()
        else:
            batch = draw([150], [prefix], 4, 2, 64, dtype=HALF, seed=1)
            arguments = in_pages(batch, prefix)
        found = []
        for order, at_once in (("", 3), ("late", 3), ("late", 64)):
            with patched("order", order):
                found.append(run((64, PAGE, 64), arguments, at_once, reproducible=True))
        expect_close(found[0], expected(batch), 2 * ROUNDING[HALF])
        for other in found[1:]:
            assert torch.equal(found[0][0], other[0])
            assert torch.equal(found[0][1], other[1])


@pytest.mark.parametrize("layout", ["rows", "pages"])
@pytest.mark.parametrize(("D", "DV", "options"), [(192, 128, {}), (320, 64, {"window": 50})])
def test_rows_that_are_read_in_parts(D, DV, options, layout):
    """Through descriptors and, behind the last whole tile, key by key."""
    from headstart.ops.extend_attention.triton.config import columns

    assert columns(D, HALF, "cuda:90").parts == D // 64
    batch = draw([24], [100], 4, 2, D, DV, dtype=HALF, seed=2)
    arguments = in_pages(batch, 100) if layout == "pages" else batch.arguments()
    found = run((64, PAGE, 64), arguments, **options)
    expect_close(found, expected(batch, **options), 2 * ROUNDING[HALF])


@pytest.mark.skipif(DEVICE != "cpu", reason="no GPU but AMD's RDNA reads queries again")
@pytest.mark.parametrize("layout", ["rows", "pages"])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(
    ("D", "options"), [(512, {}), (100, {"window": 50}), (100, {"softcap": 4.0})]
)
def test_queries_that_are_read_again(D, options, reproducible, layout):
    from headstart.ops.extend_attention.triton.config import Columns, columns

    assert columns(512, HALF, "hip:gfx1151") == Columns(64, 8, again=True)
    sizes = ([24], [100]) if layout == "pages" else ([24, 5], [100, 32])
    batch = draw(*sizes, 4, 2, D, 64, dtype=HALF, seed=2)
    arguments = in_pages(batch, 100) if layout == "pages" else batch.arguments()
    read = Columns(64, -(-D // 64), again=True)
    with patched("columns", read), patched("reads_descriptors", False):
        found = run((64, 32, 64), arguments, reproducible=reproducible, **options)
    expect_close(found, expected(batch, **options), 2 * ROUNDING[HALF])
