"""Hard decays, hard keys, long sums: what must stay finite, exact, causal and apart."""

import numpy as np
import pytest
import torch
from tests.implementations import KERNELS
from tests.ops.gated_delta_rule import oracle
from tests.ops.gated_delta_rule.inputs import INF, Inputs, draw, late_forget, packed, replay
from tests.ops.gated_delta_rule.oracle import expect_close, expect_state, last_half, relative

from headstart import DeltaCache, Gate, Schedule

LONG = 1100  # as the -small cases: more than three chunks and an odd tail
MOST = 4e-6 if KERNELS else 2e-6  # kernels form W S where others solve for v_new


def per_channel_of(x: Inputs) -> Inputs:
    """The same decay in every channel."""
    return x.but(g=x.g[..., None].expand(*x.g.shape, x.k.shape[-1]))


def decay_hard(K=128, V=128):
    x = draw(LONG, 2, 4, K, V, seed=1)
    at = torch.Generator().manual_seed(2)
    g = -0.05 * torch.rand(x.g.shape, generator=at)
    g[7::8] = -316.0
    g[[0, 100, 639, 1000]] = -INF
    return x.but(g=g)


def flat(K=128, V=128):
    x = draw(LONG, 2, 4, K, V, seed=3)
    return x.but(g=torch.zeros_like(x.g), beta=torch.ones_like(x.beta))


def repeat(K=128, V=128):
    x = draw(LONG, 2, 4, K, V, seed=4)
    return x.but(k=x.k[:1].expand_as(x.k), g=torch.zeros_like(x.g), beta=torch.ones_like(x.beta))


def raw_keys(K=128, V=128):
    """Keys of squared norm 100: only the decay keeps the recurrence together."""
    x = draw(1000, 2, 4, K, V, seed=5)
    return x.but(k=10 * x.k, g=torch.full_like(x.g, -30.0), beta=0.02 * x.beta)


def forgetting_late(K=128, V=128):
    return late_forget(draw(LONG, 2, 4, K, V, seed=6), seed=7)


HARD = {
    "decay-hard": decay_hard,
    "flat": flat,
    "repeat": repeat,
    "raw-keys": raw_keys,
    "late-forget": forgetting_late,
}


def steps_of(x, rule, *, size):
    """Outputs of one sequence brought to a cache in steps of `size`."""
    cache = DeltaCache(1, **x.sizes, per_channel=x.g.dim() == 3, dtype=x.q.dtype, device="cpu")
    parts = []
    for start in range(0, len(x), size):
        part = x[start : start + size]
        schedule = Schedule([len(part)], start_positions=start, device="cpu")
        parts.append(rule(*part, schedule=schedule, state=cache.at([0])).o)
    return torch.cat(parts)


@pytest.mark.parametrize("case", HARD)
def test_float32_stays_within_2e_6_of_float64_over_the_last_half(rule, case):
    x = HARD[case]()
    expected = replay(x)
    found = rule(*x, return_state=True)
    assert last_half(found.o, expected.o) < MOST
    expect_close(found.o, expected.o, slack=2)
    assert relative(found.state[0], expected.state) < MOST


@pytest.mark.parametrize("case", HARD)
def test_the_same_through_a_cache_in_odd_steps(rule, implementation, case):
    x = HARD[case](32, 32)
    if implementation == "reference":
        x = x[:300]
    assert last_half(steps_of(x, rule, size=37), replay(x).o) < MOST


@pytest.mark.parametrize("case", HARD)
def test_the_same_with_the_decay_per_channel(rule, implementation, case):
    x = per_channel_of(HARD[case](32, 32))
    if implementation == "reference":
        x = x[:300]
    expected = replay(x)
    found = rule(*x, return_state=True)
    assert last_half(found.o, expected.o) < MOST
    assert relative(found.state[0], expected.state) < MOST


