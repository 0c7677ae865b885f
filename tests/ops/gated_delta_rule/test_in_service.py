"""What a process does around the calls: threads, globals, refilled schedules, many sequences."""

import threading

import pytest
import torch
from tests.ops.gated_delta_rule import oracle
from tests.ops.gated_delta_rule.inputs import Inputs, draw, packed, replay
from tests.ops.gated_delta_rule.oracle import expect_close, expect_state

import headstart
from headstart import DeltaCache, Pool, Schedule


def test_threads_do_not_share_scratch(rule):
    """Two streams of calls at once: each gets the bits it gets alone."""
    inputs = [draw(90, 1, 2, 32, 24, seed=1), draw(130, 2, 4, 48, 40, seed=2)]
    alone = [rule(*x).o for x in inputs]
    wrong = []

    def serve(x, expected):
        for _ in range(10):
            o = rule(*x).o
            if not torch.equal(o, expected):
                wrong.append(x)

    threads = [
        threading.Thread(target=serve, args=pair) for pair in zip(inputs, alone, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_results_belong_to_the_mode_of_the_caller(rule, threads_restored, mode):
    """Whoever computes them, and a cache that one mode made serves in another."""
    torch.set_num_threads(2)
    x = draw(100, 1, 2, 32, 24, seed=15)
    expected = rule(*x, reproducible=True, return_state=True)
    cache = DeltaCache(1, **x.sizes, dtype=torch.float32, device="cpu")
    with mode():
        found = rule(*x, reproducible=True, return_state=True)
        cached = rule(*x, schedule=Schedule([100], device="cpu"), state=cache.at([0]))
    for tensor in (found.o, found.state, cached.o):
        assert tensor.is_inference() == (mode is torch.inference_mode)
        assert not tensor.requires_grad
    assert torch.equal(found.o, expected.o)
    assert torch.equal(cached.o, expected.o)
    assert torch.equal(found.state, expected.state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_of_the_process_changes_nothing(rule, dtype):
    x = draw(100, 1, 2, 32, 24, unit=False, seed=3)
    arguments = {"qk_l2norm": True, "return_state": True, "reproducible": True}
    expected = rule(*x, **arguments)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = rule(*x, **arguments)
        cache = DeltaCache(1, **x.sizes, dtype=torch.float32, device="cpu")
        cached = rule(*x, schedule=Schedule([100], device="cpu"), state=cache.at([0]),
                      qk_l2norm=True)  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    assert found.o.dtype == found.state.dtype == torch.float32
    assert torch.equal(found.o, expected.o)
    assert torch.equal(found.state, expected.state)
    assert torch.equal(cached.o, expected.o)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_looser_matmul_precision_of_the_process_keeps_float32_arithmetic(rule, precision):
    x = draw(200, 1, 2, 64, 64, seed=4)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = rule(*x, return_state=True)
    finally:
        torch.set_float32_matmul_precision(before)
    expect_close(found.o, replay(x).o)


def test_a_schedule_serves_all_layers_and_is_refilled(rule):
    """Nothing is cached by the identity of a schedule or of a buffer."""
    layers = [draw(100, 1, 2, seed=n) for n in (5, 6)]
    lengths, slots = torch.tensor([60, 40]), torch.tensor([2, 0])
    caches = [DeltaCache(3, **x.sizes, dtype=torch.float32, device="cpu") for x in layers]
    schedule = Schedule(lengths, device="cpu")
    for x, cache in zip(layers, caches, strict=True):
        o = rule(*x, schedule=schedule, state=cache.at(slots)).o
        expect_close(o[:60], replay(x[:60]).o)
        expect_close(o[60:], replay(x[60:]).o)
    lengths.copy_(torch.tensor([3, 97]))
    slots.copy_(torch.tensor([0, 1]))
    schedule.update_(lengths, start_positions=[40, 0])
    for x, cache in zip(layers, caches, strict=True):
        o = rule(*x, schedule=schedule, state=cache.at(slots)).o
        expect_close(o[:3], replay(packed(x[60:], x[:3])).o[40:])
        expect_close(o[3:], replay(x[3:]).o)


def test_more_than_1024_sequences(rule):
    """With states in a pool: one token each, and a few of two or none."""
    lengths = [(1, 1, 1, 2, 0)[n % 5] for n in range(1100)]
    x = draw(sum(lengths), 1, 1, 16, 16, seed=7)
    memory = torch.randn(1200, 1, 16, 16, generator=torch.Generator().manual_seed(8))
    kept = memory.clone()
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(9))[:1100]
    o = rule(*x, schedule=lengths, state=Pool(memory, order)).o
    row = 0
    for n, length in enumerate(lengths):
        if n % 20 < 5 or n > 1090:
            truth = replay(x[row : row + length], state=oracle.wide(kept[order[n]]))
            expect_close(o[row : row + length], truth.o)
            expect_state(memory[order[n]], truth.state)
        row += length


def test_more_than_2048_snapshots_of_one_sequence():
    """A decay that forgets within some hundred tokens lets the truth start late."""
    T = 2060 * 64 + 5
    x = draw(T, 1, 1, 16, 16, seed=10)
    x = x.but(g=torch.full_like(x.g, -0.2))
    schedule = Schedule([T], snapshot_every=64, device="cpu")
    found = headstart.gated_delta_rule(*x, schedule=schedule, snapshots=torch.bfloat16)
    assert found.snapshots.shape == (2060, 1, 16, 16)
    for position in (64 * 1024, 64 * 2048, 64 * 2060):
        truth = replay(x[position - 320 : position])
        expect_state(found.snapshots[position // 64 - 1], truth.state)
        expect_close(found.o[position - 64 : position], truth.o[-64:])
    assert found.o.isfinite().all()


def test_dense_views_of_one_packed_projection(rule):
    """[B, L, ...] views that do not flatten without a copy."""
    B, L, H, HV, K, V = 3, 70, 1, 2, 16, 24
    at = torch.Generator().manual_seed(11)
    projection = torch.randn(2 * B, L + 9, 2 * H * K + HV * V, generator=at)[::2, 4 : 4 + L]
    q, k, v = projection.split([H * K, H * K, HV * V], dim=2)
    g = -torch.rand(B, HV, L, generator=at).mT
    beta = torch.rand(L, B, HV, generator=at).transpose(0, 1)
    views = [q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), g, beta]
    found = rule(*views, qk_l2norm=True).o
    for n in range(B):
        x = Inputs(*(view[n] for view in views))
        expect_close(found[n], replay(x, qk_l2norm=True).o)


def test_results_stay_when_the_next_call_comes(rule):
    """Nothing that is returned lives in scratch."""
    x, y = draw(100, 1, 2, seed=12), draw(100, 1, 2, seed=13)
    schedule = Schedule([100], snapshot_every=64, device="cpu")
    arguments = {"schedule": schedule, "return_state": True, "snapshots": torch.float32}
    first = rule(*x, **arguments)
    kept = [tensor.clone() for tensor in first]
    second = rule(*y, **arguments)
    assert all(torch.equal(now, then) for now, then in zip(first, kept, strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(first, second, strict=True))
