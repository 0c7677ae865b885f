"""vLLM's pools of states: every way through a sequence gives what one call for all of it gives."""

import dataclasses

import pytest
import torch

from headstart import Gate, causal_conv1d, gated_delta_rule
from headstart.integrations.vllm import statistics
from headstart.integrations.vllm.states import DeltaCore, DraftStep, PlainStep

H, HV, K, V, WIDTH, DRAFTS = 2, 4, 32, 16, 4, 3
CHANNELS = 2 * H * K + HV * V
CLOSE = {"atol": 3e-6, "rtol": 3e-6}


def make_core(drafts=0, seed=0, dtype=torch.float32):
    """A layer whose pools lie in padded pages of NaN, as strided views."""
    generator = torch.Generator().manual_seed(seed)
    slots, length = 12, WIDTH - 1 + drafts
    pages = torch.full((slots, length * CHANNELS + HV * V * K + 40), torch.nan, dtype=dtype)
    histories, states, _ = pages.split([length * CHANNELS, HV * V * K, 40], dim=1)
    return DeltaCore(
        0.5 * torch.randn(CHANNELS, WIDTH, generator=generator),
        torch.randn(CHANNELS, generator=generator),
        torch.randn(HV, generator=generator),
        torch.randn(HV, generator=generator),
        "silu", H, K, V,
        histories.unflatten(1, (length, CHANNELS)),
        states.unflatten(1, (HV, V, K)),
    )  # fmt: skip


def make_rows(core, T, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, width, generator=generator) for width in (CHANNELS, HV, HV)]


def whole(core, mixed, b, a):
    """The layer over one sequence, token by token in float64."""
    mixed, b, a = (x.double() for x in (mixed, b, a))
    how = {"implementation": "reference"}
    y = causal_conv1d(mixed, core.weight.double(), core.bias.double(), **how).y
    q, k, v = y.split([H * K, H * K, HV * V], dim=1)
    return gated_delta_rule(
        q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V)), a, b,
        gate=Gate.raw(core.a_log.double(), core.dt_bias.double(), beta="logit"), qk_l2norm=True,
        return_state=True, **how,
    )  # fmt: skip


def run(core, steps, *rows):
    out = torch.full((len(rows[0]), HV, V), torch.nan)
    core.run(steps, *rows, out)
    return out


def test_chunks_decodes_and_fresh_sequences_share_a_step():
    core = make_core()
    rows = make_rows(core, 100), make_rows(core, 37, seed=2)
    want = [whole(core, *one) for one in rows]
    slots = torch.tensor([4, 9], dtype=torch.int32)

    def step(spans, singles, which):
        lengths = [end - begin for begin, end in spans]
        plain = PlainStep.of(lengths, [begin for begin, _ in spans], singles, slots[which])
        packed = [
            torch.cat([rows[n][i][begin:end] for n, (begin, end) in zip(which, spans, strict=True)])
            for i in range(3)
        ]
        found = run(core, [plain], *packed).split(lengths)
        for n, (begin, end), o in zip(which, spans, found, strict=True):
            torch.testing.assert_close(o, want[n].o[begin:end].float(), **CLOSE)

    step([(0, 70)], 0, [0])  # a first chunk, off the grid
    step([(70, 71), (0, 20)], 1, [0, 1])  # a decode beside a fresh prefill
    step([(71, 98), (20, 36)], 0, [0, 1])  # two chunks with states
    step([(98, 99), (36, 37)], 2, [0, 1])  # decodes
    step([(99, 100)], 1, [0])
    for n, slot in enumerate(slots.tolist()):
        torch.testing.assert_close(core.states[slot].mT, want[n].state[0].float(), **CLOSE)
        torch.testing.assert_close(core.histories[slot], rows[n][0][-3:], atol=0, rtol=0)
    others = [slot for slot in range(12) if slot not in slots]
    assert core.states[others].isnan().all()


def test_a_default_device_of_the_process_changes_no_step():
    slots = torch.tensor([[7, 2, 5, 3], [1, 8, 9, 10]], dtype=torch.int32)
    accepted = torch.tensor([1, 2])

    def steps():
        plain = PlainStep.of([1, 5], [3, 0], 1, slots[:, 0])
        drafts = DraftStep.of([2, 3], slots, accepted)
        return plain.present, *(x for turn in drafts.turns for x in turn[:4])

    wanted = steps()
    with torch.device("meta"):
        found = steps()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("accepting", [[1, 1, 1], [4, 4, 4], [2, 4, 1], [3, 1, 2]])
def test_drafts_go_on_from_the_last_token_accepted(accepting):
    core = make_core(DRAFTS)
    mixed, b, a = make_rows(core, 60)
    want = whole(core, mixed, b, a).o.float()
    slots = torch.tensor([[7, 2, 5, 3]], dtype=torch.int32)
    at = 30
    first = PlainStep.of([at], [0], 0, slots[:, 0])
    torch.testing.assert_close(run(core, [first], mixed[:at], b[:at], a[:at]), want[:at], **CLOSE)
    accepted = 1
    for taken in accepting:
        wrong = make_rows(core, DRAFTS + 1, seed=at)
        # `taken` of the four tokens are those of the sequence, the others will be dropped.
        given = [
            torch.cat([x[at : at + taken], other[taken:]])
            for x, other in zip((mixed, b, a), wrong, strict=True)
        ]
        step = DraftStep.of([DRAFTS + 1], slots, torch.tensor([accepted]))
        found = run(core, [step], *given)
        torch.testing.assert_close(found[:taken], want[at : at + taken], **CLOSE)
        at, accepted = at + taken, taken


