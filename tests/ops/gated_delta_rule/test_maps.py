"""The rule is affine in the state: segments compose; and the plain token-by-token form agrees."""

import itertools

import numpy as np
import pytest
import torch
from tests.implementations import by_name
from tests.ops.gated_delta_rule import oracle
from tests.ops.gated_delta_rule.inputs import INF, draw, late_forget, packed, replay
from tests.ops.gated_delta_rule.oracle import expect_close, expect_state, relative
from tests.ops.gated_delta_rule.test_validation import refused

import headstart
from headstart import Gate, Pool, Schedule, chunk_map, compose, recurrent_gated_delta_rule

K, V = 16, 24


def states_of(count, seed=1, HV=2):
    return torch.randn(count, HV, K, V, generator=torch.Generator().manual_seed(seed))


def mapped(x, lengths=None, **arguments):
    return chunk_map(x.k, x.v, x.g, x.beta, schedule=lengths or [len(x)], **arguments)


# Maps


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("length", [0, 1, 64, 150])
def test_a_map_carries_any_state_across_its_tokens(length, per_channel):
    x = draw(length, 1, 2, K, V, seed=2, per_channel=per_channel)
    L, b = mapped(x)
    assert L.shape == (1, 2, K, K)
    assert b.shape == (1, 2, K, V)
    assert L.dtype == b.dtype == torch.float32
    for seed in (3, 4):
        before = 10 * states_of(1, seed)
        expect_state((L @ before + b)[0], replay(x, state=oracle.wide(before[0])).state, slack=2)


def test_maps_of_a_ragged_batch_stay_apart():
    lengths = [70, 0, 130, 1]
    sequences = [draw(length, 1, 2, K, V, seed=n) for n, length in enumerate(lengths)]
    L, b = mapped(packed(*sequences), lengths)
    before = states_of(4)
    after = L @ before + b
    for n, x in enumerate(sequences):
        expect_state(after[n], replay(x, state=oracle.wide(before[n])).state, slack=2)
    assert torch.equal(L[1], torch.eye(K).expand(2, K, K))
    assert not b[1].any()


@pytest.mark.parametrize(
    "segments", [[75, 75], [64, 86], [1, 149], [40, 30, 80], [0, 150], [10] * 15]
)
def test_composed_segments_are_the_whole(segments):
    x = late_forget(draw(150, 1, 2, K, V, seed=5), seed=6)
    borders = np.cumsum([0, *segments]).tolist()
    maps = [mapped(x[start:stop]) for start, stop in itertools.pairwise(borders)]
    joined = maps[0]
    for following in maps[1:]:
        joined = compose(joined, following)
    L, b = mapped(x)
    assert (joined.L - L).abs().max() < 1e-6
    assert relative(joined.b, oracle.wide(b)) < 2e-6
    expect_state(joined.b[0], replay(x).state, slack=2)


def test_composing_is_associative_and_has_an_identity():
    x = draw(192, 1, 2, K, V, seed=7)
    first, second, third = (mapped(x[start : start + 64]) for start in (0, 64, 128))
    left = compose(compose(first, second), third)
    right = compose(first, compose(second, third))
    assert torch.allclose(left.L, right.L, atol=1e-6)
    assert torch.allclose(left.b, right.b, atol=1e-5)
    nothing = (torch.eye(K).expand(1, 2, K, K), torch.zeros(1, 2, K, V))
    for joined in (compose(nothing, first), compose(first, nothing)):
        assert torch.equal(joined.L, first.L)
        assert torch.equal(joined.b, first.b)


def test_the_order_of_composing_is_that_of_time():
    forget = draw(10, 1, 2, K, V, seed=8)
    forget.g[-1] = -INF
    x = draw(64, 1, 2, K, V, seed=9)
    joined = compose(mapped(x), mapped(forget))
    expect_state(joined.b[0], replay(packed(x, forget)).state)
    assert not torch.allclose(compose(mapped(forget), mapped(x)).b, joined.b, atol=1e-3)


def test_segments_of_a_long_sequence_join_as_ranks_would():
    """Each rank maps its segment, all learn the state before theirs, each computes its outputs."""
    x = draw(400, 1, 2, K, V, seed=10)
    truth = replay(x)
    segments = [x[start : start + 100] for start in range(0, 400, 100)]
    L, b = mapped(x, [100] * 4)
    before = [torch.zeros(2, K, V)]
    for n in range(3):
        before.append(L[n] @ before[-1] + b[n])
    for n, segment in enumerate(segments):
        found = headstart.gated_delta_rule(*segment, state=before[n][None], return_state=True)
        expect_close(found.o, truth.o[100 * n : 100 * n + 100], slack=2)
    expect_state(found.state[0], truth.state, slack=2)


