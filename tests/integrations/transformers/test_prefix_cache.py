"""PrefixCache: hits are cold prefills, and what is kept is what the budget says."""

import gc
import random
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integrations.transformers.models import CACHE, difference, make, pair, steps_of, tokens
from tests.integrations.transformers.test_bits import Cold

from headstart.integrations.snapshot_policy import SnapshotPolicy
from headstart.integrations.transformers import HybridCache, PrefixCache, enable

pytestmark = pytest.mark.kernels

T = 203
NEAR = 2e-5
HYBRIDS = ("qwen3-next", "qwen3.5", "qwen3.5-moe")


def serve(prefixes, model, ids, sizes=(1000,)):
    """Logits of what a request for ids [1, L] had to compute, and its hit."""
    with prefixes.request(ids) as request:
        return run(model, ids, request, sizes), request.hit


def run(model, ids, request, sizes=(1000,)):
    hit, total = request.hit, ids.shape[1]
    logits = [
        model(ids[:, hit + begin : hit + end], **{CACHE: request.cache}).logits
        for begin, end in steps_of(total - hit, sizes)
    ]
    return torch.cat(logits, 1)


def kept_tensors(prefixes):
    """Every tensor of a snapshot that is kept."""
    return [
        x
        for node in prefixes._tree
        for of_layer in node.state.values()
        for x in of_layer
    ]  # fmt: skip


def held_bytes(prefixes):
    """What the cache holds, counted from memory itself; no request may be open."""
    gc.collect()  # tables of ended requests give their pages back
    pool = prefixes._pool
    pages = sum(holders > 0 for holders in pool._holders)
    state_bytes = sum(x.untyped_storage().nbytes() for x in kept_tensors(prefixes))
    page_bytes = sum(
        x.untyped_storage().nbytes() // len(x) for kv in pool._memory.values() for x in kv
    )
    return pages * page_bytes + state_bytes


def test_a_second_request_starts_behind_the_first(family):
    own, served = pair(family)
    ids = tokens(1, T)
    prefixes = PrefixCache(served)
    _, hit = serve(prefixes, served, ids)
    assert hit == 0
    other = torch.cat([ids[:, :150], tokens(1, 60, seed=1)], 1)
    for prompt, first, second in ((ids, 192, 192), (other, 128, 192), (ids[:, :128], 64, 64)):
        for wanted, sizes in ((first, [1000]), (second, [7, 40])):
            found, hit = serve(prefixes, served, prompt, sizes)
            assert hit == wanted
            assert difference(found, own(prompt).logits[:, hit:]) < NEAR
    assert (prefixes.requests, prefixes.tokens) == (7, 3 * T + 2 * 210 + 2 * 128)
    assert prefixes.hit_tokens == 2 * 192 + 128 + 192 + 2 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_operations_past_a_hit_keep_every_bit(family, dtype):
    model = enable(make(family, dtype))
    ids = tokens(1, T)
    cold = Cold(model, ids)
    prefixes = PrefixCache(model)
    serve(prefixes, model, ids)
    for prompt, wanted in ((ids, 192), (ids[:, :150], 128), (ids[:, :100], 64)):
        with prefixes.request(prompt) as request:
            assert request.hit == wanted
            assert cold.differing(request.cache, wanted, [T]) == 0
        with prefixes.request(prompt) as request:
            assert cold.differing(request.cache, wanted, [5, 64]) == 0


def test_a_wrong_hit_shows(family):
    """The count above is no constant: another prompt's states give other bits."""
    model = enable(make(family))
    cold = Cold(model, tokens(1, T))
    prefixes = PrefixCache(model)
    serve(prefixes, model, tokens(1, T, seed=1))
    with prefixes.request(tokens(1, T, seed=1)) as request:
        assert cold.differing(request.cache, 192, [T]) > 0


def test_what_was_decoded_can_be_hit(family):
    own, served = pair(family)
    ids = tokens(1, 300)
    prefixes = PrefixCache(served)
    with prefixes.request(ids[:, :100]) as request:
        run(served, ids[:, :100], request)
        for begin, end in steps_of(180, [1, 1, 1, 25]):  # some word by word, some as forced
            served(ids[:, 100 + begin : 100 + end], **{CACHE: request.cache})
        request.append(ids[0, 100:280])
        if family in HYBRIDS:  # of the output one state is held, not one for every border
            assert request.cache.snapshots() == [64, 256]
    del request
    found, hit = serve(prefixes, served, ids)
    assert hit == 256
    assert difference(found, own(ids).logits[:, 256:]) < NEAR
    assert held_bytes(prefixes) == prefixes.bytes


def test_without_outputs_in_the_policy(family):
    served = pair(family)[1]
    ids = tokens(1, 300)
    prefixes = PrefixCache(served, policy=SnapshotPolicy(outputs=False))
    with prefixes.request(ids[:, :100]) as request:
        run(served, ids[:, :280], request)
        request.append(ids[0, 100:280])
    assert serve(prefixes, served, ids)[1] == (64 if family in HYBRIDS else 256)


