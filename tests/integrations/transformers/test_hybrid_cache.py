"""HybridCache: hits, sharing of pages, crops, selections, resets; and crops of other caches."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from tests.integrations.transformers.models import (
    CACHE,
    alone,
    difference,
    left_padding,
    make,
    pair,
    positions_of,
    stepped,
    steps_of,
    tokens,
)

from headstart.integrations.transformers import HybridCache, disable, enable

pytestmark = pytest.mark.kernels

T = 203
NEAR = 2e-5
HYBRIDS = ("qwen3-next", "qwen3.5", "qwen3.5-moe")


def _logits(model, ids, cache, **more):
    return model(ids, **{CACHE: cache}, **more).logits


def _refusal(act):
    """The message of the ValueError that an act ends with, or None."""
    try:
        act()
    except ValueError as error:
        return str(error)
    return None


def _cold(served, ids, **more):
    cache = HybridCache(served, snapshot_every=64)
    _logits(served, ids, cache, **more)
    return cache


@pytest.mark.parametrize("position", [0, 64, 128, 192])
def test_from_a_hit(family, position):
    own, served = pair(family)
    ids = tokens(1, T)
    cold = _cold(served, ids)
    for sizes in ([T], [50, 1]):
        hit = cold.restored(position)
        assert hit.get_seq_length() == position
        borders = [(a + position, b + position) for a, b in steps_of(T - position, sizes)]
        found = stepped(served, ids, borders, hit)
        assert difference(found, own(ids).logits[:, position:]) < NEAR


def test_from_a_hit_with_another_ending(family):
    own, served = pair(family)
    ids = tokens(1, T)
    cold = _cold(served, ids)
    other = torch.cat([ids[:, :128], tokens(1, 90, seed=1)], 1)
    found = _logits(served, other[:, 128:], cold.restored(128))
    assert difference(found, own(other).logits[:, 128:]) < NEAR


def test_every_sequence_of_a_batch_can_be_hit(family):
    """Its positions count its own tokens, not the padding."""
    own, served = pair(family)
    ids, mask = tokens(3, T), left_padding(T, 0, 30, 100)
    cold = _cold(served, ids, attention_mask=mask, position_ids=positions_of(mask))
    for row, pad in enumerate((0, 30, 100)):
        prompt = ids[row : row + 1, pad:]
        hit = cold.restored(64, row)
        found = _logits(served, prompt[:, 64:], hit)
        assert difference(found, own(prompt).logits[:, 64:]) < NEAR


@pytest.mark.parametrize("kind", ["none", "dynamic", "hybrid"])
def test_positions_count_tokens_where_none_are_given(family, kind):
    """A model of transformers counts padding too: keys would lie elsewhere than those of a hit."""
    own, served = pair(family)
    ids, mask = tokens(3, 130), left_padding(130, 0, 30, 60)
    if kind != "dynamic":  # whose sliding layers forget keys, so that none may lie between others
        mask[0, 90:100] = 0
        mask[1, 110:] = 0
    cache = {
        "none": lambda: None,
        "dynamic": lambda: transformers.DynamicCache(config=served.config),
        "hybrid": lambda: HybridCache(served, snapshot_every=64),
    }[kind]()
    if cache is None:
        found = served(ids, attention_mask=mask, use_cache=False).logits
    else:
        steps = ((0, 100), (100, 113), (113, 130))
        found = torch.cat(
            [_logits(served, ids[:, a:b], cache, attention_mask=mask[:, :b]) for a, b in steps], 1
        )
    wanted = alone(own, ids, mask)
    seen = mask.bool()
    assert difference(found[seen], wanted[seen]) < NEAR
    if kind == "hybrid":
        more = tokens(3, 5, seed=1)
        found = _logits(served, more, cache)  # it knows without the mask
        mask = torch.cat([mask, torch.ones_like(more)], 1)
        wanted = alone(own, torch.cat([ids, more], 1), mask)[:, -5:]
        assert difference(found, wanted) < NEAR
        prompt = ids[2][mask[2, :130].bool()][None]
        found = _logits(served, prompt[:, 64:], cache.restored(64, 2))
        assert difference(found, own(prompt).logits[:, 64:]) < NEAR


def test_snapshots_in_steps_and_at_chosen_positions(family):
    own, served = pair(family)
    ids = tokens(1, T)
    cache = HybridCache(served, snapshot_positions=[128])
    stepped(served, ids, steps_of(T, [50, 3]), cache)
    found = _logits(served, ids[:, 128:], cache.restored(128))
    assert difference(found, own(ids).logits[:, 128:]) < NEAR
    if family in HYBRIDS:
        with pytest.raises(ValueError, match=r"position: expected a kept one.*128.*got 64"):
            cache.restored(64)


def test_the_end_of_a_prefill_can_be_hit(family):
    """A snapshot at the last token's border is kept by the step that reaches it."""
    own, served = pair(family)
    ids = tokens(1, T)
    for sizes in ([128], [64], [100, 28]):
        for kept in ({"snapshot_every": 64}, {"snapshot_positions": [64, 128]}):
            cache = HybridCache(served, **kept)
            stepped(served, ids[:, :128], steps_of(128, sizes), cache)
            assert cache.snapshots() == [64, 128]
            found = _logits(served, ids[:, 128:], cache.restored(128))
            assert difference(found, own(ids).logits[:, 128:]) < NEAR