def test_channels_that_forget_at_different_times(rule):
    x = draw(300, 1, 2, 32, 24, per_channel=True, seed=8)
    at = torch.Generator().manual_seed(9)
    drawn = torch.rand(x.g.shape, generator=at)
    g = torch.where(drawn < 0.05, -INF, torch.where(drawn < 0.15, -316.0, x.g))
    x = x.but(g=g)
    expected = replay(x)
    found = rule(*x, return_state=True)
    assert last_half(found.o, expected.o) < MOST
    expect_close(found.o, expected.o, slack=2)
    expect_state(found.state[0], expected.state, slack=2)


@pytest.mark.parametrize("rate", [-0.1, -1.0, -20.0, -88.0, -104.0, -1e4, -1e30, -3.4e38])
def test_every_constant_decay_from_mild_to_total(rule, rate):
    x = draw(200, 1, 2, seed=10)
    x = x.but(g=torch.full_like(x.g, rate))
    expected = replay(x)
    found = rule(*x, return_state=True)
    expect_close(found.o, expected.o)
    expect_state(found.state[0], expected.state)


@pytest.mark.parametrize("rows", [[0], [63], [64], [0, 1, 2, 3], list(range(130)), [5, 127, 128]])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_minus_infinity_forgets_all_before_exactly(rule, rows, per_channel):
    x = draw(130, 1, 2, seed=11, per_channel=per_channel)
    x.g[rows] = -INF
    before = 100 * torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(12))
    found = rule(*x, state=before, return_state=True, reproducible=True)
    expected = replay(x, state=oracle.wide(before[0]))
    expect_close(found.o, expected.o)
    expect_state(found.state[0], expected.state)
    # "exactly": what came before changes no bit from the row that forgets
    other = rule(*x, state=-3 * before, return_state=True, reproducible=True)
    assert torch.equal(found.o[rows[0] :], other.o[rows[0] :])
    assert torch.equal(found.state, other.state)


def test_a_whole_chunk_of_minus_infinity(rule):
    x = draw(200, 1, 2, seed=13)
    x.g[64:128] = -INF
    expect_close(rule(*x).o, replay(x).o)


