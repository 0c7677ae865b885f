"""Derivatives and batches that PyTorch takes behind a call's back are refused, not lost."""

import pytest
import torch
from torch.autograd import forward_ad

import headstart
from headstart import ExtendPlan, Gate, KVCache, Pool

T, H, HV, K, V = 70, 1, 2, 8, 6


RULE = {
    "q": torch.randn(T, H, K),
    "k": torch.nn.functional.normalize(torch.randn(T, H, K), dim=-1),
    "v": torch.randn(T, HV, V),
    "g": -torch.rand(T, HV),
    "beta": torch.rand(T, HV),
}
CONVOLUTION = {"x": torch.randn(T, 5), "weight": torch.randn(5, 4), "bias": torch.randn(5)}
NORM = {"x": torch.randn(T, 5), "weight": torch.randn(5), "gate": torch.randn(T, 5)}
NEW = {"q": torch.randn(T, 4, 8), "k": torch.randn(T, 2, 8), "v": torch.randn(T, 2, 8)}
PLAN = ExtendPlan.from_lengths([T], device="cpu")


def rule(**changed):
    return headstart.gated_delta_rule(**RULE | changed).o


def token_by_token(**changed):
    return headstart.recurrent_gated_delta_rule(**RULE | changed).o


def mapped(**changed):
    inputs = {name: (RULE | changed)[name] for name in ("k", "v", "g", "beta")}
    return headstart.chunk_map(**inputs, schedule=[T]).L


def convolved(**changed):
    return headstart.causal_conv1d(**CONVOLUTION | changed).y


def normed(**changed):
    return headstart.rms_norm_gated(**NORM | changed)


def attended(**changed):
    return headstart.extend_attention(**NEW | changed, plan=PLAN)


def reproducible(**changed):
    return attended(reproducible=True, **changed)


def windowed(**changed):
    return attended(window=9, **changed)


def merged(parts):
    return headstart.merge_attention([(parts, torch.zeros(T, 2))])[0]


CALLS = [
    (rule, "q", (T, H, K)), (rule, "v", (T, HV, V)), (rule, "g", (T, HV)),
    (token_by_token, "k", (T, H, K)), (mapped, "k", (T, H, K)), (mapped, "v", (T, HV, V)),
    (convolved, "x", (T, 5)), (convolved, "weight", (5, 4)), (convolved, "bias", (5,)),
    (normed, "x", (T, 5)), (normed, "gate", (T, 5)), (normed, "weight", (5,)),
    (attended, "q", (T, 4, 8)), (attended, "v", (T, 2, 8)), (attended, "sinks", (4,)),
    (reproducible, "k", (T, 2, 8)), (windowed, "q", (T, 4, 8)), (merged, "parts", (T, 2, 8)),
]  # fmt: skip
CALL = pytest.mark.parametrize(
    ("call", "name", "shape"), CALLS, ids=[f"{call.__name__} {name}" for call, name, _ in CALLS]
)


@CALL
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_tangent_is_refused(call, name, shape, mode):
    """It would end here, which reads as a derivative of zero."""
    x = torch.rand(shape)
    with mode(), forward_ad.dual_level():
        call(**{name: x})  # no other input has one
        with pytest.raises(ValueError, match=f"{name}.*: carries a tangent, but .* derivative"):
            call(**{name: forward_ad.make_dual(x, torch.ones_like(x))})


@CALL
def test_derivatives_by_torch_func_are_refused(call, name, shape):
    x = torch.rand(shape)
    with pytest.raises(ValueError, match=f"{name}.*: carries a tangent"):
        torch.func.jvp(lambda x: call(**{name: x}), (x,), (x,))
    with pytest.raises(ValueError, match=f"{name}.*: requires grad"):
        torch.func.grad(lambda x: call(**{name: x}).sum())(x)


@CALL
def test_a_hidden_batch_is_refused(call, name, shape):
    with pytest.raises(ValueError, match=rf"{name}.*: expected a batch as .* torch\.vmap"):
        torch.vmap(lambda x: call(**{name: x}))(torch.rand(2, *shape))


def test_a_nested_tensor_is_refused():
    ragged = torch.nested.nested_tensor([torch.rand(3, H, K), torch.rand(4, H, K)])
    with pytest.raises(ValueError, match="q: expected a dense tensor, got a nested one"):
        rule(q=ragged)


def test_parameters_and_places_count_too():
    with forward_ad.dual_level():

        def dual(*shape):
            return forward_ad.make_dual(torch.zeros(shape), torch.ones(shape))

        for says, call in (
            ("a_log", lambda: rule(gate=Gate.raw(dual(HV)))),
            ("state", lambda: rule(state=dual(1, HV, K, V))),
            ("state", lambda: rule(state=Pool(dual(3, HV, K, V), [1]))),
            ("cache.k", lambda: cached(dual(T, 2, 8), torch.zeros(T, 2, 8))),
            ("out", lambda: attended(out=dual(T, 4, 8))),
        ):
            with pytest.raises(ValueError, match=f"{says}: carries a tangent"):
                call()


def cached(k, v, k_scale=None):
    plan = ExtendPlan.from_lengths([1], [T], device="cpu")
    new = torch.randn(1, 4, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    cache = KVCache(k, v, k_scale, None if k_scale is None else 1.0)
    return headstart.extend_attention(*new, plan=plan, cache=cache)


def test_gradients_of_a_cache_and_of_results_are_an_error():
    keys, values = torch.randn(T, 2, 8), torch.randn(T, 2, 8)
    eight = keys.to(torch.float8_e4m3fn)
    for says, call in (
        ("cache.k", lambda: cached(keys.clone().requires_grad_(), values)),
        ("cache.v", lambda: cached(keys, values.clone().requires_grad_())),
        ("k_scale", lambda: cached(eight, eight, torch.ones(2).requires_grad_())),
        ("out", lambda: attended(out=torch.zeros(T, 4, 8).requires_grad_())),
    ):
        with pytest.raises(ValueError, match=f"{says}: requires grad, but extend_attention has no"):
            call()
        with torch.inference_mode():
            call()
