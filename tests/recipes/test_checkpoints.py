"""The checkpoints that ship: what they are, and that they learnt what docs/checkpoints.md says."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart import checkpoints
from headstart.checkpoints.recall import answered, recall_prompt

SAMPLE = checkpoints.sample_text().read_bytes()


@pytest.fixture(scope="module", params=checkpoints.names())
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return AutoModelForCausalLM.from_pretrained(checkpoints.path(name)).eval()


@pytest.fixture(scope="module")
def tokenizer(name):
    return AutoTokenizer.from_pretrained(checkpoints.path(name))


@torch.inference_mode()
def logits(model, *data: bytes) -> torch.Tensor:
    """[B, L, 264] for byte strings of one length."""
    return model(torch.tensor([list(row) for row in data]), use_cache=False).logits


def bits_per_byte(model, data: bytes) -> float:
    log_probabilities = logits(model, data)[0, :-1].log_softmax(-1)
    picked = log_probabilities[torch.arange(len(data) - 1), torch.tensor(list(data[1:]))]
    return -picked.mean().item() / math.log(2)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"name: expected one of tiny-gpt-oss, .*, got 'gpt-2'"):
        checkpoints.path("gpt-2")


def test_the_sample_is_ascii_text_of_a_few_thousand_bytes():
    assert 4000 <= len(SAMPLE) <= 16000
    assert SAMPLE.decode("ascii").startswith("Jonah 1\n")


def test_weights_load_as_float32_and_are_bfloat16_numbers(name, model):
    assert model.dtype == torch.float32
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameter.bfloat16().float())
    with safe_open(checkpoints.path(name) / "model.safetensors", "pt") as stored:
        assert {stored.get_slice(key).get_dtype() for key in stored.keys()} == {"BF16"}  # noqa: SIM118


def test_shapes_are_those_of_the_large_models(name, model):
    config = model.config
    assert config.max_position_embeddings == 32_768
    if name == "tiny-qwen3-next":
        assert type(model).__name__ == "Qwen3NextForCausalLM"
        assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
        assert (config.linear_key_head_dim, config.linear_value_head_dim) == (128, 128)
        assert config.linear_num_value_heads == 2 * config.linear_num_key_heads
        assert config.head_dim == 128
    else:
        assert type(model).__name__ == "GptOssForCausalLM"
        assert config.layer_types == ["sliding_attention", "full_attention"] * 3
        assert (config.sliding_window, config.head_dim) == (128, 64)
        assert config.num_attention_heads == 4 * config.num_key_value_heads


def test_token_ids_are_bytes(tokenizer):
    assert tokenizer("<qkVT> é\n").input_ids == list("<qkVT> é\n".encode())
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == 256
    assert len(tokenizer) == 257
    everything = [tokenizer.convert_ids_to_tokens(byte) for byte in range(256)]
    assert len(set(everything)) == 256


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_text_round_trips(text):
    tokenizer = _a_tokenizer()
    ids = tokenizer(text).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


@settings(max_examples=50, deadline=None)
@given(data=st.binary())
def test_bytes_that_are_no_text_decode_without_an_error(data):
    assert _a_tokenizer().decode(list(data)) == data.decode(errors="replace")


def _a_tokenizer(kept: list = []):  # noqa: B006 - loaded once for all examples
    if not kept:
        kept.append(AutoTokenizer.from_pretrained(checkpoints.path("tiny-gpt-oss")))
    return kept[0]


def test_unseen_text_is_predicted_far_better_than_its_own_bigrams_can(model):
    data = SAMPLE[:1024]
    singles, followed = Counter(data), Counter(data[:-1])
    pairs = Counter(itertools.pairwise(data))
    # Counted on the sample itself, hence lower bounds of what such baselines score on it.
    unigram = -sum(n * math.log2(n / len(data)) for n in singles.values()) / len(data)
    bigram = -sum(n * math.log2(n / followed[pair[0]]) for pair, n in pairs.items())
    bigram /= len(data) - 1
    assert bigram < unigram
    assert bits_per_byte(model, data) < 0.75 * bigram


def test_a_continuation_is_made_of_words_of_the_text(model):
    ids = torch.tensor([list(SAMPLE[:400])])
    text = bytes(model.generate(ids, max_new_tokens=40, do_sample=False)[0, 400:].tolist())
    words = text.decode("ascii").split()[1:-1]
    assert len(words) >= 4
    common = b"the and of to that LORD unto he in shall I said".split()
    assert sum(word.encode() in common for word in words) >= len(words) / 4


def test_pairs_are_recalled(model):
    prompts = [
        recall_prompt(f"test {seed}", 512, SAMPLE, pairs=12, questions=6) for seed in range(3)
    ]
    predictions = logits(model, *(prompt.data for prompt in prompts)).argmax(-1).tolist()
    for prompt, row in zip(prompts, predictions, strict=True):
        assert answered(prompt, row) == [True] * 6


def test_a_changed_pair_changes_the_answer(model):
    prompt = recall_prompt("changed", 512, SAMPLE, pairs=8, questions=1)
    start, value, distance = prompt.answers[0]
    question = prompt.data[:start]
    other = b"QZ" if value != b"QZ" else b"ZQ"
    changed = question[: start - distance] + other + question[start - distance + 2 :]
    first_bytes = logits(model, question, changed)[:, -1].argmax(-1).tolist()
    assert first_bytes == [value[0], other[0]]


def test_sinks_are_trained_and_matter(model):
    if model.config.model_type != "gpt_oss":
        pytest.skip("no sinks")
    sinks = torch.cat([layer.self_attn.sinks for layer in model.model.layers])
    # They start from a normal distribution of deviation 0.02.
    assert sinks.abs().min() > 0.1
    data = SAMPLE[:512]
    before = logits(model, data)
    kept = [layer.self_attn.sinks.clone() for layer in model.model.layers]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        without = logits(model, data)
        for layer, sink in zip(model.model.layers, kept, strict=True):
            layer.self_attn.sinks.copy_(sink)
    assert (before - without).abs().max() > 0.5
    assert torch.equal(logits(model, data), before)


def test_linear_heads_span_short_and_long_memories(model):
    if model.config.model_type != "qwen3_next":
        pytest.skip("no linear layers")
    gates = []
    hooks = [
        layer.linear_attn.in_proj_ba.register_forward_hook(
            lambda module, inputs, output, layer=layer: gates.append(decay(layer, output))
        )
        for layer in model.model.layers
        if hasattr(layer, "linear_attn")
    ]
    logits(model, SAMPLE[:1024])
    for hook in hooks:
        hook.remove()
    per_head = torch.cat(gates)  # [layers, HV], mean log decay of a token
    assert per_head.max() > 0.5
    assert per_head.min() < 0.01


def decay(layer, mixed: torch.Tensor) -> torch.Tensor:
    """Mean decay of each value head, [1, HV], from the projection of b and a."""
    linear = layer.linear_attn
    a = mixed.unflatten(-1, (linear.num_k_heads, -1)).chunk(2, dim=-1)[1].flatten(-2)
    rate = linear.A_log.exp() * torch.nn.functional.softplus(a + linear.dt_bias)
    return rate.mean(dim=(0, 1))[None]
