"""Cached keys that are copied row by row are configured apart, with the bits of all others."""

from dataclasses import asdict
from unittest import mock

import pytest
import torch
from tests.implementations import DEVICE, KERNELS
from tests.on_device import on_device
from tests.ops.extend_attention.oracle import draw

import headstart
from headstart import ExtendPlan, KVCache
from headstart.ops.extend_attention.triton import call as kernels
from headstart.ops.extend_attention.triton.config import Config, configuration, kind_of
from headstart.runtime import dispatch
from headstart.runtime.static import TARGETS
from headstart.runtime.table_files import Key, order_of_sums
from headstart.runtime.tables import using

pytest.importorskip("triton")


@pytest.mark.skipif(KERNELS, reason="launches nothing")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_rule_sums_scattered_keys_in_the_order_of_others(
    target, sizes, dtype, windowed, masked
):
    plain, scattered = (
        configuration(
            *sizes, dtype, windowed=windowed, scattered=scattered, masked=masked,
            reproducible=True, target=target,
        )
        for scattered in (False, True)
    )  # fmt: skip
    assert order_of_sums(asdict(plain)) == order_of_sums(asdict(scattered))
    own = (64,) if windowed else (80, 128)
    known = kind_of(target) == "hopper" and max(sizes) in own and dtype == torch.bfloat16
    assert (plain != scattered) == (known and not masked)


def stored(batch, page_size, new_in_cache):
    """The keys of one sequence in a cache of shuffled pages, or of shuffled slots (1)."""
    T = batch.lengths[0]
    pages = -(-T // page_size)
    table = torch.randperm(pages + 3, generator=torch.Generator().manual_seed(page_size))[:pages]
    shape = (pages + 3, page_size, *batch.k.shape[1:])
    cache = KVCache(*(torch.full(shape, torch.nan, dtype=batch.k.dtype) for _ in "kv"))
    position = torch.arange(T)
    slots = table[position // page_size] * page_size + position % page_size

    def write(begin, end):
        k, v = batch.k[begin:end], batch.v[begin:end]
        headstart.write_kv(k, v, cache, slots[begin:end], implementation="torch")

    def step(begin, end, options):
        rows = slice(begin, end)
        if new_in_cache:
            write(begin, end)
        plan = ExtendPlan.from_pages(
            [end - begin], [end], table[None], page_size, new_in_cache=new_in_cache
        )
        k, v = (None, None) if new_in_cache else (batch.k[rows], batch.v[rows])
        found = attend(batch.q[rows], k, v, plan=plan, cache=cache, **options)
        if not new_in_cache:
            write(begin, end)
        return found

    return step


def attend(q, k, v, **options):
    """The operation by these kernels, asked for its configuration each time."""

    def call(**given):
        operation, bound, _ = dispatch.bound("extend_attention", (), given)
        return dispatch.run(operation, bound, "triton")

    given = {"q": q, "k": k, "v": v, "reproducible": True, "return_lse": True} | options
    return call(**given) if DEVICE == "cpu" else on_device(torch.device(DEVICE), call, **given)


def rows(dtype, windowed, plain, scattered):
    """Configurations of the key without switches, and of those for scattered keys."""
    key = Key("extend_attention", "unified", (64, 64), dtype, windowed=windowed)
    own = [("scattered",), ("scattered", "few")]
    return {key: plain} | {key._replace(switches=switches): scattered for switches in own}


@pytest.mark.kernels
@pytest.mark.skipif(not KERNELS, reason="kernels run in the interpreter or on a GPU")
@pytest.mark.parametrize("options", [{}, {"window": 50}], ids=str)
@pytest.mark.parametrize(("page_size", "new_in_cache"), [(1, True), (16, False), (64, True)])
def test_more_rows_and_warps_give_the_same_bits(options, page_size, new_in_cache):
    """Packed prompts in tiles of 64 rows against steps from pages in tiles of 128."""
    dtype, length, BN = torch.float16, 200, 64
    batch = draw([length], None, 8, 2, 64, dtype=dtype, seed=3)
    own = Config(64, BN, 2, 4, piece=128, resident=2)
    wide = Config(128, BN, 3, 8, piece=128)
    options = options | {"sinks": torch.linspace(-2, 2, 8)}
    plan = ExtendPlan.from_lengths([length], device="cpu")
    with (
        using(rows(dtype, "window" in options, own, wide)),
        mock.patch.object(kernels, "start", wraps=kernels.start) as launches,
    ):
        want = attend(batch.q, batch.k, batch.v, plan=plan, **options)
        assert own in (launch.args[3] for launch in launches.mock_calls)
        launches.reset_mock()
        step = stored(batch, page_size, new_in_cache)
        for begin, end in ((0, 100), (100, 101), (101, 192), (192, length)):
            found = step(begin, end, options)
            assert torch.equal(found[0], want[0][begin:end])
            assert torch.equal(found[1], want[1][begin:end])
        tiles = {launch.args[3] for launch in launches.mock_calls} & {own, wide}
        # Tiles of 64 keys fill such pages, which are then read as packed keys are.
        assert tiles == ({own} if page_size == 64 else {wide})
