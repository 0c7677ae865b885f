"""Which keys a row sees: windows, prefixes, custom masks, positions, against the literal mask."""

from dataclasses import replace

import pytest
import torch
from tests.ops.extend_attention.oracle import INF, draw, expect_close, expected, tail

import headstart
from headstart import ExtendPlan, KVCache
from headstart.evidence.verify.tolerances import WIDE

WINDOWS = [1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, 1023, 4096, 10**9]
PREFIXES = [0, 1, 31, 63, 64, 65, 127, 128, 200, 255, 257]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_of_w_shows_w_keys_over_every_straddling_prefix(attend, window):
    batch = draw([70] * len(PREFIXES), PREFIXES, HQ=1, seed=window)
    for sinks in (None, torch.tensor([0.5])):
        found = attend(**batch.arguments(), window=window, sinks=sinks, return_lse=True)
        expect_close(found, expected(batch, window=window, sinks=sinks))


@pytest.mark.parametrize("part", ["all", "extend"])
@pytest.mark.parametrize("prefix", [0, 40])
def test_a_window_just_as_wide_as_everything(attend, prefix, part):
    batch = draw([50], [prefix], seed=2)
    everything = 50 + (prefix if part == "all" else 0)
    for window in (everything - 1, everything, everything + 1):
        found = attend(**batch.arguments(), window=window, part=part, return_lse=True)
        expect_close(found, expected(batch, window=window, part=part))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("window", [None, 1, 64, 100, 129])
def test_long_steps_cross_every_block_border(attend, window, reproducible):
    batch = draw([333, 65], [300, 1], HQ=2, HK=2, seed=3)
    found = attend(**batch.arguments(), window=window, reproducible=reproducible, return_lse=True)
    expect_close(found, expected(batch, window=window))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("window", [None, 100, 4200])
