"""How the chunks of a step are cut into spans, and a span into pieces that run side by side.

A span has room for so many chunks, and ends before the next one begins. A piece is a run of chunks
of one sequence in one span. A chain of chunks is serial, so a span takes as long as its longest
piece, at least: the longest sequences go through all spans side by side, the others where there is
room. Few of them are under way between spans, since each leaves a state in float32 there.

One sequence alone, of few heads, leaves most of a device idle. Its part of a span may be cut into
segments. What a segment does to a state is an affine map S -> L S + b: maps run first, from zeros
for b, and from the identity, as if v were 0, for L; then segments begin where the maps before them
lead, side by side.
"""

from __future__ import annotations

from typing import NamedTuple

CHUNK = 64
"""Tokens of a chunk on the absolute grid of a sequence."""
OPENS, ZEROS, IDENTITY = -1, -2, -3
"""In place of a row of `carry`, the state before a piece: the sequence's own, zeros, or the
identity beside values of 0."""
CLOSES, KNOWN = -1, -2
"""In place of a row of `carry`: the sequence ends with this piece; the state after it is known."""
CARRY = 8 * 2**20
"""Bytes of states that may be under way between two spans, unless one alone is larger."""


class Cut(NamedTuple):
    """span: chunks of a span, 0: of any number; live: sequences under way between spans; segments:
    pieces of the part that a span has of the one sequence."""

    span: int
    live: int
    segments: int

    def spans(self, chunks: int) -> int:
        """Spans of so many chunks; at least one."""
        return max(1, -(-chunks // self.span)) if self.span else 1

    def rows(self, sequences: int) -> int:
        """Rows that the table of pieces has for one span: segments, then maps."""
        return sequences if self.segments == 1 else self.segments + self.maps

    def pieces(self, sequences: int, chunks: int) -> int:
        """About how many pieces a span has, of so many sequences with so many chunks in all.

        >>> Cut(span=80, live=4, segments=1).pieces(sequences=24, chunks=688)
        7
        """
        spans = self.spans(chunks)
        if self.segments > 1 or spans == 1:
            return max(sequences, self.segments)
        return min(sequences, -(-sequences // spans) + self.live)

    @property
    def maps(self) -> int:
        """Pieces that run before those of segments: the first from its own state, the last not."""
        return max(0, 2 * self.segments - 3)

    @property
    def carried(self) -> int:
        """Rows of `carry`: sequences under way; states after all segments but the last, b at first;
        L of all segments but the first and the last."""
        return self.under_way + self.maps

    @property
    def under_way(self) -> int:
        """Rows of `carry` for `live` sequences and one that begins where the others end."""
        return self.live + 1


WHOLE = Cut(0, 0, 1)
"""Everything in one span."""


class Piece(NamedTuple):
    """Chunks [begin, end) of a sequence, and the rows of `carry` before and after them."""

    sequence: int
    begin: int
    end: int
    source: int
    target: int


def pieces_of_spans(counts: list[int], cut: Cut) -> list[list[Piece]]:
    """The pieces of every span, for sequences of so many chunks: long ones first.

    A sequence without chunks is an empty piece of the first span.

    >>> spans = pieces_of_spans([5, 2], Cut(span=4, live=1, segments=1))
    >>> [[(piece.sequence, piece.begin, piece.end) for piece in span] for span in spans]
    [[(0, 0, 4)], [(1, 0, 2), (0, 4, 5)]]
    """
    done = [0] * len(counts)
    rows: dict[int, int] = {}
    spans = []
    for share in _shares(counts, cut):
        # A row that is read in a span is written in it by the same sequence alone.
        free = [row for row in range(cut.under_way) if row not in rows.values()]
        pieces = []
        for n in sorted(share, key=lambda n: -share[n]):
            begin, done[n] = done[n], done[n] + share[n]
            source = rows.pop(n, OPENS)
            if done[n] < counts[n]:
                rows[n] = source if source >= 0 else free.pop(0)
            pieces.append(Piece(n, begin, done[n], source, rows.get(n, CLOSES)))
        spans.append(pieces)
    empty = [Piece(n, 0, 0, OPENS, CLOSES) for n, count in enumerate(counts) if count == 0]
    spans[:1] = [(spans[0] if spans else []) + empty]
    return [_segments(span, cut) for span in spans] if cut.segments > 1 else spans


def _shares(counts: list[int], cut: Cut) -> list[dict[int, int]]:
    """For every span how many chunks each sequence advances; every span but the last is full."""
    left = {n: count for n, count in enumerate(counts) if count}
    total, span = sum(counts), cut.span or sum(counts)
    under_way: list[int] = []
    spans = []
    while total:
        later, room = -(-total // span), span
        longest = sorted(left, key=lambda n: (n not in under_way, -left[n]))
        together, others = longest[: cut.live], longest[cut.live :]
        share = dict.fromkeys(together, 0)
        for n in together:
            share[n] = min(room, -(-left[n] // later))
            room -= share[n]
        for n in others:
            if left[n] <= room:
                share[n] = left[n]
                room -= left[n]
        # With room left, those that go on go on further, and only then does another begin.
        for n in longest:
            more = min(room, left[n] - share.get(n, 0))
            if more:
                share[n] = share.get(n, 0) + more
                room -= more
        share = {n: taken for n, taken in share.items() if taken}
        for n, taken in share.items():
            left[n] -= taken
            if not left[n]:
                del left[n]
        under_way = [n for n in left if n in share or n in under_way]
        total = sum(left.values())
        spans.append(share)
    return spans


def _segments(span: list[Piece], cut: Cut) -> list[Piece]:
    """The one piece of a span as segments, then maps."""
    if not span or span[0].begin == span[0].end:
        return span
    n, begin, end, source, target = span[0]
    size = -(-(end - begin) // cut.segments)
    borders = [*range(begin, end, size), end]
    last = len(borders) - 2
    state = cut.under_way
    factor = state + cut.segments - 2  # rows after segment 0
    segments, maps = [], []
    for i in range(last + 1):
        place = n, borders[i], borders[i + 1]
        before = source if i == 0 else state + i - 1
        segments.append(Piece(*place, before, target if i == last else KNOWN))
        if i < last:
            maps.append(Piece(*place, source if i == 0 else ZEROS, state + i))
            if i > 0:
                maps.append(Piece(*place, IDENTITY, factor + i))
    nothing = Piece(-1, 0, 0, OPENS, KNOWN)
    return segments + [nothing] * (cut.segments - len(segments)) + maps
