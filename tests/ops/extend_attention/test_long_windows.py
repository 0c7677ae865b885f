"""A window of many keys: rows are cut into pieces, of which only those that they see are listed."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.implementations import DEVICE, KERNELS, by_name
from tests.on_device import on_device
from tests.ops.extend_attention.oracle import ROUNDING, draw, expect_close, expected
from tests.ops.extend_attention.test_bits import Steps, equal, whole
from tests.ops.extend_attention.test_caches import stored
from tests.ops.extend_attention.test_kernels import run

import headstart
from headstart import ExtendPlan, KVCache, Workspace
from headstart.ops.extend_attention import spec
from headstart.ops.extend_attention.tile_table import Cut, tile_table
from headstart.runtime.static import TARGETS

pytest.importorskip("triton")

from headstart.ops.extend_attention.triton import call as kernels
from headstart.ops.extend_attention.triton.config import LONG_WINDOW

on_kernels = [
    pytest.mark.kernels,
    pytest.mark.skipif(not KERNELS, reason="kernels run in the interpreter or on a GPU"),
]
LONG, CONFIG = 60, (64, 32, 64)
"""Where a window is long in tests of small shapes; rows and keys of a tile, and keys of a piece."""


@pytest.fixture
def long_from_60(monkeypatch):
    monkeypatch.setattr(kernels, "LONG_WINDOW", LONG)


def cut_of(window, tokens=8, piece=128, part="all", joined=False, absolute=False, at_once=0):
    return Cut(part, joined, tokens, piece, absolute, at_once, window)


drawn = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 900), st.integers(0, 150), st.integers(0, 40)),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    sequences=drawn,
    window=st.integers(1, 700),
    joined=st.booleans(),
    absolute=st.booleans(),
    at_once=st.sampled_from([0, 9, 50]),
)
def test_only_pieces_that_a_row_sees_are_listed(sequences, window, joined, absolute, at_once):
    lengths, prefix, gaps, starts = (list(one) for one in zip(*sequences, strict=True))
    cut = cut_of(window, joined=joined, absolute=absolute, at_once=at_once)
    ends = [start + old for start, old in zip(starts, prefix, strict=True)]
    own = [end + gap for end, gap in zip(ends, gaps, strict=True)]
    room = (len(lengths) + 1, sum(lengths) + 5, sum(prefix) + 30)
    for capacity in (None, room):
        plan = ExtendPlan.from_lengths(
            lengths, prefix, key_start=starts, query_start=own, capacity=capacity, device="cpu"
        )
        table = tile_table(plan, cut)
        listed = {}
        for n, first, piece, _ in table.tiles.tolist():
            if n >= 0 and piece >= 0:
                listed.setdefault((n, first), []).append(piece)
        for (n, first), found in listed.items():
            joins = ends[n] == own[n] and (joined or absolute)
            begin = 0 if absolute else starts[n]
            end = ends[n] + (lengths[n] if joins else 0)
            lowest = max(own[n] + first - window + 1, starts[n])
            assert lowest < end
            assert found == list(range((lowest - begin) // 128, -(-(end - begin) // 128)))
        used = [
            scratch + i * step
            for _, scratch, count, step in table.joins.tolist()
            for i in range(count)
        ]
        most = table.scratch_rows
        assert len(used) == len(set(used))
        assert len(used) == most or (capacity is not None and max(used, default=0) < most)
    # An update writes the tables where they lie: with a capacity they are of one size.
    empty = ExtendPlan.from_lengths([], [], capacity=room, device="cpu")
    for name in ("tiles", "joins", "sequences"):
        assert getattr(tile_table(empty, cut), name).shape == getattr(table, name).shape


def test_a_row_far_behind_its_first_key_has_few_pieces():
    plan = ExtendPlan.from_lengths([1], [5000], device="cpu")
    table = tile_table(plan, cut_of(2048, piece=1024))
    assert table.tiles.tolist() == [[0, 0, 2, 0], [0, 0, 3, 1], [0, 0, 4, 2]]
    assert table.joins.tolist() == [[0, 0, 3, 1]]
    # Where all that is seen lies in one piece, nothing is cut.
    assert tile_table(plan, cut_of(900, piece=1024)).tiles.tolist() == [[0, 0, -1, 0]]


def test_room_for_pieces_is_that_of_what_windows_show():
    """Not that of all keys which a cache holds."""
    plan = ExtendPlan.from_lengths([], [], capacity=(8, 16, 10**7), device="cpu")
    rows = [tile_table(plan, cut_of(window)).scratch_rows for window in (0, 1024)]
    assert rows[1] == 8 * (8 * (1024 + 7) // 128 // 8 + 2) * 8
    assert rows[0] > 100 * rows[1]


def test_keys_behind_a_row_are_not_cut():
    plan = ExtendPlan.from_lengths([1], [5000], query_start=4000, device="cpu")
    assert len(tile_table(plan, cut_of(1000)).joins) == 0
    assert len(tile_table(plan, cut_of(0)).joins) == 1


def bound(window, reproducible=False, positions=False, dtype=torch.bfloat16):
    """One token behind 5000 keys."""
    q, k, v = (torch.empty(1, n, 64, dtype=dtype) for n in (8, 2, 2))
    cache = KVCache(*(torch.empty(5000, 2, 64, dtype=dtype) for _ in "kv"))
    own = {"key_positions": list(range(5000)), "query_start": 5000} if positions else {}
    plan = ExtendPlan.from_lengths([1], [5000], device="cpu", **own)
    return spec.bind(
        q, k, v, plan=plan, cache=cache, scale=None, window=window, sinks=None, softcap=None,
        custom_mask=None, causal=True, part="all", return_lse=False, reproducible=reproducible,
        workspace=None, out=None,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_long_window_is_configured_and_cut_as_none_is(target, reproducible):
    with (
        mock.patch.object(kernels, "target_of", return_value=TARGETS[target]),
        mock.patch.object(kernels, "processors", return_value=4),
    ):
        full, short, long = (
            bound(window, reproducible) for window in (None, LONG_WINDOW - 1, LONG_WINDOW)
        )
        configs = [kernels.configured(call) for call in (full, short, long)]
        assert configs[2] == configs[0]
        configs = [replace(config, piece=1024) for config in configs]
        pieces = [
            [piece for _, _, piece, _ in tile_table(call.plan, kernels.cut_of(call, own)).tiles]
            for call, own in zip((full, short, long), configs, strict=True)
        ]
        assert pieces == [[0, 1, 2, 3, 4], [-1], [2, 3, 4]]
        assert kernels.layout(short, configs[1], 0) == {}
        if not reproducible:
            listed = bound(LONG_WINDOW, positions=True)
            table = tile_table(listed.plan, kernels.cut_of(listed, configs[2]))
            assert [piece for _, _, piece, _ in table.tiles] == [0, 1, 2, 3, 4]


def run_rows(q, k, v, **given):
    return run((64, 64, 128), {"q": q, "k": k, "v": v}, **given)


class TestKernels:
    pytestmark = on_kernels

    @pytest.mark.parametrize("window", [LONG - 1, LONG, LONG + 1, 130, 10**9])
    @pytest.mark.parametrize("part", ["all", "prefix", "extend", "reproducible"])
    def test_decodes_drafts_and_prompts(self, long_from_60, window, part):
        batch = draw([90, 1, 7, 0, 2], [100, 333, 260, 70, 64], 6, 2, 16, 24, seed=1)
        kept = part == "reproducible"
        options = {"window": window, "part": "all" if kept else part}
        sinks = torch.linspace(-2, 2, 6) if options["part"] == "all" else None
        found = run(CONFIG, batch.arguments(), sinks=sinks, reproducible=kept, **options)
        expect_close(found, expected(batch, sinks=sinks, **options))

    @pytest.mark.parametrize("window", [LONG_WINDOW - 1, LONG_WINDOW, LONG_WINDOW + 1])
    def test_the_border_between_short_and_long(self, window):
        """As calls take it, with the configurations of the rule."""
        batch = draw([1, 4], [5000, LONG_WINDOW - 2], 4, 2, 16, seed=2)
        attend = by_name(headstart.extend_attention, "triton")
        found = attend(**batch.arguments(), window=window, return_lse=True)
        expect_close(found, expected(batch, window=window))

    @pytest.mark.parametrize("window", [150, 10**6])
    @pytest.mark.parametrize("page", [1, 16, 64])
    @pytest.mark.parametrize("order", ["", "late"])
    def test_a_hit_has_the_bits_of_a_cold_prompt(self, long_from_60, window, page, order):
        """Blocks ended one by one and run through; rows behind pieces and in the midst of them."""
        batch = draw([420], HQ=4, HK=2, D=64, dtype=torch.float16, seed=11)
        attend = partial(run_rows, at_once=2, window=window, reproducible=True)
        with mock.patch.object(kernels, "order", return_value=order):
            want = whole(attend, batch, {})
            expect_close(want, expected(batch, window=window), 2 * ROUNDING[torch.float16])
            assert equal(whole(attend, batch, {"at_once": 64}), want)
            for cuts in ([0, 1, 190, 256, 419, 420], [0, 300, 420]):
                steps = Steps(batch, page, new_in_cache=page == 16)
                for begin, end in pairwise(cuts):
                    found = steps.step(attend, begin, end, {})
                    assert equal(found, (want[0][begin:end], want[1][begin:end]))
            if window > 420:
                assert equal(whole(attend, batch, {"window": None}), want)

    @pytest.mark.parametrize("options", [{"softcap": 4.0}, {"causal": False}, {"scale": -0.3}])
    def test_other_scores(self, long_from_60, options):
        batch = draw([5, 40, 1], [300, 90, 200], 4, 2, 16, seed=3)
        found = run(CONFIG, batch.arguments(), window=150, **options)
        expect_close(found, expected(batch, window=150, **options))

    @pytest.mark.parametrize("layout", ["slots", "pages of 16", "pages of 64", "left"])
    @pytest.mark.parametrize("new_in_cache", [False, True])
    def test_layouts(self, long_from_60, layout, new_in_cache):
        """Whole tiles too, of one page and of two, and prompts beside rows that are decoded."""
        batch = draw([40, 1, 3], [170, 333, 200], 4, 2, 64, dtype=torch.float16, seed=4)
        arguments = stored(batch, layout, new_in_cache)
        for BN in (32, 128):
            found = run((64, BN, 128), arguments, window=150)
            expect_close(found, expected(batch, window=150), 2 * ROUNDING[torch.float16])

    @pytest.mark.parametrize("page", [1, 16, 64])
    @pytest.mark.parametrize("reproducible", [False, True])
    def test_nothing_is_read_that_every_window_has_left(self, long_from_60, page, reproducible):
        """Another sequence may own these pages by now, and no weight of 0 makes up for a NaN."""
        prefix, window = 500, 201
        batch = draw([1], [prefix], 4, 2, 64, dtype=torch.float16, seed=5)
        want = expected(batch, window=window)
        left = (prefix - window + 1) // page * page
        assert left % 64 or page == 64
        batch.prefix_k[:left] = batch.prefix_v[:left] = torch.nan
        arguments = stored(batch, f"pages of {page}" if page > 1 else "slots", False)
        with mock.patch.object(kernels, "order", return_value="late"):
            found = run((64, 64, 64), arguments, window=window, reproducible=reproducible)
        expect_close(found, want, 2 * ROUNDING[torch.float16])

    @pytest.mark.parametrize("covers", ["all", "new"])
    def test_masks(self, long_from_60, covers):
        batch = draw([6, 40], [300, 100], 4, 2, 16, seed=6)
        at = torch.Generator().manual_seed(6)
        masks = [
            torch.rand(n, n + (p if covers == "all" else 0), generator=at) < 0.5
            for n, p in zip(batch.lengths, batch.prefix, strict=True)
        ]
        mask = torch.cat([one.flatten() for one in masks])
        arguments = batch.arguments(mask_covers=covers)
        found = run(CONFIG, arguments, window=150, custom_mask=mask)
        expect_close(found, expected(batch, window=150, masks=masks, covers=covers))

    def test_keys_at_listed_positions(self, long_from_60):
        positions = [torch.randperm(300, generator=torch.Generator().manual_seed(7))]
        batch = draw([3], [300], 4, 2, 16, seed=7, query_start=[310], positions=positions)
        plan = {"key_positions": positions[0], "query_start": 310}
        found = run(CONFIG, batch.arguments(**plan), window=150)
        expect_close(found, expected(batch, window=150))

    @pytest.mark.parametrize("own", [260, 300, 310, 470, 1000])
    def test_rows_before_and_far_behind_their_prefix(self, long_from_60, own):
        batch = draw([3], [300], 4, 2, 16, seed=8, query_start=[own])
        found = run(CONFIG, batch.arguments(query_start=own), window=150)
        expect_close(found, expected(batch, window=150))

    def test_the_last_tiles_are_cut_too(self, long_from_60):
        batch = draw([20, 3], [170, 190], 16, 2, 16, 24, seed=9)
        for at_once in (2, 14):
            found = run(CONFIG, batch.arguments(), at_once, window=130)
            expect_close(found, expected(batch, window=130))

    def test_partials_merge_to_the_whole(self, long_from_60):
        batch = draw([5, 1], [300, 222], 4, 2, 16, seed=10)
        parts = [run(CONFIG, batch.arguments(), window=150, part=p) for p in ("prefix", "extend")]
        expect_close(headstart.merge_attention(parts), expected(batch, window=150))

    def test_an_updated_plan_serves_the_launch_of_another(self, long_from_60):
        table = torch.arange(3 * 100).view(3, 100)
        cache = KVCache(*(torch.randn(300, 16, 2, 16) for _ in "kv"))
        plan = ExtendPlan.from_pages(
            [1], [1], table[:1], 16, new_in_cache=True, capacity=(3, 70, 5000)
        )
        q, at = torch.randn(70, 4, 16), {"k": None, "v": None, "cache": cache}
        for lengths, total in (([1], [1500]), ([60, 1, 0], [90, 1300, 5]), ([], []), ([2], [2])):
            plan.update_(lengths, total, table[: len(lengths)], 16, new_in_cache=True)
            fresh = ExtendPlan.from_pages(
                lengths, total, table[: len(lengths)], 16, new_in_cache=True
            )
            found, want = (
                run((64, 32, 128), {"q": q, "plan": p, **at}, window=400) for p in (plan, fresh)
            )
            assert torch.equal(found[0], want[0])
            assert torch.equal(found[1], want[1])

    @pytest.mark.parametrize(
        ("capacity", "told"), [(None, 3 * 1 + 3 * 3), ((2, 64, 10_000), 32 * 2 * 4)]
    )
    def test_scratch_is_what_workspace_bytes_says(self, capacity, told):
        """A state of each row and each piece that it sees; with a capacity, of all that may come.

        Three pieces of 1024 keys for a window of 2048, four where 32 tokens end anywhere.
        """
        batch = draw([1, 3], [5000, 4100], 4, 2, 16, seed=3)
        options = {"implementation": "triton", "window": LONG_WINDOW}
        device = torch.device(DEVICE)
        workspace = Workspace(device)

        def measured(**given):
            found = headstart.workspace_bytes("extend_attention", **given)
            headstart.extend_attention(**given, workspace=workspace)
            assert workspace.bytes == found
            return found

        arguments = batch.arguments(capacity=capacity) | options
        if DEVICE == "cpu":
            found = measured(**arguments)
        else:
            found = on_device(device, measured, **arguments)
        assert found == told * 4 * (16 + 2) * 4
