"""Oracles that nobody here wrote: torch, transformers and ONNX Runtime on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from tests.ops.extend_attention.oracle import draw
from torch.nn.functional import scaled_dot_product_attention

from headstart import ExtendPlan, KVCache
from headstart.evidence.oracles.onnx import onnx_run

CLOSE = {"rtol": 3e-6, "atol": 3e-6}
HQ, HK, D = 8, 2, 64


def head_major(x):
    return x.transpose(0, 1)[None]


def with_prefix(batch):
    """k and v of prefix and new tokens, [1, HK, prefix + new, D]."""
    return (
        head_major(torch.cat([batch.prefix_k, batch.k])),
        head_major(torch.cat([batch.prefix_v, batch.v])),
    )


def literal(length, prefix, window):
    own = torch.arange(prefix, prefix + length)[:, None]
    position = torch.arange(prefix + length)[None]
    seen = position <= own
    return seen if window is None else seen & (position > own - window)


@pytest.mark.parametrize(("length", "prefix"), [(60, 0), (33, 70), (1, 90)])
@pytest.mark.parametrize("window", [None, 20])
def test_torch_agrees(attend, length, prefix, window):
    batch = draw([length], [prefix], HQ, HK, D)
    theirs = scaled_dot_product_attention(
        head_major(batch.q),
        *with_prefix(batch),
        attn_mask=literal(length, prefix, window),
        enable_gqa=True,
    )
    found = attend(**batch.arguments(), window=window)
    torch.testing.assert_close(found, theirs[0].transpose(0, 1), **CLOSE)


def test_torch_agrees_on_its_causal_kernel(attend):
    batch = draw([80], None, HQ, HK, D)
    q, k, v = (head_major(getattr(batch, name)) for name in "qkv")
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    found = attend(**batch.arguments())
    torch.testing.assert_close(found, theirs[0].transpose(0, 1), **CLOSE)


@pytest.mark.parametrize(("length", "prefix"), [(60, 0), (33, 70), (1, 90)])
@pytest.mark.parametrize("window", [None, 20])
def test_transformers_gpt_oss_agrees(attend, length, prefix, window):
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    batch = draw([length], [prefix], HQ, HK, D, seed=1)
    sinks = torch.linspace(-3, 5, HQ)
    module = SimpleNamespace(num_key_value_groups=HQ // HK, sinks=sinks, training=False)
    mask = torch.zeros(length, prefix + length)
    mask.masked_fill_(~literal(length, prefix, window), -torch.inf)
    theirs, _ = modeling.eager_attention_forward(
        module, head_major(batch.q), *with_prefix(batch), mask[None, None], scaling=D**-0.5
    )
    found = attend(**batch.arguments(), window=window, sinks=sinks)
    torch.testing.assert_close(found, theirs[0], **CLOSE)


@pytest.mark.parametrize(("length", "prefix"), [(60, 0), (1, 90)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
def test_onnxruntime_agrees(attend, length, prefix, window, softcap, with_sinks):
    """com.microsoft GroupQueryAttention: its window counts the own key, its head_sink is natural.

    It takes a past with one new token, or none.
    """
    batch = draw([length], [prefix], HQ, HK, D, seed=2)
    sinks = torch.linspace(-3, 5, HQ) if with_sinks else None
    total = prefix + length
    theirs, present, _ = onnx_run(
        "GroupQueryAttention",
        {
            "query": batch.q.reshape(1, length, HQ * D),
            "key": batch.k.reshape(1, length, HK * D),
            "value": batch.v.reshape(1, length, HK * D),
            "past_key": head_major(batch.prefix_k).contiguous(),
            "past_value": head_major(batch.prefix_v).contiguous(),
            "seqlens_k": torch.tensor([total - 1], dtype=torch.int32),
            "total_sequence_length": torch.tensor([total], dtype=torch.int32),
            "cos_cache": None,
            "sin_cache": None,
            "position_ids": None,
            "attention_bias": None,
            "head_sink": sinks,
        },
        outputs=3,
        num_heads=HQ,
        kv_num_heads=HK,
        local_window_size=-1 if window is None else window,
        softcap=softcap or 0.0,
    )
    k, _ = with_prefix(batch)
    torch.testing.assert_close(torch.as_tensor(present), k, rtol=0, atol=0)
    found = attend(**batch.arguments(), window=window, sinks=sinks, softcap=softcap)
    theirs = torch.as_tensor(theirs).view(length, HQ, D)
    torch.testing.assert_close(found, theirs, **CLOSE)


def test_torch_agrees_on_a_padded_batch(attend):
    """Left padding, as generation pads: row n of the cache is used from offsets[n] on."""
    lengths, total = [3, 3], [40, 25]
    room = torch.randn(2, 48, HK, D), torch.randn(2, 48, HK, D)
    q = torch.randn(6, HQ, D)
    offsets = [8, 23]
    plan = ExtendPlan.from_padded(lengths, total, 48, new_in_cache=True, offsets=offsets)
    found = attend(q, None, None, plan=plan, cache=KVCache(*room))
    for n in range(2):
        rows, used = slice(3 * n, 3 * n + 3), slice(offsets[n], offsets[n] + total[n])
        theirs = scaled_dot_product_attention(
            head_major(q[rows]),
            head_major(room[0][n, used]),
            head_major(room[1][n, used]),
            attn_mask=literal(3, total[n] - 3, None),
            enable_gqa=True,
        )
        torch.testing.assert_close(found[rows], theirs[0].transpose(0, 1), **CLOSE)
