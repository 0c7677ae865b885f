"""The memory of sequences: slots, their copies, and states that go out and come back."""

import pytest
import torch

import headstart
from headstart import DeltaCache, Schedule

SIZES = {"H": 2, "HV": 4, "K": 16, "V": 24}


def cache_of(slots=4, **changes):
    arguments = SIZES | {"dtype": torch.float32, "device": "cpu"} | changes
    return DeltaCache(slots, **arguments)


def states_of(count, seed=0):
    at = torch.Generator().manual_seed(seed)
    return torch.randn(count, SIZES["HV"], SIZES["K"], SIZES["V"], generator=at)


def test_a_new_cache_is_zero_filled_and_empty():
    cache = cache_of(conv_channels=8)
    assert all(not tensor.any() for tensor in cache.tensors.values())
    positions, states, histories = cache.export([0, 3])
    assert positions.tolist() == [0, 0]
    assert states.shape == (2, 4, 16, 24)
    assert states.dtype == torch.float32
    assert not states.any()
    assert histories.shape == (2, 3, 8)
    assert not histories.any()


def test_bytes_per_slot_is_the_memory_divided_by_the_slots():
    for changes in ({}, {"per_channel": True}, {"conv_channels": 8}, {"dtype": torch.bfloat16}):
        cache = cache_of(7, **changes)
        total = sum(tensor.nbytes for tensor in cache.tensors.values())
        assert cache.bytes_per_slot * 7 == total


def test_every_tensor_starts_with_the_slots():
    for tensor in cache_of(5, conv_channels=8, per_channel=True).tensors.values():
        assert tensor.shape[0] == 5


@pytest.mark.parametrize("conv", [0, 8])
def test_load_then_export_gives_back_the_bits(conv):
    cache = cache_of(conv_channels=conv, dtype=torch.bfloat16)
    states = states_of(3)
    at = torch.Generator().manual_seed(1)
    histories = torch.randn(3, 3, conv, generator=at).bfloat16() if conv else None
    cache.load([2, 0, 3], torch.tensor([64, 640, 128]), states, histories)
    positions, found, kept = cache.export(torch.tensor([0, 2, 3]))
    assert positions.tolist() == [640, 64, 128]
    assert torch.equal(found, states[[1, 0, 2]])
    if conv:
        assert torch.equal(kept, histories[[1, 0, 2]])
    else:
        assert kept is None
    assert not cache.export([1])[1].any()


def test_a_state_loaded_at_position_0_is_empty():
    cache = cache_of(conv_channels=8)
    cache.load([1], [0], states_of(1), torch.ones(1, 3, 8))
    positions, states, histories = cache.export([1])
    assert positions.tolist() == [0]
    assert not states.any()
    assert not histories.any()


def test_reset_empties_only_its_slots():
    cache = cache_of(conv_channels=8)
    cache.load([0, 1], [64, 128], states_of(2), torch.ones(2, 3, 8))
    kept = cache.export([1])
    cache.reset([0])
    positions, states, histories = cache.export([0])
    assert positions.tolist() == [0]
    assert not states.any()
    assert not histories.any()
    assert all(torch.equal(x, y) for x, y in zip(cache.export([1]), kept, strict=True))


def test_copy_takes_all_of_a_slot():
    cache = cache_of(6, conv_channels=8, per_channel=True)
    at = torch.Generator().manual_seed(2)
    for tensor in cache.tensors.values():
        tensor.copy_(torch.randint(1, 100, tensor.shape, generator=at))
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    cache.copy([1, 1, 4], torch.tensor([0, 5, 2]))
    for name, tensor in cache.tensors.items():
        for slot, source in enumerate([1, 1, 4, 3, 4, 1]):
            assert torch.equal(tensor[slot], before[name][source]), (name, slot)


def test_copying_between_overlapping_slots_reads_before_it_writes():
    cache = cache_of()
    states = states_of(2)
    cache.load([0, 1], [64, 128], states)
    cache.copy([0, 1], [1, 0])
    positions, found, _ = cache.export([0, 1])
    assert positions.tolist() == [128, 64]
    assert torch.equal(found, states.flip(0))


def test_the_cache_lives_in_the_memory_of_its_caller():
    layout = {name: x.shape for name, x in cache_of(4, conv_channels=8).tensors.items()}
    kinds = {name: x.dtype for name, x in cache_of(4, conv_channels=8).tensors.items()}
    mine = {
        # every slot followed by another slot of padding: the slot stride is free
        name: torch.full((8, *shape[1:]), 7, dtype=kinds[name])[::2]
        for name, shape in layout.items()
    }
    for tensor in mine.values():
        tensor.zero_()
    cache = cache_of(4, conv_channels=8, tensors=mine)
    assert all(cache.tensors[name] is mine[name] for name in mine)
    states, histories = states_of(1), torch.ones(1, 3, 8)
    cache.load([2], [64], states, histories)
    assert torch.equal(mine["state"][2], states[0])
    positions, found, kept = cache.export([2])
    assert positions.tolist() == [64]
    assert torch.equal(found, states)
    assert torch.equal(kept, histories)