def test_steps_longer_than_one_span_of_the_scratch(window, reproducible):
    batch = draw([4133], [4100], HQ=1, D=8, seed=4)
    o, lse = headstart.extend_attention(
        **batch.arguments(), window=window, reproducible=reproducible, return_lse=True
    )
    for found in ((o, lse), (o[:4096], lse[:4096])):  # the end of the last span, and of the first
        end = found[0].shape[0]
        part = draw([4133], [4100], HQ=1, D=8, seed=4)
        part = replace(part, lengths=[end], q=part.q[:end], k=part.k[:end], v=part.v[:end])
        last = tail(part, 37)
        expect_close((found[0][-37:], found[1][-37:]), expected(last, window=window), rounding=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_window_of_one_gives_the_own_value(attend, implementation, dtype):
    """Bit for bit; but products of float32 in three parts leave two bits of a value out."""
    batch = draw([40], [30], dtype=dtype)
    o = attend(**batch.arguments(), window=1)
    parts = dtype == torch.float32 and implementation not in WIDE
    torch.testing.assert_close(o, batch.v.expand_as(o), rtol=2.0**-21 if parts else 0, atol=0)


def test_keys_out_of_the_window_are_never_touched(attend):
    """The cost cannot grow with the prefix if the far prefix is not even read."""
    batch = draw([70], [5000], seed=5)
    want = expected(batch, window=100)
    batch.prefix_k[:4500] = batch.prefix_v[:4500] = torch.nan
    for options in ({}, {"reproducible": True}, {"softcap": 1e6}):
        found = attend(**batch.arguments(), window=100, return_lse=True, **options)
        expect_close(found, want, rounding=1e-5)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("window", [None, 1, 30, 100])
def test_without_causality_all_keys_down_to_the_window(attend, window, reproducible):
    batch = draw([90, 1, 20], [40, 7, 0], seed=6)
    options = {"window": window, "causal": False}
    found = attend(**batch.arguments(), **options, reproducible=reproducible, return_lse=True)
    expect_close(found, expected(batch, **options))


def custom(batch, covers, seed=0, share=0.5):
    at = torch.Generator().manual_seed(seed)
    return [
        torch.rand(length, length + (prefix if covers == "all" else 0), generator=at) < share
        for length, prefix in zip(batch.lengths, batch.prefix, strict=True)
    ]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("covers", ["all", "new"])
@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize("causal", [True, False])
def test_a_custom_mask_may_look_ahead_and_the_window_still_applies(
    attend, covers, window, causal, reproducible
):
    batch = draw([140, 0, 1, 30], [50, 9, 0, 270], seed=7)
    masks = custom(batch, covers)
    flat = torch.cat([mask.flatten() for mask in masks])
    for dtype in (torch.bool, torch.uint8):
        found = attend(
            **batch.arguments(mask_covers=covers),
            custom_mask=flat.to(dtype),
            window=window,
            causal=causal,
            reproducible=reproducible,
            return_lse=True,
        )
        rules = {"covers": covers, "window": window, "causal": causal}
        expect_close(found, expected(batch, masks=masks, **rules))


def test_a_nonzero_byte_is_true(attend):
    batch = draw([3])
    mask = torch.tensor([2, 0, 0, 255, 1, 0, 7, 0, 9], dtype=torch.uint8)
    found = attend(**batch.arguments(), custom_mask=mask, return_lse=True)
    expect_close(found, expected(batch, masks=[mask.view(3, 3)]))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("sink", [0.0, -103.0, -150.0, -1e30, 80.0, -INF])
def test_a_row_without_keys_gives_zero_and_the_sink(attend, sink, reproducible):
    batch = draw([3, 2], [0, 4])
    masks = [torch.zeros(3, 3, dtype=torch.bool), torch.ones(2, 6, dtype=torch.bool)]
    sinks = torch.tensor([sink, sink])
    flat = torch.cat([mask.flatten() for mask in masks])
    found = attend(
        **batch.arguments(),
        custom_mask=flat,
        sinks=sinks,
        reproducible=reproducible,
        return_lse=True,
    )
    expect_close(found, expected(batch, masks=masks, sinks=sinks))
    assert torch.equal(found[0][:3], torch.zeros(3, 2, 16))
    assert torch.equal(found[1][:3], torch.full((3, 2), sink))


def test_rows_past_the_prefix_of_a_window_see_nothing(attend):
    """Zero trips: the window starts beyond the last key."""
    batch = draw([40], [10])
    o, lse = attend(**batch.arguments(), window=15, part="prefix")
    expect_close((o, lse), expected(batch, window=15, part="prefix"))
    assert torch.equal(lse[14:], torch.full((26, 2), -INF))
    assert torch.equal(o[14:], torch.zeros(26, 2, 16))


def test_the_sink_is_a_natural_logit_neither_scaled_nor_capped(attend):
    batch = draw([9], [3])
    sinks = torch.tensor([4.0, -2.0], dtype=torch.float64)
    options = {"scale": 0.01, "softcap": 0.5}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = attend(**batch.arguments(), sinks=sinks.to(dtype), return_lse=True, **options)
        expect_close(found, expected(batch, sinks=sinks, **options))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, 1.0, -0.3, 3])
def test_the_scale_is_the_callers_even_when_it_is_zero(attend, scale, reproducible):
    batch = draw([30, 2], [20, 0])
    found = attend(**batch.arguments(), scale=scale, reproducible=reproducible, return_lse=True)
    expect_close(found, expected(batch, scale=scale), rounding=1e-5)


@pytest.mark.parametrize("reproducible", [False, True])
def test_the_softcap_comes_after_the_scale_and_before_the_mask(attend, reproducible):
    batch = draw([150], [120], seed=8)
    options = {"softcap": 2.0, "window": 60, "scale": 1.5}
    found = attend(**batch.arguments(), reproducible=reproducible, return_lse=True, **options)
    expect_close(found, expected(batch, **options))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_a_trimmed_prefix_keeps_its_positions(attend, window, reproducible):
    """With the keys before position 180 dropped, a window of 100 sees what it saw before."""
    batch = draw([50, 8], [140, 20], seed=9, query_start=[320, 200])
    batch.positions[:] = [torch.arange(180, 320), torch.arange(180, 200)]
    found = attend(
        **batch.arguments(query_start=[320, 200], key_start=180),
        window=window,
        reproducible=reproducible,
        return_lse=True,
    )
    expect_close(found, expected(batch, window=window))
    # query_start follows from key_start and the prefix where the plan says nothing else.
    plan = ExtendPlan.from_lengths([50, 8], [140, 20], device="cpu", key_start=180)
    assert plan.query_start == [320, 200]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("window", [None, 90])
