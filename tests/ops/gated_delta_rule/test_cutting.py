"""Spans and pieces: every chunk once, in order, in spans that are full, and no row of states that
two pieces of a span disagree about."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import Schedule
from headstart.ops.gated_delta_rule.chunk_table import chunk_table
from headstart.ops.gated_delta_rule.cutting import CLOSES, KNOWN, OPENS, Cut, pieces_of_spans
from headstart.runtime.record import recording

COUNTS = st.lists(st.integers(0, 40), max_size=9)


@settings(max_examples=300, deadline=None)
@given(COUNTS, st.integers(1, 60), st.integers(1, 4))
def test_pieces_cover_every_sequence_in_full_spans(counts: list[int], room: int, live: int) -> None:
    cut = Cut(room, live, 1)
    spans = pieces_of_spans(counts, cut)
    assert len(spans) == cut.spans(sum(counts))
    done = [0] * len(counts)
    for i, span in enumerate(spans):
        taken = sum(piece.end - piece.begin for piece in span)
        assert taken == room if i < len(spans) - 1 else taken <= room
        for piece in span:
            assert piece.begin == done[piece.sequence]
            done[piece.sequence] = piece.end
            assert (piece.source == OPENS) == (piece.begin == 0)
            assert (piece.target == CLOSES) == (piece.end == counts[piece.sequence])
    assert done == counts


@settings(max_examples=300, deadline=None)
@given(COUNTS, st.integers(1, 60), st.integers(1, 4))
def test_states_between_spans_are_read_by_their_own_sequence(
    counts: list[int], room: int, live: int
) -> None:
    cut = Cut(room, live, 1)
    held: dict[int, int] = {}
    for span in pieces_of_spans(counts, cut):
        reads = {piece.source: piece.sequence for piece in span if piece.source >= 0}
        assert reads == {row: held.pop(row) for row in reads}
        for piece in span:
            if piece.target >= 0:
                assert piece.target < cut.carried
                assert piece.target not in held
                assert reads.get(piece.target, piece.sequence) == piece.sequence
                held[piece.target] = piece.sequence
    assert not held


def test_long_sequences_advance_side_by_side() -> None:
    spans = pieces_of_spans([128] * 4, Cut(128, 4, 1))
    assert [[piece.end - piece.begin for piece in span] for span in spans] == [[32] * 4] * 4


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(1, 80), st.integers(2, 9))
def test_segments_begin_where_maps_lead(count: int, room: int, segments: int) -> None:
    cut = Cut(room, 1, segments)
    for span in pieces_of_spans([count], cut):
        parts = [piece for piece in span[: cut.segments] if piece.sequence >= 0]
        maps = span[cut.segments :]
        assert len(maps) == max(0, 2 * len(parts) - 3) <= cut.maps
        assert [piece.begin for piece in parts[1:]] == [piece.end for piece in parts[:-1]]
        assert all(piece.target == KNOWN for piece in parts[:-1])
        states = [piece.source for piece in parts[1:]]
        assert [piece.target for piece in maps if piece.source > -3] == states
        assert all(row < cut.carried for row in states)
        others = [piece.target for piece in maps if piece.source == -3]
        assert len({*states, *others, parts[-1].target}) == len(states) + len(others) + 1


def test_a_part_that_has_fewer_chunks_than_segments_leaves_the_sequence_as_it_is() -> None:
    schedule = Schedule([64 * 3], device="cpu")
    table = chunk_table(schedule, cached=False, drafting=False, cut=Cut(3, 1, 8))
    pieces = table.pieces.view(-1, 6)
    assert table.sequences[4] == 0
    assert pieces[:8, 0].tolist() == [0] * 3 + [-1] * 5
    assert table.items.view(-1, 3)[:, 1].tolist() == [0, 64, 128]


def test_kernels_without_spans_get_no_table_of_pieces() -> None:
    schedule = Schedule([70, 5], device="cpu")
    with recording() as record:
        assert chunk_table(schedule, cached=False, drafting=False).pieces is None
    assert len(record.tables) == 2
