"""The layers that the recipe trains with against those of transformers."""

import pytest
import tiny_models
import torch
import training_paths
from transformers.models.qwen3_next import modeling_qwen3_next

# Kept before a training run in this process can put its own in their place.
REFERENCE_RULE = modeling_qwen3_next.torch_chunk_gated_delta_rule
REFERENCE_CONVOLUTION = modeling_qwen3_next.causal_conv1d_fn


@pytest.mark.parametrize("length", [1, 100, 128, 300])
def test_attention_and_experts_of_gpt_oss(length):
    model = tiny_models.new_model("tiny-gpt-oss", seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start: gates and sinks count
            parameter.mul_(3)
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(std=2)
        ids = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(1))
        expected = model(ids, use_cache=False).logits
        training_paths.use(model)
        got = model(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_attention_refuses_what_it_does_not_compute():
    q = torch.zeros(1, 8, 4, 64)
    with pytest.raises(ValueError, match="no mask, and sinks"):
        training_paths.attention(None, q, q, q, None, 0.125, s_aux=None)


@pytest.mark.parametrize("length", [1, 64, 200])
def test_gated_delta_rule_and_its_gradients(length):
    def drawn():
        torch.manual_seed(0)
        shapes = [(2, length, 2, 16), (2, length, 2, 16), (2, length, 4, 32)]
        q, k, v = (torch.randn(shape) for shape in shapes)
        g, beta = -3 * torch.rand(2, length, 4), torch.rand(2, length, 4)
        # transformers 5.17 expects as many key heads as value heads.
        q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
        return [x.requires_grad_() for x in (q, k, v, g, beta)]

    results = []
    for rule in (training_paths.gated_delta_rule, REFERENCE_RULE):
        q, k, v, g, beta = inputs = drawn()
        out = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gated_delta_rule_shares_key_heads():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 70, 2, 16), torch.randn(1, 70, 2, 16), torch.randn(1, 70, 4, 16)
    g, beta = -torch.rand(1, 70, 4), torch.rand(1, 70, 4)
    rule = training_paths.gated_delta_rule
    shared = rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
    q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
    assert torch.equal(shared, rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0])
    with pytest.raises(ValueError, match="no states"):
        rule(q, k, v, g, beta)


def test_convolution():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 24, 50), torch.randn(24, 4)
    got = training_paths.causal_convolution(x, weight, None, "silu")
    expected = REFERENCE_CONVOLUTION(x, weight, None, activation="silu")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_heads_start_with_memories_of_every_length():
    layer = tiny_models.new_model("tiny-qwen3-next", seed=0).model.layers[0].linear_attn
    rates = layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias)
    torch.testing.assert_close(
        rates, torch.tensor([0.1, 7.937e-3, 6.3e-4, 5e-5]), rtol=1e-3, atol=0
    )
