"""The history of a cache: rings by position, rollback, snapshots, restores, dirty slots."""

import functools

import pytest
import torch
from tests.ops.convolution.oracle import cache_of, draw

import headstart
from headstart import Pool, Schedule


def step(convolve, cache, slots, x, lengths, starts, drafts=False, **kwargs):
    """One call on a cache; `positions` keeps snapshots."""
    positions = kwargs.pop("positions", None)
    schedule = Schedule(
        lengths, start_positions=starts, drafts=drafts, snapshot_positions=positions, device="cpu"
    )
    weight, bias = WEIGHT
    return convolve(x, weight, bias, schedule=schedule, state=cache.at(slots), **kwargs)


X, *WEIGHT = draw(400)


@pytest.fixture(scope="module")
def whole(convolve):
    return convolve(X, *WEIGHT).y


def test_input_j_lies_in_row_j_modulo_the_rows(convolve):
    cache = cache_of()  # nine rows
    step(convolve, cache, [2], X[:100], [100], 0)
    ring = cache.tensors["history"][2]
    for position in range(91, 100):
        assert torch.equal(ring[position % 9], X[position])
    assert cache.tensors["history_end"].flatten().tolist() == [0, 0, 100, 0]
    assert cache.tensors["history"][[0, 1, 3]].isnan().all()