@pytest.mark.parametrize("case", ["repeat", "late-forget", "decay-hard"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_hard_cases_in_half_precision(rule, implementation, case, dtype):
    x = HARD[case](32, 32)[: 300 if implementation == "reference" else None]
    x = x.but(q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype))
    found = rule(*x, return_state=True)
    expected = replay(x)
    # U - W S cancels where all keys are equal, and its operands are rounded
    expect_close(found.o, expected.o, slack=6 if KERNELS else 2)
    expect_state(found.state[0], expected.state, slack=30)  # keys of norm 1 + 2**-9 and no decay


@pytest.mark.parametrize("case", HARD)
def test_equal_keys_and_strong_ones_normalised_inside(rule, implementation, case):
    """With |k| <= 1 by construction value heads may share one inverse; it must hold up too."""
    x = HARD[case](32, 32)[: 300 if implementation == "reference" else None]
    x = x.but(k=7 * x.k, q=3 * x.q)
    found = rule(*x, qk_l2norm=True, return_state=True)
    expected = replay(x, qk_l2norm=True)
    assert last_half(found.o, expected.o) < MOST
    assert relative(found.state[0], expected.state) < MOST


def test_beta_2_on_equal_keys_normalised_inside(rule):
    """Every token reflects: the worst that negative eigenvalues can do."""
    x = draw(300, 1, 2, 32, 24, seed=14)
    x = x.but(k=x.k[:1].expand_as(x.k), g=None, beta=torch.full_like(x.beta, 2.0))
    # each token undoes the last, so rounding adds up; doubling over 64 rows would be off by 1e9
    expect_close(rule(*x, qk_l2norm=True).o, replay(x, qk_l2norm=True).o, slack=60)


@pytest.mark.parametrize("a_log", [-20.0, 0.0, 5.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_raw_gates_are_finite_for_any_rate_and_any_bias(rule, a_log, lower_bound):
    x = draw(200, 1, 2, seed=15)
    projection = torch.linspace(-1e4, 1e4, 400).reshape(200, 2)
    projection[::7] = torch.tensor([-3e38, 3e38])
    bias = torch.tensor([90.0, -90.0])
    rate = torch.full((2,), a_log)
    found = rule(*x.but(g=projection), gate=Gate.raw(rate, bias, lower_bound), return_state=True)
    g = oracle.raw_decay(projection, rate, bias, lower_bound)
    expected = oracle.replay(x.q, x.k, x.v, g, x.beta)
    expect_close(found.o, expected.o, slack=2)
    expect_state(found.state[0], expected.state, slack=2)


def test_saturated_logits_are_0_and_1_and_2(rule):
    x = draw(130, 1, 2, seed=16)
    logits = torch.where(torch.arange(130)[:, None] % 3 == 0, -1e4, 1e4).expand(130, 2)
    for beta, most in (("logit", 1.0), ("logit2", 2.0)):
        found = rule(*x.but(beta=logits), gate=Gate.log(beta=beta)).o
        expect_close(found, replay(x.but(beta=most * (logits > 0).float())).o)


# Causality: nothing a row computes may look at a later row of its chunk.


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", ["g", "k", "v", "beta", "q"])
def test_a_later_row_changes_no_bit_of_an_earlier_one(
    rule, implementation, dtype, per_channel, change
):
    rows = (1, 15, 16, 40, 62, 63, 64, 100, 149)
    if implementation == "reference":  # it walks row by row, so little can go wrong
        rows = (15, 64)
    x = draw(rows[-1] + 1, 1, 2, 32, 24, dtype=dtype, unit=False, per_channel=per_channel, seed=17)
    values = {"g": [-INF, -316.0, 0.0, -1e-3], "beta": [0.0, 1.0]}.get(change, [0.0, 9.0, -1.0])
    for reproducible in (False, True):
        arguments = {"qk_l2norm": True, "reproducible": reproducible}
        plain = rule(*x, **arguments).o
        for row in rows:
            for value in values:
                y = x.clone()
                getattr(y, change)[row] = value
                assert torch.equal(rule(*y, **arguments).o[:row], plain[:row]), (row, value)


def test_a_row_keeps_its_bits_however_many_rows_follow(rule):
    x = late_forget(draw(200, 1, 2, 32, 24, seed=18), seed=19)
    whole = rule(*x, reproducible=True).o
    for length in (1, 5, 16, 63, 64, 65, 100, 128, 199):
        assert torch.equal(rule(*x[:length], reproducible=True).o, whole[:length])


# NaN stays where it was born.


@pytest.mark.parametrize("value", [torch.nan, INF])
@pytest.mark.parametrize("which", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("row", [0, 17, 63, 64, 100])
def test_nan_in_a_row_spoils_no_earlier_row_and_no_other_sequence(rule, which, row, value):
    lengths = [30, 101, 70]
    clean = [draw(length, 1, 2, 16, 24, seed=20 + n) for n, length in enumerate(lengths)]
    bad = clean[1].clone()
    getattr(bad, which)[row] = value
    for reproducible in (False, True):
        arguments = {"schedule": lengths, "return_state": True, "reproducible": reproducible}
        plain = rule(*packed(*clean), **arguments)
        found = rule(*packed(clean[0], bad, clean[2]), **arguments)
        assert torch.equal(found.o[: 30 + row], plain.o[: 30 + row])
        assert torch.equal(found.o[131:], plain.o[131:])
        assert torch.equal(found.state[[0, 2]], plain.state[[0, 2]])
        if which == "q":
            assert torch.equal(found.state, plain.state)
            assert torch.equal(found.o[31 + row :], plain.o[31 + row :])
        else:
            assert not found.state[1].isfinite().all()


def test_nan_of_one_head_stays_in_that_head(rule):
    x = draw(130, 2, 4, 16, 24, seed=23)
    bad = x.clone()
    bad.v[50, 1] = torch.nan
    plain, found = rule(*x, return_state=True), rule(*bad, return_state=True)
    others = [0, 2, 3]
    assert torch.equal(found.o[:, others], plain.o[:, others])
    assert torch.equal(found.state[:, others], plain.state[:, others])


@pytest.mark.skipif(KERNELS, reason="kernels spoil whole rows, as the promise allows")
def test_nan_of_one_column_of_v_stays_in_that_column(rule):
    x = draw(130, 1, 2, 16, 24, seed=24)
    bad = x.clone()
    bad.v[50, 1, 3] = torch.nan
    plain, found = rule(*x).o, rule(*bad).o
    others = [column for column in range(24) if column != 3]
    assert torch.equal(found[..., others], plain[..., others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [40, 1e4])
@pytest.mark.parametrize("row", [67, 100, 127])
def test_rows_that_overflow_spoil_no_earlier_row(rule, row, size, dtype):
    """Keys far from normalised, as in a draft gone wrong, let the state grow past all numbers."""
    x = draw(140, 1, 2, 16, 24, dtype=dtype, seed=27)
    x = x.but(g=torch.zeros_like(x.g), beta=torch.ones_like(x.beta))
    wild = x.clone()
    wild.k[row:] *= size
    plain, found = rule(*x, reproducible=True).o, rule(*wild, reproducible=True).o
    assert torch.equal(found[:row], plain[:row])
    assert size == 40 or not found.isfinite().all()


def test_nan_in_a_state_stays_in_its_sequence(rule):
    lengths = [30, 101, 70]
    x = packed(*(draw(length, 1, 2, seed=25 + n) for n, length in enumerate(lengths)))
    before = torch.randn(3, 2, 16, 16, generator=torch.Generator().manual_seed(28))
    spoilt = before.clone()
    spoilt[1] = torch.nan
    plain = rule(*x, schedule=lengths, state=before, return_state=True)
    found = rule(*x, schedule=lengths, state=spoilt, return_state=True)
    for rows in (slice(0, 30), slice(131, 201)):
        assert torch.equal(found.o[rows], plain.o[rows])
    assert torch.equal(found.state[[0, 2]], plain.state[[0, 2]])


def test_nan_in_unused_memory_never_leaks(rule):
    """Rows between and around the views, unused slots, unused rows of the tail."""
    x = draw(150, 1, 2, 16, 24, seed=29)
    wide = Inputs(*(torch.full((300, *t.shape[1:-1], 2 * t.shape[-1]), torch.nan) for t in x))
    views = Inputs(*(w[10:160, ..., : t.shape[-1]].copy_(t) for w, t in zip(wide, x, strict=True)))
    assert torch.equal(rule(*views).o, rule(*x).o)

    cache = DeltaCache(3, **x.sizes, dtype=torch.float32, device="cpu")
    for tensor in cache.tensors.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    parts = []
    for start, stop in ((0, 40), (40, 41), (41, 130), (130, 150)):
        schedule = Schedule([stop - start], start_positions=start, device="cpu")
        parts.append(rule(*x[start:stop], schedule=schedule, state=cache.at([1])).o)
    expect_close(torch.cat(parts), replay(x).o)
    assert cache.tensors["state"][[0, 2]].isnan().all()


def test_nan_drafts_that_are_dropped_leave_nothing(rule):
    x = draw(150, 1, 2, 16, 24, seed=30)
    cache = DeltaCache(2, **x.sizes, dtype=torch.float32, device="cpu")
    rule(*x[:60], schedule=Schedule([60], device="cpu"), state=cache.at([0]))
    bad = x[60:70].clone()
    for tensor in (bad.k, bad.v, bad.beta, bad.g):
        tensor[1:] = torch.nan
    draft = Schedule([10], start_positions=60, drafts=True, device="cpu")
    o = rule(*bad, schedule=draft, state=cache.at([0])).o
    expect_close(o[:1], replay(x).o[60:61])
    rest = Schedule([89], start_positions=61, device="cpu")
    found = rule(*x[61:], schedule=rest, state=cache.at([0])).o
    expect_close(found, replay(x).o[61:])
    assert np.isfinite(oracle.wide(cache.export([0])[1])).all()
