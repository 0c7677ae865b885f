"""Where states come from and go to: tensors, pools, caches, snapshots."""

import itertools

import numpy as np
import pytest
import torch
from tests.ops.gated_delta_rule import oracle
from tests.ops.gated_delta_rule.inputs import draw, packed, replay
from tests.ops.gated_delta_rule.oracle import expect_close, expect_state

import headstart
from headstart import DeltaCache, Pool, Schedule

LENGTHS = [70, 0, 130, 1]
H, HV, K, V = 1, 2, 16, 24
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def batch(lengths=LENGTHS, *, dtype=torch.float32, per_channel=False, seed=0):
    """Sequences of these lengths, alone and packed."""
    sequences = [
        draw(length, H, HV, K, V, dtype=dtype, per_channel=per_channel, seed=seed + n)
        for n, length in enumerate(lengths)
    ]
    return sequences, packed(*sequences)


def states_of(count, seed=1, dtype=torch.float32):
    at = torch.Generator().manual_seed(seed)
    return torch.randn(count, HV, K, V, generator=at).to(dtype)


def rows_of(lengths):
    offsets = np.cumsum([0, *lengths]).tolist()
    return [slice(*pair) for pair in itertools.pairwise(offsets)]


def expect_sequences(o, sequences, before):
    """Outputs of a packed batch whose sequence n started in state before[n] (None: zeros)."""
    for rows, x, state in zip(rows_of([len(x) for x in sequences]), sequences, before, strict=True):
        old = None if state is None else oracle.wide(state)
        expect_close(o[rows], replay(x, state=old).o)


def new_cache(slots=8, **changes):
    arguments = {"H": H, "HV": HV, "K": K, "V": V, "dtype": torch.float32, "device": "cpu"}
    return DeltaCache(slots, **arguments | changes)


# Tensors


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_a_state_tensor_is_read_and_the_new_one_comes_back_in_its_dtype(rule, dtype):
    sequences, x = batch()
    before = states_of(4, dtype=dtype)
    kept = before.clone()
    found = rule(*x, schedule=LENGTHS, state=before, return_state=True)
    assert torch.equal(before, kept)
    assert found.state.dtype == dtype
    expect_sequences(found.o, sequences, before)
    for n, sequence in enumerate(sequences):
        expect_state(found.state[n], replay(sequence, state=oracle.wide(before[n])).state)
    assert torch.equal(found.state[1], before[1])  # an empty sequence passes its state through


def test_without_return_state_nothing_comes_back(rule):
    _, x = batch()
    found = rule(*x, schedule=LENGTHS, state=states_of(4))
    assert found.state is None
    assert found.snapshots is None


def test_return_state_starts_from_zeros_without_a_state(rule):
    sequences, x = batch()
    found = rule(*x, schedule=LENGTHS, return_state=True)
    assert found.state.dtype == torch.float32
    for n, sequence in enumerate(sequences):
        expect_state(found.state[n], replay(sequence).state)


def test_a_state_tensor_may_have_any_strides(rule):
    sequences, x = batch()
    before = states_of(4)
    turned = before.mT.contiguous().mT
    spread = torch.full((8, HV, K, 2 * V), torch.nan)[::2, :, :, ::2].copy_(before)
    plain = rule(*x, schedule=LENGTHS, state=before, return_state=True, reproducible=True)
    for view in (turned, spread):
        assert not view.is_contiguous()
        found = rule(*x, schedule=LENGTHS, state=view, return_state=True)
        expect_sequences(found.o, sequences, before)
        found = rule(*x, schedule=LENGTHS, state=view, return_state=True, reproducible=True)
        assert torch.equal(found.o, plain.o)
        assert torch.equal(found.state, plain.state)


def test_the_new_state_is_rounded_to_nearest_even(rule):
    _, x = batch()
    before = states_of(4).bfloat16()
    found = rule(*x, schedule=LENGTHS, state=before, return_state=True).state
    wide = rule(*x, schedule=LENGTHS, state=before.float(), return_state=True).state
    assert torch.equal(found, wide.bfloat16())