def test_rolling_back_is_passing_a_smaller_start(convolve, whole):
    cache = cache_of()
    step(convolve, cache, [0], X[:50], [50], 0)
    wrong = torch.randn(6, 5)
    for start in (50, 53, 54, 54, 57):
        # A known token, five drafts that are wrong; then what was right so far again.
        drafts = torch.cat([X[start : start + 1], wrong[1:]])
        y = step(convolve, cache, [0], drafts, [6], start, drafts=True).y
        assert torch.equal(y[:1], whole[start : start + 1])
        y = step(convolve, cache, [0], X[start : start + 3], [3], start, drafts=True).y
        assert torch.equal(y, whole[start : start + 3])


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(("end", "oldest"), [(3, 0), (9, 0), (10, 4), (100, 94)])
def test_a_start_is_legal_while_its_inputs_are_in_the_ring(convolve, whole, end, oldest):
    for start in range(max(0, oldest - 3), end + 3):
        cache = cache_of()
        step(convolve, cache, [1], X[:end], [end], 0)
        before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
        if start == 0 or oldest <= start <= end:
            y = step(convolve, cache, [1], X[start : start + 2], [2], start).y
            assert torch.equal(y, whole[start : start + 2])
            continue
        out = torch.full((2, 5), 7.0)
        with pytest.raises(ValueError, match=rf"start_positions: .* slot 1 .* got {start}"):
            step(convolve, cache, [1], X[:2], [2], start, out=out)
        assert (out == 7).all()
        for name, tensor in cache.tensors.items():
            torch.testing.assert_close(tensor, before[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.usefixtures("checked")
def test_one_bad_start_stops_the_whole_batch(convolve):
    cache = cache_of()
    step(convolve, cache, [0, 1], X[:60], [30, 30], 0)
    with pytest.raises(ValueError, match="sequence 1 in slot 1"):
        step(convolve, cache, [0, 1], X[:2], [1, 1], [30, 31])
    assert cache.tensors["history_end"].flatten().tolist() == [30, 30, 0, 0]


def test_a_start_of_zero_is_an_empty_slot_whatever_it_held(convolve, whole):
    cache = cache_of()
    step(convolve, cache, [0], torch.full((80, 5), torch.nan), [80], 0)
    for begin, end in ((0, 1), (1, 2), (2, 12)):
        y = step(convolve, cache, [0], X[begin:end], [end - begin], begin).y
        assert torch.equal(y, whole[begin:end])


def test_slot_minus_one_reads_as_empty_and_writes_nothing(convolve, whole):
    cache = cache_of()
    y = step(convolve, cache, [-1, 3], X[:40], [20, 20], [70, 0]).y
    assert torch.equal(y[:20], whole[:20])
    assert cache.tensors["history"][:3].isnan().all()
    assert cache.tensors["history_end"].flatten().tolist() == [0, 0, 0, 20]


def test_empty_steps_move_the_end(convolve, whole):
    cache = cache_of()
    step(convolve, cache, [0, 1], X[:60], [30, 30], 0)
    step(convolve, cache, [0, 1], X[:0], [0, 0], [27, 0])
    assert cache.tensors["history_end"].flatten().tolist() == [27, 0, 0, 0]
    y = step(convolve, cache, [0, 1], torch.cat([X[27:30], X[:5]]), [3, 5], [27, 0]).y
    assert torch.equal(y, torch.cat([whole[27:30], whole[:5]]))


def test_drafts_fit_the_cache(convolve):
    cache = cache_of(drafts=2)
    with pytest.raises(ValueError, match=r"at most draft_tokens = 2 tokens .* got 3"):
        step(convolve, cache, [0], X[:3], [3], 0, drafts=True)


# Snapshots


@pytest.mark.parametrize("kind", ["cache", "same cache", "pool", "dtype"])
def test_snapshots_restore(convolve, whole, kind):
    """Every position a step may keep, its start and its end included."""
    cache, other = cache_of(slots=8), cache_of(slots=8, drafts=0)
    pool = torch.full((8, 3, 5), torch.nan)
    wanted = [[0, 64], [128, 192, 256], [192]]
    target = {
        "cache": other.at([4, 3, 5, 6, 7, 2]),
        "same cache": cache.at([4, 3, 5, 6, 7, -1]),
        "pool": Pool(pool, write_slots=[4, 3, 5, 6, 7, 2]),
        "dtype": torch.float32,
    }[kind]
    step(convolve, cache, [1, 2], torch.cat([X[:130], X[:197]]), [130, 197], 0)
    kept = step(
        convolve, cache, [0, 1, 2], torch.cat([X[:64], X[130:256], X[197:200]]),
        [64, 126, 3], [0, 130, 197], positions=wanted, snapshots=target,
    ).snapshots  # fmt: skip
    positions = [p for places in wanted for p in places]
    source = other if kind == "cache" else cache
    for index, position in enumerate(positions):
        new = X[position : position + 10]
        if kind in ("cache", "same cache"):
            slot = target.slots[index]
            if slot < 0:
                continue
            assert source.tensors["history_end"][slot] == position
            cache_step = step(convolve, source, [slot], new, [len(new)], position)
            assert torch.equal(cache_step.y, whole[position : position + 10])
            continue
        history = kept[index] if kind == "dtype" else pool[target.write_slots[index]]
        y = convolve(new, *WEIGHT, state=history[None].clone()).y
        assert torch.equal(y, whole[position : position + 10])
    assert (kept is None) == (kind != "dtype")


def test_a_snapshot_of_drafts_is_the_opening_border(convolve, whole):
    cache = cache_of()
    step(convolve, cache, [0], X[:66], [66], 0)
    kept = step(
        convolve, cache, [0], torch.randn(4, 5), [4], 66, drafts=True, positions=[[64]],
        snapshots=cache.at([1]),
    )  # fmt: skip
    assert kept.snapshots is None
    assert torch.equal(step(convolve, cache, [1], X[64:80], [16], 64).y, whole[64:80])


@pytest.mark.usefixtures("checked")
def test_a_snapshot_whose_inputs_have_left_the_ring_is_refused(convolve):
    cache = cache_of()
    step(convolve, cache, [0], X[:75], [75], 0)
    with pytest.raises(ValueError, match=r"snapshot_positions: .* slot 0 .* got 64"):
        step(convolve, cache, [0], X[75:80], [5], 75, positions=[[64]], snapshots=cache.at([1]))
    assert cache.tensors["history_end"][0] == 75
    # Nobody keeps it: nobody misses it.
    step(convolve, cache, [0], X[75:80], [5], 75, positions=[[64]])


@pytest.mark.usefixtures("checked")
def test_a_restored_slot_does_not_reach_back_past_its_snapshot(convolve):
    """The ring of a restored slot may hold another sequence's inputs beside the history."""
    cache = cache_of()
    step(convolve, cache, [1], torch.randn(100, 5), [100], 0)
    step(convolve, cache, [0], X[:64], [64], 0, positions=[[64]], snapshots=cache.at([1]))
    with pytest.raises(ValueError, match="start of 64 to 64, got 63"):
        step(convolve, cache, [1], X[63:70], [7], 63)


def test_copy_export_and_load(convolve, whole):
    cache, other = cache_of(), cache_of()
    step(convolve, cache, [0], X[:64], [64], 0)
    cache.copy([0], [3])
    assert torch.equal(step(convolve, cache, [3], X[64:70], [6], 64).y, whole[64:70])
    cache.tensors["position"][0] = 64  # as the gated delta rule leaves it
    other.load([2], *cache.export([0]))
    assert torch.equal(step(convolve, other, [2], X[64:70], [6], 64).y, whole[64:70])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(convolve, dtype):
    if dtype == torch.float64:  # nobody else takes it
        convolve = functools.partial(headstart.causal_conv1d, implementation="reference")
    x, weight, bias = draw(100, dtype=dtype)
    cache = cache_of(dtype=dtype)
    whole = convolve(x, weight, bias).y
    for begin, end in ((0, 61), (61, 62), (62, 100)):
        schedule = Schedule([end - begin], start_positions=begin, device="cpu")
        y = convolve(x[begin:end], weight, bias, schedule=schedule, state=cache.at([0])).y
        assert torch.equal(y, whole[begin:end])


def test_memory_of_the_caller_with_a_slot_stride(convolve, whole):
    plain = cache_of()
    memory = torch.full((4, 2, 9, 5), torch.nan)
    tensors = dict(plain.tensors, history=memory[:, 1])
    cache = headstart.DeltaCache(
        4, H=1, HV=1, K=2, V=2, conv_channels=5, dtype=torch.float32, draft_tokens=6,
        device="cpu", tensors=tensors,
    )  # fmt: skip
    y = [step(convolve, cache, [3], X[a:b], [b - a], a).y for a, b in ((0, 70), (70, 90))]
    assert torch.equal(torch.cat(y), whole[:90])
    assert memory[:, 0].isnan().all()
    assert memory[:3].isnan().all()
