"""The gated norm: values, bits, and the module of transformers that it takes the place of."""

import pytest
import torch

import headstart

GATES = {"silu": lambda x: x / (1 + (-x).exp()), "sigmoid": lambda x: 1 / (1 + (-x).exp())}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def literal(x, weight, gate, eps=1e-6, activation="silu"):
    x, gate = x.double(), gate.double()
    return (
        x
        / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        * weight.double()
        * GATES[activation](gate)
    )


def draw(*shape, dtype=torch.float32, seed=0):
    at = torch.Generator().manual_seed(seed)
    x, gate = torch.randn(2, *shape, generator=at)
    return x.to(dtype), torch.randn(shape[-1], generator=at), gate.to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("shape", [(128,), (7, 96), (5, 4, 128), (2, 3, 4, 33), (3, 1), (9, 3000)])
def test_values(norm, shape, activation, dtype):
    x, weight, gate = draw(*shape, dtype=dtype)
    found = norm(x, weight, gate, 1e-5, activation)
    assert found.dtype == dtype
    assert found.shape == shape
    rounding = ROUNDING[dtype]
    wanted = literal(x, weight, gate, 1e-5, activation)
    torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=min(rounding, 1e-6))


def test_extreme_gates_and_rows(norm):
    x, weight, gate = draw(4, 64)
    gate[0], gate[1] = -1e4, 1e4
    x[2], x[3] = 0, 1e-20
    found = norm(x, weight, gate)
    assert found.isfinite().all()
    assert not found[0].any()
    assert not found[2].any()
    torch.testing.assert_close(found.double(), literal(x, weight, gate), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 3, 8)])
def test_no_rows(norm, shape):
    assert norm(torch.empty(shape), torch.ones(8), torch.empty(shape)).shape == shape


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 31, 64, 100, 128, 1003])
def test_a_row_alone_has_the_bits_it_has_among_others(norm, size, dtype):
    x, weight, gate = draw(33, size, dtype=dtype)
    whole = norm(x, weight, gate)
    alone = torch.stack([norm(*row) for row in zip(x, [weight] * 33, gate, strict=True)])
    assert torch.equal(whole, alone)
    assert torch.equal(
        norm(x.view(3, 11, size), weight, gate.view(3, 11, size)).view(33, -1), whole
    )
    assert torch.equal(norm(x[5:12], weight, gate[5:12]), whole[5:12])


def test_rows_counted_in_64_bits_have_the_same_bits(norm, monkeypatch):
    pytest.importorskip("triton")
    x, weight, gate = draw(6, 5, 128)
    whole = norm(x, weight, gate)
    monkeypatch.setattr("headstart.ops.convolution.triton.norm.MOST_NARROW", 0)
    assert torch.equal(norm(x[1:], weight, gate[1:]), whole[1:])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [3, 37, 128])
def test_strides(norm, size, dtype):
    """The gate as a slice of a packed projection, x as a turned batch."""
    x, weight, gate = draw(6, 5, size, dtype=dtype)
    whole = norm(x, weight, gate)
    memory = torch.full((6, 9, size + 3), torch.nan, dtype=dtype)
    strided = memory[:, 2:7, 1 : 1 + size]
    strided.copy_(gate)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(norm(x, weight, strided), whole)
    assert torch.equal(norm(turned, weight, gate), whole)
    assert torch.equal(norm(x.transpose(0, 1), weight, gate.transpose(0, 1)), whole.transpose(0, 1))


@pytest.mark.parametrize("shape", [(700, 128), (3, 100000), (1, 200000)])
def test_threads(norm, threads_restored, shape):
    x, weight, gate = draw(*shape)
    torch.set_num_threads(1)
    one = norm(x, weight, gate)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(norm(x, weight, gate), one)
        assert torch.equal(norm(x[-1:], weight, gate[-1:]), one[-1:])


def test_a_nan_stays_in_its_row(norm):
    x, weight, gate = draw(9, 40)
    clean = norm(x, weight, gate)
    x[4, 7] = torch.nan
    found = norm(x, weight, gate)
    assert found[4].isnan().all()
    found[4] = clean[4]
    assert torch.equal(found, clean)


def test_transformers_qwen3_next_agrees(norm):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, weight, gate = draw(50, 128)
    module = modeling.Qwen3NextRMSNormGated(128, eps=1e-6)
    with torch.no_grad():
        module.weight.copy_(weight)
        theirs = module(x, gate)
    torch.testing.assert_close(norm(x, weight, gate), theirs, rtol=2e-6, atol=1e-6)


def test_float64_is_for_the_reference():
    x, weight, gate = draw(5, 8, dtype=torch.float64)
    with pytest.raises(headstart.Declined, match="float64"):
        headstart.rms_norm_gated(x, weight, gate)
    found = headstart.rms_norm_gated(x, weight, gate, implementation="reference")
    torch.testing.assert_close(found, literal(x, weight, gate), rtol=1e-12, atol=1e-12)
