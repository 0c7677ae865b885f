"""Every test that takes `convolve` or `norm` runs once for each implementation."""

import functools

import pytest
import torch

import headstart

# name -> whether the implementation may decline a call (then that test is skipped, with its
# sentence); the two CPU implementations must run everything.
IMPLEMENTATIONS = {"reference": False, "torch": False}


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def implementation(request) -> str:
    return request.param


def by_name(function, implementation):
    """`function` computed by one named implementation."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        try:
            return function(*args, implementation=implementation, **kwargs)
        except headstart.Declined as reason:
            if IMPLEMENTATIONS[implementation]:
                pytest.skip(str(reason))
            raise

    return run


@pytest.fixture(scope="module")
def convolve(implementation):
    return by_name(headstart.causal_conv1d, implementation)


@pytest.fixture(scope="module")
def norm(implementation):
    return by_name(headstart.rms_norm_gated, implementation)


@pytest.fixture
def threads_restored():
    """Leave torch's thread count as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
