"""Memory that nobody wrote is poison in every test: NaN in floats, huge values in integers."""

import pytest
from tests.implementations import INTERPRETED, KERNELS

from headstart.evidence.poison import poisoned_memory


@pytest.fixture(autouse=True, scope="session")
def fresh_memory_is_poison():
    """Poison torch.empty and its siblings, and every buffer that a Workspace hands out."""
    with poisoned_memory():
        yield


def pytest_collection_modifyitems(config, items):
    """Where kernels are tested, keep the tests that run once for each implementation."""
    if KERNELS:
        kept = [item for item in items if "implementation" in getattr(item, "fixturenames", ())]
        dropped = [item for item in items if item not in set(kept)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(autouse=True, scope="session")
def scalars_are_integers_in_the_interpreter():
    """Let numbers of Triton 3.6's interpreter bound a loop: numpy 2.4 refuses arrays of one."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", with_index)
        yield
