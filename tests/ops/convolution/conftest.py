"""Every test that takes `convolve` or `norm` runs once for each implementation."""

import pytest
import torch
from tests.implementations import by_name, here

import headstart

IMPLEMENTATIONS = here("reference", "torch", "triton")


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def implementation(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def convolve(implementation):
    return by_name(headstart.causal_conv1d, implementation)


@pytest.fixture(scope="module")
def norm(implementation):
    return by_name(headstart.rms_norm_gated, implementation)


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