def test_the_callers_memory_must_have_the_layout_of_tensors():
    good = cache_of().tensors
    for wrong, says in (
        ({name: x for name, x in good.items() if name != "state"}, "tensors: expected"),
        (good | {"more": good["state"]}, "tensors: expected"),
        (good | {"state": good["state"].mT}, r"tensors\['state'\]: expected \[S, HV, K, V\]"),
        (good | {"state": good["state"].half()}, r"tensors\['state'\]: expected dtype float32"),
        (good | {"state": good["state"].to("meta")}, r"tensors\['state'\]: expected device cpu"),
        (good | {"state": None}, r"tensors\['state'\]: expected a tensor"),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            cache_of(tensors=wrong)


def test_a_history_that_left_the_ring_is_nan_and_is_refused_back():
    cache = cache_of(conv_channels=8, draft_tokens=4)
    cache.load([0], [64], states_of(1), torch.ones(1, 3, 8))
    # 40 more inputs went through the ring of 7 while the state stayed at 64
    cache.tensors["history_first"][0], cache.tensors["history_end"][0] = 97, 104
    positions, states, histories = cache.export([0])
    assert positions.tolist() == [64]
    assert histories.isnan().all()
    with pytest.raises(ValueError, match=r"^histories: expected finite"):
        cache.load([1], positions, states, histories)
    assert cache.export([1])[0].tolist() == [0]


def test_a_history_overwritten_by_dropped_drafts_is_not_kept():
    """Seven drafts in a ring of ten columns reach back over what a smaller end seems to keep."""
    cache = cache_of(conv_channels=8, draft_tokens=7)
    at = torch.Generator().manual_seed(3)
    x, weight = torch.randn(200, 8, generator=at), torch.randn(8, 4, generator=at)

    def step(start, stop, **arguments):
        schedule = Schedule([stop - start], start_positions=start, device="cpu", **arguments)
        return headstart.causal_conv1d(
            x[start:stop], weight, schedule=schedule, state=cache.at([0]), snapshots=torch.float32
        )

    step(0, 133)
    step(133, 140, drafts=True)
    step(133, 134, drafts=True)  # drafts 134..139 are dropped, but they were written
    cache.tensors["position"][0] = 128  # as the rule of the same layer would leave it
    history = cache.export([0])[2]
    assert history.isnan().all() or torch.equal(history[0], x[125:128])
    with pytest.raises(ValueError, match=r"^snapshot_positions"):
        step(134, 135, snapshot_positions=[[128]])
    with pytest.raises(ValueError, match=r"^start_positions"):
        step(129, 130)
    y = step(133, 135).y  # what a rollback over the drafts needs is there
    expected = headstart.causal_conv1d(x[:135], weight).y[133:]
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slots": 0}, "slots: expected at least 1, got 0"),
        ({"H": 0}, "H: expected at least 1"),
        ({"K": 0}, "K: expected at least 1"),
        ({"V": -3}, "V: expected at least 1"),
        ({"H": 2, "HV": 3}, "HV: expected a multiple of H = 2, got 3"),
        ({"dtype": torch.int8}, "dtype: expected"),
        ({"draft_tokens": -1}, "draft_tokens: expected 0 to 64"),
        ({"draft_tokens": 65}, "draft_tokens: expected 0 to 64"),
        ({"conv_channels": -1}, "conv_channels: expected at least 0"),
        ({"conv_channels": 8, "conv_width": 1}, "conv_width: expected at least 2"),
    ],
)
def test_a_wrong_cache_gets_one_clear_error(changes, says):
    with pytest.raises(ValueError) as error:
        cache_of(**changes)
    assert str(error.value).startswith(says)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda c: c.reset([4]), r"slots: expected slots in \[0, 4\), got 4"),
        (lambda c: c.reset([-1]), "slots: expected slots in"),
        (lambda c: c.export([9]), "slots: expected slots in"),
        (lambda c: c.export([1.0]), "slots: expected integers"),
        (lambda c: c.copy([0, 1], [2]), "dst: expected 2 slots, got 1"),
        (lambda c: c.copy([0, 1], [2, 2]), "dst: expected distinct slots"),
        (lambda c: c.copy([7], [2]), "src: expected slots in"),
        (lambda c: c.load([1, 1], [64, 64], states_of(2)), "slots: expected distinct slots"),
        (lambda c: c.load([1], [64, 64], states_of(1)), "positions: expected 1 positions, got 2"),
        (lambda c: c.load([1], [63], states_of(1)), "positions: expected multiples of 64, got 63"),
        (lambda c: c.load([1], [-64], states_of(1)), "positions: expected multiples of 64"),
        (lambda c: c.load([1], [64], states_of(2)), r"states: expected \[N, HV, K, V\]"),
        (lambda c: c.load([1], [64], states_of(1).mT), r"states: expected \[N, HV, K, V\]"),
        (
            lambda c: c.load([1], [64], states_of(1), torch.zeros(1, 3, 8)),
            "histories: expected None",
        ),
    ],
)
def test_wrong_slots_and_states_are_refused_and_nothing_changes(act, says):
    cache = cache_of()
    cache.load([0, 1, 2, 3], [64, 128, 192, 256], states_of(4))
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    with pytest.raises(ValueError, match=f"^{says}"):
        act(cache)
    assert all(torch.equal(cache.tensors[name], before[name]) for name in before)


def test_a_cache_with_a_convolution_is_loaded_with_its_history():
    cache = cache_of(conv_channels=8)
    with pytest.raises(ValueError, match=r"^histories: expected a tensor"):
        cache.load([1], [64], states_of(1))
    with pytest.raises(ValueError, match=r"^histories: expected \[N, width - 1, channels\]"):
        cache.load([1], [64], states_of(1), torch.zeros(1, 4, 8))
    assert cache.export([1])[0].tolist() == [0]


def test_a_state_that_is_no_tensor_is_named():
    with pytest.raises(ValueError, match=r"^states: expected a tensor"):
        cache_of().load([1], [64], [[0.0]])
