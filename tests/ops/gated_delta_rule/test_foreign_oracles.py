"""Oracles that nobody here wrote: ONNX Runtime's CPU operators and transformers' functions."""

import pytest
import torch
from tests.implementations import KERNELS
from tests.ops.gated_delta_rule.inputs import Inputs, draw, packed
from tests.ops.gated_delta_rule.oracle import relative, wide

from headstart import Gate
from headstart.evidence.oracles import onnx
from headstart.evidence.oracles.onnx import onnx_run

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime", minversion="1.30")

MOST = 4e-6 if KERNELS else 2e-6  # both sides work in float32


def near(found: torch.Tensor, theirs) -> bool:
    return relative(found, wide(torch.as_tensor(theirs))) < MOST


def gated_delta_net(x: Inputs, *args, **attributes):
    return onnx.gated_delta_net(*x, *args, **attributes)


LENGTHS = [70, 1, 130]


def ragged(per_channel=False, unit=True, seed=0):
    parts = [
        draw(n, 2, 4, 32, 24, per_channel=per_channel, unit=unit, seed=seed + n) for n in LENGTHS
    ]
    before = torch.randn(3, 4, 32, 24, generator=torch.Generator().manual_seed(seed))
    return packed(*parts), before


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_onnxruntime_gated_delta_net_agrees(rule, per_channel):
    x, before = ragged(per_channel, seed=1)
    found = rule(*x, schedule=LENGTHS, state=before, return_state=True)
    o, state = gated_delta_net(x, LENGTHS, before)
    assert near(found.o, o)
    assert near(found.state, state)


@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_onnxruntime_fused_gates_agree(rule, per_channel, lower_bound):
    x, before = ragged(per_channel, unit=False, seed=2)
    at = torch.Generator().manual_seed(3)
    x = x.but(g=torch.randn(x.g.shape, generator=at), beta=torch.randn(x.beta.shape, generator=at))
    a_log = torch.tensor([-2.0, -1.0, 0.0, 1.0])
    dt_bias = torch.randn(x.g.shape[1:], generator=at)
    found = rule(
        *x,
        schedule=LENGTHS,
        state=before,
        return_state=True,
        qk_l2norm=True,
        scale=0.25,
        gate=Gate.raw(a_log, dt_bias, lower_bound, beta="logit"),
    )
    gate = {"gate_activation": "softplus"}
    if lower_bound is not None:
        gate = {"gate_activation": "kda", "gate_lower_bound": lower_bound}
    o, state = gated_delta_net(
        x,
        LENGTHS,
        before,
        a_log,
        dt_bias,
        beta_activation="sigmoid",
        qk_l2_norm=1,
        scale=0.25,
        **gate,
    )
    assert near(found.o, o)
    assert near(found.state, state)


@pytest.mark.parametrize(
    ("rule_name", "per_channel"),
    [("gated_delta", False), ("gated_delta", True), ("delta", False)],
    ids=["per head", "per channel", "no decay"],
)
def test_onnxruntime_linear_attention_agrees(rule, per_channel, rule_name):
    """As many key heads as value heads; [B, T, heads * size]."""
    B, T, H, K, V = 2, 150, 3, 32, 24
    rows = [draw(T, H, H, K, V, per_channel=per_channel, seed=n) for n in (4, 5)]
    if rule_name == "delta":
        rows = [x.but(g=None) for x in rows]
    dense = [
        None if tensors[0] is None else torch.stack(tensors) for tensors in zip(*rows, strict=True)
    ]
    before = torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(6))
    found = rule(*dense, state=before, return_state=True)
    q, k, v, g, beta = dense
    o, state = onnx_run(
        "LinearAttention",
        {
            "query": q.flatten(2),
            "key": k.flatten(2),
            "value": v.flatten(2),
            "past_state": before,
            "decay": None if g is None else g.flatten(2),
            "beta": beta,
        },
        outputs=2,
        q_num_heads=H,
        kv_num_heads=H,
        update_rule=rule_name,
    )
    assert near(found.o.flatten(2), o)
    assert near(found.state, state)


# transformers


@pytest.fixture(params=["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def theirs(request):
    model = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    return getattr(model, request.param)


def repeated(x: Inputs) -> list[torch.Tensor]:
    """A batch of one with a key head for every value head: older versions ask for it."""
    ratio = x.v.shape[1] // x.k.shape[1]
    q, k = (tensor.repeat_interleave(ratio, 1) for tensor in (x.q, x.k))
    return [tensor[None] for tensor in x.but(q=q, k=k)]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("T", [1, 64, 150])
def test_transformers_agrees(rule, theirs, T, normalised):
    x = draw(T, 2, 4, 32, 24, unit=not normalised, seed=7)
    before = torch.randn(1, 4, 32, 24, generator=torch.Generator().manual_seed(8))
    found = rule(*x, state=before, return_state=True, qk_l2norm=normalised)
    o, state = theirs(
        *repeated(x),
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalised,
    )
    assert near(found.o, o[0])
    assert near(found.state, state)


def test_transformers_agrees_in_bfloat16(rule, theirs):
    x = draw(150, 2, 4, 32, 24, dtype=torch.bfloat16, unit=False, seed=9)
    found = rule(*x, return_state=True, qk_l2norm=True)
    o, _ = theirs(*repeated(x), output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert relative(found.o, wide(o[0])) < 1e-2
