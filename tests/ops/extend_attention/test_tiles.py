"""The tile bounds against the literal mask: nothing seen lies outside, and both ends are seen."""

import itertools

import pytest

from headstart.ops.extend_attention.tiles import (
    key_tiles,
    new_tiles,
    prefix_tiles,
    unmasked_tiles,
    visible_keys,
)

WINDOWS = [None, 1, 15, 16, 17, 31, 32, 33, 64, 100, 10**6]


def sees(query, key, window, causal):
    return (key <= query or not causal) and (window is None or key > query - window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("anchor", [0, 5])
def test_bounds_are_complete_and_tight(window, causal, anchor):
    tile = 16
    checked = 0
    for first, rows, start, length in itertools.product(
        (0, 1, 15, 16, 47, 90), (1, 2, 16, 33), (0, 7, 16, 40), (0, 1, 16, 37, 64)
    ):
        block = range(first, first + rows)
        keys = range(start, start + length)
        seen = {key: [sees(query, key, window, causal) for query in block] for key in keys}
        visited = {(key - anchor) // tile for key in keys if any(seen[key])}
        options = {"window": window, "causal": causal}
        found = key_tiles(first, block[-1], start, length, tile=tile, anchor=anchor, **options)
        assert visited <= set(found)
        if found:
            assert {found[0], found[-1]} <= visited
        exact = visible_keys(first, block[-1], start, length, **options)
        touched = [key for key in keys if any(seen[key])]
        assert (exact.start, exact.stop) == ((touched[0], touched[-1] + 1) if touched else (0, 0))
        clear = unmasked_tiles(first, block[-1], start, length, tile=tile, anchor=anchor, **options)
        full = {
            i
            for i in range(-2, (start + length) // tile + 2)
            if all(
                key in seen and all(seen[key])
                for key in range(anchor + i * tile, anchor + (i + 1) * tile)
            )
        }
        assert set(clear) == full
        checked += 1
    assert checked == 480


@pytest.mark.parametrize("window", WINDOWS)
def test_prefix_and_new_keys_have_ranges_of_their_own(window):
    """Key tiles counted from the first key of each part, as a two-loop kernel counts them."""
    tile = 16
    for prefix, key_start, row, rows, length in itertools.product(
        (0, 1, 16, 50), (0, 3), (0, 16, 20), (1, 16), (40,)
    ):
        query_start = key_start + prefix
        old = prefix_tiles(
            row,
            row + rows - 1,
            query_start=query_start,
            key_start=key_start,
            prefix=prefix,
            tile=tile,
            window=window,
            anchor=key_start,
        )
        new = new_tiles(
            row,
            row + rows - 1,
            query_start=query_start,
            length=length,
            tile=tile,
            window=window,
            anchor=query_start,
        )
        block = range(query_start + row, query_start + row + rows)
        for found, start, count in ((old, key_start, prefix), (new, query_start, length)):
            visited = sorted(
                {
                    j // tile
                    for j in range(count)
                    if any(sees(query, start + j, window, True) for query in block)
                }
            )
            assert list(found) == visited
