"""What the convolution computes, in every form in which the arguments may come."""

import pytest
import torch
from tests.implementations import INTERPRETED
from tests.ops.convolution.oracle import assert_close, cache_of, draw, history, replay

from headstart import Pool, Schedule

RAGGED = [0, 1, 2, 3, 0, 4, 40, 5, 1, 200, 0]


def parts(x, lengths):
    return x[: sum(lengths)].split(lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [2, 3, 4, 7])
def test_a_ragged_batch(convolve, width, activation, dtype):
    x, weight, bias = draw(sum(RAGGED), 5, width, dtype)
    found = convolve(
        x, weight, bias, schedule=RAGGED, activation=activation, return_state=True,
    )  # fmt: skip
    wanted = torch.cat([replay(part, weight, bias, activation) for part in parts(x, RAGGED)])
    assert found.y.dtype == dtype
    assert_close(found.y, wanted)
    kept = [history(part, len(part), width) for part in parts(x, RAGGED)]
    assert torch.equal(found.state, torch.stack(kept))
    assert found.snapshots is None


def test_float64_is_kept_by_the_reference_and_declined_by_name_elsewhere(implementation):
    import headstart

    x, weight, bias = draw(50, dtype=torch.float64)
    if implementation != "reference":
        with pytest.raises(headstart.Declined, match="float64"):
            headstart.causal_conv1d(x, weight, implementation=implementation)
        return
    found = headstart.causal_conv1d(x, weight, bias, implementation="reference")
    assert found.y.dtype == torch.float64
    assert_close(found.y, replay(x, weight, bias))


def test_weight_and_bias_of_other_dtypes_are_read_as_float32(convolve):
    x, weight, bias = draw(30, dtype=torch.bfloat16)
    weight, bias = weight.double() / 3, bias.half()
    assert_close(convolve(x, weight, bias).y, replay(x, weight.float(), bias))


def test_plain_states_are_continued_and_left_alone(convolve):
    x, weight, bias = draw(60)
    lengths = [2, 0, 58]
    before = torch.randn(3, 3, 5)
    copy = before.clone()
    found = convolve(x, weight, bias, schedule=lengths, state=before, return_state=True)
    whole = [torch.cat([old, new]) for old, new in zip(before, parts(x, lengths), strict=True)]
    assert_close(found.y, torch.cat([replay(both, weight, bias)[3:] for both in whole]))
    assert torch.equal(found.state, torch.stack([both[-3:] for both in whole]))
    assert torch.equal(before, copy)
    assert convolve(x, weight, bias, schedule=lengths, state=before).state is None


def test_a_dense_batch_is_equal_sequences(convolve):
    x, weight, bias = draw(3 * 20)
    dense = convolve(x.view(3, 20, 5), weight, bias, return_state=True)
    packed = convolve(x, weight, bias, schedule=[20] * 3, return_state=True)
    assert dense.y.shape == (3, 20, 5)
    assert torch.equal(dense.y.view(60, 5), packed.y)
    assert torch.equal(dense.state, packed.state)


@pytest.mark.parametrize("packs", [True, False])
def test_a_dense_out_with_strides_is_filled(convolve, packs):
    x, weight, _ = draw(3 * 20)
    rows = 20 if packs else 23
    memory = torch.full((3, rows, 9), 7.0)
    out = memory[:, :20, 2:7]
    found = convolve(x.view(3, 20, 5), weight, out=out)
    assert found.y is out
    assert torch.equal(out, convolve(x.view(3, 20, 5), weight).y)
    assert (memory[:, :, :2] == 7).all()
    assert (memory[:, :, 7:] == 7).all()
    assert (memory[:, 20:] == 7).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 4, 5)])
def test_no_tokens(convolve, shape):
    found = convolve(torch.empty(shape), torch.ones(5, 4), return_state=True)
    assert found.y.shape == shape
    count = shape[0] if len(shape) == 3 else 1
    assert torch.equal(found.state, torch.zeros(count, 3, 5))


