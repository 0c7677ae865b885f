"""Memory for results of steady calls, with PyTorch's own function and without."""

import importlib.util
import sys

import pytest
import torch

from headstart.runtime import fresh


@pytest.fixture(params=["PyTorch's", "public"])
def module(request, monkeypatch):
    """The module, or a copy of it that finds no function that is not public."""
    if request.param == "PyTorch's":
        return fresh
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    spec = importlib.util.spec_from_file_location("fresh_of_old", fresh.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_it_is_what_empty_strided_gives(module, mode):
    with mode():
        for shape, strides in (((2, 3, 5), (15, 5, 1)), ((4, 6), (1, 4)), ((0, 3), (3, 1))):
            x = module.cpu(shape, strides, torch.bfloat16)
            like = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="cpu")
            for what in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.is_inference):
                assert what(x) == what(like)
            assert (x.dtype, x.device, x.requires_grad) == (torch.bfloat16, like.device, False)
            x.fill_(1)
            assert bool((x == 1).all())
