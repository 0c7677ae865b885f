"""Which key tiles a block of queries must visit, in plain integers.

A query at position p sees the keys at positions (p - window, p]; without a window from the first
key on; not causal (or under a custom mask, which may look ahead) to the last key. Tile i holds the
absolute positions [i * tile, (i + 1) * tile), shifted by `anchor` where the tiles are counted from
elsewhere. Bounds are tight: the first and the last tile of a range each hold a key that some query
of the block sees. Prefix and new keys are two runs of positions, each with its own range.
"""

from __future__ import annotations

NOTHING = range(0)


def visible_keys(
    first_query: int,
    last_query: int,
    start: int,
    length: int,
    *,
    window: int | None = None,
    causal: bool = True,
) -> range:
    """Positions between the first and the last key that a query of the block sees, both included.

    first_query, last_query: positions of the first and last query of the block.
    start, length: the keys at hand sit at positions [start, start + length).
    causal: False where the causal end is lifted (causal=False, or a custom mask over these keys).

    >>> visible_keys(100, 163, 0, 164, window=128)
    range(0, 164)
    >>> visible_keys(200, 263, 0, 200, window=100)
    range(101, 200)
    """
    lower = start if window is None else max(start, first_query - window + 1)
    upper = start + length if not causal else min(start + length, last_query + 1)
    return range(lower, upper) if lower < upper else NOTHING


def key_tiles(
    first_query: int,
    last_query: int,
    start: int,
    length: int,
    *,
    tile: int,
    window: int | None = None,
    causal: bool = True,
    anchor: int = 0,
) -> range:
    """Tiles that the block must visit among one run of keys (arguments as for `visible_keys`).

    >>> key_tiles(256, 319, 0, 320, tile=64, window=128)
    range(2, 5)
    >>> key_tiles(1000, 1063, 0, 500, tile=64, window=128)
    range(0, 0)
    """
    keys = visible_keys(first_query, last_query, start, length, window=window, causal=causal)
    if not keys:
        return NOTHING
    return range((keys.start - anchor) // tile, (keys.stop - 1 - anchor) // tile + 1)


def unmasked_tiles(
    first_query: int,
    last_query: int,
    start: int,
    length: int,
    *,
    tile: int,
    window: int | None = None,
    causal: bool = True,
    anchor: int = 0,
) -> range:
    """Tiles full of keys that every query of the block sees: they need no mask.

    >>> unmasked_tiles(256, 319, 0, 320, tile=64, window=256)
    range(1, 4)
    """
    lower = start if window is None else max(start, last_query - window + 1)
    upper = start + length if not causal else min(start + length, first_query + 1)
    first, end = -(-(lower - anchor) // tile), (upper - anchor) // tile
    return range(first, end) if first < end else NOTHING


def prefix_tiles(
    first_row: int,
    last_row: int,
    *,
    query_start: int,
    key_start: int,
    prefix: int,
    tile: int,
    window: int | None = None,
    causal: bool = True,
    anchor: int = 0,
) -> range:
    """Tiles among the prefix keys, for rows [first_row, last_row] of the new tokens.

    Query row t sits at query_start + t, prefix key j at key_start + j.

    >>> prefix_tiles(0, 63, query_start=8192, key_start=0, prefix=8192, tile=64, window=128)
    range(126, 128)
    """
    return key_tiles(
        query_start + first_row,
        query_start + last_row,
        key_start,
        prefix,
        tile=tile,
        window=window,
        causal=causal,
        anchor=anchor,
    )


def new_tiles(
    first_row: int,
    last_row: int,
    *,
    query_start: int,
    length: int,
    tile: int,
    window: int | None = None,
    causal: bool = True,
    anchor: int = 0,
) -> range:
    """Tiles among the new keys, for rows [first_row, last_row]; new key i sits at query_start + i.

    >>> new_tiles(64, 127, query_start=8192, length=512, tile=64, anchor=8192)
    range(0, 2)
    """
    return key_tiles(
        query_start + first_row,
        query_start + last_row,
        query_start,
        length,
        tile=tile,
        window=window,
        causal=causal,
        anchor=anchor,
    )
