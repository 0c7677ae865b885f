"""Every test that takes `rule` runs once for each implementation; one more line adds another."""

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


@pytest.fixture(scope="module")
def rule(implementation):
    """`headstart.gated_delta_rule` computed by one named implementation."""

    @functools.wraps(headstart.gated_delta_rule)
    def run(*args, **kwargs):
        try:
            return headstart.gated_delta_rule(*args, implementation=implementation, **kwargs)
        except headstart.Declined as reason:
            if IMPLEMENTATIONS[implementation]:
                pytest.skip(str(reason))
            raise

    return run


@pytest.fixture
def threads_restored():
    """Leave torch's thread count as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
