"""The trained checkpoints: headstart against transformers' own path, on text and on recall.

Random weights hide errors; real activations, gates, decays and sinks do not.
"""

import functools

import pytest
import torch
import transformers
from tests.integrations.transformers.models import (
    CACHE,
    alone,
    difference,
    left_padding,
    stepped,
    steps_of,
)

from headstart import checkpoints
from headstart.checkpoints.recall import answered, recall_prompt
from headstart.integrations.transformers import HybridCache, enable

NEAR = 2e-5
RECALL = 640


@pytest.fixture(params=checkpoints.names())
def checkpoint(request) -> str:
    if not (checkpoints.path(request.param) / "model.safetensors").is_file():
        pytest.skip(f"the weights of {request.param} are not in this checkout")
    return request.param


@functools.cache
def _pair(name):
    with torch.inference_mode(False):
        own, served = (
            transformers.AutoModelForCausalLM.from_pretrained(
                checkpoints.path(name), dtype=torch.float32
            ).eval()
            for _ in range(2)
        )
    return own, enable(served)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data))[None]


@functools.cache
def _text(name):
    """(ids of the sample's beginning, own logits)."""
    ids = _bytes(checkpoints.sample_text().read_bytes()[:450])
    return ids, _pair(name)[0](ids).logits


def _prefills(served, ids):
    """Name of a way to prefill -> (logits from a position on, that position)."""
    total = ids.shape[1]
    cold = HybridCache(served, snapshot_every=64)
    yield "whole", served(ids, **{CACHE: cold}).logits, 0
    dynamic = transformers.DynamicCache(config=served.config)
    yield "stepped", stepped(served, ids, steps_of(total, [100]), dynamic), 0
    hybrid = HybridCache(served, snapshot_every=64)
    yield "stepped, hybrid", stepped(served, ids, steps_of(total, [177]), hybrid), 0
    longest = (total - 1) // 64 * 64
    for cache in (cold, hybrid):
        for position in (longest, 64 * (longest // 128)):
            hit = cache.restored(position)
            yield f"hit at {position}", served(ids[:, position:], **{CACHE: hit}).logits, position


def test_text(checkpoint):
    ids, wanted = _text(checkpoint)
    for name, logits, start in _prefills(_pair(checkpoint)[1], ids):
        assert difference(logits, wanted[:, start:]) < NEAR, name
        assert torch.equal(logits.argmax(-1), wanted[:, start:].argmax(-1)), name


def test_a_padded_batch(checkpoint):
    own, served = _pair(checkpoint)
    ids, _ = _text(checkpoint)
    ids, mask = ids[:, :450].view(3, 150), left_padding(150, 0, 80, 9)
    cache = HybridCache(served)
    found = stepped(served, ids, steps_of(150, [100]), cache, mask)
    assert difference(found * mask[..., None], alone(own, ids, mask)) < NEAR


def test_greedy_tokens(checkpoint):
    own, served = _pair(checkpoint)
    ids, _ = _text(checkpoint)
    arguments = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}
    wanted = own.generate(ids[:, :300], **arguments)
    cold = HybridCache(served, snapshot_every=64)
    for cache in ({}, {CACHE: cold}):
        assert torch.equal(served.generate(ids[:, :300], **arguments, **cache), wanted)
    hit = cold.restored(256)
    assert torch.equal(served.generate(ids[:, :300], **arguments, **{CACHE: hit}), wanted)


def test_recall(checkpoint):
    """The same questions are answered however the prompt was prefilled."""
    own, served = _pair(checkpoint)
    text = checkpoints.sample_text().read_bytes()
    prompt = recall_prompt(5, RECALL, text.replace(b"<", b""), pairs=16, questions=16)
    ids = _bytes(prompt.data)
    predicted = own(ids).logits.argmax(-1)
    wanted = answered(prompt, predicted[0].tolist())
    if "qwen3-next" in checkpoint:
        assert sum(wanted) >= 15  # of 16: the task means something to this model
    for name, logits, start in _prefills(served, ids):
        found = torch.cat([predicted[:, :start], logits.argmax(-1)], 1)
        assert answered(prompt, found[0].tolist()) == wanted, name


def test_wrong_weights_would_be_seen(checkpoint):
    """One layer's decays or sinks a little off move the logits far past the tolerance."""
    ids, wanted = _text(checkpoint)
    with torch.inference_mode(False):
        other = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoints.path(checkpoint), dtype=torch.float32
        ).eval()
    for name, parameter in other.named_parameters():
        if name.endswith(("A_log", "sinks")):
            parameter.data += 0.01
            break
    assert difference(enable(other)(ids).logits, wanted) > 3 * NEAR