def test_generate_from_a_hit(family):
    own, served = pair(family)
    ids = tokens(1, T)
    prefixes = PrefixCache(served)
    serve(prefixes, served, ids[:, :180])
    options = {"max_new_tokens": 6, "do_sample": False}
    with prefixes.request(ids) as request:
        found = served.generate(ids, **options, **{CACHE: request.cache})
        request.append(found[0, T:])
    assert request.hit == 128
    assert torch.equal(found, own.generate(ids, **options))


def test_requests_side_by_side(family):
    """Open at once, in turns, over common prefixes, while a small budget evicts between them."""
    own, served = pair(family)
    ids = tokens(1, T)
    probe = PrefixCache(served)
    serve(probe, served, ids)
    prefixes = PrefixCache(served, budget=probe.bytes)
    serve(prefixes, served, ids)
    prompts = [
        torch.cat([ids[:, :cut], tokens(1, 250 - cut, seed=cut)], 1) for cut in (200, 140, 200, 70)
    ]
    with ExitStack() as stack:
        opened = [stack.enter_context(prefixes.request(prompt)) for prompt in prompts]
        assert [request.hit for request in opened] == [192, 128, 192, 64]
        serve(prefixes, served, tokens(1, 260, seed=9))  # would need the room of those in use
        assert prefixes.bytes <= prefixes.budget
        found = [[] for _ in prompts]
        places = [request.hit for request in opened]
        drawn = random.Random(0)
        while any(place < 250 for place in places):
            n = drawn.choice([n for n, place in enumerate(places) if place < 250])
            end = min(places[n] + drawn.randint(1, 90), 250)
            rows = prompts[n][:, places[n] : end]
            found[n].append(served(rows, **{CACHE: opened[n].cache}).logits)
            places[n] = end
    for prompt, request, logits in zip(prompts, opened, found, strict=True):
        wanted = own(prompt).logits[:, request.hit :]
        assert difference(torch.cat(logits, 1), wanted) < NEAR
    del opened, request, stack
    assert prefixes.bytes <= prefixes.budget
    assert held_bytes(prefixes) == prefixes.bytes


def test_the_budget_is_kept_and_counted_from_memory(family):
    served = pair(family)[1]
    probe = PrefixCache(served)
    serve(probe, served, tokens(1, 300))
    prefixes = PrefixCache(served, budget=2 * probe.bytes)
    for seed in range(7):
        serve(prefixes, served, tokens(1, 300, seed=seed))
        assert 0 < prefixes.bytes <= prefixes.budget
        assert held_bytes(prefixes) == prefixes.bytes
    assert prefixes.evicted
    assert serve(prefixes, served, tokens(1, 300, seed=6))[1] == 256
    assert serve(prefixes, served, tokens(1, 300, seed=0))[1] == 0
    # Evicted pages are used again: memory for the budget and one request, with room to grow.
    assert prefixes._pool.bytes <= 3 * prefixes.budget
    prefixes.clear()
    assert prefixes.bytes == held_bytes(prefixes) == 0


def test_clear_leaves_what_is_in_use(family):
    own, served = pair(family)
    ids = tokens(1, T)
    prefixes = PrefixCache(served)
    serve(prefixes, served, ids)
    serve(prefixes, served, tokens(1, T, seed=1))
    with prefixes.request(ids) as request:
        prefixes.clear()
        assert prefixes.bytes
        assert difference(run(served, ids, request), own(ids).logits[:, 192:]) < NEAR
    assert serve(prefixes, served, tokens(1, T, seed=1))[1] == 0


def test_an_error_keeps_nothing_and_harms_nothing(family):
    own, served = pair(family)
    ids = tokens(1, T)
    prefixes = PrefixCache(served)
    request = prefixes.request(ids).__enter__()
    run(served, ids, request)
    request.__exit__(KeyError, KeyError(), None)
    assert prefixes.bytes == 0
    serve(prefixes, served, ids[:, :150])
    before = prefixes.bytes
    with pytest.raises(KeyError), prefixes.request(ids):
        raise KeyError
    assert prefixes.bytes == before
    assert not any(node.users for node in prefixes._tree)
    found, hit = serve(prefixes, served, ids)
    assert hit == 128
    assert difference(found, own(ids).logits[:, hit:]) < NEAR


def test_the_whole_prompt_behind_a_hit_is_refused(family):
    """What it computes would be kept as another prompt's prefix."""
    _, served = pair(family)
    prefixes = PrefixCache(served)
    ids = tokens(1, T)
    serve(prefixes, served, ids[:, :100])
    refused = pytest.raises(ValueError, match="input_ids: expected at most the 139 tokens")
    with torch.inference_mode(), refused, prefixes.request(ids) as request:
        assert request.hit == 64
        served(ids, **{CACHE: request.cache})
    _, hit = serve(prefixes, served, ids)
    assert hit == 64