# Pools


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_a_pool_is_read_and_written_in_place_by_slot(rule, layout, dtype):
    sequences, x = batch()
    states = states_of(9, dtype=dtype)
    memory = states.clone() if layout == "kv" else states.mT.contiguous()
    slots = [7, 2, 0, 5]
    found = rule(*x, schedule=LENGTHS, state=Pool(memory, slots, layout=layout))
    assert found.state is None
    after = memory if layout == "kv" else memory.mT
    expect_sequences(found.o, sequences, states[slots])
    for n, slot in enumerate(slots):
        expect_state(after[slot], replay(sequences[n], state=oracle.wide(states[slot])).state)
    untouched = [1, 3, 4, 6, 8]
    assert torch.equal(after[untouched], states[untouched])
    assert torch.equal(after[2], states[2])


def test_slot_minus_1_reads_zeros_and_writes_nothing(rule):
    sequences, x = batch()
    memory = states_of(4)
    kept = memory.clone()
    found = rule(*x, schedule=LENGTHS, state=Pool(memory, [3, -1, -1, 0]))
    expect_sequences(found.o, sequences, [kept[3], None, None, kept[0]])
    assert torch.equal(memory[1:3], kept[1:3])
    expect_state(memory[3], replay(sequences[0], state=oracle.wide(kept[3])).state)
    expect_state(memory[0], replay(sequences[3], state=oracle.wide(kept[0])).state)


def test_present_false_reads_zeros_whatever_the_slot_holds(rule):
    sequences, x = batch()
    for present in ([True, False, False, True], torch.tensor([True, False, False, True])):
        memory = states_of(4)
        kept = memory.clone()
        memory[1:3] = torch.nan
        rule_out = rule(*x, schedule=LENGTHS, state=Pool(memory, [0, 1, 2, 3], present=present))
        expect_sequences(rule_out.o, sequences, [kept[0], None, None, kept[3]])
        assert not memory[1].any()  # an empty sequence without a state has the state zero
        expect_state(memory[2], replay(sequences[2]).state)


def test_write_slots_may_differ_from_read_slots(rule):
    sequences, x = batch()
    memory = states_of(8)
    kept = memory.clone()
    read, write = torch.tensor([0, 1, 1, 3]), torch.tensor([4, -1, 6, 7], dtype=torch.int32)
    found = rule(*x, schedule=LENGTHS, state=Pool(memory, read, write))
    expect_sequences(found.o, sequences, kept[read])
    assert torch.equal(memory[[0, 1, 2, 3, 5]], kept[[0, 1, 2, 3, 5]])
    for n, slot in ((0, 4), (2, 6), (3, 7)):
        expect_state(memory[slot], replay(sequences[n], state=oracle.wide(kept[read[n]])).state)


def test_a_pool_without_read_slots_starts_from_zeros(rule):
    sequences, x = batch()
    memory = torch.full((4, HV, K, V), torch.nan)
    found = rule(*x, schedule=LENGTHS, state=Pool(memory, write_slots=[3, 2, 1, 0]))
    expect_sequences(found.o, sequences, [None] * 4)
    for n, sequence in enumerate(sequences):
        expect_state(memory[3 - n], replay(sequence).state)


def test_the_slots_of_a_pool_may_be_padded_apart(rule):
    sequences, x = batch()
    states = states_of(8)
    memory = torch.full((8, HV * K * V + 37), 7.0)
    pool = memory[:, : HV * K * V].unflatten(1, (HV, K, V)).copy_(states)
    rule(*x, schedule=LENGTHS, state=Pool(pool, [6, 1, 3, 4]))
    assert (memory[:, HV * K * V :] == 7).all()
    for n, slot in enumerate([6, 1, 3, 4]):
        expect_state(pool[slot], replay(sequences[n], state=oracle.wide(states[slot])).state)