def test_fewer_drafts_than_the_last_step_accepted():
    core = make_core(DRAFTS)
    mixed, b, a = make_rows(core, 40)
    want = whole(core, mixed, b, a).o.float()
    slots = torch.tensor([[7, 2, 5, 3]], dtype=torch.int32)
    run(core, [PlainStep.of([20], [0], 0, slots[:, 0])], mixed[:20], b[:20], a[:20])
    at, accepted = 20, 1
    for length in (4, 1, 2, 4, 1):
        step = DraftStep.of([length], slots, torch.tensor([accepted]))
        own = slice(at, at + length)
        found = run(core, [step], mixed[own], b[own], a[own])
        torch.testing.assert_close(found, want[own], **CLOSE)
        at, accepted = at + length, length


def test_drafts_of_any_length_beside_a_prefill_in_any_order():
    core = make_core(DRAFTS)
    slots = torch.tensor([[7, 2, 5, 3], [1, 8, 9, 10]], dtype=torch.int32)
    rows = [make_rows(core, 40, seed=n) for n in range(3)]
    want = [whole(core, *one).o.float() for one in rows]
    for n in range(2):
        own = [x[:20] for x in rows[n]]
        run(core, [PlainStep.of([20], [0], 0, slots[n : n + 1, 0])], *own)
    # Sequence 0 drafts two tokens, a fresh sequence brings ten, sequence 1 drafts four.
    packed = [torch.cat([rows[0][i][20:22], rows[2][i][:10], rows[1][i][20:24]]) for i in range(3)]
    plain = PlainStep.of([10], [0], 0, torch.tensor([4]), torch.arange(2, 12))
    drafts = DraftStep.of([2, 4], slots, torch.tensor([1, 1]), torch.tensor([0, 1, 12, 13, 14, 15]))
    found = run(core, [plain, drafts], *packed)
    expected = torch.cat([want[0][20:22], want[2][:10], want[1][20:24]])
    torch.testing.assert_close(found, expected, **CLOSE)


def test_reproducible_rows_do_not_depend_on_the_batch_nor_on_steps_on_the_grid():
    alone, among = (dataclasses.replace(make_core(), reproducible=True) for _ in range(2))
    rows, others = make_rows(alone, 180), make_rows(alone, 90, seed=7)
    whole = run(alone, [PlainStep.of([178], [0], 0, torch.tensor([5]))], *(x[:178] for x in rows))
    decoded = [
        run(alone, [PlainStep.of([1], [at], 1, torch.tensor([5]))], *(x[at : at + 1] for x in rows))
        for at in (178, 179)
    ]
    # In two chunks, the second from a copy of the state: a prefix hit. Another sequence runs along.
    slots = torch.tensor([2, 7])
    packed = [torch.cat([x[:128], y[:60]]) for x, y in zip(rows, others, strict=True)]
    first = run(among, [PlainStep.of([128, 60], [0, 0], 0, slots)], *packed)
    for pool in (among.states, among.histories):
        pool[9] = pool[2]
    slots = torch.tensor([7, 9])
    packed = [torch.cat([y[60:61], x[128:178]]) for x, y in zip(rows, others, strict=True)]
    second = run(among, [PlainStep.of([1, 50], [60, 128], 1, slots)], *packed)
    assert torch.equal(torch.cat([first[:128], second[1:]]), whole)
    for n, at in enumerate((178, 179)):
        packed = [
            torch.cat([y[61 + n : 62 + n], x[at : at + 1]])
            for x, y in zip(rows, others, strict=True)
        ]
        both = run(among, [PlainStep.of([1, 1], [61 + n, at], 2, slots)], *packed)
        assert torch.equal(both[1:], decoded[n])
    assert torch.equal(among.states[9], alone.states[5])


def test_rows_of_no_sequence_are_left_alone():
    core = make_core()
    rows = make_rows(core, 8)
    found = run(core, [PlainStep.of([5], [0], 0, torch.tensor([3]))], *rows)
    assert found[:5].isfinite().all()
    assert found[5:].isnan().all()


def test_layers_times_steps_are_counted():
    core = make_core(DRAFTS)
    statistics().reset()
    step = PlainStep.of([1, 6], [9, 0], 1, torch.tensor([3, 4]))
    core.states.zero_(), core.histories.zero_()
    for layer in range(3):
        run(dataclasses.replace(core, activation="silu"), [step], *make_rows(core, 7, seed=layer))
    assert statistics().served == {"linear_attention": 3}
    assert {name: count for (_, name, _), count in statistics().calls.items()} == {
        "causal_conv1d": 3,
        "recurrent_gated_delta_rule": 3,
        "gated_delta_rule": 3,
    }