def test_hits_do_not_disturb_each_other(family):
    """Twins and the original go on side by side, in turns, and share the pages before the hit."""
    own, served = pair(family)
    ids = tokens(1, T)
    cold = HybridCache(served, snapshot_every=64)
    _logits(served, ids[:, :150], cold)
    endings = [tokens(1, 60, seed=seed) for seed in (1, 2)]
    twins = [cold.restored(128), cold.restored(128), cold.restored(128).restored(64)]
    prompts = [torch.cat([ids[:, :128], ending], 1) for ending in endings]
    prompts += [torch.cat([ids[:, :64], tokens(1, 124, seed=3)], 1), ids]
    caches = [*twins, cold]
    found = [[] for _ in caches]
    for begin, end in ((0, 20), (20, 21), (21, 60)):
        for cache, prompt, parts in zip(caches, prompts, found, strict=True):
            start = {0: 128, 1: 128, 2: 64, 3: 150}[caches.index(cache)]
            parts.append(_logits(served, prompt[:, start + begin : start + end], cache))
    for prompt, parts, start in zip(prompts, found, (128, 128, 64, 150), strict=True):
        logits = torch.cat(parts, 1)
        wanted = own(prompt).logits[:, start : start + logits.shape[1]]
        assert difference(logits, wanted) < NEAR


def test_a_shared_page_is_never_written():
    """Cropped below a shared border and extended: the other holder's keys stay as they are."""
    own, served = pair("gpt-oss")
    ids, other = tokens(1, T), tokens(1, 100, seed=1)
    cold = _cold(served, ids)
    for cropped in ("twin", "cold"):
        twin, untouched = cold.restored(128), cold.restored(128)
        writer = twin if cropped == "twin" else cold
        writer.crop(80 - writer.get_seq_length())
        found = _logits(served, other, writer)
        prompt = torch.cat([ids[:, :80], other], 1)
        assert difference(found, own(prompt).logits[:, 80:]) < NEAR
        for reader in (untouched, twin if cropped == "cold" else cold.restored(128)):
            found = _logits(served, ids[:, 128:], reader)
            assert difference(found, own(ids).logits[:, 128:]) < NEAR