def test_a_pool_slot_may_lie_beyond_2_to_the_31_elements(rule):
    """Memory is reserved by its strides and only the pages that are used are ever touched."""
    stride = 2**31 // 3 + 5
    # half precision: an untouched page costs nothing, and poison would touch it
    storage = torch.UntypedStorage(4 * stride * 2)
    flat = torch.tensor([], dtype=torch.float16).set_(storage, 0, (4 * stride,))
    memory = flat.as_strided((4, HV, K, V), (stride, K * V, V, 1))
    states = states_of(2, dtype=torch.float16)
    memory[0], memory[3] = states[0], states[1]
    assert memory[3].storage_offset() > 2**31
    sequences, x = batch([70, 3])
    found = rule(*x, schedule=[70, 3], state=Pool(memory, [0, 3]))
    expect_sequences(found.o, sequences, states)
    for n, slot in ((0, 0), (1, 3)):
        expect_state(memory[slot], replay(sequences[n], state=oracle.wide(states[n])).state)


# Snapshots


@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_snapshots_are_packed_sequence_by_sequence_in_rising_positions(rule, dtype, per_channel):
    lengths = [200, 0, 64, 63, 130]
    sequences, x = batch(lengths, per_channel=per_channel, seed=10)
    before = states_of(5)
    positions = [[64, 192], [0], [0, 64], [], [128]]
    schedule = Schedule(lengths, snapshot_positions=positions, device="cpu")
    found = rule(*x, schedule=schedule, state=before, snapshots=dtype).snapshots
    assert found.dtype == dtype
    assert found.shape == (6, HV, K, V)
    m = 0
    for n, kept in enumerate(positions):
        truth = replay(sequences[n], state=oracle.wide(before[n]), keep=kept)
        for position in kept:
            expect_state(found[m], truth.states[position])
            m += 1
    assert torch.equal(found[2], before[1].to(dtype))
    assert torch.equal(found[3], before[2].to(dtype))


def test_snapshot_every_keeps_the_whole_grid(rule):
    lengths = [200, 64]
    sequences, x = batch(lengths, seed=20)
    schedule = Schedule(lengths, snapshot_every=64, device="cpu")
    found = rule(*x, schedule=schedule, snapshots=torch.float32).snapshots
    truth = replay(sequences[0], keep=(64, 128, 192)).states
    for n, position in enumerate((64, 128, 192)):
        expect_state(found[n], truth[position])
    expect_state(found[3], replay(sequences[1]).state)


def test_a_later_step_keeps_absolute_positions(rule):
    """64 to 200 of a sequence that stands at 64: the grid is the sequence's, not the step's."""
    whole = draw(200, H, HV, K, V, seed=30)
    truth = replay(whole, keep=(64, 128, 192)).states
    before = torch.from_numpy(truth[64]).float()[None]
    schedule = Schedule(
        [136], start_positions=64, snapshot_positions=[[64, 128, 192]], device="cpu"
    )
    found = rule(*whole[64:], schedule=schedule, state=before, snapshots=torch.float32)
    assert torch.equal(found.snapshots[0], before[0])
    expect_state(found.snapshots[1], truth[128], slack=2)
    expect_state(found.snapshots[2], truth[192], slack=2)


@pytest.mark.parametrize("start", [1, 63, 100])
def test_a_step_off_the_grid_meets_the_grid_inside(rule, start):
    whole = draw(260, H, HV, K, V, seed=31)
    truth = replay(whole, keep=(start, 128, 192, 256)).states
    before = torch.from_numpy(truth[start]).float()[None]
    schedule = Schedule(
        [260 - start], start_positions=start, snapshot_positions=[[128, 192, 256]], device="cpu"
    )
    for reproducible in (False, True):
        found = rule(
            *whole[start:],
            schedule=schedule,
            state=before,
            snapshots=torch.float32,
            return_state=True,
            reproducible=reproducible,
        )
        for n, position in enumerate((128, 192, 256)):
            expect_state(found.snapshots[n], truth[position], slack=2)
        expect_state(found.state[0], truth[260], slack=2)
        expect_close(found.o, replay(whole).o[start:], slack=2)


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("dtype", STATE_DTYPES, ids=str)
def test_snapshots_may_go_to_the_slots_of_a_pool(rule, layout, dtype):
    lengths = [200, 70]
    _, x = batch(lengths, seed=40)
    schedule = Schedule(lengths, snapshot_every=64, device="cpu")
    packed_ones = rule(*x, schedule=schedule, snapshots=dtype).snapshots
    memory = torch.full((6, HV, K, V) if layout == "kv" else (6, HV, V, K), 7.0, dtype=dtype)
    found = rule(
        *x, schedule=schedule, snapshots=Pool(memory, write_slots=[5, -1, 0, 2], layout=layout)
    )
    assert found.snapshots is None
    after = memory if layout == "kv" else memory.mT
    assert torch.equal(after[[5, 0, 2]], packed_ones[[0, 2, 3]])
    assert (after[[1, 3, 4]] == 7).all()


