"""What is particular to the kernels: small tiles and blocks, pieces, scratch, tables in place."""

from unittest import mock

import pytest
import torch
from tests.implementations import DEVICE, KERNELS
from tests.on_device import on_device
from tests.ops.extend_attention.oracle import ROUNDING, draw, expect_close, expected

import headstart
from headstart import ExtendPlan, KVCache, Workspace
from headstart.ops.extend_attention import spec

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not KERNELS, reason="kernels run in the interpreter or on a GPU"),
]

CONFIGS = [(64, 32, 64), (128, 64, 128), (16, 16, 32)]
"""Rows and keys of a tile, and keys of a piece or block: small, so that few keys cross borders."""


def run(config, arguments, at_once=None, **options):
    """One call in a configuration of one's own; at_once: programs that the device holds."""
    from headstart.ops.extend_attention.triton import call as kernels
    from headstart.ops.extend_attention.triton.config import Config

    BM, BN, piece = config
    given = {
        "cache": None, "scale": None, "window": None, "sinks": None, "softcap": None,
        "custom_mask": None, "causal": True, "part": "all", "return_lse": True,
        "reproducible": False, "workspace": None, "out": None,
    } | arguments | options  # fmt: skip

    def call(**given):
        bound = spec.bind(**given)
        if sentence := kernels.declines(bound):
            pytest.skip(sentence)
        own = Config(BM, BN, 1, 4, piece, resident=at_once or 3)
        with (
            mock.patch.object(kernels, "configured", return_value=own),
            mock.patch.object(kernels, "processors", return_value=1),
        ):
            return kernels.run(bound)

    return call(**given) if DEVICE == "cpu" else on_device(torch.device(DEVICE), call, **given)


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_call_without_rows_takes_no_scratch(reproducible):
    batch = draw([0, 0], [50, 300], 2, 1, 16, seed=3)

    def told_and_taken(**given):
        workspace = Workspace(given["q"].device)
        told = headstart.workspace_bytes("extend_attention", **given)
        o = headstart.extend_attention(**given, workspace=workspace)
        return told, workspace.bytes, o.shape

    given = {**batch.arguments(), "reproducible": reproducible, "implementation": "triton"}
    found = (
        told_and_taken(**given)
        if DEVICE == "cpu"
        else on_device(torch.device(DEVICE), told_and_taken, **given)
    )
    assert found == (0, 0, (0, 2, 16))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"causal": False}], ids=str)
def test_values_over_the_borders_of_tiles_and_blocks(config, reproducible, options):
    batch = draw([90, 0, 1, 7], [100, 5, 333, 64], 6, 2, 16, 24, seed=1)
    sinks = None if options else torch.linspace(-2, 2, 6)
    found = run(config, batch.arguments(), reproducible=reproducible, sinks=sinks, **options)
    expect_close(found, expected(batch, sinks=sinks, **options))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": False}], ids=str)