def test_a_reset_leaves_what_others_share(family):
    own, served = pair(family)
    ids, other = tokens(1, T), tokens(2, 150, seed=1)
    cold = _cold(served, ids)
    twin = cold.restored(128)
    cold.reset()
    assert cold.get_seq_length() == 0
    with pytest.raises(ValueError, match="position: expected a kept one"):
        cold.restored(64)
    # another batch size too
    assert difference(_logits(served, other, cold), own(other).logits) < NEAR
    assert difference(_logits(served, ids[:, 128:], twin), own(ids).logits[:, 128:]) < NEAR


def test_a_reset_dynamic_cache_begins_again(family):
    own, served = pair(family)
    cache = transformers.DynamicCache(config=served.config)
    _logits(served, tokens(1, 100, seed=1), cache)
    cache.reset()
    ids = tokens(1, 90)
    last = cache.layers[-1]
    if last.get_seq_length():  # transformers 5.17 zeroes the keys and keeps counting them
        with pytest.raises(ValueError, match=r"past_key_values: expected .* start a new cache"):
            _logits(served, ids, cache)
        return
    assert difference(_logits(served, ids, cache), own(ids).logits) < NEAR


@pytest.mark.parametrize("kind", ["dynamic", "hybrid"])
def test_rolled_back_drafts(family, kind):
    """With `activate_past_recording`, drafts are cropped, across the grid's borders too."""
    own, served = pair(family)
    ids = tokens(2, T)
    cache = {
        "dynamic": lambda: transformers.DynamicCache(config=served.config),
        "hybrid": lambda: HybridCache(served),
    }[kind]()
    cache.activate_past_recording()
    logits, at = [_logits(served, ids[:, :120], cache)], 120
    for drafted, kept in ((10, 3), (8, 8), (16, 1), (5, 1), (16, 12), (16, 2), (40, 30)):
        drafts = torch.cat([ids[:, at : at + kept], tokens(2, drafted - kept, seed=at)], 1)
        logits.append(_logits(served, drafts, cache)[:, :kept])
        cache.crop(kept - drafted)
        at += kept
    assert at == 177
    logits.append(_logits(served, ids[:, at:], cache))
    assert difference(torch.cat(logits, 1), own(ids).logits) < NEAR


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_crop_behind_the_state_is_refused(family):
    _, served = pair(family)
    for cache in (HybridCache(served), transformers.DynamicCache(config=served.config)):
        _logits(served, tokens(1, 131), cache)
        with pytest.raises(ValueError, match=r"tokens_to_remove.*got 4"):
            cache.crop(-4)
    assert cache.get_seq_length() == 131  # the refusal comes before anything is cropped


@pytest.mark.parametrize("kind", ["dynamic", "hybrid"])
@pytest.mark.parametrize("crops", [[5], [10, 10], [10, None, 10], [16, None, 1, None, 12]])
def test_crops_within_the_tail_are_right_or_refused(family, kind, crops):
    """None stands for a step of one token. Inputs of the convolution are kept for 16 tokens."""
    own, served = pair(family)
    if family == "gpt-oss" and kind == "dynamic":
        pytest.skip("all layers of this cache are transformers' own")
    ids = tokens(1, T)
    cache = {
        "dynamic": lambda: transformers.DynamicCache(config=served.config),
        "hybrid": lambda: HybridCache(served),
    }[kind]()
    prompt = ids[:, :190]
    _logits(served, prompt, cache)
    for crop in crops:
        if crop is None:
            token = tokens(1, 1, seed=prompt.shape[1])
            _logits(served, token, cache)
            prompt = torch.cat([prompt, token], 1)
            continue
        refusal = _refusal(lambda crop=crop: cache.crop(-crop))
        if refusal:
            assert "tokens_to_remove" in refusal
            assert family in HYBRIDS
            assert len(crops) > 1  # the first crop is always within reach
            return
        prompt = prompt[:, :-crop]
    more = tokens(1, 30, seed=1)
    wanted = own(torch.cat([prompt, more], 1)).logits[:, -30:]
    assert difference(_logits(served, more, cache), wanted) < NEAR