def test_snapshots_may_go_to_the_slots_of_a_cache(rule):
    lengths = [200, 70]
    _, x = batch(lengths, seed=41)
    schedule = Schedule(lengths, snapshot_every=64, device="cpu")
    expected = rule(*x, schedule=schedule, snapshots=torch.float32, reproducible=True).snapshots
    cache, live = new_cache(), new_cache()
    found = rule(*x, schedule=schedule, state=live.at([0, 1]), snapshots=cache.at([5, -1, 0, 2]))
    assert found.snapshots is None
    positions, states, _ = cache.export([5, 0, 2, 1])
    assert positions.tolist() == [64, 192, 64, 0]
    assert torch.equal(states[:3], expected[[0, 2, 3]])
    assert not states[3].any()


def test_snapshots_are_not_kept_unless_asked_for(rule):
    _, x = batch([200])
    schedule = Schedule([200], snapshot_every=64, device="cpu")
    assert rule(*x, schedule=schedule).snapshots is None


def test_no_snapshot_is_an_empty_tensor(rule):
    _, x = batch([20])
    found = rule(*x, schedule=Schedule([20], device="cpu"), snapshots=torch.float32).snapshots
    assert found.shape == (0, HV, K, V)


# Caches


def test_a_cache_carries_a_sequence_through_steps_of_any_size(rule):
    x = draw(300, H, HV, K, V, seed=50)
    truth = replay(x, keep=(64, 128, 192, 256))
    cache, start = new_cache(), 0
    for length in (1, 63, 10, 0, 100, 64, 61, 1):
        schedule = Schedule([length], start_positions=start, device="cpu")
        o = rule(*x[start : start + length], schedule=schedule, state=cache.at([3])).o
        expect_close(o, truth.o[start : start + length])
        start += length
        positions, states, _ = cache.export([3])
        assert positions.tolist() == [start // 64 * 64]
        if start >= 64:
            expect_state(states[0], truth.states[start // 64 * 64])
    assert start == 300


def test_sequences_of_a_cache_do_not_meet(rule):
    sequences, x = batch([70, 0, 130, 1], seed=60)
    cache = new_cache()
    o = rule(*x, schedule=Schedule(LENGTHS, device="cpu"), state=cache.at([6, 0, 2, 4])).o
    expect_sequences(o, sequences, [None] * 4)
    more, y = batch([3, 5, 64, 70], seed=70)
    schedule = Schedule([3, 5, 64, 70], start_positions=[1, 70, 0, 130], device="cpu")
    o = rule(*y, schedule=schedule, state=cache.at(torch.tensor([4, 6, 0, 2]))).o
    for rows, old, new in zip(rows_of([3, 5, 64, 70]), (3, 0, 1, 2), more, strict=True):
        expected = replay(packed(sequences[old], new)).o[len(sequences[old]) :]
        expect_close(o[rows], expected)


def test_a_start_of_0_finds_an_empty_slot_whatever_it_held(rule):
    cache = new_cache()
    for name, tensor in cache.tensors.items():
        tensor.fill_(torch.nan if tensor.is_floating_point() else {"end": 100}.get(name, 64))
    x = draw(130, H, HV, K, V, seed=80)
    o = rule(*x, schedule=Schedule([130], device="cpu"), state=cache.at([0])).o
    fresh = new_cache()
    assert torch.equal(o, rule(*x, schedule=Schedule([130], device="cpu"), state=fresh.at([0])).o)
    positions, states, _ = cache.export([0])
    assert positions.tolist() == [128]
    assert torch.equal(states, fresh.export([0])[1])


@pytest.mark.parametrize("length", [0, 1, 30])
def test_a_short_start_of_0_in_a_used_slot_leaves_an_empty_state(rule, length):
    """No chunk is completed, so nobody writes the state; it must read as zeros all the same."""
    cache, x, y = new_cache(), draw(200, H, HV, K, V, seed=81), draw(100, H, HV, K, V, seed=82)
    rule(*x, schedule=Schedule([200], device="cpu"), state=cache.at([0]))
    rule(*y[:length], schedule=Schedule([length], device="cpu"), state=cache.at([0]))
    positions, states, _ = cache.export([0])
    assert positions.tolist() == [0]
    assert not states.any()
    rest = Schedule([100 - length], start_positions=length, device="cpu")
    expect_close(rule(*y[length:], schedule=rest, state=cache.at([0])).o, replay(y).o[length:])


def test_minus_1_in_a_cache_reads_as_empty_and_writes_nothing(rule):
    sequences, x = batch(seed=90)
    cache = new_cache()
    rule(*x, schedule=Schedule(LENGTHS, device="cpu"), state=cache.at([0, 1, 2, 3]))
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    o = rule(*x, schedule=Schedule(LENGTHS, device="cpu"), state=cache.at([-1] * 4)).o
    expect_sequences(o, sequences, [None] * 4)
    assert all(torch.equal(cache.tensors[name], before[name]) for name in before)


def test_drafts_are_dropped_by_passing_a_smaller_start(rule):
    x, wrong = draw(200, H, HV, K, V, seed=100), draw(200, H, HV, K, V, seed=101)
    truth, cache = replay(x), new_cache()
    rule(*x[:120], schedule=Schedule([120], device="cpu"), state=cache.at([0]))
    at = 120
    for right, drafted in ((3, 8), (0, 16), (1, 1), (16, 16), (5, 16), (10, 12), (7, 16)):
        tokens = packed(x[at : at + right], wrong[at + right : at + drafted])
        schedule = Schedule([drafted], start_positions=at, drafts=True, device="cpu")
        o = rule(*tokens, schedule=schedule, state=cache.at([0])).o
        expect_close(o[:right], truth.o[at : at + right])
        assert cache.export([0])[0].tolist() == [at // 64 * 64]
        at += right
    rest = Schedule([200 - at], start_positions=at, device="cpu")
    expect_close(rule(*x[at:], schedule=rest, state=cache.at([0])).o, truth.o[at:])


def test_a_start_may_go_back_as_far_as_the_state(rule):
    x, cache = draw(100, H, HV, K, V, seed=110), new_cache()
    rule(*x[:90], schedule=Schedule([90], device="cpu"), state=cache.at([0]))
    for start in (70, 64):
        y = draw(20, H, HV, K, V, seed=start)
        schedule = Schedule([20], start_positions=start, device="cpu")
        o = rule(*y, schedule=schedule, state=cache.at([0])).o
        expect_close(o, replay(packed(x[:start], y)).o[start:])


def test_a_copied_slot_goes_its_own_way(rule):
    x, y = draw(150, H, HV, K, V, seed=120), draw(90, H, HV, K, V, seed=121)
    cache = new_cache()
    rule(*x[:100], schedule=Schedule([100], device="cpu"), state=cache.at([0]))
    cache.copy([0], [5])
    more = Schedule([50], start_positions=100, device="cpu")
    expect_close(rule(*x[100:], schedule=more, state=cache.at([0])).o, replay(x).o[100:])
    fork = Schedule([90], start_positions=100, device="cpu")
    expected = replay(packed(x[:100], y)).o[100:]
    expect_close(rule(*y, schedule=fork, state=cache.at([5])).o, expected)


def test_an_exported_state_restores_a_sequence_elsewhere(rule):
    x = draw(200, H, HV, K, V, seed=130)
    first, second = new_cache(), new_cache()
    rule(*x[:150], schedule=Schedule([150], device="cpu"), state=first.at([1]))
    second.load([6], *first.export([1]))
    rest = Schedule([72], start_positions=128, device="cpu")
    expect_close(rule(*x[128:], schedule=rest, state=second.at([6])).o, replay(x).o[128:])


def test_a_cache_may_live_in_padded_memory_of_its_caller(rule):
    layout = new_cache().tensors
    mine = {
        name: torch.zeros((16, *tensor.shape[1:]), dtype=tensor.dtype)[::2]
        for name, tensor in layout.items()
    }
    between = {name: tensor[1::2] for name, tensor in mine.items()}
    cache, plain = new_cache(tensors=mine), new_cache()
    x = draw(150, H, HV, K, V, seed=140)
    for start, stop in ((0, 100), (100, 150)):
        schedule = Schedule([stop - start], start_positions=start, device="cpu")
        here = rule(*x[start:stop], schedule=schedule, state=cache.at([7])).o
        there = rule(*x[start:stop], schedule=schedule, state=plain.at([7])).o
        assert torch.equal(here, there)
    assert torch.equal(cache.export([7])[1], plain.export([7])[1])
    assert not any(tensor[:3].any() for tensor in between.values())


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_a_cache_takes_steps_with_and_without_a_decay(rule, per_channel):
    """g None is a decay of 0 in a cache too, per head or per channel."""
    x = draw(100, H, HV, K, V, per_channel=per_channel, seed=150)
    cache = new_cache(per_channel=per_channel)
    g = x.g.clone()
    g[30:80] = 0
    truth = replay(x.but(g=g)).o
    for start, stop in ((0, 30), (30, 80), (80, 100)):
        part = x[start:stop] if start != 30 else x[start:stop].but(g=None)
        schedule = Schedule([stop - start], start_positions=start, device="cpu")
        expect_close(rule(*part, schedule=schedule, state=cache.at([0])).o, truth[start:stop])


def test_snapshots_of_a_draft_step_hold_the_opening_fold(rule):
    x, cache = draw(150, H, HV, K, V, seed=160), new_cache()
    truth = replay(x, keep=(64, 128)).states
    rule(*x[:100], schedule=Schedule([100], device="cpu"), state=cache.at([0]))
    for start, position in ((100, 64), (110, 64), (120, 64), (130, 128)):
        schedule = Schedule(
            [10], start_positions=start, drafts=True, snapshot_positions=[[position]], device="cpu"
        )
        found = rule(
            *x[start : start + 10],
            schedule=schedule,
            state=cache.at([0]),
            snapshots=torch.float32,
        ).snapshots
        expect_state(found[0], truth[position])


def test_a_capacity_leaves_entries_that_are_ignored(rule):
    sequences, x = batch([70, 20], seed=170)
    schedule = Schedule([70, 20], snapshot_every=64, device="cpu", capacity=(4, 256, 3))
    cache = new_cache()
    slots, kept = torch.tensor([2, 0, 999, -77]), torch.tensor([5, 10**6, -9])
    found = rule(*x, schedule=schedule, state=cache.at(slots), snapshots=cache.at(kept))
    expect_sequences(found.o, sequences, [None, None])
    assert cache.export([5])[0].tolist() == [64]
    found = rule(*x, schedule=schedule, return_state=True, snapshots=torch.float32)
    assert found.state.shape == (4, HV, K, V)
    assert found.snapshots.shape == (3, HV, K, V)
    expect_state(found.state[1], replay(sequences[1]).state)
    assert found.state[2:].isfinite().all()


def test_a_rank_with_some_of_the_heads_keeps_a_cache_of_those():
    cache = DeltaCache(2, H=2, HV=4, K=K, V=V, dtype=torch.float32, device="cpu")
    half = DeltaCache(2, H=1, HV=2, K=K, V=V, dtype=torch.float32, device="cpu")
    x = draw(100, 2, 4, K, V, seed=180)
    schedule = Schedule([100], device="cpu")
    whole = headstart.gated_delta_rule(*x, schedule=schedule, state=cache.at([0])).o
    mine = x[:, 1:, 2:]
    part = headstart.gated_delta_rule(*mine, schedule=schedule, state=half.at([0])).o
    assert torch.equal(part, whole[:, 2:])
    assert torch.equal(half.export([0])[1], cache.export([0])[1][:, 2:])
