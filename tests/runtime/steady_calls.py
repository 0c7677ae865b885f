"""Calls on the fake driver: what they launched, and by which way."""

import dataclasses

import torch
from tests.runtime.fake_driver import Map
from triton import knobs

import headstart
from headstart.runtime import launcher


def rule(call, implementation, function=headstart.gated_delta_rule, **more):
    tensors, options = call
    with torch.inference_mode():
        return function(*tensors, **options, **more, implementation=implementation)


def launched(driver, call, implementation, **more):
    """The result of a call, and its launches with the memory of results by name."""
    del driver.launched[:]
    result = rule(call, implementation, **more)
    results = (result,) if isinstance(result, torch.Tensor) else result
    names = {x.data_ptr(): i for i, x in enumerate(results) if x is not None}

    def plain(value):
        if isinstance(value, Map):
            return dataclasses.replace(value, address=names.get(value.address, value.address))
        if isinstance(value, knobs.HookChain):  # with nobody in it
            return None
        address = value.data_ptr() if hasattr(value, "data_ptr") else value
        return names.get(address, address) if type(address) is int else address

    return result, [tuple(map(plain, args)) for args in driver.launched]


def is_steady(driver):
    """Whether the last call gave the driver addresses, not tensors."""
    return not any(isinstance(value, torch.Tensor) for args in driver.launched for value in args)


def the_long_way(monkeypatch, driver, call, implementation, **more):
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "prepares", lambda x: False)
        return launched(driver, call, implementation, **more)


def alike(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