def test_a_default_device_of_the_process_changes_nothing(family):
    _, served = pair(family)
    ids, rows = tokens(2, 150), torch.tensor([1, 0])

    def served_in_steps():
        cache = HybridCache(served, snapshot_every=64)
        _logits(served, ids[:, :100], cache)
        cache.batch_select_indices(rows)
        return _logits(served, ids[:, 100:], cache)

    wanted = served_in_steps()
    with torch.device("meta"):
        assert torch.equal(served_in_steps(), wanted)


@pytest.mark.parametrize("kind", ["dynamic", "hybrid"])
def test_sequences_are_selected_and_repeated(family, kind):
    own, served = pair(family)
    ids, mask = tokens(3, 150), left_padding(150, 0, 40, 9)
    cache = {
        "dynamic": lambda: transformers.DynamicCache(config=served.config),
        "hybrid": lambda: HybridCache(served, snapshot_every=64),
    }[kind]()
    positions = positions_of(mask)
    _logits(
        served, ids[:, :100], cache, attention_mask=mask[:, :100], position_ids=positions[:, :100]
    )
    rows = torch.tensor([2, 0, 0, 1])
    if kind == "hybrid":
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2, 3, 4]))
    else:
        cache.batch_select_indices(rows)
    ids, mask, positions = ids[rows], mask[rows], positions[rows]
    found = _logits(
        served, ids[:, 100:], cache, attention_mask=mask, position_ids=positions[:, 100:]
    )
    assert difference(found, alone(own, ids, mask)[:, 100:]) < NEAR
    if kind == "hybrid":  # snapshots follow their sequences
        prompt = ids[3:, 40:]
        found = _logits(served, prompt[:, 64:], cache.restored(64, row=3))
        assert difference(found, own(prompt).logits[:, 64:]) < NEAR


def test_a_copy_goes_on_alone(family):
    own, served = pair(family)
    ids, other = tokens(1, T), tokens(1, T - 100, seed=1)
    for cache in (
        HybridCache(served, snapshot_every=64),
        transformers.DynamicCache(config=served.config),
    ):
        _logits(served, ids[:, :100], cache)
        twin = copy.deepcopy(cache)
        _logits(served, other, twin)
        found = _logits(served, ids[:, 100:], cache)
        assert difference(found, own(ids).logits[:, 100:]) < NEAR
        if isinstance(cache, HybridCache):
            found = _logits(served, ids[:, 64:], twin.restored(64))
            assert difference(found, own(ids).logits[:, 64:]) < NEAR


def test_memory_made_in_inference_mode_is_used_outside_it(family):
    own, served = pair(family)
    ids = tokens(1, T)
    cold = HybridCache(served, snapshot_every=64)
    _logits(served, ids[:, :130], cold)
    repeated = HybridCache(served, snapshot_every=64)
    _logits(served, ids[:, :130], repeated)
    repeated.batch_repeat_interleave(2)
    wanted = own(ids).logits
    hit = cold.restored(128)
    with torch.inference_mode(False), torch.no_grad():
        for cache, start, batch in ((cold, 130, 1), (hit, 128, 1), (repeated, 130, 2)):
            for begin, end in ((start, start + 1), (start + 1, T)):  # the first without new pages
                found = _logits(served, ids[:, begin:end].clone().repeat(batch, 1), cache)
                assert difference(found[-1:], wanted[:, begin:end]) < NEAR


def test_memory_is_given_back(family):
    """A hit that is dropped frees its pages at once, without a collection of garbage."""
    _, served = pair(family)
    ids = tokens(1, T)
    cold = _cold(served, ids)

    def hit():
        cache = cold.restored(64)
        _logits(served, ids[:, 64:], cache)
        return weakref.ref(cache)

    gc.disable()
    try:
        assert hit()() is None
        before = cold.bytes
        for _ in range(5):
            hit()
        assert cold.bytes == before
    finally:
        gc.enable()