def test_a_contiguous_shard_of_the_prefix_leaves_a_gap(attend, window, reproducible):
    batch = draw([60], [100], seed=10, query_start=[230], positions=[torch.arange(64, 164)])
    found = attend(
        **batch.arguments(query_start=230, key_start=[64]),
        window=window,
        reproducible=reproducible,
        return_lse=True,
    )
    expect_close(found, expected(batch, window=window))


@pytest.mark.parametrize("part", ["all", "prefix"])
@pytest.mark.parametrize("window", [None, 200, 1300])
def test_interleaved_shards_take_their_positions_from_the_plan(attend, window, part):
    positions = [torch.arange(1, 2001, 2), torch.tensor([5, 3, 11])]
    batch = draw([70, 2], [1000, 3], seed=11, query_start=[2001, 8], positions=positions)
    packed = torch.cat(positions)
    for given in (packed, packed.to(torch.int32), packed.tolist()):
        found = attend(
            **batch.arguments(query_start=[2001, 8], key_positions=given),
            window=window,
            part=part,
            return_lse=True,
        )
        expect_close(found, expected(batch, window=window, part=part))


def test_prefix_keys_beyond_a_query_are_hidden_by_the_causal_rule(attend):
    batch = draw([20], [30], query_start=[10])
    found = attend(**batch.arguments(query_start=10), return_lse=True)
    expect_close(found, expected(batch))


@pytest.mark.parametrize("reproducible", [False, True])
def test_rows_past_the_last_length_are_zero_also_in_out(attend, reproducible):
    batch = draw([5, 3], [2, 4])
    arguments = batch.arguments()
    for name in ("q", "k", "v"):
        rows = arguments[name]
        arguments[name] = torch.cat([rows, torch.full_like(rows[:4], torch.nan)])
    want = expected(batch)
    fresh = attend(**arguments, reproducible=reproducible, return_lse=True)
    given = torch.full((12, 2, 16), 7.0), torch.full((12, 2), 7.0)
    found = attend(**arguments, reproducible=reproducible, return_lse=True, out=given)
    assert found[0] is given[0]
    assert found[1] is given[1]
    for o, lse in (fresh, found):
        expect_close((o[:8], lse[:8]), want)
        assert torch.equal(o[8:], torch.zeros(4, 2, 16))
        assert torch.equal(lse[8:], torch.full((4, 2), -INF))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(
    ("lengths", "prefix"),
    [([], []), ([0], [0]), ([0], [5]), ([0, 0], [0, 3]), ([0, 2], [3, 0])],
)
def test_empty_batches_and_sequences_are_legal(attend, lengths, prefix, reproducible):
    batch = draw(lengths, prefix)
    for window in (None, 2):
        found = attend(
            **batch.arguments(), window=window, reproducible=reproducible, return_lse=True
        )
        assert found[0].shape == (sum(lengths), 2, 16)
        if sum(lengths):
            expect_close(found, expected(batch, window=window))


def test_one_row_on_a_hundred_thousand(attend):
    batch = draw([1], [100_000], D=8, seed=12)
    for window in (None, 1, 128):
        found = attend(**batch.arguments(), window=window, return_lse=True)
        expect_close(found, expected(batch, window=window), rounding=1e-5)


def test_a_plan_without_a_cache_needs_none(attend):
    batch = draw([20, 5])
    plan = ExtendPlan.from_lengths([20, 5], device="cpu")
    found = attend(batch.q, batch.k, batch.v, plan=plan, return_lse=True)
    expect_close(found, expected(batch))
    empty = KVCache(torch.empty(0, 1, 16), torch.empty(0, 1, 16))
    again = attend(batch.q, batch.k, batch.v, plan=plan, cache=empty, return_lse=True)
    assert torch.equal(again[0], found[0])


def test_the_default_on_a_cpu_is_torch():
    batch = draw([20])
    rows = headstart.explain("extend_attention", **batch.arguments())
    assert [(name, accepted) for name, accepted, _ in rows] == [
        ("torch", True),
        ("triton", False),
        ("reference", True),
    ]
