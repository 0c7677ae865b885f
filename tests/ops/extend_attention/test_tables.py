"""The tables that kernels read: every row once, heavy tiles first, in place after an update."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import ExtendPlan
from headstart.ops.extend_attention.tile_table import Cut, tile_table

drawn = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 900)), min_size=1, max_size=6)


def cut_of(tokens=8, piece=128, part="all", joined=False, absolute=False, at_once=0):
    return Cut(part, joined, tokens, piece, absolute, at_once)


@settings(max_examples=60, deadline=None)
@given(
    sequences=drawn,
    tokens=st.sampled_from([1, 5, 8, 64]),
    piece=st.sampled_from([0, 64, 256]),
    at_once=st.sampled_from([0, 1, 4, 9, 50]),
)
def test_every_new_row_is_in_one_tile_or_one_row_of_pieces(sequences, tokens, piece, at_once):
    lengths, prefix = [s[0] for s in sequences], [s[1] for s in sequences]
    plan = ExtendPlan.from_lengths(lengths, prefix, device="cpu")
    table = tile_table(plan, cut_of(tokens, piece, at_once=at_once))
    seen = torch.zeros(plan.T, dtype=torch.int64)
    pieces = {}
    for n, first, part, scratch in table.tiles.tolist():
        rows = range(first, min(first + tokens, lengths[n]))
        if part < 0:
            seen[plan.offsets[n] + rows.start : plan.offsets[n] + rows.stop] += 1
        else:
            pieces.setdefault((n, first), []).append((part, scratch))
    used = []
    for row, scratch, count, step in table.joins.tolist():
        seen[row] += 1
        used += [scratch + i * step for i in range(count)]
    assert bool((seen == 1).all())
    assert sorted(used) == list(range(table.scratch_rows))
    for (n, _), found in pieces.items():
        assert [part for part, _ in found] == list(range(-(-prefix[n] // piece)))
        assert lengths[n] <= tokens or at_once


def test_tiles_with_more_keys_come_first():
    plan = ExtendPlan.from_lengths([100, 300, 20], [50, 0, 500], device="cpu")
    tiles = tile_table(plan, cut_of(64, 0)).tiles.tolist()
    keys = [plan.prefix[n] + first for n, first, _, _ in tiles]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize(
    ("at_once", "last"), [(0, 0), (4, 2), (9, 1), (5, 0), (6, 0), (20, 10), (1, 0)]
)
def test_the_last_tiles_are_cut_where_they_fill_at_most_half_a_round(at_once, last):
    plan = ExtendPlan.from_lengths([80], [300], device="cpu")
    table = tile_table(plan, cut_of(8, 128, at_once=at_once))
    whole = [[0, first, -1, 0] for first in reversed(range(8 * last, 80, 8))]
    firsts = list(reversed(range(0, 8 * last, 8)))
    cut = [[0, first, p, 24 * i + 8 * p] for i, first in enumerate(firsts) for p in range(3)]
    assert table.tiles.tolist() == whole + cut
    assert table.scratch_rows == 24 * last
    joins = [[first + t, 24 * i + t, 3, 8] for i, first in enumerate(firsts) for t in range(8)]
    assert table.joins.tolist() == joins


def test_the_last_tiles_stay_whole_behind_many_rounds():
    found = [
        len(
            tile_table(
                ExtendPlan.from_lengths([n * 8], [300], device="cpu"), cut_of(at_once=4)
            ).joins
        )
        for n in (29, 33)
    ]
    assert found == [8, 0]


def test_the_last_tiles_stay_whole_where_their_pieces_would_take_much_scratch():
    cut = cut_of(8, 128, at_once=20)
    rows = [
        tile_table(ExtendPlan.from_lengths([80], [n * 128], device="cpu"), cut).scratch_rows
        for n in (51, 52)
    ]
    assert rows == [51 * 80, 0]


def test_no_tile_stands_for_rows_that_do_not_exist():
    plan = ExtendPlan.from_lengths([1] * 200 + [1000], device="cpu")
    assert len(tile_table(plan, cut_of(64, 0)).tiles) == 200 + 16


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_an_update_rewrites_the_tables_where_they_lie(absolute, joined):
    cut = cut_of(8, 64, joined=joined, absolute=absolute)
    room = (4, 300, 1200)
    table = torch.arange(80).view(4, 20)

    def forward(plan, lengths, total):
        return plan.update_(lengths, total, table[: len(lengths)], 16, new_in_cache=True)

    plan = ExtendPlan.from_pages(
        [3], [70], table[:1], 16, new_in_cache=True, capacity=room, device="cpu"
    )
    kept = tile_table(plan, cut)
    for lengths, total in (
        ([3], [300]),
        ([1, 8, 200, 0], [300, 299, 280, 320]),
        ([], []),
        ([2, 2, 2, 2], [300, 300, 300, 300]),
    ):
        forward(plan, lengths, total)
        again = tile_table(plan, cut)
        fresh = ExtendPlan.from_pages(
            lengths, total, table[: len(lengths)], 16, new_in_cache=True, device="cpu"
        )
        wanted = tile_table(fresh, cut)
        for name in ("sequences", "tiles", "joins"):
            held, found = getattr(kept, name), getattr(again, name)
            assert held.data_ptr() == found.data_ptr()
            want = getattr(wanted, name)
            assert torch.equal(found[: len(want)], want) or name == "sequences"
            if name != "sequences":
                assert bool((found[len(want) :, 0] == -1).all())
        used = wanted.sequences[:, [0, 1, 2, 3, 4, 5, 7]]
        assert torch.equal(again.sequences[: len(used), [0, 1, 2, 3, 4, 5, 7]], used)
        assert wanted.scratch_rows <= again.scratch_rows