def test_cutting_the_last_tiles_changes_no_value_and_no_promised_bit(reproducible, options):
    config, rows = CONFIGS[0], 8
    batch = draw([20, 3], [70, 90], 2 * rows, 2, 16, 24, seed=4)
    sinks = torch.linspace(-2, 2, 2 * rows)
    # Three tiles of two blocks of heads: full rounds, and less than half a round.
    full, half = (
        run(config, batch.arguments(), at_once, reproducible=reproducible, sinks=sinks, **options)
        for at_once in (2, 14)
    )
    expect_close(half, expected(batch, sinks=sinks, **options))
    for whole, cut in zip(full, half, strict=True):
        assert torch.equal(whole, cut) == reproducible


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("new_in_cache", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (5, 1)])
def test_bits_of_whole_prefills_steps_and_decodes_over_many_blocks(config, new_in_cache, heads):
    length = 150
    batch = draw([length], None, *heads, 64, seed=2)
    plan = ExtendPlan.from_lengths([length], device="cpu")
    options = {"reproducible": True, "sinks": torch.linspace(-2, 2, heads[0])}
    want = run(config, {"q": batch.q, "k": batch.k, "v": batch.v, "plan": plan}, **options)
    table = torch.tensor([[3, 0, 4, 1, 2]])
    cache = KVCache(*(torch.full((5, 32, heads[1], 64), torch.nan) for _ in "kv"))
    for begin, end in ((0, 63), (63, 64), (64, 129), (129, 131), (131, length)):
        rows = slice(begin, end)
        position = torch.arange(begin, end)
        slots = table[0, position // 32] * 32 + position % 32
        plan = ExtendPlan.from_pages([end - begin], [end], table, 32, new_in_cache=new_in_cache)
        step = {"q": batch.q[rows], "k": batch.k[rows], "v": batch.v[rows]}
        if new_in_cache:
            headstart.write_kv(batch.k[rows], batch.v[rows], cache, slots, implementation="torch")
            step |= {"k": None, "v": None}
        found = run(config, {**step, "plan": plan, "cache": cache}, **options)
        if not new_in_cache:
            headstart.write_kv(batch.k[rows], batch.v[rows], cache, slots, implementation="torch")
        assert torch.equal(found[0], want[0][rows])
        assert torch.equal(found[1], want[1][rows])


@pytest.mark.parametrize("options", [{}, {"window": 150}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("pages", [1, 2])
def test_tiles_of_one_page_and_of_two(options, pages):
    batch = draw([40, 1], [200, 170], 4, 2, 64, dtype=torch.float16, seed=4)
    table = torch.tensor([[3, 9, 1, 7, 0, 12, 5], [8, 2, 11, 6, 4, 10, -1]])
    cache = KVCache(*(torch.full((13, 32, 2, 64), torch.nan, dtype=torch.float16) for _ in "kv"))
    for n, begin, prefix in ((0, 0, 200), (1, 200, 170)):
        position = torch.arange(prefix)
        slots = table[n, position // 32] * 32 + position % 32
        rows = slice(begin, begin + prefix)
        k, v = batch.prefix_k[rows], batch.prefix_v[rows]
        headstart.write_kv(k, v, cache, slots, implementation="torch")
    plan = ExtendPlan.from_pages([40, 1], [240, 171], table, 32, new_in_cache=False)
    arguments = {"q": batch.q, "k": batch.k, "v": batch.v, "plan": plan, "cache": cache}
    found = run((64, 32 * pages, 128), arguments, **options)
    expect_close(found, expected(batch, **options), 2 * ROUNDING[torch.float16])


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("new_in_cache", [False, True])
@pytest.mark.parametrize(("page", "BN"), [(1, 32), (16, 64), (32, 64)])
def test_nothing_is_read_of_pages_that_every_window_has_left(page, BN, new_in_cache, reproducible):
    """Another sequence may own them by now, and no weight of 0 makes up for a NaN."""
    prefix, new, window = 237, 24, 50
    pages, left = -(-(prefix + new) // page), (prefix - window + 1) // page
    assert left * page > (prefix - window) // BN * BN  # within a tile that some row sees
    batch = draw([new], [prefix], 4, 2, 64, dtype=torch.float16, seed=5)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    cache = KVCache(*(torch.full((pages, page, 2, 64), torch.nan).half() for _ in "kv"))
    position = torch.arange(prefix + new)
    slots = table[position // page] * page + position % page
    own = slice(left * page, prefix + (new if new_in_cache else 0))
    k, v = torch.cat([batch.prefix_k, batch.k]), torch.cat([batch.prefix_v, batch.v])
    headstart.write_kv(k[own], v[own], cache, slots[own], implementation="torch")
    plan = ExtendPlan.from_pages(
        [new], [prefix + new], table[None], page, new_in_cache=new_in_cache
    )
    arguments = {"q": batch.q, "k": batch.k, "v": batch.v, "plan": plan, "cache": cache}
    if new_in_cache:
        arguments |= {"k": None, "v": None}
    found = run((64, BN, 128), arguments, window=window, reproducible=reproducible)
    expect_close(found, expected(batch, window=window), 2 * ROUNDING[torch.float16])


def test_scratch_is_what_workspace_bytes_says():
    batch = draw([1, 3, 80], [3000, 2100, 10], 4, 2, 64, seed=3)
    arguments = batch.arguments() | {"implementation": "triton"}
    device = torch.device(DEVICE)
    workspace = Workspace(device)

    def measured(**given):
        told = headstart.workspace_bytes("extend_attention", **given)
        headstart.extend_attention(**given, workspace=workspace)
        assert workspace.bytes == told
        return told

    told = measured(**arguments) if DEVICE == "cpu" else on_device(device, measured, **arguments)
    # Three and three pieces of 1024 keys: a state of each of the four rows.
    assert told == (3 * 1 + 3 * 3) * 4 * (64 + 2) * 4


def test_an_updated_plan_serves_the_launch_of_another():
    """Steps, decodes, empty batches: what a captured graph would read after each update."""
    room = (3, 70, 5000)
    table = torch.arange(3 * 100).view(3, 100)
    cache = KVCache(*(torch.randn(300, 16, 2, 64) for _ in "kv"))
    plan = ExtendPlan.from_pages([1], [1], table[:1], 16, new_in_cache=True, capacity=room)
    q = torch.randn(70, 4, 64)
    at = {"k": None, "v": None, "cache": cache}
    for lengths, total in (([1], [1500]), ([60, 1, 0], [90, 1300, 5]), ([], []), ([2], [2])):
        plan.update_(lengths, total, table[: len(lengths)], 16, new_in_cache=True)
        fresh = ExtendPlan.from_pages(lengths, total, table[: len(lengths)], 16, new_in_cache=True)
        for reproducible in (False, True):
            found, want = (
                run((64, 32, 512), {"q": q, "plan": p, **at}, reproducible=reproducible)
                for p in (plan, fresh)
            )
            assert torch.equal(found[0], want[0])
            assert torch.equal(found[1], want[1])
            assert not found[0][sum(lengths) :].any()
