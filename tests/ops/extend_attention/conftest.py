"""Every test that takes `attend` runs once for each implementation; one more name adds another."""

import pytest
import torch
from tests.implementations import by_name, here

import headstart

IMPLEMENTATIONS = here("reference", "torch", "triton")


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def implementation(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def attend(implementation):
    """`headstart.extend_attention` computed by one named implementation."""
    return by_name(headstart.extend_attention, implementation)


@pytest.fixture(scope="module")
def merge(implementation):
    """`headstart.merge_attention` computed by one named implementation."""
    return by_name(headstart.merge_attention, implementation)


@pytest.fixture(scope="module")
def write(implementation):
    """`headstart.write_kv` computed by one named implementation."""
    return by_name(headstart.write_kv, implementation)


@pytest.fixture
def threads_restored():
    """Leave torch's thread count as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
