"""Memory that nobody wrote, made visible: every fresh tensor starts as NaN with a payload.

A freshly allocated page is often zero, which hides a row that was never written or a scratch buffer
that was read too early. The payload tells memory that nobody wrote from a NaN that was computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from headstart.runtime import fresh
from headstart.runtime.workspace import Workspace

HUGE = {
    torch.uint8: 255,
    torch.int8: 127,
    torch.int16: 2**15 - 1,
    torch.int32: 2**31 - 1,
    torch.int64: 2**62,
}
"""What fresh integers hold: far outside any range."""

PAYLOAD = {
    torch.bfloat16: (torch.int16, 0x7FD5),
    torch.float16: (torch.int16, 0x7F5A),
    torch.float32: (torch.int32, 0x7FD5_A5A5),
    torch.float64: (torch.int64, 0x7FFD_5A5A_A5A5_5A5A),
}
"""Float dtype -> (integers of the same size, bits of a NaN that no arithmetic makes)."""

PLACES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
    (fresh, "cpu"),
    (fresh, "cuda"),
    (Workspace, "buffer"),
)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor whose contents are undefined; returns it.

    >>> bool(poison(torch.zeros(2, dtype=torch.bfloat16)).isnan().all())
    True
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta" or not tensor.numel():
        return tensor
    with torch.no_grad():
        if tensor.dtype in PAYLOAD:
            integers, bits = PAYLOAD[tensor.dtype]
            tensor.view(integers).fill_(bits)
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(torch.nan)
        elif tensor.dtype in HUGE:
            tensor.fill_(HUGE[tensor.dtype])
    return tensor


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor still holds the poison: bool, of its shape.

    >>> out = poison(torch.empty(3))
    >>> out[1] = torch.nan
    >>> unwritten(out).tolist()
    [True, False, True]
    """
    if tensor.dtype not in PAYLOAD:
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    integers, bits = PAYLOAD[tensor.dtype]
    return tensor.view(integers) == bits


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """While active, torch.empty and its siblings and every workspace buffer hand out poison."""
    with ExitStack() as stack:
        for owner, name in PLACES:
            allocate = _poisoned(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, allocate))
        yield


def _poisoned(allocate: Callable) -> Callable:
    """`allocate` whose result is poisoned; memory handed in by `out=` stays the caller's."""

    @functools.wraps(allocate)
    def fresh(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor if kwargs.get("out") is not None else poison(tensor)

    return fresh