def test_a_request_cut_short_keeps_what_it_has_computed(family):
    served = pair(family)[1]
    ids = tokens(1, 400)
    prefixes = PrefixCache(served)
    with prefixes.request(ids) as request:
        run(served, ids[:, :140], request)
    assert serve(prefixes, served, ids)[1] == 128
    with prefixes.request(tokens(1, 100, seed=1)) as idle:
        assert idle.hit == 0
    assert serve(prefixes, served, tokens(1, 100, seed=1))[1] == 0


def test_short_prompts_and_borders(family):
    served = pair(family)[1]
    prefixes = PrefixCache(served)
    ids = tokens(1, 129)
    for length, hit in ((1, 0), (63, 0), (64, 0), (64, 0), (65, 64), (128, 64), (128, 64)):
        assert serve(prefixes, served, ids[:, :length])[1] == hit
    assert serve(prefixes, served, ids)[1] == 128  # the end of a prompt that ends on a border


def test_a_budget_that_holds_nothing(family):
    own, served = pair(family)
    ids = tokens(1, T)
    prefixes = PrefixCache(served, budget=0)
    for _ in range(2):
        found, hit = serve(prefixes, served, ids)
        assert hit == prefixes.bytes == 0
        assert difference(found, own(ids).logits) < NEAR


class Blocks:
    """Prompts over few blocks of text, whose own logits are computed once."""

    def __init__(self, family):
        self.own, self.served = pair(family)
        self.blocks = [tokens(64, seed=seed) for seed in range(3)]
        self.known = {}

    def prompt(self, word, tail):
        pieces = [self.blocks[at] for at in word] + [self.blocks[0][:tail]]
        return torch.cat(pieces)[None]

    def wanted(self, ids):
        key = tuple(ids[0].tolist())
        if key not in self.known:
            self.known[key] = self.own(ids).logits
        return self.known[key]


PROMPTS = st.tuples(st.lists(st.integers(0, 2), max_size=4).map(tuple), st.integers(1, 64))


@pytest.mark.parametrize("which", ["qwen3.5", "gpt-oss"])
def test_any_order_of_requests(which):
    text = Blocks(which)
    probe = PrefixCache(text.served)
    serve(probe, text.served, text.prompt((0, 1, 2, 0), 1))
    size = probe.bytes

    @settings(deadline=None, max_examples=12)
    @given(
        steps=st.lists(st.tuples(PROMPTS, st.sampled_from(["open", "open", "end", "fail"]))),
        budget=st.integers(0, 3 * size),
    )
    @torch.inference_mode()
    def scenario(steps, budget):
        prefixes = PrefixCache(text.served, budget=budget)
        opened = []
        for (word, tail), act in [*steps, *[(((), 1), "end")] * len(steps)]:
            if act == "open":
                ids = text.prompt(word, tail)
                opened.append((prefixes.request(ids).__enter__(), ids))
            elif opened:
                request, ids = opened.pop(0)
                wanted = text.wanted(ids)[:, request.hit :]
                assert difference(run(text.served, ids, request), wanted) < NEAR
                request.__exit__(*((None,) * 3 if act == "end" else (KeyError, KeyError(), None)))
                del request
            assert prefixes.bytes <= budget
        if prefixes._tree is not None:
            assert held_bytes(prefixes) == prefixes.bytes

    scenario()


def test_wrong_arguments():
    model = pair("qwen3.5")[1]
    prefixes = PrefixCache(model)
    for wrong, words in (
        ([], "tokens: expected one or more, got none"),
        ([1.5], "tokens: expected integers"),
        (tokens(2, 70), "tokens: expected one dimension, got shape"),
        ("abc", "tokens: expected a list or tensor of integers"),
        (None, "tokens: expected a list or tensor of integers"),
    ):
        with pytest.raises(ValueError, match=words):
            prefixes.request(wrong)
    for wrong, words in (
        ({"budget": -1}, "budget: expected"),
        ({"budget": 1.5}, "budget: expected"),
        ({"policy": "ends"}, "policy: expected a SnapshotPolicy, got 'ends'"),
    ):
        with pytest.raises(ValueError, match=words):
            PrefixCache(model, **wrong)
    with pytest.raises(ValueError, match="model: expected a model of transformers"):
        PrefixCache("qwen")
    request = prefixes.request([1, 2])
    with request, pytest.raises(ValueError, match="request: expected one that was not entered"):
        request.__enter__()


def test_a_batch_in_a_request_is_refused():
    served = pair("qwen3.5")[1]
    prefixes = PrefixCache(served)
    words = "cache: expected one sequence in a request, got 2"
    with pytest.raises(ValueError, match=words), prefixes.request(tokens(70)) as request:
        served(tokens(2, 70), **{CACHE: request.cache})
    assert prefixes.bytes == 0


def test_a_cache_of_a_request_is_a_hybrid_cache(family):
    served = pair(family)[1]
    with PrefixCache(served).request(tokens(70)) as request:
        assert isinstance(request.cache, HybridCache)
        assert request.cache.get_seq_length() == 0
