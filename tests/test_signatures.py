"""The shapes in public signatures, checked at run time: jaxtyping's words bind across arguments."""

import importlib
import types
import typing

import beartype
import jaxtyping
import pytest
import torch

import headstart

H, HV, K, V, T = 2, 4, 16, 24, 70


def checked(name):
    """headstart.<name> with its annotations resolved and enforced."""
    function = getattr(headstart, name)
    module = importlib.import_module(function.__module__)
    names = {**vars(jaxtyping), **vars(module)}
    copy = types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = {
        key: eval(value, names) if isinstance(value, str) else value
        for key, value in function.__annotations__.items()
    }
    return jaxtyping.jaxtyped(typechecker=beartype.beartype)(copy)


def delta_inputs():
    return (
        torch.randn(T, H, K),
        torch.nn.functional.normalize(torch.randn(T, H, K), dim=-1),
        torch.randn(T, HV, V),
        -torch.rand(T, HV),
        torch.rand(T, HV),
    )


CALLS = {
    "gated_delta_rule": lambda f, q, k, v, g, b: f(q, k, v, g, b, return_state=True),
    "recurrent_gated_delta_rule": lambda f, q, k, v, g, b: f(q, k, v, g, b, schedule=[30, 40]),
    "chunk_map": lambda f, q, k, v, g, b: f(k, v, g, b, schedule=[T]),
}


@pytest.mark.parametrize("name", CALLS)
def test_right_shapes_pass_and_wrong_ones_are_caught(name):
    function, inputs = checked(name), delta_inputs()
    CALLS[name](function, *inputs)
    for place in range(1, 5):
        wrong = list(inputs)
        wrong[place] = wrong[place][:-1]
        with pytest.raises(jaxtyping.TypeCheckError):
            CALLS[name](function, *wrong)


def test_every_public_function_states_its_shapes():
    """Each public function with tensor arguments names at least one shape."""
    for name in headstart.__all__:
        thing = getattr(headstart, name)
        if not callable(thing) or isinstance(thing, type):
            continue
        words = " ".join(str(a) for a in typing.cast(dict, thing.__annotations__).values())
        if "torch.Tensor" in words and name != "compose":
            assert "Float[" in words or "Int[" in words, name