@pytest.mark.parametrize("kind", ["linear", "raw", "logit"])
def test_maps_read_gates_as_the_rule_does(kind):
    x = draw(100, 2, 4, K, V, unit=False, seed=11)
    gate = {
        "linear": Gate.linear(),
        "raw": Gate.raw(torch.tensor([-2.0, -1.0, 0.0, -3.0]), torch.ones(4)),
        "logit": Gate.log(beta="logit"),
    }[kind]
    if kind == "linear":
        x = x.but(g=x.g.exp())
    L, b = mapped(x, gate=gate, qk_l2norm=True)
    before = states_of(1, HV=4)
    found = headstart.gated_delta_rule(
        *x, gate=gate, qk_l2norm=True, state=before, return_state=True
    ).state
    assert relative(L @ before + b, oracle.wide(found)) < 2e-6


def test_maps_in_half_and_in_double_precision():
    x = draw(100, 1, 2, K, V, dtype=torch.bfloat16, seed=12)
    L, b = mapped(x)
    assert L.dtype == b.dtype == torch.float32
    expect_state(b[0], replay(x).state)
    x = draw(100, 1, 2, K, V, dtype=torch.float64, seed=13)
    L, b = mapped(x)
    assert L.dtype == b.dtype == torch.float64
    before = states_of(1).double()
    expect_state((L @ before + b)[0], replay(x, state=oracle.wide(before[0])).state)


def test_maps_take_a_schedule_and_ignore_where_it_starts():
    x = draw(150, 1, 2, K, V, seed=14)
    schedule = Schedule([100, 50], start_positions=[64, 128], device="cpu")
    L, b = chunk_map(x.k, x.v, x.g, x.beta, schedule=schedule)
    before = states_of(2)
    for n, part in enumerate((x[:100], x[100:])):
        after = (L @ before + b)[n]
        expect_state(after, replay(part, state=oracle.wide(before[n])).state, slack=2)


MAP = torch.eye(3).expand(2, 3, 3), torch.ones(2, 3, 5)


def bad_map(L=MAP[0], b=MAP[1]):
    return L, b


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (None, "second: expected a pair (L, b), got None"),
        ("ab", "second: expected a pair (L, b), got 'ab'"),
        (MAP[0], "second: expected a pair (L, b), got a float32 tensor [2, 3, 3]"),
        ((*MAP, MAP[1]), "second: expected a pair (L, b), got ("),
        (bad_map(L=1.0), "second: L: expected a tensor, got float"),
        (bad_map(L=MAP[0][0]), "second: L: expected [..., K, K] = [2, 3, 3], got [3, 3]"),
        (bad_map(L=MAP[0][..., :2]), "second: L: expected [..., K, K] = [2, 3, 3], got [2, 3, 2]"),
        (bad_map(b=MAP[1][:1]), "second: b: expected [..., K, V] = [2, 3, 5], got [1, 3, 5]"),
        (bad_map(b=MAP[1].double()), "second: b: expected dtype float32, got float64"),
        (bad_map(L=MAP[0].to("meta")), "second: L: expected device cpu (that of first: L), got"),
        (bad_map(b=MAP[1].to("meta")), "second: b: expected device cpu (that of first: L), got"),
        (bad_map(b=MAP[1].clone().requires_grad_()), "second: b: requires grad, but compose has"),
    ],
    ids=range(12),
)
def test_maps_that_do_not_fit_are_not_composed(second, says):
    refused(says, compose, first=MAP, second=second)
    compose(MAP, MAP)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ((torch.ones(3), torch.ones(3)), "first: L: expected [..., K, K], got [3]"),
        ((torch.ones(2, 3), torch.ones(2, 3)), "first: L: expected [..., K, K], got [2, 3]"),
        (tuple(x.int() for x in MAP), "first: L: expected dtype float32 or bfloat16"),
        (tuple(x.to(torch.complex64) for x in MAP), "first: L: expected dtype float32 or"),
    ],
    ids=range(4),
)
def test_a_first_map_of_its_own_kind_is_refused(first, says):
    refused(says, compose, first=first, second=first)


