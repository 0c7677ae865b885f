"""Memory that nobody wrote is poison in every test: NaN in floats, huge values in integers."""

import os
from contextlib import nullcontext

import pytest
from tests.implementations import INTERPRETED, KERNELS
from tests.interpreter import comparisons_give_bits

from headstart.evidence.poison import poisoned_memory
from headstart.evidence.static.parts import Part

PART = Part.parse(os.environ.get("HEADSTART_TEST_PART") or "1/1")
"""The share of the tests of kernels that this process runs."""


@pytest.fixture(autouse=True, scope="session")
def fresh_memory_is_poison():
    """Poison torch.empty and its siblings, and every buffer that a Workspace hands out."""
    with poisoned_memory():
        yield


@pytest.fixture(autouse=True, scope="session")
def interpreter_compares_as_the_compiler_does():
    """Every Triton's interpreter makes masks of bits, whatever it compares."""
    with comparisons_give_bits() if INTERPRETED else nullcontext():
        yield


def pytest_collection_modifyitems(config, items):
    """Where kernels are tested, keep what runs once for each implementation or is about kernels.

    Of these what PART holds.
    """
    if KERNELS:
        kept = [
            item
            for item in items
            if PART.holds(item.nodeid)
            and (
                "implementation" in getattr(item, "fixturenames", ())
                or item.get_closest_marker("kernels")
            )
        ]
        dropped = [item for item in items if item not in set(kept)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
