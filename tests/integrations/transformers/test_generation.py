"""`generate` with headstart gives the tokens of transformers' own path."""

import pytest
import torch
import transformers
from tests.integrations.transformers.models import (
    CACHE,
    difference,
    left_padding,
    pair,
    served_calls,
    tokens,
)

from headstart.integrations.transformers import HybridCache, statistics

pytestmark = pytest.mark.kernels

NEW = 12
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture
def batch():
    """Three prompts with left padding; the longest crosses a border of the grid as it decodes."""
    mask = left_padding(120, 0, 59, 7)
    return {"input_ids": tokens(3, 120) * mask, "attention_mask": mask}


def test_greedy(family, batch):
    own, served = pair(family)
    statistics(served).reset()
    found = served.generate(**batch, **GREEDY)
    assert torch.equal(found, own.generate(**batch, **GREEDY))
    calls = served_calls(served)
    kinds = {key[0] for key in calls}
    assert kinds == set(served.config.layer_types)
    for kind in kinds:
        operation = "gated_delta_rule" if kind == "linear_attention" else "extend_attention"
        count = served.config.layer_types.count(kind) * NEW
        assert calls[kind, operation] == count


def test_greedy_with_a_hybrid_cache(family, batch):
    own, served = pair(family)
    found = served.generate(**batch, **GREEDY, **{CACHE: HybridCache(served)})
    assert torch.equal(found, own.generate(**batch, **GREEDY))


def test_greedy_with_a_static_cache(family, batch):
    own, served = pair(family)
    arguments = {**GREEDY, "cache_implementation": "static", "disable_compile": True}
    assert torch.equal(served.generate(**batch, **arguments), own.generate(**batch, **GREEDY))


def test_greedy_without_a_cache(family, batch):
    own, served = pair(family)
    found = served.generate(**batch, **GREEDY, use_cache=False)
    assert torch.equal(found, own.generate(**batch, **GREEDY))


def test_a_prompt_prefilled_in_chunks(family, batch):
    own, served = pair(family)
    found = served.generate(**batch, **GREEDY, prefill_chunk_size=50)
    assert torch.equal(found, own.generate(**batch, **GREEDY))


@pytest.mark.parametrize("hybrid", [False, True], ids=["dynamic", "hybrid"])
def test_beams(family, batch, hybrid):
    own, served = pair(family)
    arguments = {**GREEDY, "num_beams": 3}
    cache = {CACHE: HybridCache(served)} if hybrid else {}
    found = served.generate(**batch, **arguments, **cache)
    assert torch.equal(found, own.generate(**batch, **arguments))


def test_sampling(family, batch):
    own, served = pair(family)
    drawn = []
    for model in (own, served):
        torch.manual_seed(3)
        arguments = {"do_sample": True, "num_return_sequences": 2, "top_k": 5}
        drawn.append(model.generate(**batch, **arguments, max_new_tokens=NEW))
    assert torch.equal(*drawn)


def test_a_conversation_goes_on_in_its_cache(family):
    """Prompt, answer, next prompt: the cache holds all of it, decoded tokens included."""
    own, served = pair(family)
    ids, more = tokens(1, 100), tokens(1, 40, seed=1)
    cache = HybridCache(served, snapshot_every=64)
    first = served.generate(ids, **GREEDY, **{CACHE: cache})
    prompt = torch.cat([first, more], 1)
    second = served.generate(prompt, **GREEDY, **{CACHE: cache})
    assert torch.equal(second, own.generate(prompt, **GREEDY))
    # and what it decoded can be hit
    hit = cache.restored(128)
    found = served(prompt[:, 128:], **{CACHE: hit}).logits
    assert difference(found, own(prompt).logits[:, 128:]) < 2e-5


def test_greedy_from_a_hit(family):
    own, served = pair(family)
    ids = tokens(1, 150)
    cold = HybridCache(served, snapshot_positions=[64, 128])
    served(ids, **{CACHE: cold})
    other = torch.cat([ids[:, :128], tokens(1, 30, seed=1)], 1)
    for prompt, position in ((ids, 128), (ids, 64), (other, 128)):
        found = served.generate(prompt, **GREEDY, **{CACHE: cold.restored(position)})
        assert torch.equal(found, own.generate(prompt, **GREEDY))


@pytest.mark.parametrize("hybrid", [False, True], ids=["dynamic", "hybrid"])
def test_drafts_from_the_prompt(hybrid):
    """Drafted tokens are verified in one step and rolled back; gpt-oss alone allows it."""
    own, served = pair("gpt-oss")
    ids = tokens(1, 40).repeat(1, 4)  # repeats, so that drafts are found
    arguments = {"do_sample": False, "max_new_tokens": 30, "prompt_lookup_num_tokens": 4}
    cache = {CACHE: HybridCache(served)} if hybrid else {}
    found = served.generate(ids, **arguments, **cache)
    assert torch.equal(found, own.generate(ids, do_sample=False, max_new_tokens=30))


def test_an_assistant_drafts():
    """Both models are served, each by headstart of its own."""
    own, served = pair("gpt-oss")
    assistant = transformers.GptOssForCausalLM(own.config).to(own.device).eval()
    assistant.generation_config = own.generation_config
    from headstart.integrations.transformers import enable

    enable(assistant)
    ids = tokens(1, 100)
    found = served.generate(ids, **GREEDY, assistant_model=assistant)
    assert torch.equal(found, own.generate(ids, **GREEDY))
    assert served_calls(assistant)["sliding_attention", "extend_attention"] > 0
