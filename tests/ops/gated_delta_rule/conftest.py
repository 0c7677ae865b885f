"""Every test that takes `rule` runs once for each implementation; one more name adds another."""

import pytest
import torch
from tests.implementations import by_name, here

import headstart

IMPLEMENTATIONS = here("reference", "torch", "triton", "hopper")


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def implementation(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def rule(implementation):
    """`headstart.gated_delta_rule` computed by one named implementation."""
    return by_name(headstart.gated_delta_rule, implementation)


@pytest.fixture
def checked(monkeypatch):
    """What a device does not look at on its own is looked at."""
    monkeypatch.setattr("headstart.runtime.checks.asked", True)


@pytest.fixture
def threads_restored():
    """Leave torch's thread count as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
