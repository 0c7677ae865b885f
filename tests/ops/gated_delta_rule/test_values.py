"""Every argument of the gated delta rule means what it says: outputs against the oracle.

States in and out are in test_states.py, hard decays in test_numerics.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.gated_delta_rule import oracle
from tests.ops.gated_delta_rule.inputs import Inputs, draw, packed, replay
from tests.ops.gated_delta_rule.oracle import expect_close, expect_state

import headstart
from headstart import Gate, Schedule

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
T = 150  # three chunks, an odd tail


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("reproducible", [None, True, False])
def test_outputs_and_final_state_are_those_of_the_recurrence(
    rule, dtype, per_channel, reproducible
):
    x = draw(T, 2, 4, 32, 24, dtype=dtype, per_channel=per_channel, seed=1)
    found = rule(*x, return_state=True, reproducible=reproducible)
    expected = replay(x)
    assert found.o.dtype == dtype
    assert found.state.dtype == torch.float32
    assert found.snapshots is None
    expect_close(found.o, expected.o)
    expect_state(found.state[0], expected.state)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("H", [1, 2, 3])
def test_value_head_j_reads_key_head_j_over_the_ratio(rule, H, ratio):
    x = draw(70, H, H * ratio, 16, 24, seed=H * 10 + ratio)
    expect_close(rule(*x).o, replay(x).o)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize(
    ("K", "V"),
    [(16, 16), (16, 40), (40, 16), (64, 64), (96, 128), (128, 96), (128, 128), (256, 64), (64, 256),
     (256, 256), (13, 7), (1, 1)],
)  # fmt: skip
def test_head_sizes_need_not_be_equal_nor_powers_of_two(rule, K, V, per_channel):
    x = draw(100, 1, 2, K, V, seed=K + V, per_channel=per_channel)
    found = rule(*x, return_state=True)
    expected = replay(x)
    expect_close(found.o, expected.o)
    expect_state(found.state[0], expected.state)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_a_linear_gate_holds_the_decay_itself(rule, per_channel):
    x = draw(T, 1, 2, per_channel=per_channel, seed=2)
    linear = x.g.double().exp().float()
    linear[40] = 0.0
    found = rule(*x.but(g=linear), gate=Gate.linear()).o
    with np.errstate(divide="ignore"):
        expect_close(found, oracle.replay(x.q, x.k, x.v, np.log(oracle.wide(linear)), x.beta).o)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_a_raw_gate_is_made_from_the_projection(rule, per_channel, biased, lower_bound, parameters):
    x = draw(T, 2, 4, 16, 24, per_channel=per_channel, seed=3)
    at = torch.Generator().manual_seed(4)
    a_log = torch.linspace(-3, 2, 4).to(parameters)
    bias = torch.randn(x.g.shape[1:], generator=at).to(parameters) if biased else None
    projection = 2 * torch.randn(x.g.shape, generator=at)
    found = rule(*x.but(g=projection), gate=Gate.raw(a_log, bias, lower_bound)).o
    g = oracle.raw_decay(projection, a_log, bias, lower_bound)
    expect_close(found, oracle.replay(x.q, x.k, x.v, g, x.beta).o)


@pytest.mark.parametrize("kind", ["log", "linear", "raw"])
@pytest.mark.parametrize(("beta", "most"), [("value", 1), ("logit", 1), ("logit2", 2)])
def test_beta_is_a_value_or_a_logit_beside_every_gate(rule, kind, beta, most):
    x = draw(T, 1, 2, seed=5)
    logits = 2 * torch.randn(T, 2, generator=torch.Generator().manual_seed(6))
    strength = most * oracle.sigmoid(oracle.wide(logits))
    given = x.but(beta=logits if beta != "value" else torch.from_numpy(strength).float())
    if beta == "value":
        strength = oracle.wide(given.beta)
    g = oracle.wide(x.g)
    if kind == "linear":
        given = given.but(g=x.g.exp())
        g = np.log(oracle.wide(given.g))
        gate = Gate.linear(beta=beta)
    elif kind == "raw":
        a_log = torch.tensor([-2.0, -1.0])
        g = oracle.raw_decay(x.g, a_log)
        gate = Gate.raw(a_log, beta=beta)
    else:
        gate = Gate.log(beta=beta)
    expect_close(rule(*given, gate=gate).o, oracle.replay(x.q, x.k, x.v, g, strength).o)


def test_beta_up_to_2_gives_negative_eigenvalues(rule):
    x = draw(300, 1, 2, seed=7)
    x = x.but(beta=2 - x.beta / 10)
    expect_close(rule(*x).o, replay(x).o, slack=3)  # reflections: nothing decays


@pytest.mark.parametrize("g", [True, False])
@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("length", [1, 64, 77])
def test_no_decay_and_no_strength_mean_0_and_1(rule, g, beta, length):
    x = draw(length, 1, 2, 24, 16, seed=8)
    x = x.but(g=x.g if g else None, beta=x.beta if beta else None)
    expect_close(rule(*x).o, replay(x).o)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5, 3])
def test_scale_multiplies_the_outputs_even_when_it_is_0(rule, scale):
    x = draw(T, 1, 2, seed=9)
    found = rule(*x, scale=scale, return_state=True)
    expected = replay(x, scale=scale)
    expect_close(found.o, expected.o)
    expect_state(found.state[0], expected.state)
    if scale == 0:
        assert not found.o.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_q_and_k_may_be_normalised_inside(rule, dtype):
    x = draw(T, 2, 4, 32, 24, dtype=dtype, unit=False, seed=10)
    x.q[3], x.k[5] = 0.0, 0.0  # the epsilon keeps zeros at zero
    found = rule(*x, qk_l2norm=True, return_state=True)
    expected = replay(x, qk_l2norm=True)
    expect_close(found.o, expected.o)
    # a key normalised in float32 may round to the other neighbour than one normalised in float64
    expect_state(found.state[0], expected.state, slack=1 if dtype == torch.float32 else 200)


def test_normalisation_adds_1e_6_to_the_sum_of_squares(rule):
    x = draw(40, 1, 1, unit=False, seed=11)
    x = x.but(q=x.q * 1e-3, k=x.k * 1e-3)
    expect_close(rule(*x, qk_l2norm=True).o, replay(x, qk_l2norm=True).o)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_g_and_beta_come_in_any_float_dtype(rule, kind):
    x = draw(T, 1, 2, seed=12)
    x = x.but(g=x.g.to(kind), beta=x.beta.to(kind))
    # "read as float32": what float64 says beyond that is gone
    expect_close(rule(*x).o, replay(x.but(g=x.g.float(), beta=x.beta.float())).o)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_one_packed_projection_give_the_bits_of_contiguous_tensors(rule, dtype):
    H, HV, K, V = 2, 4, 32, 24
    at = torch.Generator().manual_seed(13)
    projection = torch.randn(T, 2 * H * K + HV * V + 5, generator=at).to(dtype)
    q, k, v, _ = projection.split([H * K, H * K, HV * V, 5], dim=1)
    q, k, v = q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))
    gates = torch.rand(T, 2 * HV, generator=at)
    gates[:, :HV] *= -1
    g, beta = gates[:, :HV], gates[:, HV:]
    views = Inputs(q, k, v, g, beta)
    assert not any(tensor.is_contiguous() for tensor in views)
    whole = Inputs(*(tensor.contiguous() for tensor in views))
    for reproducible in (False, True):
        arguments = {"qk_l2norm": True, "reproducible": reproducible, "return_state": True}
        found, expected = rule(*views, **arguments), rule(*whole, **arguments)
        assert torch.equal(found.o, expected.o)
        assert torch.equal(found.state, expected.state)
    expect_close(found.o, replay(whole, qk_l2norm=True).o)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_head_major_and_token_major_tensors_mean_the_same(rule, per_channel):
    x = draw(T, 2, 4, 16, 24, per_channel=per_channel, seed=14)
    turned = Inputs(*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in x))
    assert not turned.g.is_contiguous()
    assert torch.equal(rule(*turned).o, rule(*x).o)
    if per_channel:
        turned = x.but(g=x.g.mT.contiguous().mT)
        assert torch.equal(rule(*turned).o, rule(*x).o)


def test_inputs_may_be_broadcast(rule):
    x = draw(T, 1, 4, seed=15)
    x = x.but(
        g=x.g[:, :1].expand(T, 4), beta=x.beta[:1].expand(T, 4), v=x.v[:, :1].expand(x.v.shape)
    )
    expect_close(rule(*x).o, replay(x).o)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_a_dense_batch_is_so_many_equal_sequences(rule, per_channel):
    rows = [draw(T, 2, 4, 16, 24, seed=n, per_channel=per_channel) for n in (16, 17, 18)]
    batch = [torch.stack(tensors) for tensors in zip(*rows, strict=True)]
    found = rule(*batch, return_state=True)
    assert found.o.shape == (3, T, 4, 24)
    assert found.state.shape == (3, 4, 16, 24)
    for o, state, x in zip(found.o, found.state, rows, strict=True):
        expected = replay(x)
        expect_close(o, expected.o)
        expect_state(state, expected.state)


def test_a_dense_batch_may_lack_gates_start_from_states_and_fill_out(rule):
    rows = [draw(70, 1, 2, seed=n) for n in (19, 20)]
    q, k, v, _, _ = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    before = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(21))
    out = torch.empty(2, 70, 2, 16)
    found = rule(q, k, v, None, None, state=before, out=out)
    assert found.o.data_ptr() == out.data_ptr()
    for n in range(2):
        x = rows[n].but(g=None, beta=None)
        expect_close(out[n], replay(x, state=oracle.wide(before[n])).o)


def test_a_dense_batch_fills_a_strided_out(rule):
    rows = [draw(70, 1, 2, seed=n) for n in (22, 23)]
    batch = [torch.stack(tensors) for tensors in zip(*rows, strict=True)]
    memory = torch.full((2, 80, 2, 20), 7.0)
    rule(*batch, out=memory[:, :70, :, :16])
    assert torch.equal(memory[:, :70, :, :16], rule(*batch).o)
    assert (memory[:, 70:] == 7).all()
    assert (memory[..., 16:] == 7).all()


LENGTHS = [15, 100, 0, 1, 63, 64, 130]


@pytest.mark.parametrize("reproducible", [False, True])
def test_lengths_running_sums_and_schedules_say_the_same(rule, reproducible):
    sequences = [draw(length, 1, 2, seed=n) for n, length in enumerate(LENGTHS)]
    x = packed(*sequences)
    offsets = np.cumsum([0, *LENGTHS]).tolist()
    schedules = [
        LENGTHS,
        Schedule(LENGTHS, device="cpu"),
        Schedule(cu_seqlens=offsets, device="cpu"),
        Schedule(cu_seqlens=torch.tensor(offsets, dtype=torch.int32), device="cpu"),
    ]
    results = [
        rule(*x, schedule=schedule, return_state=True, reproducible=reproducible)
        for schedule in schedules
    ]
    for o, state, _ in results[1:]:
        assert torch.equal(o, results[0].o)
        assert torch.equal(state, results[0].state)
    for n, sequence in enumerate(sequences):
        expected = replay(sequence)
        expect_close(results[0].o[offsets[n] : offsets[n + 1]], expected.o)
        expect_state(results[0].state[n], expected.state)
    assert not results[0].state[2].any()


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 140), max_size=6), spare=st.integers(0, 70))
def test_ragged_batches_with_states_in_and_out(rule, lengths, spare):
    sequences = [draw(length, 1, 2, seed=n) for n, length in enumerate([*lengths, spare])]
    x = packed(*sequences)
    before = torch.randn(len(lengths), 2, 16, 16, generator=torch.Generator().manual_seed(24))
    found = rule(*x, schedule=lengths, state=before, return_state=True)
    row = 0
    for n, length in enumerate(lengths):
        expected = replay(sequences[n], state=oracle.wide(before[n]))
        expect_close(found.o[row : row + length], expected.o)
        expect_state(found.state[n], expected.state)
        if not length:
            assert torch.equal(found.state[n], before[n])
        row += length
    assert not found.o[row:].any()


@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_rows_past_the_last_length_are_0(rule, given_out, per_channel):
    x = draw(T, 1, 2, seed=25, per_channel=per_channel)
    out = torch.empty(T, 2, 16) if given_out else None
    spare = slice(90, T)
    for tensor in x:
        tensor[spare] = torch.nan  # nobody may read them either
    o = rule(*x, schedule=[50, 40], out=out).o
    if given_out:
        assert o is out
    assert not o[spare].any()
    assert not o[spare].isnan().any()
    expect_close(o[:50], replay(x[:50]).o)
    expect_close(o[50:90], replay(x[50:90]).o)


def test_out_may_be_any_strided_memory_and_nothing_beside_it_is_touched(rule):
    x = draw(T, 1, 2, seed=26)
    memory = torch.full((T, 3, 40), 7.0)
    out = memory[:, ::2, 5:21]
    found = rule(*x, out=out)
    assert torch.equal(out, rule(*x).o)
    assert found.o.data_ptr() == out.data_ptr()
    memory[:, ::2, 5:21] = 7.0
    assert (memory == 7).all()


@pytest.mark.parametrize("state", [False, True])
def test_no_tokens_and_no_sequences_are_legal(rule, state):
    x = draw(0, 1, 2)
    before = torch.randn(1, 2, 16, 16)
    for reproducible in (False, True):
        found = rule(
            *x, state=before if state else None, return_state=True, reproducible=reproducible
        )
        assert found.o.shape == (0, 2, 16)
        assert torch.equal(found.state, before if state else torch.zeros_like(before))
        none = rule(*x, schedule=[], return_state=True, reproducible=reproducible)
        assert none.o.shape == (0, 2, 16)
        assert none.state.shape == (0, 2, 16, 16)
        unused = rule(*draw(5, 1, 2), schedule=[], return_state=True, reproducible=reproducible)
        assert not unused.o.any()
        assert unused.state.shape == (0, 2, 16, 16)
    empty = [torch.stack([t, t]) for t in x]
    assert rule(*empty).o.shape == (2, 0, 2, 16)
    assert rule(*(t[:0] for t in empty)).o.shape == (0, 0, 2, 16)


def test_inputs_are_only_read(rule):
    x = draw(T, 1, 2, unit=False, seed=27)
    before, state = x.clone(), torch.randn(1, 2, 16, 16)
    kept = state.clone()
    rule(*x, state=state, qk_l2norm=True, return_state=True, gate=Gate.log(beta="logit"))
    assert all(torch.equal(now, then) for now, then in zip(x, before, strict=True))
    assert torch.equal(state, kept)


@pytest.mark.parametrize("lengths", [[1] * 20, [1, 300, 2, 5, 1, 16, 17]])
def test_short_rows_beside_a_long_one(rule, lengths):
    sequences = [draw(length, 1, 2, 32, 24, seed=n) for n, length in enumerate(lengths)]
    before = torch.randn(len(lengths), 2, 32, 24, generator=torch.Generator().manual_seed(28))
    for reproducible in (False, True):
        found = rule(
            *packed(*sequences),
            schedule=lengths,
            state=before,
            return_state=True,
            reproducible=reproducible,
        )
        row = 0
        for n, length in enumerate(lengths):
            expected = replay(sequences[n], state=oracle.wide(before[n]))
            expect_close(found.o[row : row + length], expected.o)
            expect_state(found.state[n], expected.state)
            row += length


def test_a_cpu_call_without_a_name_is_served_by_torch():
    from headstart.runtime.dispatch import served

    x = draw(70, 1, 2, seed=29)
    before = served["gated_delta_rule", "torch"]
    o = headstart.gated_delta_rule(*x).o
    assert served["gated_delta_rule", "torch"] == before + 1
    assert torch.equal(o, headstart.gated_delta_rule(*x, implementation="torch").o)


def test_the_reference_keeps_float64():
    x = draw(T, 2, 4, 16, 24, dtype=torch.float64, seed=30)
    found = headstart.gated_delta_rule(
        *x, return_state=True, snapshots=torch.float64, implementation="reference",
        schedule=Schedule([T], snapshot_every=64, device="cpu"),
    )  # fmt: skip
    expected = replay(x, keep=(64, 128))
    assert found.o.dtype == found.state.dtype == found.snapshots.dtype == torch.float64
    expect_close(found.o, expected.o)
    expect_state(found.state[0], expected.state)
    expect_state(found.snapshots[1], expected.states[128])
