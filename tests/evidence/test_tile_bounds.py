"""The brute force of the tile bounds: it finds nothing wrong, and everything planted."""

import pytest

from headstart.evidence import cases
from headstart.evidence.tile_bounds import (
    LENGTHS,
    PREFIXES,
    RULES,
    TILINGS,
    WINDOWS,
    brute_force,
    saving,
    slices,
)
from headstart.ops.extend_attention import tiles

GRID = {
    "tilings": TILINGS[3:5],
    "windows": (None, 1, 17, 64, 100),
    "prefixes": (0, 1, 63, 129),
    "lengths": (1, 31, 65),
}


def test_the_grid_is_as_large_as_asked():
    assert (len(TILINGS), len(WINDOWS), len(PREFIXES), len(LENGTHS)) == (8, 20, 17, 10)
    assert slices() == len(WINDOWS) * len(RULES)


def test_the_bounds_hold_and_are_tight():
    counts = brute_force(**GRID)
    assert [count.rules for count in counts] == [rule.name for rule in RULES]
    assert all(count.violations == 0 for count in counts)
    assert all(count.lower > 0 for count in counts)
    assert all(count.upper > 0 for count in counts if count.rules == "causal")


def moved(change):
    """`visible_keys` with its two ends moved."""
    right = tiles.visible_keys

    def wrong(*args, **options):
        keys = right(*args, **options)
        return range(*change(keys, options)) if keys else keys

    return wrong


@pytest.mark.parametrize(
    ("change", "figure"),
    [
        (lambda keys, o: (keys.start + 1, keys.stop), "lost"),
        (lambda keys, o: (keys.start, keys.stop - 1), "lost"),
        (lambda keys, o: (keys.start - 1 if o["window"] else keys.start, keys.stop), "idle"),
        (lambda keys, o: (keys.start, keys.stop + 1), "idle"),
    ],
    ids=["starts one late", "ends one early", "starts one early", "ends one late"],
)
def test_a_bound_that_is_one_key_off_is_found(monkeypatch, change, figure):
    monkeypatch.setattr(tiles, "visible_keys", moved(change))
    counts = brute_force(**GRID)
    assert sum(getattr(count, figure) for count in counts) > 0


def test_a_tile_wrongly_unmasked_is_found(monkeypatch):
    right = tiles.unmasked_tiles
    monkeypatch.setattr(
        tiles, "unmasked_tiles", lambda *a, **o: right(*a, **(o | {"causal": False}))
    )
    assert sum(count.unmasked for count in brute_force(**GRID)) > 0


def test_processes_count_what_one_counts():
    grid = {**GRID, "windows": (None, 17), "rules": RULES[:1]}
    assert brute_force(**grid, processes=2) == brute_force(**grid)


def test_savings_of_cases():
    full, window = (saving(cases.get(f"oss-16k-{name}"), (64, 64)) for name in ("full", "win"))
    assert full.before == window.before == 256 * 256
    assert full.after == 256 * 257 // 2
    assert window.after == 256 * 3 - 3
    assert window.saved > 0.98
    flat = [saving(cases.get(f"oss-512-on-{name}-win"), (64, 64)).after for name in ("8k", "512")]
    assert flat[0] == flat[1]
