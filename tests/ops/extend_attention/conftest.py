"""Every test that takes `attend` runs once for each implementation; one more line adds another."""

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
def attend(implementation):
    """`headstart.extend_attention` computed by one named implementation."""
    return _named(headstart.extend_attention, implementation)


@pytest.fixture(scope="module")
def merge(implementation):
    """`headstart.merge_attention` computed by one named implementation."""
    return _named(headstart.merge_attention, implementation)


@pytest.fixture(scope="module")
def write(implementation):
    """`headstart.write_kv` computed by one named implementation."""
    return _named(headstart.write_kv, implementation)


@pytest.fixture
def threads_restored():
    """Leave torch's thread count as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _named(function, implementation):
    @functools.wraps(function)
    def run(*args, **kwargs):
        try:
            return function(*args, implementation=implementation, **kwargs)
        except headstart.Declined as reason:
            if IMPLEMENTATIONS[implementation]:
                pytest.skip(str(reason))
            raise

    return run
