"""Lists that the host gave, on the device: one copy for each stream, none made while capturing."""

import pytest
import torch
from tests.implementations import DEVICE

from headstart.runtime import launcher
from headstart.runtime.launcher import HostInts

CPU = torch.device("cpu")


@pytest.fixture
def stream(monkeypatch):
    """Sets the current stream, and whether it is being captured."""

    def enter(number: int, capturing: bool = False) -> None:
        monkeypatch.setattr(launcher, "stream_of", lambda device: number)
        monkeypatch.setattr(launcher, "capturing", lambda device: capturing)

    return enter


def test_each_stream_has_its_copy(stream):
    slots = HostInts([3, -1])
    stream(1)
    one = slots.on_device(CPU)
    assert slots.on_device(CPU) is one
    stream(2)
    other = slots.on_device(CPU)
    assert other is not one
    assert other.tolist() == one.tolist() == [3, -1]


def test_a_capture_reads_what_a_warming_call_copied(stream):
    """Its own copy would be made at each replay, from memory that is long gone."""
    slots = HostInts([3, -1])
    stream(1)
    warm = slots.on_device(CPU)
    stream(2, capturing=True)
    assert slots.on_device(CPU) is warm


def test_a_capture_without_a_warming_call_keeps_nothing(stream):
    slots = HostInts([3, -1])
    stream(2, capturing=True)
    made = slots.on_device(CPU)
    assert made.tolist() == [3, -1]
    assert slots.on_device(CPU) is not made


@pytest.mark.kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU copies behind the host's back")
def test_a_pinned_tensor_may_be_overwritten_as_soon_as_the_call_returns():
    given = torch.full((2**20,), 3, dtype=torch.int32).pin_memory()  # a driver takes few at once
    torch.cuda._sleep(50_000_000)  # what is on the stream keeps the copy waiting
    found = launcher.device_ints(given, torch.device(DEVICE))
    given.fill_(7)
    assert bool((found == 3).all())