def test_arguments_of_a_map_are_named_as_it_has_them():
    x = draw(20, 1, 2, K, V)
    good = {"k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "schedule": [20]}
    for changes, says in (
        ({"k": x.k[0]}, "k: expected [T, H, K]"),
        ({"v": x.v[:5]}, "v: expected [T, HV, V]"),
        ({"g": x.g[:, :1]}, "g: expected [T, HV]"),
        ({"beta": x.beta[:3]}, "beta: expected [T, HV]"),
        ({"k": x.k.int()}, "k: expected dtype float32"),
        ({"k": torch.zeros(20, K, 3).mT}, "k: expected a contiguous last dimension"),
        ({"k": x.k.clone().requires_grad_()}, "k: requires grad, but chunk_map has no"),
        ({"g": x.g.clone().requires_grad_()}, "g: requires grad, but chunk_map has no"),
        ({"v": x.v.half()}, "v: expected dtype float32, got float16"),
        ({"schedule": [21]}, "schedule: expected at most"),
    ):
        refused(says, chunk_map, **good | changes)


# Token by token


@pytest.fixture
def recurrent(implementation):
    return by_name(recurrent_gated_delta_rule, implementation)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_recurrent_form_is_the_recurrence(recurrent, dtype, per_channel):
    lengths = [70, 0, 1, 20]
    sequences = [
        draw(length, 1, 2, K, V, dtype=dtype, per_channel=per_channel, seed=n)
        for n, length in enumerate(lengths)
    ]
    before = states_of(4)
    found = recurrent(*packed(*sequences), schedule=lengths, state=before, return_state=True)
    assert found.snapshots is None
    row = 0
    for n, x in enumerate(sequences):
        truth = replay(x, state=oracle.wide(before[n]))
        expect_close(found.o[row : row + len(x)], truth.o)
        expect_state(found.state[n], truth.state)
        row += len(x)


def test_the_recurrent_form_agrees_with_the_chunk_form(recurrent, rule):
    x = late_forget(draw(200, 2, 4, K, V, unit=False, seed=15), seed=16)
    arguments = {"qk_l2norm": True, "scale": 0.7, "return_state": True}
    one, other = recurrent(*x, **arguments), rule(*x, **arguments)
    assert relative(one.o, oracle.wide(other.o)) < 2e-6
    assert relative(one.state, oracle.wide(other.state)) < 2e-6


def test_the_recurrent_form_reads_gates_views_pools_and_fills_out(recurrent):
    x = draw(30, 1, 2, K, V, unit=False, seed=17)
    memory = states_of(6)
    kept = memory.clone()
    a_log, bias = torch.tensor([-1.0, 0.5]), torch.tensor([0.3, -0.2])
    out = torch.empty(40, 2, V)
    padded = packed(x, draw(10, 1, 2, K, V, seed=18))
    found = recurrent(
        *padded,
        schedule=[30],
        state=Pool(memory, [4], [1]),
        gate=Gate.raw(a_log, bias, beta="logit2"),
        qk_l2norm=True,
        out=out,
    )
    assert found.o is out
    g, beta = oracle.raw_decay(x.g, a_log, bias), 2 * oracle.sigmoid(oracle.wide(x.beta))
    truth = oracle.replay(x.q, x.k, x.v, g, beta, qk_l2norm=True, state=oracle.wide(kept[4]))
    expect_close(out[:30], truth.o)
    assert not out[30:].any()
    expect_state(memory[1], truth.state)
    assert torch.equal(memory[[0, 2, 3, 4, 5]], kept[[0, 2, 3, 4, 5]])


def test_the_recurrent_form_takes_dense_batches_and_missing_gates(recurrent):
    rows = [draw(5, 1, 2, K, V, seed=n) for n in (19, 20, 21)]
    q, k, v, _, _ = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    found = recurrent(q, k, v, None, None, return_state=True)
    for n, x in enumerate(rows):
        truth = replay(x.but(g=None, beta=None))
        expect_close(found.o[n], truth.o)
        expect_state(found.state[n], truth.state)


def test_the_recurrent_form_has_no_caches():
    cache = headstart.DeltaCache(1, H=1, HV=2, K=K, V=V, dtype=torch.float32, device="cpu")
    x = draw(5, 1, 2, K, V)
    with pytest.raises(ValueError, match=r"^state: expected a tensor or a Pool"):
        recurrent_gated_delta_rule(*x, schedule=Schedule([5], device="cpu"), state=cache.at([0]))
