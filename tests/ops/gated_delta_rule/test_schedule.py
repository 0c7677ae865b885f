"""What a step may say of its sequences, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import Schedule


def told(schedule):
    return (
        schedule.lengths,
        schedule.offsets,
        schedule.starts,
        schedule.drafts,
        schedule.snapshot_positions,
    )


@pytest.mark.parametrize(
    "given_as",
    [
        {"lengths": [3, 0, 64]},
        {"lengths": torch.tensor([3, 0, 64])},
        {"lengths": torch.tensor([3, 0, 64], dtype=torch.int32)},
        {"cu_seqlens": [0, 3, 3, 67]},
        {"cu_seqlens": torch.tensor([0, 3, 3, 67], dtype=torch.int32)},
    ],
    ids=["list", "int64", "int32", "running sum", "running sum int32"],
)
def test_lengths_and_running_sums_say_the_same(given_as):
    schedule = Schedule(**given_as, device="cpu")
    assert schedule.lengths == [3, 0, 64]
    assert schedule.offsets == [0, 3, 3, 67]
    assert (schedule.N, schedule.T, schedule.M) == (3, 67, 0)
    assert schedule.starts == [0, 0, 0]
    assert schedule.drafts == [False, False, False]


def test_a_step_may_be_empty():
    none, empty = Schedule([], device="cpu"), Schedule([0], device="cpu")
    assert (none.N, none.T) == (0, 0)
    assert (empty.N, empty.T) == (1, 0)
    assert Schedule(cu_seqlens=[0], device="cpu").N == 0


def test_one_start_for_all_or_one_each():
    assert Schedule([1, 2], start_positions=7, device="cpu").starts == [7, 7]
    each = Schedule([1, 2], start_positions=torch.tensor([7, 64]), device="cpu")
    assert each.starts == [7, 64]
    flags = Schedule([1, 2], drafts=[False, True], device="cpu").drafts
    assert flags == [False, True]


def test_snapshot_every_keeps_the_multiples_after_the_start_up_to_the_end():
    schedule = Schedule(
        [64, 63, 200, 0], start_positions=[0, 0, 60, 64], snapshot_every=64, device="cpu"
    )
    assert schedule.snapshot_positions == [[64], [], [64, 128, 192, 256], []]
    assert schedule.M == 5
    coarse = Schedule([400], start_positions=[128], snapshot_every=128, device="cpu")
    assert coarse.snapshot_positions == [[256, 384, 512]]


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, 300),
    length=st.integers(0, 300),
    draft=st.booleans(),
    position=st.integers(-64, 700),
)
def test_a_legal_snapshot_is_the_opening_fold_or_lies_in_the_new_tokens(
    start, length, draft, position
):
    legal = position == start // 64 * 64 or (
        not draft and position % 64 == 0 and start < position <= start + length
    )
    arguments = {
        "lengths": [length],
        "start_positions": [start],
        "drafts": draft,
        "snapshot_positions": [[position]],
        "device": "cpu",
    }
    if legal:
        assert Schedule(**arguments).snapshot_positions == [[position]]
    else:
        with pytest.raises(ValueError, match=r"^snapshot_positions\[0\]: expected .* got"):
            Schedule(**arguments)


def test_the_opening_fold_and_later_positions_may_be_kept_together():
    schedule = Schedule([100], start_positions=[70], snapshot_positions=[[64, 128]], device="cpu")
    assert schedule.snapshot_positions == [[64, 128]]
    assert schedule.M == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "lengths: expected exactly one of lengths and cu_seqlens"),
        ({"lengths": [1], "cu_seqlens": [0, 1]}, "lengths: expected exactly one"),
        ({"lengths": [3, -1]}, "lengths: expected lengths >= 0, got -1"),
        ({"lengths": [3, 1.5]}, "lengths: expected integers, got 1.5"),
        ({"lengths": [True]}, "lengths: expected integers, got True"),
        ({"lengths": "12"}, "lengths: expected a list or tensor of integers"),
        ({"lengths": 5}, "lengths: expected a list or tensor of integers"),
        ({"lengths": torch.tensor([1.0])}, "lengths: expected dtype int32 or int64"),
        ({"lengths": torch.tensor([[1]])}, "lengths: expected one dimension"),
        ({"cu_seqlens": []}, "cu_seqlens: expected a running sum from 0"),
        ({"cu_seqlens": [1, 2]}, "cu_seqlens: expected a running sum from 0"),
        ({"cu_seqlens": [0, 5, 4]}, "cu_seqlens: expected a rising running sum"),
        ({"lengths": [1], "start_positions": [0, 0]}, "start_positions: expected one for each"),
        ({"lengths": [1], "start_positions": [-1]}, "start_positions: expected positions >= 0"),
        ({"lengths": [1], "start_positions": -64}, "start_positions: expected positions >= 0"),
        ({"lengths": [1], "drafts": [True, False]}, "drafts: expected one for each"),
        ({"lengths": [1], "snapshot_positions": []}, "snapshot_positions: expected one for each"),
        ({"lengths": [1], "snapshot_positions": 64}, "snapshot_positions: expected one list for"),
        (
            {"lengths": [1], "snapshot_positions": torch.ones(())},
            "snapshot_positions: expected one",
        ),
        ({"lengths": [64], "snapshot_positions": [64]}, "snapshot_positions[0]: expected a list"),
        ({"lengths": [64], "snapshot_positions": [[64.0]]}, "snapshot_positions[0]: expected int"),
        ({"lengths": [2**31]}, "lengths: expected at most 2147483647 tokens, got 2147483648"),
        ({"lengths": [2**90]}, "lengths: expected lengths <= "),
        ({"lengths": {3: 4}}, "lengths: expected a list or tensor of integers, got dict"),
        ({"lengths": [torch.tensor(1.5)]}, "lengths: expected integers, got a float32 tensor []"),
        ({"lengths": [torch.tensor(True)]}, "lengths: expected integers, got a bool tensor []"),
        ({"lengths": torch.zeros(9000)}, "lengths: expected dtype int32 or int64, got float32"),
        ({"lengths": [1], "start_positions": 2**31 - 1}, "lengths: expected ends <= 2147483647"),
        ({"lengths": [1], "start_positions": 2**31}, "start_positions: expected positions <= 2147"),
        ({"lengths": [1], "start_positions": 1.5}, "start_positions: expected a list or tensor of"),
        ({"lengths": [1], "start_positions": True}, "start_positions: expected a list or tensor"),
        (
            {"lengths": [1], "start_positions": [True]},
            "start_positions: expected integers, got Tru",
        ),
        ({"lengths": [1], "start_positions": None}, "start_positions: expected a list or tensor"),
        (
            {"lengths": [1], "drafts": None},
            "drafts: expected bools, one for each sequence",
        ),
        ({"lengths": [1], "drafts": 1}, "drafts: expected bools, one for each sequence, got 1"),
        ({"lengths": [1], "drafts": [0]}, "drafts: expected True or False, got 0"),
        (
            {"lengths": [1], "drafts": "no"},
            "drafts: expected bools, one for each sequence",
        ),
        ({"lengths": [64], "snapshot_every": 64.0}, "snapshot_every: expected an integer >= 0"),
        ({"lengths": [64], "snapshot_every": True}, "snapshot_every: expected an integer >= 0"),
        ({"lengths": [64], "snapshot_every": "64"}, "snapshot_every: expected an integer >= 0"),
        ({"lengths": [8], "capacity": 8}, "capacity: expected a list or tensor of integers, got 8"),
        ({"lengths": [8], "capacity": (1, 8.0, 0)}, "capacity: expected integers, got 8.0"),
        ({"lengths": [8], "capacity": (1, 8, -1)}, "capacity: expected counts >= 0, got -1"),
        ({"lengths": [128], "snapshot_positions": [[128, 64]]}, "snapshot_positions[0]: expected"),
        ({"lengths": [128], "snapshot_positions": [[64, 64]]}, "snapshot_positions[0]: expected"),
        ({"lengths": [128], "snapshot_every": 32}, "snapshot_every: expected a multiple of 64"),
        ({"lengths": [128], "snapshot_every": -64}, "snapshot_every: expected an integer >= 0"),
        (
            {"lengths": [128], "snapshot_every": 64, "snapshot_positions": [[]]},
            "snapshot_every: expected 0 beside snapshot_positions",
        ),
        ({"lengths": [8], "snapshot_every": 64, "drafts": True}, "snapshot_every: expected 0"),
        ({"lengths": [8], "capacity": (1, 2)}, "capacity: expected (sequences, tokens, snapshots)"),
        ({"lengths": [8], "capacity": (0, 64, 0)}, "capacity: expected at most 0 sequences, got 1"),
        ({"lengths": [8], "capacity": (1, 7, 0)}, "capacity: expected at most 7 tokens, got 8"),
        (
            {"lengths": [64], "snapshot_every": 64, "capacity": (1, 64, 0)},
            "capacity: expected at most 0 snapshots, got 1",
        ),
    ],
)
def test_a_wrong_step_gets_one_clear_error(arguments, says):
    with pytest.raises(ValueError) as error:
        Schedule(**arguments, device="cpu")
    assert str(error.value).startswith(says)


@pytest.mark.parametrize("device", ["toaster", None, True, 1.5, "cuda:x"])
def test_a_wrong_device_is_named(device):
    with pytest.raises(
        ValueError, match=r'^device: expected a device such as "cpu" or "cuda:0", g'
    ):
        Schedule([1], device=device)


def test_the_integers_of_other_libraries_are_integers():
    numpy = pytest.importorskip("numpy")
    schedule = Schedule(
        numpy.array([3, 2]),
        start_positions=numpy.int32(64),
        drafts=[numpy.True_, False],
        device="cpu",
    )
    assert (schedule.lengths, schedule.starts, schedule.drafts) == ([3, 2], [64, 64], [True, False])
    assert Schedule([torch.tensor(3), 2], device="cpu").lengths == [3, 2]
    for wrong in (numpy.array([1.5]), [numpy.True_], numpy.array([True])):
        with pytest.raises(ValueError, match=r"^lengths: expected integers, got "):
            Schedule(wrong, device="cpu")


def test_a_long_list_is_not_repeated_in_an_error():
    with pytest.raises(ValueError) as error:
        Schedule([1], capacity=range(1000), device="cpu")
    assert len(str(error.value)) < 120
    with pytest.raises(ValueError) as error:
        Schedule([64 * 999], snapshot_positions=[[*range(64, 64 * 999, 64), 64]], device="cpu")
    assert (
        str(error.value) == "snapshot_positions[0]: expected rising positions, got 64 after 63872"
    )


def test_update_copies_what_it_is_given():
    lengths, starts, positions, drafts = [100, 64], [0, 64], [[64], []], [False, False]
    schedule = Schedule([], device="cpu").update_(
        lengths, start_positions=starts, drafts=drafts, snapshot_positions=positions
    )
    before = [list(part) for part in told(schedule)]
    lengths[0], starts[1], drafts[0] = 7, 3, True
    positions[0].append(128)
    assert [list(part) for part in told(schedule)] == before

    tensor = torch.tensor([5, 6])
    schedule.update_(tensor)
    tensor.zero_()
    assert schedule.lengths == [5, 6]


def test_update_forgets_the_step_before_and_returns_the_schedule():
    schedule = Schedule(
        [100], start_positions=[64], snapshot_positions=[[64]], drafts=[False], device="cpu"
    )
    assert schedule.update_([3, 4]) is schedule
    assert told(schedule) == told(Schedule([3, 4], device="cpu"))


def test_a_refused_update_leaves_the_schedule_as_it_was():
    schedule = Schedule([8, 9], start_positions=[3, 4], capacity=(2, 20, 1), device="cpu")
    before = told(schedule)
    for wrong in (
        {"lengths": [1, 2, 3]},
        {"lengths": [30]},
        {"lengths": [1], "start_positions": [-1]},
        {"lengths": [1], "snapshot_positions": [[64]]},
        {},
    ):
        with pytest.raises(ValueError):
            schedule.update_(**wrong)
        assert told(schedule) == before


def test_capacity_leaves_room_for_later_steps():
    schedule = Schedule([1], device="cpu", capacity=(4, 256, 2))
    schedule.update_([64, 64, 0, 128], start_positions=0)
    assert (schedule.N, schedule.T) == (4, 256)
    with pytest.raises(ValueError, match="capacity: expected at most 4 sequences, got 5"):
        schedule.update_([0, 0, 0, 0, 0])
