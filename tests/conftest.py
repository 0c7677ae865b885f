"""Memory that nobody wrote is poison in every test: NaN in floats, huge values in integers.

A freshly allocated page is often zero, which hides a row that was never written or a scratch buffer
that was read too early.
"""

import functools

import pytest
import torch

from headstart.runtime.workspace import Workspace

HUGE = {
    torch.uint8: 255,
    torch.int8: 127,
    torch.int16: 2**15 - 1,
    torch.int32: 2**31 - 1,
    torch.int64: 2**62,
}


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor whose contents are undefined."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta" or not tensor.numel():
        return tensor
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(torch.nan)
        elif tensor.dtype in HUGE:
            tensor.fill_(HUGE[tensor.dtype])
    return tensor


def poisoned(allocate):
    """`allocate` whose result is poisoned; memory handed in by `out=` stays the caller's."""

    @functools.wraps(allocate)
    def fresh(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        return tensor if kwargs.get("out") is not None else poison(tensor)

    return fresh


@pytest.fixture(autouse=True, scope="session")
def fresh_memory_is_poison():
    """Poison torch.empty and its siblings, and every buffer that a Workspace hands out."""
    places = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch, "empty_permuted"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
        (Workspace, "buffer"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
