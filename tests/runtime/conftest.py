"""Fake drivers, on which CPU tensors are those of a device."""

import dataclasses

import pytest
import torch

from headstart.runtime import dispatch, launcher
from headstart.runtime.workspace import workspace_of


@pytest.fixture
def driver(monkeypatch):
    """One of a Hopper device."""
    pytest.importorskip("triton")
    from tests.runtime.fake_driver import FakeDriver

    yield from installed(FakeDriver(), monkeypatch)


@pytest.fixture
def hip(monkeypatch):
    """One of an AMD device."""
    pytest.importorskip("triton")
    from tests.runtime.fake_hip import FakeHipDriver

    from headstart.ops.gated_delta_rule.passes import launch

    # Calls on a CPU are taken for those of an NVIDIA device, which lets launches overlap.
    monkeypatch.setattr(launch, "chained", lambda target: False)
    yield from installed(FakeHipDriver(), monkeypatch)


def installed(fake, monkeypatch):
    """The fake as Triton's driver while a test runs."""
    import triton

    from headstart.ops.extend_attention.triton import call as attention
    from headstart.ops.gated_delta_rule.passes import launch
    from headstart.ops.gated_delta_rule.triton import call as portable

    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    monkeypatch.setattr(triton.compiler, "compile", fake.compile)
    monkeypatch.setattr(launcher, "prepares", lambda x: True)
    for module in (launch, portable):
        monkeypatch.setattr(module, "INTERPRETED_AS", 90)
    for module in (launch, attention):
        monkeypatch.setattr(
            module, "default_workspace", lambda device: workspace_of(device, fake.stream)
        )
    for operation in dispatch.operations().values():
        monkeypatch.setitem(operation.__dict__, "prepared", {})
        for name in {"triton", "hopper"} & set(operation.places):
            able = dataclasses.replace(operation.implementation(name), declines=lambda call: None)
            monkeypatch.setitem(operation.loaded, name, able)
    yield fake
    fake.forget()
    workspace_of(torch.device("cpu"), fake.stream).release()


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """A bundle that holds the gated norm for two targets, compiled, and what launches it."""
    pytest.importorskip("triton")
    from tests.runtime.bundled import rehearsed

    from headstart.runtime.bundle import Bundle

    made = Bundle(tmp_path_factory.mktemp("bundle") / "built")
    for target in ("cuda:90", "hip:gfx942"):
        (program,) = rehearsed(target).values()
        compiled = program.compile()
        assert made.add(program, compiled)
        made.add_launcher(program, compiled)
    return made
