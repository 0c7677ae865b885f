"""Oracles that nobody here wrote: torch, transformers and ONNX Runtime on the CPU."""

import pytest
import torch
from tests.ops.convolution.oracle import draw
from torch.nn import functional

from headstart.evidence.oracles.onnx import onnx_run

CLOSE = {"rtol": 2e-6, "atol": 2e-6}


@pytest.mark.parametrize("width", [2, 4, 5])
def test_torch_agrees(convolve, width):
    x, weight, bias = draw(90, 37, width)
    theirs = functional.conv1d(x.t()[None], weight[:, None], bias, padding=width - 1, groups=37)
    theirs = functional.silu(theirs[0, :, :90]).t()
    torch.testing.assert_close(convolve(x, weight, bias).y, theirs, **CLOSE)


def test_transformers_agrees_over_a_prefill_and_decoded_tokens(convolve):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, weight, bias = draw(2 * 30, 24)
    x = x.view(2, 30, 24)
    # Unwrapped, so that no kernel from elsewhere takes the place of the code under comparison.
    whole, step = (
        getattr(function, "__wrapped__", function)
        for function in (modeling.causal_conv1d_fn, modeling.causal_conv1d_update)
    )
    theirs = whole(x[:, :20].mT, weight, bias, activation="silu").mT
    found = convolve(x[:, :20], weight, bias, return_state=True)
    torch.testing.assert_close(found.y, theirs, **CLOSE)
    kept = x[:, 16:20].mT.clone()  # theirs keeps one input more than it needs
    for t in range(20, 30):
        theirs = step(x[:, t : t + 1].mT, kept, weight, bias, activation="silu").mT
        found = convolve(x[:, t : t + 1], weight, bias, state=found.state, return_state=True)
        torch.testing.assert_close(found.y, theirs, **CLOSE)
        assert torch.equal(found.state, kept.mT[:, 1:])


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("length", [1, 2, 50])
def test_onnxruntime_agrees(convolve, length, activation):
    x, weight, bias = draw(3 * length, 16)
    x = x.view(3, length, 16)
    before = torch.randn(3, 3, 16)
    y, state = onnx_run(
        "CausalConvWithState",
        {
            "input": x.mT.contiguous(),
            "weight": weight[:, None].contiguous(),
            "bias": bias,
            "past_state": before.mT.contiguous(),
        },
        outputs=2,
        activation=activation or "none",
    )
    found = convolve(x, weight, bias, state=before, return_state=True, activation=activation)
    torch.testing.assert_close(found.y, torch.as_tensor(y).mT, **CLOSE)
    assert torch.equal(found.state, torch.as_tensor(state).mT)