def test_no_sequences(convolve):
    found = convolve(torch.ones(4, 5), torch.ones(5, 4), schedule=[], return_state=True)
    assert torch.equal(found.y, torch.zeros(4, 5))
    assert found.state.shape == (0, 3, 5)


@pytest.mark.parametrize("given", [False, True])
def test_rows_past_the_last_length_are_zero(convolve, given):
    x, weight, bias = draw(30)
    x[20:] = torch.nan
    out = torch.full((30, 5), torch.nan) if given else None
    y = convolve(x, weight, bias, schedule=[5, 15], out=out).y
    assert torch.equal(y[20:], torch.zeros(10, 5))
    assert y[:20].isfinite().all()


@pytest.mark.parametrize("lengths", [[30], [1, 3, 26], [10, 20]])
def test_a_nan_spoils_the_rows_that_see_it_and_no_other(convolve, lengths):
    x, weight, bias = draw(30)
    clean = convolve(x, weight, bias, schedule=lengths).y
    begin = 0
    for length in lengths:
        for t in range(begin, begin + length, 9 if INTERPRETED else 1):
            dirty = x.clone()
            dirty[t] = torch.nan
            found = convolve(dirty, weight, bias, schedule=lengths).y
            seen = slice(t, min(t + 4, begin + length))
            assert found[seen].isnan().all()
            found[seen] = clean[seen]
            assert torch.equal(found, clean)
        begin += length


# Pools


def test_a_pool_is_read_and_written_by_slot(convolve):
    x, weight, bias = draw(40)
    lengths = [2, 0, 30, 8]
    pool = torch.randn(6, 3, 5)
    before = pool.clone()
    convolved = convolve(
        x, weight, bias, schedule=lengths,
        state=Pool(pool, [4, 1, -1, 2], [4, 5, 0, -1], present=[True, True, True, False]),
    )  # fmt: skip
    old = torch.stack([before[4], before[1], torch.zeros(3, 5), torch.zeros(3, 5)])
    plain = convolve(x, weight, bias, schedule=lengths, state=old, return_state=True)
    assert torch.equal(convolved.y, plain.y)
    assert convolved.state is None
    for slot, wanted in {4: plain.state[0], 5: plain.state[1], 0: plain.state[2]}.items():
        assert torch.equal(pool[slot], wanted)
    for slot in (1, 2, 3):
        assert torch.equal(pool[slot], before[slot])


def test_a_pool_without_read_slots_starts_from_zeros(convolve):
    x, weight, _ = draw(10)
    pool = torch.full((3, 3, 5), torch.nan)
    y = convolve(x, weight, schedule=[4, 6], state=Pool(pool, write_slots=[2, 0])).y
    assert torch.equal(y, convolve(x, weight, schedule=[4, 6]).y)
    assert torch.equal(pool[2], x[1:4])
    assert torch.equal(pool[0], x[7:])
    assert pool[1].isnan().all()


def test_the_read_slots_are_written_where_no_others_are_given(convolve):
    x, weight, _ = draw(10)
    pool = torch.randn(3, 3, 5)
    wanted = convolve(x, weight, state=pool[1:2].clone(), return_state=True)
    y = convolve(x, weight, state=Pool(pool, torch.tensor([1]))).y
    assert torch.equal(y, wanted.y)
    assert torch.equal(pool[1:2], wanted.state)


@pytest.mark.parametrize(
    ("slots", "present"),
    [([0, 1], [False, False]), ([0, 2], [False, True]), ([2, -1], [True, True])],
)
def test_slots_that_are_not_read_may_hold_nan(convolve, slots, present):
    x, weight, _ = draw(10)
    pool = torch.full((3, 3, 5), torch.nan)
    pool[2] = 1
    old = torch.zeros(2, 3, 5)
    for n, slot in enumerate(slots):
        old[n] = 1 if slot == 2 else 0
    wanted = convolve(x, weight, schedule=[5, 5], state=old).y
    state = Pool(pool, slots, present=torch.tensor(present))
    assert torch.equal(convolve(x, weight, schedule=[5, 5], state=state).y, wanted)