def test_a_hit_outlives_the_cold_cache(family):
    own, served = pair(family)
    ids = tokens(1, T)
    hit = _cold(served, ids).restored(128)
    _cold(served, tokens(1, T, seed=1))
    assert difference(_logits(served, ids[:, 128:], hit), own(ids).logits[:, 128:]) < NEAR


@pytest.mark.parametrize("kind", [None, "dynamic", "hybrid", "static"])
def test_a_step_of_padding_alone(family, kind):
    """Both sequences begin after the first step."""
    own, served = pair(family)
    ids, mask = tokens(2, 130), left_padding(130, 70, 50)
    if kind is None:
        empty = served(ids[:, :40], attention_mask=mask[:, :40], use_cache=False).logits
        assert empty.isfinite().all()
        return
    cache = {
        "dynamic": lambda: transformers.DynamicCache(config=served.config),
        "hybrid": lambda: HybridCache(served, snapshot_every=64),
        "static": lambda: transformers.StaticCache(config=served.config, max_cache_len=140),
    }[kind]()
    found = stepped(served, ids, steps_of(130, [40]), cache, mask)
    assert difference(found * mask[..., None], alone(own, ids, mask)) < NEAR


def test_padding_after_and_between_the_tokens():
    """A hybrid cache counts tokens, so a turn may be padded at its right, and another follow."""
    for family in ("qwen3.5", "gpt-oss"):
        own, served = pair(family)
        ids, mask = tokens(2, 150), torch.ones_like(tokens(2, 150))
        mask[0, 60:80] = 0
        for cache in (HybridCache(served), transformers.DynamicCache(config=served.config)):
            if family == "gpt-oss" and isinstance(cache, transformers.DynamicCache):
                with pytest.raises(ValueError, match="attention_mask: padding between tokens"):
                    stepped(served, ids, [(0, 80), (80, 150)], cache, mask)
                continue  # its sliding layer has dropped keys
            found = stepped(served, ids, [(0, 80), (80, 150)], cache, mask)
            assert difference(found * mask[..., None], alone(own, ids, mask)) < NEAR
        with pytest.raises(ValueError, match="attention_mask"):
            stepped(served, ids, [(0, 150)], HybridCache(served), mask[:1])


def test_the_mask_may_not_contradict_the_cache(family):
    _, served = pair(family)
    ids, mask = tokens(2, 120), left_padding(120, 0, 50)
    cache = HybridCache(served)
    _logits(served, ids[:, :100], cache, attention_mask=mask[:, :100])
    with pytest.raises(ValueError, match=r"attention_mask: .*\[100, 50\].*got \[100, 100\]"):
        _logits(served, ids[:, 100:], cache, attention_mask=torch.ones_like(mask))
    with pytest.raises(ValueError, match="attention_mask"):
        _logits(served, ids[:, 100:], cache, attention_mask=mask[:, 100:])


@pytest.mark.parametrize("family", HYBRIDS)
def test_padding_is_not_forgotten_by_leaving_out_the_mask(family):
    """A hybrid cache knows its tokens; transformers' own keys beside canonical states do not."""
    own, served = pair(family)
    ids, mask = tokens(2, 120), left_padding(120, 0, 50)
    positions = positions_of(mask)
    padded = {"attention_mask": mask[:, :100], "position_ids": positions[:, :100]}
    cache = HybridCache(served)
    _logits(served, ids[:, :100], cache, **padded)
    found = _logits(served, ids[:, 100:], cache, position_ids=positions[:, 100:])
    assert difference(found, alone(own, ids, mask)[:, 100:]) < NEAR
    cache = transformers.DynamicCache(config=served.config)
    _logits(served, ids[:, :100], cache, **padded)
    with pytest.raises(ValueError, match=r"attention_mask: expected .* got None"):
        _logits(served, ids[:, 100:], cache, position_ids=positions[:, 100:])


