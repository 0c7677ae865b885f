"""headstart against transformers' own path in float32: whole, in steps, padded and packed."""

import itertools

import pytest
import torch
import transformers
from tests.integrations.transformers.models import (
    alone,
    difference,
    left_padding,
    make,
    pair,
    served_calls,
    stepped,
    steps_of,
    tokens,
)

from headstart.integrations.transformers import HybridCache, enable, statistics

pytestmark = pytest.mark.kernels

T = 203
NEAR = 2e-5  # of the largest logit; differences of order 1e-6 are usual
STEPS = {"100": [100], "64": [64], "1": [1] * 4 + [54] + [1] * 12, "odd": [1, 62, 3, 65, 37]}


def _caches(model):
    return {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=256),
        "hybrid": lambda: HybridCache(model, snapshot_every=64),
    }


CACHES = ["dynamic", "static", "hybrid"]


def test_the_comparison_means_something(family):
    own, _ = pair(family)
    ids = tokens(1, T)
    logits = own(ids).logits
    changed = ids.clone()
    changed[0, 0] = 1 + ids[0, 0] % 90
    assert logits.abs().max() > 1
    # a change of the very first token is seen at the end of a hybrid, and past the window
    assert difference(own(changed).logits[:, -1], logits[:, -1]) > 10 * NEAR


@pytest.mark.parametrize("batch", [1, 3])
def test_whole(family, batch):
    own, served = pair(family)
    ids = tokens(batch, T, seed=batch)
    assert difference(served(ids).logits, own(ids).logits) < NEAR
    assert difference(served(ids, use_cache=False).logits, own(ids).logits) < NEAR


def test_embeddings_instead_of_tokens(family):
    own, served = pair(family)
    embeddings = own.get_input_embeddings()(tokens(2, 90))
    found = served(inputs_embeds=embeddings).logits
    assert difference(found, own(inputs_embeds=embeddings).logits) < NEAR


def test_a_single_token(family):
    own, served = pair(family)
    ids = tokens(2, 1)
    assert difference(served(ids).logits, own(ids).logits) < NEAR


@pytest.mark.parametrize("sizes", STEPS)
@pytest.mark.parametrize("kind", CACHES)
def test_steps(family, kind, sizes):
    own, served = pair(family)
    length = 70 if sizes == "1" else T  # a border of the grid lies among the single tokens
    ids = tokens(2, T)[:, :length]
    borders = steps_of(length, STEPS[sizes])
    found = stepped(served, ids, borders, _caches(served)[kind]())
    assert difference(found, own(ids).logits) < NEAR


def test_a_dynamic_cache_made_without_the_configuration():
    """Its sliding layers keep every key, so the window is the mask's affair."""
    own, served = pair("gpt-oss")
    ids = tokens(1, T)
    found = stepped(served, ids, steps_of(T, [50]), transformers.DynamicCache())
    assert difference(found, own(ids).logits) < NEAR


def test_bfloat16_is_as_near_to_float32_as_the_model_s_own_path(family):
    exact = pair(family)[0]
    own, served = make(family, torch.bfloat16), enable(make(family, torch.bfloat16))
    ids = tokens(1, T)
    # experts chosen otherwise after a rounding move single tokens, so tokens are compared in the
    # middle, not at the worst
    wanted = exact(ids).logits
    errors = [(m(ids).logits.float() - wanted).norm(dim=-1).median() for m in (own, served)]
    assert errors[1] < 1.25 * errors[0]


@pytest.mark.parametrize("kind", [None, *CACHES])
def test_left_padding(family, kind):
    own, served = pair(family)
    ids, mask = tokens(3, 150), left_padding(150, 0, 71, 9)
    cache = None if kind is None else _caches(served)[kind]()
    found = stepped(served, ids, [(0, 150)], cache, mask)
    assert difference(found * mask[..., None], alone(own, ids, mask)) < NEAR


@pytest.mark.parametrize("sizes", [[64], [1, 99], [33]])
@pytest.mark.parametrize("kind", CACHES)
def test_left_padding_in_steps(family, kind, sizes):
    """The longest padding covers whole steps: that sequence begins later than the others."""
    own, served = pair(family)
    ids, mask = tokens(3, 180), left_padding(180, 0, 110, 9)
    found = stepped(served, ids, steps_of(180, sizes), _caches(served)[kind](), mask)
    assert difference(found * mask[..., None], alone(own, ids, mask)) < NEAR


@pytest.mark.parametrize("kind", [None, *CACHES])
def test_right_padding(family, kind):
    own, served = pair(family)
    ids, mask = tokens(3, 150), left_padding(150, 0, 71, 9).flip(1)
    cache = None if kind is None else _caches(served)[kind]()
    found = stepped(served, ids, [(0, 150)], cache, mask)
    assert difference(found * mask[..., None], alone(own, ids, mask)) < NEAR


def test_padding_at_both_ends_and_a_sequence_without_tokens(family):
    own, served = pair(family)
    ids, mask = tokens(3, 100), left_padding(100, 5, 100, 20)
    mask[0, 90:] = 0
    found = stepped(served, ids, [(0, 100)], None, mask)
    assert difference(found * mask[..., None], alone(own, ids, mask)) < NEAR
    assert found.isfinite().all()


def test_what_padding_holds_changes_nothing(family):
    """Not even bits: padding is never computed with."""
    _, served = pair(family)
    mask = left_padding(150, 0, 71, 9)
    ids, other = tokens(3, 150), tokens(3, 150, seed=1)
    other = torch.where(mask.bool(), ids, other)
    found = [stepped(served, x, [(0, 150)], None, mask) for x in (ids, other)]
    assert torch.equal(found[0][mask.bool()], found[1][mask.bool()])


@pytest.mark.parametrize("lengths", [[[100, 1, 64, 38]], [[203]], [[3, 200], [150, 53]]])
def test_packed_sequences(family, lengths):
    own, served = pair(family)
    ids = tokens(len(lengths), T)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    positions = positions.to(ids.device)
    wanted = torch.cat(
        [
            torch.cat([own(part[None]).logits for part in row.split(sizes)], 1)
            for row, sizes in zip(ids, lengths, strict=True)
        ]
    )
    for more in ({"use_cache": False}, {}):
        found = served(ids, position_ids=positions, **more).logits
        assert difference(found, wanted) < NEAR
    borders = torch.tensor([0, *itertools.chain(*lengths)]).cumsum(0).to(ids)
    borders = borders.to(torch.int32)
    found = served(ids, position_ids=positions, cu_seq_lens_q=borders).logits
    assert difference(found, wanted) < NEAR


def test_every_layer_is_served_at_every_step(family):
    _, served = pair(family)
    layers = served.config.layer_types
    counted = statistics(served)
    counted.reset()
    stepped(served, tokens(1, T), steps_of(T, [50]), HybridCache(served))
    steps = 5
    linear = layers.count("linear_attention") * steps
    wanted = {
        ("linear_attention", "causal_conv1d"): linear,
        ("linear_attention", "gated_delta_rule"): linear,
        ("linear_attention", "rms_norm_gated"): linear,
        ("full_attention", "extend_attention"): layers.count("full_attention") * steps,
        ("sliding_attention", "extend_attention"): layers.count("sliding_attention") * steps,
    }
    calls = {key: n for key, n in served_calls(served).items() if key[1] != "write_kv"}
    assert calls == {key: n for key, n in wanted.items() if n}
    assert all(counted.seconds[key] > 0 for key in counted.calls)
