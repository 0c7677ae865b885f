"""What calls would launch on a device that is not here.

Within `rehearsing(target, processors)` meta tensors stand for tensors of that device: calls on them
are checked and bound as usual, and `launcher.start` keeps what it is given instead of launching it.

>>> import torch, headstart
>>> from headstart.runtime.static import TARGETS
>>> x = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
>>> with rehearsing(TARGETS["cuda:90"], 132) as rehearsal:
...     _ = headstart.causal_conv1d(x, x[:32, :4])
>>> [launch.kernel.__name__ for launch in rehearsal.launches]
['convolve_kernel']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headstart.runtime.static import Target


class Launch(NamedTuple):
    """A launch that did not happen: its kernel, the kernel's arguments, options of the compiler."""

    kernel: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass
class Rehearsal:
    """The device that meta tensors stand for, and what was launched on it.

    processors: its multiprocessors (compute units). asked: the configurations that launchers asked
    `tables.configuration` for, by key.
    """

    target: Target
    processors: int
    launches: list[Launch] = field(default_factory=list)
    asked: dict[Any, Any] = field(default_factory=dict)


_rehearsing: ContextVar[Rehearsal | None] = ContextVar("rehearsing", default=None)


@contextmanager
def rehearsing(target: Target, processors: int) -> Iterator[Rehearsal]:
    """The rehearsal of what this context launches."""
    rehearsal = Rehearsal(target, processors)
    token = _rehearsing.set(rehearsal)
    try:
        yield rehearsal
    finally:
        _rehearsing.reset(token)


def current_rehearsal() -> Rehearsal | None:
    """The rehearsal that is going on, if any."""
    return _rehearsing.get()
