"""Where memory ends in mid-call: an error that says so, and the call may be made again."""

import threading

import pytest
import torch
from tests.implementations import DEVICE, KERNELS
from tests.runtime.traced_calls import FORMS, World, outcome, same_bits

from headstart import Workspace
from headstart.runtime import dispatch, workspace
from headstart.runtime import fresh as fresh_memory

MAKERS = ("empty", "zeros", "empty_strided", "empty_like", "zeros_like")
"""Everything that PyTorch is asked for memory with."""


class Memory:
    """Memory that ends with the n-th tensor that is asked for."""

    def __init__(self, monkeypatch, n: int) -> None:
        self.asked, self._n, self._lock = 0, n, threading.Lock()
        for name in MAKERS:
            monkeypatch.setattr(torch, name, self._ending(getattr(torch, name)))
        monkeypatch.setattr(fresh_memory, "cpu", self._ending(fresh_memory.cpu))

    def _ending(self, make):
        def ending(*args, **kwargs):
            with self._lock:
                self.asked += 1
                ended = self.asked > self._n
            if ended:
                raise torch.OutOfMemoryError("no memory is left")
            return make(*args, **kwargs)

        return ending


@pytest.fixture
def fresh(monkeypatch):
    """Each call finds an empty workspace, and kernels where this process interprets them."""
    monkeypatch.setattr(workspace, "_per_thread", workspace._PerThread())
    if KERNELS:
        monkeypatch.setitem(dispatch.ORDER, "cpu", ("triton",))
    return monkeypatch


@pytest.mark.kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="test_device.py ends a GPU's memory")
@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_found_no_memory_may_be_made_again(fresh, name):
    """It has changed nothing that outlives it: no cache, no pool."""
    with torch.inference_mode():
        world = World()
        wanted = outcome(world, FORMS[name](world)())
        n = 0
        while True:
            world = World()
            call = FORMS[name](world)
            before = {word: x.clone() for word, x in world.changed.items() if word != "out"}
            fresh.setattr(workspace, "_per_thread", workspace._PerThread())
            with fresh.context() as patched:
                memory = Memory(patched, n)
                try:
                    call()
                except torch.OutOfMemoryError:
                    assert memory.asked > n
                else:
                    assert memory.asked == n
                    break
            for word, x in before.items():
                assert same_bits([world.changed[word]], [x]), (word, n)
            assert same_bits(outcome(world, call()), wanted), n
            n += 1


def test_a_workspace_says_what_did_not_fit():
    held = Workspace("cpu")
    held.buffer("small", (16,), torch.float32)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"workspace: 4611686018427387904 bytes for "
        r"'large' do not fit on cpu beside the 64 bytes held",
    ):
        held.buffer("large", (1 << 60,), torch.float32)
    assert held.bytes == 64
    assert held.buffer("large", (4,), torch.float32).shape == (4,)


def test_other_errors_of_a_device_stay_what_they_are(monkeypatch):
    held = Workspace("cpu")
    held.device = torch.device("cuda:0")

    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        held.buffer("x", (4,), torch.float32)
