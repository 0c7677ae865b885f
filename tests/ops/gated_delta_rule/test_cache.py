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
        ({"slots": 0}, "slots: expected an integer in [1, 2147483647], got 0"),
        ({"H": 0}, "H: expected an integer in [1"),
        ({"K": 0}, "K: expected an integer in [1"),
        ({"V": -3}, "V: expected an integer in [1"),
        ({"H": 2, "HV": 3}, "HV: expected a multiple of H = 2, got 3"),
        ({"slots": 4.0}, "slots: expected an integer in [1, 2147483647], got 4.0"),
        ({"slots": True}, "slots: expected an integer in [1, 2147483647], got True"),
        ({"slots": "4"}, "slots: expected an integer in [1, 2147483647], got '4'"),
        ({"HV": None}, "HV: expected an integer in [1, 2147483647], got None"),
        ({"K": torch.ones(2)}, "K: expected an integer in [1, 2147483647], got a float32 tensor"),
        ({"draft_tokens": 2.5}, "draft_tokens: expected an integer in [0, 64], got 2.5"),
        (
            {"conv_channels": None},
            "conv_channels: expected an integer in [0, ",
        ),
        ({"conv_width": "4"}, "conv_width: expected an integer in [2, 2147483647], got '4'"),
        ({"per_channel": None}, "per_channel: expected True or False, got None"),
        ({"dtype": "float32"}, "dtype: expected float32, bfloat16 or float16, got 'float32'"),
        ({"dtype": None}, "dtype: expected float32, bfloat16 or float16, got None"),
        ({"device": "toaster"}, "device: expected a device such as"),
        ({"device": None}, "device: expected a device such as"),
        ({"tensors": [1]}, "tensors: expected tensors by name, got [1]"),
        ({"tensors": {1: 2}}, "tensors: expected ['end', 'position'"),
        ({"dtype": torch.int8}, "dtype: expected"),
        ({"draft_tokens": -1}, "draft_tokens: expected an integer in [0, 64], got"),
        ({"draft_tokens": 65}, "draft_tokens: expected an integer in [0, 64], got"),
        ({"conv_channels": -1}, "conv_channels: expected an integer in [0"),
        ({"conv_channels": 8, "conv_width": 1}, "conv_width: expected an integer in [2"),
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
        (lambda c: c.copy([0] * 99, [1] * 99), r"dst: expected distinct .*\.\.\.\] of 99 entries"),
        (lambda c: c.reset("12"), "slots: expected a list or tensor of integers, got '12'"),
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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"positions": [2**31]}, r"positions: expected multiples of 64 <= 2147483647, got 2147483"),
        ({"positions": [-64]}, r"positions: expected multiples of 64 >= 0, got -64"),
        ({"positions": [64.0]}, r"positions: expected integers, got 64.0"),
        ({"positions": [True]}, r"positions: expected integers, got True"),
        ({"positions": torch.tensor([64.0])}, r"positions: expected dtype int32 or int64"),
        ({"positions": 64}, r"positions: expected a list or tensor of integers, got 64"),
        ({"slots": [True]}, r"slots: expected integers, got True"),
        ({"states": states_of(1).int()}, r"states: expected dtype float32 .* got int32"),
        ({"states": states_of(1) * 1j}, r"states: expected dtype float32 .* got complex64"),
        ({"states": states_of(1).requires_grad_()}, r"states: requires grad, but DeltaCache.load"),
        (
            {"states": states_of(1) * torch.nan},
            r"states: expected finite values, got 1536 that",
        ),
        (
            {"states": states_of(1) / 0},
            r"states: expected finite values, got .* at \[0, 0, 0, 0\]: ",
        ),
        ({"states": states_of(1).double() * 1e200}, r"states: expected finite values"),
        ({"histories": torch.ones(1, 3, 8).int()}, r"histories: expected dtype float32 .* int32"),
        ({"histories": torch.ones(1, 3, 8).requires_grad_()}, r"histories: requires grad"),
        ({"histories": torch.full((1, 3, 8), 1e30)}, r"histories: expected finite values"),
        ({"histories": [0.0]}, r"histories: expected a tensor, got list"),
    ],
)
def test_what_no_step_could_have_left_is_not_loaded(changes, says):
    cache = cache_of(conv_channels=8, dtype=torch.float16)
    good = {"positions": [64], "states": states_of(1), "histories": torch.ones(1, 3, 8)}
    cache.load([1], **good)
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    with pytest.raises(ValueError, match=f"^{says}"):
        cache.load(**{"slots": [2], **good, **changes})
    assert all(torch.equal(cache.tensors[name], before[name]) for name in before)


def test_the_last_position_of_32_bits_can_be_loaded_and_an_empty_state_may_hold_anything():
    cache = cache_of()
    cache.load([0, 1], [2**31 - 64, 0], torch.stack([states_of(1)[0], states_of(1)[0] * torch.nan]))
    positions, states, _ = cache.export([0, 1])
    assert positions.tolist() == [2**31 - 64, 0]
    assert torch.equal(states[0], states_of(1)[0])
    assert not states[1].any()


def test_the_callers_memory_is_its_own_for_every_slot():
    """Slots that share memory would overwrite each other; several tensors in one buffer may not."""
    good = cache_of().tensors
    one = torch.zeros(1, 4, 16, 24).expand(4, -1, -1, -1)
    with pytest.raises(ValueError, match=r"^tensors\['state'\]: expected memory of its own for ev"):
        cache_of(tensors=good | {"state": one})
    with pytest.raises(ValueError, match=r"^tensors\['(position|end)'\]: expected .* got that of"):
        cache_of(tensors=good | {"position": good["end"]})
    marked = {"tail_beta": good["tail_beta"].clone().requires_grad_()}
    with pytest.raises(ValueError, match=r"^tensors\['tail_beta'\]: requires grad"):
        cache_of(tensors=good | marked)
    rows = torch.zeros(4, 2, 4, dtype=torch.int32)  # position and end of a slot side by side
    cache_of(tensors=good | {"position": rows[:, 0], "end": rows[:, 1]})


def test_a_state_that_is_no_tensor_is_named():
    with pytest.raises(ValueError, match=r"^states: expected a tensor"):
        cache_of().load([1], [64], [[0.0]])


def test_a_slot_whose_heads_do_not_agree_is_refused():
    """As an interrupted call leaves it: some groups of heads were computed, others not."""
    cache = cache_of()
    cache.load([1], [128], states_of(1))
    cache.tensors["position"][1, 2:] = 64
    q, k = torch.zeros(2, 5, SIZES["H"], SIZES["K"])
    rows = q, k, torch.zeros(5, SIZES["HV"], SIZES["V"]), torch.zeros(5, 4), torch.zeros(5, 4)

    def go(start):
        schedule = Schedule([5], start_positions=[start], device="cpu")
        return headstart.gated_delta_rule(*rows, schedule=schedule, state=cache.at([1]))

    with pytest.raises(ValueError, match="state: slot 1 holds heads at different positions"):
        go(128)
    go(0)
    go(5)


@pytest.mark.parametrize("change", [torch.Tensor.half, lambda x: x[:-1]], ids=["dtype", "shape"])
def test_a_cache_with_another_tensor_is_another_kind(change):
    cache = cache_of(4)
    before = cache.kind
    cache.tensors["state"] = change(cache.tensors["state"])
    assert cache.kind is not before
