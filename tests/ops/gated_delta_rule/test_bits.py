"""The promise: equal bits however the tokens of a sequence arrived, and whatever came beside them.

Every comparison is torch.equal: outputs, canonical states and snapshots.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.implementations import DEVICE
from tests.ops.gated_delta_rule.inputs import INF, Inputs, draw, late_forget, packed

from headstart import DeltaCache, Gate, Schedule

T = 200
# name -> (inputs, arguments of the call): each of them on its own can break the promise
KINDS = {
    "float32": (lambda: draw(T, 1, 2, 32, 24, seed=1), {}),
    "float32, normalised": (lambda: draw(T, 1, 2, 32, 24, unit=False, seed=2), {"qk_l2norm": True}),
    "bfloat16, normalised": (
        lambda: draw(T, 1, 2, 32, 24, dtype=torch.bfloat16, unit=False, seed=3),
        {"qk_l2norm": True},
    ),
    "float16": (lambda: draw(T, 1, 2, 32, 24, dtype=torch.float16, seed=4), {}),
    "per channel": (lambda: draw(T, 1, 2, 32, 24, per_channel=True, seed=5), {}),
    "per channel, bfloat16, normalised": (
        lambda: draw(T, 1, 2, 32, 24, dtype=torch.bfloat16, unit=False, per_channel=True, seed=6),
        {"qk_l2norm": True},
    ),
    "late forgetting": (lambda: late_forget(draw(T, 1, 2, 32, 24, seed=7), seed=8), {}),
    "late forgetting, bfloat16, normalised": (
        lambda: late_forget(
            draw(T, 1, 2, 32, 24, dtype=torch.bfloat16, unit=False, seed=9), seed=10
        ),
        {"qk_l2norm": True},
    ),
    "raw gates and logits": (
        lambda: draw(T, 1, 2, 32, 24, dtype=torch.bfloat16, unit=False, seed=11),
        {
            "qk_l2norm": True,
            "gate": Gate.raw(torch.tensor([0.5, 3.0]), torch.tensor([0.1, -2.0]), beta="logit"),
        },
    ),
    "no decay": (lambda: draw(T, 1, 2, 32, 24, seed=12).but(g=None, beta=None), {"scale": 0.3}),
}


@pytest.fixture(params=KINDS)
def kind(request, implementation):
    """Inputs and arguments; fewer tokens for the reference, which walks row by row."""
    make, arguments = KINDS[request.param]
    return make()[: 140 if implementation == "reference" else T], arguments


def cache_for(x: Inputs, slots=4) -> DeltaCache:
    per_channel = x.g is not None and x.g.dim() == 3
    return DeltaCache(
        slots, **x.sizes, per_channel=per_channel, dtype=x.q.dtype, draft_tokens=16, device="cpu"
    )


def step(rule, x, start, stop, cache, slot=0, **arguments):
    """Bring tokens start to stop; outputs and, by position, every snapshot on the grid."""
    schedule = Schedule([stop - start], start_positions=start, snapshot_every=64, device="cpu")
    found = rule(
        *x[start:stop],
        schedule=schedule,
        state=cache.at([slot]),
        snapshots=torch.float32,
        **arguments,
    )
    return found.o, dict(zip(schedule.snapshot_positions[0], found.snapshots, strict=True))


def split(rule, x, cuts, cache, slot=0, **arguments):
    """The same in steps cut at `cuts`."""
    borders = [0, *cuts, len(x)]
    outputs, kept = [], {}
    for start, stop in itertools.pairwise(borders):
        o, snapshots = step(rule, x, start, stop, cache, slot, **arguments)
        outputs.append(o)
        kept |= snapshots
    return torch.cat(outputs), kept


def whole(rule, x, **arguments):
    """Outputs, snapshots and export of a cold prefill."""
    cache = cache_for(x)
    o, kept = step(rule, x, 0, len(x), cache, **arguments)
    return o, kept, cache.export([0])


def expect_same(found, expected):
    """Outputs, snapshots and exports, bit by bit."""
    o, kept, (positions, states, _) = found
    assert torch.equal(o, expected[0])
    assert kept.keys() == expected[1].keys()
    for position in kept:
        assert torch.equal(kept[position], expected[1][position]), position
    assert torch.equal(positions, expected[2][0])
    assert torch.equal(states, expected[2][1])


# Steps


def test_any_split_into_steps_is_the_whole_prefill(rule, kind):
    x, arguments = kind
    expected = whole(rule, x, **arguments)

    @settings(max_examples=12, deadline=None, database=None)
    @given(cuts=st.lists(st.integers(0, len(x)), max_size=8).map(sorted))
    def holds(cuts):
        cache = cache_for(x)
        o, kept = split(rule, x, cuts, cache, **arguments)
        expect_same((o, kept, cache.export([0])), expected)

    holds()


@pytest.mark.parametrize("size", [1, 16, 63, 65])
def test_steps_of_one_size_are_the_whole_prefill(rule, kind, size):
    x, arguments = kind
    expected = whole(rule, x, **arguments)
    cache = cache_for(x)
    o, kept = split(rule, x, range(size, len(x), size), cache, **arguments)
    expect_same((o, kept, cache.export([0])), expected)


def journey(rule, x, cache, seed, **arguments):
    """Bring x by steps, decodes, drafts that are mostly wrong, and by going back, all at random."""
    dice = random.Random(seed)
    poor = draw(len(x), *x.sizes.values(), dtype=x.q.dtype, unit=False, seed=seed + 1000)
    wrong = x.but(
        k=poor.k, v=poor.v, g=None if x.g is None else x.g.flip(0),
        beta=None if x.beta is None else poor.beta,
    )  # fmt: skip
    outputs, at, position, end = torch.full_like(x.v, torch.nan), 0, 0, 0
    while at < len(x):
        turn = dice.choice(["step", "decode", "drafts", "drafts", "back"])
        if turn == "back" and at == end and position < at:
            at = dice.randint(position, at)
            continue
        if turn == "drafts":
            drafted = min(dice.randint(1, 16), len(x) - at)
            right = dice.randint(0, drafted)
            tokens = packed(x[at : at + right], wrong[at + right : at + drafted])
            if dice.random() < 0.3 and right < drafted:
                tokens.v[right:] = torch.nan
            schedule = Schedule([drafted], start_positions=at, drafts=True, device="cpu")
            o = rule(*tokens, schedule=schedule, state=cache.at([0]), **arguments).o
            outputs[at : at + right] = o[:right]
            position, end, at = at // 64 * 64, at + drafted, at + right
            continue
        stop = min(at + (1 if turn == "decode" else dice.randint(1, 90)), len(x))
        outputs[at:stop], _ = step(rule, x, at, stop, cache, **arguments)
        at = end = stop
        position = at // 64 * 64
    return outputs


@pytest.mark.parametrize("seed", range(4))
def test_drafts_rollbacks_and_decodes_leave_the_bits_of_the_whole_prefill(rule, kind, seed):
    x, arguments = kind
    expected, kept, export = whole(rule, x, **arguments)
    cache = cache_for(x)
    assert torch.equal(journey(rule, x, cache, seed, **arguments), expected)
    # close the last drafts, so that the canonical state stands where the whole prefill left it
    step(rule, x, len(x), len(x), cache, **arguments)
    positions, states, _ = cache.export([0])
    assert torch.equal(positions, export[0])
    assert torch.equal(states, export[1])
    assert torch.equal(states[0], kept[max(kept)])


def test_a_hit_is_a_cold_prefill(rule, kind):
    """From every position of the grid, restored by a copied snapshot slot and by load."""
    x, arguments = kind
    expected, kept, _ = whole(rule, x, **arguments)
    source = cache_for(x, 8)
    slots = list(range(3, 3 + len(kept)))
    schedule = Schedule([len(x)], snapshot_every=64, device="cpu")
    rule(*x, schedule=schedule, state=source.at([0]), snapshots=source.at(slots), **arguments)
    for slot, position in zip(slots, kept, strict=True):
        source.copy([slot], [6])
        loaded = cache_for(x, 2)
        loaded.load([1], [position], kept[position][None])
        for cache, where in ((source, 6), (loaded, 1)):
            cuts = [position, position + 5, len(x)]
            parts = [
                step(rule, x, start, stop, cache, where, **arguments)[0]
                for start, stop in itertools.pairwise(cuts)
            ]
            assert torch.equal(torch.cat(parts), expected[position:])
            assert torch.equal(cache.export([where])[1][0], kept[max(kept)])


def test_a_snapshot_of_what_a_turn_decoded_is_that_of_a_cold_prefill(rule, kind):
    x, arguments = kind
    _, kept, _ = whole(rule, x, **arguments)
    cache = cache_for(x)
    step(rule, x, 0, 100, cache, **arguments)
    for at in range(100, 130):
        schedule = Schedule(
            [1], start_positions=at, device="cpu",
            snapshot_positions=[[at // 64 * 64] if at in (100, 129) else []],
        )  # fmt: skip
        found = rule(
            *x[at : at + 1],
            schedule=schedule,
            state=cache.at([0]),
            snapshots=torch.float32,
            **arguments,
        )
        if at in (100, 129):
            assert torch.equal(found.snapshots[0], kept[at // 64 * 64])


# What comes beside


@pytest.mark.parametrize("beside", [[1], [64, 0, 300], [5, 130, 1, 1, 1]])
def test_the_batch_a_sequence_comes_in_changes_no_bit(rule, kind, beside):
    x, arguments = kind
    expected = whole(rule, x, **arguments)
    others = [
        draw(length, *x.sizes.values(), dtype=x.q.dtype, unit=False, seed=n,
             per_channel=x.g is not None and x.g.dim() == 3)
        for n, length in enumerate(beside)
    ]  # fmt: skip
    if x.g is None:
        others = [y.but(g=None, beta=None) for y in others]
    for place in range(len(others) + 1):
        sequences = [*others[:place], x, *others[place:]]
        lengths = [len(y) for y in sequences]
        first = sum(lengths[:place])
        schedule = Schedule(lengths, device="cpu")
        cache = cache_for(x, 8)
        slots = [7 - n for n in range(len(lengths))]
        o = rule(*packed(*sequences), schedule=schedule, state=cache.at(slots), **arguments).o
        assert torch.equal(o[first : first + len(x)], expected[0])
        assert torch.equal(cache.export([7 - place])[1], expected[2][1])


def test_decodes_in_one_launch_are_decodes_alone(rule, kind):
    """Sequences at the offsets of a chunk, one token each."""
    x, arguments = kind
    many, alone = cache_for(x, 64), cache_for(x, 64)
    lengths = [*range(0, 63, 3), 63]
    rows = packed(*(x[:n] for n in lengths))
    filled = Schedule(lengths, device="cpu")
    for cache in (many, alone):
        rule(*rows, schedule=filled, state=cache.at(lengths), **arguments)
    schedule = Schedule([1] * len(lengths), start_positions=lengths, device="cpu")
    last = packed(*(x[n : n + 1] for n in lengths))
    o = rule(*last, schedule=schedule, state=many.at(lengths), **arguments).o
    assert torch.equal(o, whole(rule, x, **arguments)[0][lengths])
    for row, n in ((0, 0), (1, 3), (11, 33), (21, 63)):
        one = Schedule([1], start_positions=n, device="cpu")
        mine = rule(*x[n : n + 1], schedule=one, state=alone.at([n]), **arguments).o
        assert torch.equal(mine[0], o[row])


def heads_of(x: Inputs, arguments: dict, heads: slice, value_heads: slice):
    """What a rank with some of the heads gets."""
    gate = arguments.get("gate")
    if gate is not None:
        arguments = arguments | {
            "gate": Gate.raw(gate.a_log[value_heads], gate.dt_bias[value_heads], beta=gate.beta)
        }
    mine = x[:, heads, value_heads]
    return mine.but(**{n: getattr(mine, n).contiguous() for n in ("q", "k", "v")}), arguments


@pytest.mark.parametrize(
    ("H", "HV", "mine", "values"),
    [
        (16, 32, slice(8, 16), slice(16, 32)),
        (16, 32, slice(4, 8), slice(8, 16)),
        (16, 32, slice(15, 16), slice(30, 32)),
        (16, 64, slice(2, 4), slice(8, 16)),
        (2, 6, slice(1, 2), slice(3, 6)),
        (7, 7, slice(3, 4), slice(3, 4)),
        # a rank may even hold some of the value heads of one key head
        (2, 8, slice(1, 2), slice(6, 8)),
        (1, 3, slice(0, 1), slice(1, 2)),
    ],
)
@pytest.mark.parametrize(
    "form", ["float32", "bfloat16, normalised", "per channel", "raw gates and logits"]
)
def test_a_head_has_the_same_bits_whatever_heads_are_beside_it(rule, H, HV, mine, values, form):
    dtype = torch.float32 if form in ("float32", "per channel") else torch.bfloat16
    x = draw(100, H, HV, 32, 24, dtype=dtype, unit=False, per_channel=form == "per channel", seed=H)
    arguments = {"qk_l2norm": True}
    if form == "raw gates and logits":
        arguments["gate"] = Gate.raw(torch.linspace(-2, 2, HV), torch.linspace(1, -1, HV))
    part, fewer = heads_of(x, arguments, mine, values)
    all_cache, my_cache = cache_for(x, 1), cache_for(part, 1)
    for start, stop in ((0, 70), (70, 71), (71, 100)):
        expected, _ = step(rule, x, start, stop, all_cache, **arguments)
        found, _ = step(rule, part, start, stop, my_cache, **fewer)
        assert torch.equal(found, expected[:, values])
    assert torch.equal(my_cache.export([0])[1], all_cache.export([0])[1][:, values])
    plain = rule(*x, return_state=True, reproducible=True, **arguments)
    alone = rule(*part, return_state=True, reproducible=True, **fewer)
    assert torch.equal(alone.o, plain.o[:, values])
    assert torch.equal(alone.state, plain.state[:, values])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_size_128_keeps_the_promise(rule, implementation, dtype):
    if implementation == "reference":
        pytest.skip("its arithmetic does not depend on sizes; the small ones tell")
    x = draw(330, 4, 8, 128, 128, dtype=dtype, unit=False, seed=13)
    arguments = {"qk_l2norm": True}
    expected = whole(rule, x, **arguments)
    for cuts in ([100], [1, 2, 3, 64, 300], range(64, 330, 64), range(31, 330, 31)):
        cache = cache_for(x)
        o, kept = split(rule, x, list(cuts), cache, **arguments)
        expect_same((o, kept, cache.export([0])), expected)
    part, fewer = heads_of(x, arguments, slice(1, 2), slice(2, 4))
    o, kept, _ = whole(rule, part, **fewer)
    assert torch.equal(o, expected[0][:, 2:4])
    assert torch.equal(kept[320], expected[1][320][2:4])


@pytest.mark.parametrize(
    ("K", "V", "H", "ratio", "per_channel", "tokens"),
    [
        (31, 7, 8, 1, True, 70),
        (33, 7, 3, 1, False, 100),
        (2, 13, 3, 1, False, 64),
        (1, 7, 2, 1, False, 70),
        (7, 100, 1, 8, False, 64),
        (7, 64, 2, 6, False, 100),
        (96, 7, 4, 3, False, 100),
        (64, 8, 4, 3, False, 100),
        (40, 8, 4, 6, False, 5),
        (72, 40, 2, 3, False, 100),
        (100, 56, 3, 2, True, 70),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_head_sizes_keep_the_promise(
    rule, threads_restored, K, V, H, ratio, per_channel, tokens, dtype
):
    """Lanes of such sizes start at unaligned addresses, which a library product may care about."""
    sizes, HV = (H, H * ratio, K, V), H * ratio
    form = {"dtype": dtype, "unit": False, "per_channel": per_channel}
    x = draw(tokens, *sizes, **form, seed=13)
    arguments = {"qk_l2norm": True, "reproducible": True, "return_state": True}
    alone = rule(*x, **arguments)
    for n, before in enumerate(([30], [1, 64, 2])):
        others = [draw(length, *sizes, **form, seed=20 + n) for length in before]
        lengths = [*before, tokens]
        found = rule(*packed(*others, x), schedule=lengths, **arguments)
        assert torch.equal(found.o[sum(before) :], alone.o), before
        assert torch.equal(found.state[-1], alone.state[0]), before
    for head in range(H):
        mine = slice(head * ratio, (head + 1) * ratio)
        found = rule(*x[:, head : head + 1, mine], **arguments)
        assert torch.equal(found.o, alone.o[:, mine]), head
        assert torch.equal(found.state, alone.state[:, mine]), head
    found = rule(*x[:, H - 1 : H, HV - 1 : HV], **arguments)
    assert torch.equal(found.o, alone.o[:, HV - 1 :])
    torch.set_num_threads(2)
    found = rule(*x, **arguments)
    assert torch.equal(found.o, alone.o)
    assert torch.equal(found.state, alone.state)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize(
    "sizes", [(1, 2, 16, 16), (10, 20, 16, 16), (2, 4, 96, 64), (2, 4, 128, 128)], ids=str
)
def test_one_or_two_threads_give_the_same_bits(
    rule, implementation, threads_restored, sizes, per_channel
):
    x = draw(150, *sizes, per_channel=per_channel, dtype=torch.bfloat16, unit=False, seed=14)
    # two threads walking row by row mostly wait for each other
    x = x[: 30 if implementation == "reference" else None]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cache = cache_for(x)
        o, _ = split(rule, x, [20, 21], cache, qk_l2norm=True)
        plain = rule(*x, qk_l2norm=True, reproducible=True, return_state=True)
        results.append((o, cache.export([0])[1], plain.o, plain.state))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_strided_views_in_a_cache_give_the_bits_of_contiguous_tensors(rule, kind):
    x, arguments = kind
    if x.g is None:
        pytest.skip("nothing more to stride")
    expected = whole(rule, x, **arguments)
    views = Inputs(
        *(torch.full((len(x), *t.shape[1:-1], 2 * t.shape[-1] + 1), torch.nan, dtype=t.dtype)
          [..., 1 : 1 + t.shape[-1]].copy_(t) for t in x)
    )  # fmt: skip
    turned = views.but(
        g=x.g.transpose(0, 1).contiguous().transpose(0, 1), beta=x.beta.mT.contiguous().mT
    )
    for y in (views, turned):
        assert not y.k.is_contiguous()
        cache = cache_for(x)
        o, kept = split(rule, y, [70, 71, 130], cache, **arguments)
        expect_same((o, kept, cache.export([0])), expected)


def test_rows_that_fill_a_tile_give_the_bits_of_gathered_ones(rule):
    """Eight value heads may be read where they lie; fewer of them are copied."""
    x = draw(T, 4, 8, 32, 32, seed=17)
    expected = whole(rule, x)
    o, kept, export = whole(rule, x.but(v=torch.cat([x.v, x.v], 2)[..., 32:]))
    expect_same((o, kept, export), expected)
    o, kept, _ = whole(rule, heads_of(x, {}, slice(0, 2), slice(0, 4))[0])
    assert torch.equal(o, expected[0][:, :4])
    assert torch.equal(kept[192], expected[1][192][:4])


def test_a_whole_chunk_of_drafts_stays_in_the_tail(rule):
    x = draw(T, 4, 8, 32, 32, seed=18)
    expected = whole(rule, x)[0]
    cache = DeltaCache(1, **x.sizes, dtype=torch.float32, draft_tokens=64, device="cpu")
    parts = [rule(*x[:64], schedule=Schedule([64], device="cpu"), state=cache.at([0])).o]
    drafts = Schedule([64], start_positions=64, drafts=True, device="cpu")
    parts.append(rule(*x[64:128], schedule=drafts, state=cache.at([0])).o)
    parts.append(step(rule, x, 128, T, cache)[0])
    assert torch.equal(torch.cat(parts), expected)


# Plain states


@pytest.mark.parametrize("cuts", [[], [64], [128], [64, 128]])
def test_plain_states_keep_the_bits_of_steps_cut_on_the_grid(rule, kind, cuts):
    x, arguments = kind
    expected, kept, _ = whole(rule, x, **arguments)
    borders, state, outputs = [0, *cuts, len(x)], None, []
    for start, stop in itertools.pairwise(borders):
        schedule = Schedule([stop - start], start_positions=start, device="cpu")
        found = rule(
            *x[start:stop],
            schedule=schedule,
            state=state,
            return_state=True,
            reproducible=True,
            **arguments,
        )
        state = found.state
        if stop in kept:
            assert torch.equal(state[0], kept[stop])
        outputs.append(found.o)
    assert torch.equal(torch.cat(outputs), expected)


def test_reproducible_plain_states_do_not_see_the_batch(rule, kind):
    x, arguments = kind
    lengths = [70, 64, 1, 65]
    parts = [x[:70], x[64:128], x[3:4], x[60:125]]
    found = rule(
        *packed(*parts), schedule=lengths, return_state=True, reproducible=True, **arguments
    )
    row = 0
    for n, part in enumerate(parts):
        alone = rule(*part, return_state=True, reproducible=True, **arguments)
        assert torch.equal(found.o[row : row + len(part)], alone.o)
        assert torch.equal(found.state[n], alone.state[0])
        row += len(part)


def test_a_forgotten_past_leaves_no_trace_in_the_bits(rule):
    """After a -inf the bits are those of any other past, in the chunk of the -inf and later."""
    x, y = draw(T, 1, 2, 32, 24, seed=15), draw(T, 1, 2, 32, 24, seed=16)
    x.g[90] = -INF
    other = packed(y[:90], x[90:])
    first, second = whole(rule, x), whole(rule, other)
    assert torch.equal(first[0][90:], second[0][90:])
    assert torch.equal(first[1][128], second[1][128])
    assert not torch.equal(first[0][:90], second[0][:90])


def test_scratch_left_by_other_calls_changes_no_bit(rule):
    from headstart import Workspace

    x, y = draw(T, 1, 2, 32, 24, seed=17), draw(333, 3, 6, 48, 40, seed=18)
    workspace = Workspace(DEVICE)
    expected = rule(*x, reproducible=True).o
    rule(*y, workspace=workspace)
    assert torch.equal(rule(*x, reproducible=True, workspace=workspace).o, expected)
    assert torch.equal(rule(*x, reproducible=True, workspace=workspace).o, expected)


def test_heads_that_fill_a_group_and_heads_that_share_one(rule):
    """Six key heads: those of the second sequence lie in other groups than when it is alone."""
    first, second = (draw(150, 6, 12, seed=seed) for seed in (50, 51))
    alone = [rule(*x, reproducible=True, return_state=True) for x in (first, second)]
    both = rule(*packed(first, second), schedule=[150, 150], reproducible=True, return_state=True)
    assert torch.equal(both.o, torch.cat([found.o for found in alone]))
    assert torch.equal(both.state, torch.cat([found.state for found in alone]))