def test_a_batch_of_another_size_is_refused(family):
    _, served = pair(family)
    for more in (1, 3):
        cache = HybridCache(served)
        _logits(served, tokens(2, 70), cache)
        with pytest.raises(ValueError, match=f"expected a batch of 2, as before, got {more}"):
            _logits(served, tokens(more, 5), cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"snapshot_positions": [100]},
            "snapshot_positions: expected a multiple of 64, got 100",
        ),
        ({"snapshot_every": 65}, "snapshot_every: expected a multiple of 64, got 65"),
        ({"snapshot_every": -64}, "snapshot_every: expected an integer >= 0, got -64"),
        ({"snapshot_every": None}, "snapshot_every: expected an integer >= 0, got None"),
        (
            {"snapshot_positions": 64},
            "snapshot_positions: expected a list or .*, got 64",
        ),
        ({"snapshot_positions": [64.0]}, "snapshot_positions: expected integers, got 64.0"),
        ({"snapshot_positions": [True]}, "snapshot_positions: expected integers, got True"),
        ({"snapshot_positions": "64"}, "snapshot_positions: expected a list or tensor of integers"),
    ],
)
def test_wrong_positions_are_named(arguments, message):
    _, served = pair("qwen3.5")
    with pytest.raises(ValueError, match=message):
        HybridCache(served, **arguments)


@pytest.mark.parametrize("model", [None, 5, {}, torch.nn.Linear(2, 2)])
def test_what_is_no_model_has_no_cache(model):
    with pytest.raises(ValueError, match=r"^model: expected a model of transformers or its config"):
        HybridCache(model)


def test_rows_positions_and_layers_are_integers():
    cache = HybridCache(pair("qwen3.5")[1])
    for act, message in (
        (lambda: cache.restored("x"), "position: expected an integer >= 0, got 'x'"),
        (lambda: cache.restored(64.0), "position: expected an integer >= 0, got 64.0"),
        (lambda: cache.restored(0, row=None), "row: expected an integer in [0, 0], got None"),
        (lambda: cache.snapshots(True), "row: expected an integer in [0, 0], got True"),
        (lambda: cache.arguments(99, 0, 1), "layer: expected an integer in [0, "),
    ):
        with pytest.raises(ValueError) as error:
            act()
        assert str(error.value).startswith(message)


def test_a_place_that_was_not_kept_is_refused(family):
    _, served = pair(family)
    empty, cache = HybridCache(served, snapshot_every=64), _cold(served, tokens(2, 100))
    for source, position, row in ((empty, 64, 0), (cache, 128, 0), (cache, 96, 0), (cache, -64, 0)):
        with pytest.raises(ValueError, match=f"position: expected .*got {position}"):
            source.restored(position, row)
    for row in (2, -1):
        with pytest.raises(ValueError, match=f"row: expected .*got {row}"):
            cache.restored(64, row)


@pytest.mark.parametrize("family", HYBRIDS)
def test_caches_of_the_other_path_are_refused(family):
    own, served = pair(family)
    ids = tokens(1, 20)
    cache = transformers.DynamicCache(config=own.config)
    _logits(own, ids, cache)
    with pytest.raises(ValueError, match="own path has filled this cache"):
        _logits(served, ids, cache)
    for cache in (HybridCache(served), transformers.DynamicCache(config=served.config)):
        _logits(served, ids, cache)
        with pytest.raises(ValueError, match="past_key_values"):
            _logits(own, ids, cache)


def test_a_hybrid_cache_needs_an_enabled_model(family):
    own, _ = pair(family)
    with pytest.raises(ValueError, match=r"enable\(model\)"):
        _logits(own, tokens(1, 20), HybridCache(own))


def test_a_cache_lives_on_when_a_model_is_disabled_and_enabled(family):
    own, _ = pair(family)
    model = enable(make(family))
    ids = tokens(1, T)
    cold = _cold(model, ids)
    enable(disable(model))
    found = _logits(model, ids[:, 128:], cold.restored(128))
    assert difference(found, own(ids).logits[:, 128:]) < NEAR
