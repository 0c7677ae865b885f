"""The trained checkpoints: headstart against transformers' own path, on text and on recall.

Random weights hide errors; real activations, gates, decays and sinks do not.
"""

import functools
import math
import random

import pytest
import torch
import transformers
from tests.implementations import DEVICE
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

pytestmark = pytest.mark.kernels

NEAR = 2e-5
RECALL = 640
TEXT = 1200
NEW = 4
MARGIN = 1e-4
"""Of the two largest logits: below it they are a near-tie."""


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch):
    # cuDNN, in whose convolutions transformers' own path runs on a GPU, else drops 13 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(params=checkpoints.names())
def checkpoint(request) -> str:
    if not (checkpoints.path(request.param) / "model.safetensors").is_file():
        pytest.skip(f"the weights of {request.param} are not in this checkout")
    return request.param


def _load(name, dtype=torch.float32):
    with torch.inference_mode(False):
        folder = checkpoints.path(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(DEVICE).eval()


@functools.cache
def _pair(name, dtype=torch.float32):
    return _load(name, dtype), enable(_load(name, dtype))


def _bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), device=DEVICE)[None]


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


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-3)])
def test_perplexity(checkpoint, dtype, within):
    """Of the sample's text, and the tokens of all rows that are no near-ties."""
    own, served = _pair(checkpoint, dtype)
    ids = _bytes(checkpoints.sample_text().read_bytes()[:TEXT])
    wanted = own(ids).logits[0].float()
    best = wanted.topk(2).values
    clear = best[:, 0] - best[:, 1] > (1e-4 if dtype == torch.float32 else 0.5)
    assert clear.float().mean() > 0.5
    losses = [torch.nn.functional.cross_entropy(wanted[:-1], ids[0, 1:]).item()]
    for cache, sizes in ((None, [TEXT]), (HybridCache(served), [400])):
        found = stepped(served, ids, steps_of(TEXT, sizes), cache)[0].float()
        losses.append(torch.nn.functional.cross_entropy(found[:-1], ids[0, 1:]).item())
        assert abs(math.exp(losses[-1] - losses[0]) - 1) < within
        assert torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])


def test_a_hundred_prompts(checkpoint):
    """Greedy tokens are the model's own up to the first near-tie."""
    own, served = _pair(checkpoint)
    text = checkpoints.sample_text().read_bytes()
    drawn = random.Random(7)
    compared = 0
    for _ in range(100):
        begin, length = drawn.randrange(len(text) - 200), drawn.randint(1, 200)
        prompt = _bytes(text[begin : begin + length])
        own_cache = transformers.DynamicCache(config=own.config)
        wanted, margins = _greedy(own, prompt, own_cache)
        found, _ = _greedy(served, prompt, HybridCache(served))
        for mine, theirs, margin in zip(found, wanted, margins, strict=True):
            if margin <= MARGIN:
                break
            assert mine == theirs
            compared += 1
    assert compared > 95 * NEW


def _greedy(model, ids, cache):
    """`NEW` tokens after a prompt, and by how much each one's logit leads."""
    tokens, margins = [], []
    for _ in range(NEW):
        best = model(ids, **{CACHE: cache}).logits[0, -1].topk(2)
        tokens.append(best.indices[0].item())
        margins.append((best.values[0] - best.values[1]).item())
        ids = best.indices[None, :1]
    return tokens, margins


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
    other = _load(checkpoint)
    for name, parameter in other.named_parameters():
        if name.endswith(("A_log", "sinks")):
            parameter.data += 0.01
            break
    assert difference(enable(other)(ids).logits, wanted) > 3 * NEAR
