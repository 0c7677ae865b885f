"""Memory that nobody wrote is poison in every test: NaN in floats, huge values in integers."""

import pytest
from tests.implementations import KERNELS

from headstart.evidence.poison import poisoned_memory


@pytest.fixture(autouse=True, scope="session")
def fresh_memory_is_poison():
    """Poison torch.empty and its siblings, and every buffer that a Workspace hands out."""
    with poisoned_memory():
        yield


def pytest_collection_modifyitems(config, items):
    """Where kernels are tested, keep what runs once for each implementation or is about kernels."""
    if KERNELS:
        kept = [
            item
            for item in items
            if "implementation" in getattr(item, "fixturenames", ())
            or item.get_closest_marker("kernels")
        ]
        dropped = [item for item in items if item not in set(kept)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
