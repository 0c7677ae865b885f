"""What a step asks of the convolution's kernel, as integers: which rows are whose, what is kept.

The rows of a sequence are cut into tiles of `rows` rows, from its own first row on. Sequence n
takes the tiles from offsets[n] // rows + n on: since every sequence starts one tile later than its
rows ask for, none overlap, each has at least one tile (its first, which owns its history), and a
program finds its sequence by a search over offsets alone, whatever `rows` is. Behind the last
sequence come the tiles of the rows that belong to none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.ops.gated_delta_rule.schedule import Schedule


def entries(schedule: Schedule) -> tuple[int, int]:
    """Sequences and snapshots that the table of this schedule has room for."""
    return schedule.slot_count(schedule.N, 0), schedule.slot_count(schedule.M, 2)


def step_table(schedule: Schedule) -> list[int]:
    """The table, for `Schedule.on_device`, with E sequences and M snapshots of room.

    N; offsets [E + 1], T behind the last; starts [E]; first snapshot of each sequence [E + 1];
    positions [M] and sequences [M] of the snapshots. What lies past N or its snapshots is empty.

    >>> from headstart import Schedule
    >>> step_table(Schedule([70, 3], start_positions=[0, 5], snapshot_every=64, device="cpu"))
    [2, 0, 70, 73, 0, 5, 0, 1, 1, 64, 0]
    """
    count, kept = entries(schedule)
    rest = count - schedule.N
    firsts = [0]
    for positions in schedule.snapshot_positions:
        firsts.append(firsts[-1] + len(positions))
    places = [p for positions in schedule.snapshot_positions for p in positions]
    owners = [n for n, found in enumerate(schedule.snapshot_positions) for _ in found]
    return [
        schedule.N,
        *schedule.offsets,
        *[schedule.T] * rest,
        *schedule.starts,
        *[0] * rest,
        *firsts,
        *[firsts[-1]] * rest,
        *places,
        *[0] * (kept - len(places)),
        *owners,
        *[0] * (kept - len(owners)),
    ]


def tiles(schedule: Schedule, tokens: int, rows: int) -> int:
    """Tiles that `tokens` rows are cut into; under a capacity, for any step that it may hold.

    >>> from headstart import Schedule
    >>> schedule = Schedule([70, 3], device="cpu")
    >>> tiles(schedule, 73, 64), tiles(schedule, 100, 64)  # rows of nobody: one more
    (3, 4)
    """
    nobody = schedule.capacity is not None or tokens > schedule.T
    return tokens // rows + entries(schedule)[0] + nobody