def test_the_slot_stride_of_a_pool_is_free(convolve):
    x, weight, _ = draw(10)
    wide = torch.randn(3, 2, 3, 9)
    pool = wide[:, 1, :, 2:7]
    wanted = convolve(x, weight, state=pool[2:3].clone(), return_state=True)
    untouched = wide[:, 0].clone()
    assert torch.equal(convolve(x, weight, state=Pool(pool, [2])).y, wanted.y)
    assert torch.equal(pool[2:3], wanted.state)
    assert torch.equal(wide[:, 0], untouched)


def test_a_pool_past_two_to_the_31_elements(convolve):
    # Slots 2**30 elements apart over memory that the system never has to provide.
    memory = torch.empty_strided((1,), (1,), dtype=torch.bfloat16)
    try:
        storage = torch.UntypedStorage(2 * (3 * 2**30 + 64))
    except RuntimeError:
        pytest.skip("no address space for 6 GiB")
    pool = memory.new_zeros(0).set_(storage, 0, (4, 3, 5), (2**30, 5, 1))
    x, weight, _ = draw(10, dtype=torch.bfloat16)
    pool[3] = x[:3]
    wanted = convolve(x, weight, state=x[:3][None].clone(), return_state=True)
    found = convolve(x, weight, state=Pool(pool, [3]))
    assert torch.equal(found.y, wanted.y)
    assert torch.equal(pool[3], wanted.state[0])


# Snapshots


def test_snapshots_of_a_plain_state(convolve):
    x, weight, bias = draw(200 + 64 + 70)
    before = torch.randn(3, 3, 5)
    schedule = Schedule(
        [200, 64, 70], start_positions=[0, 64, 63],
        snapshot_positions=[[0, 64, 192], [64, 128], [64, 128]], device="cpu",
    )  # fmt: skip
    pool = torch.full((9, 3, 5), torch.nan)
    arguments = {"schedule": schedule, "state": before}
    found = convolve(x, weight, bias, snapshots=torch.float32, **arguments).snapshots
    whole = [torch.cat([b, part]) for b, part in zip(before, x.split([200, 64, 70]), strict=True)]
    wanted = [
        sequence[p - start : p - start + 3]
        for sequence, start, places in zip(
            whole, schedule.starts, schedule.snapshot_positions, strict=True
        )
        for p in places
    ]
    assert torch.equal(found, torch.stack(wanted))
    slots = [8, 0, 1, -1, 3, 4, 5]
    convolve(x, weight, bias, snapshots=Pool(pool, write_slots=slots), **arguments)
    for slot, histories in zip(slots, wanted, strict=True):
        assert slot < 0 or torch.equal(pool[slot], histories)
    assert pool[[2, 6, 7]].isnan().all()


def test_no_snapshots_are_an_empty_tensor(convolve):
    x, weight, _ = draw(10)
    assert convolve(x, weight, snapshots=torch.float32).snapshots.shape == (0, 3, 5)


def test_a_schedule_with_room_to_spare(convolve):
    x, weight, _ = draw(100)
    schedule = Schedule([30, 65], snapshot_every=64, device="cpu", capacity=(4, 100, 3))
    cache = cache_of()
    state, kept = cache.at([2, 0, 9, 9]), cache.at([1, 9, 9])
    y = convolve(x, weight, schedule=schedule, state=state, snapshots=kept).y
    assert torch.equal(y[:95], convolve(x[:95], weight, schedule=[30, 65]).y)
    plain = convolve(x, weight, schedule=schedule, snapshots=x.dtype, return_state=True)
    assert plain.state.shape == (4, 3, 5)
    assert plain.snapshots.shape == (3, 3, 5)
    assert torch.equal(plain.snapshots[0], x[91:94])
    assert torch.equal(plain.state[1], x[92:95])
    assert not plain.state[2:].any()
