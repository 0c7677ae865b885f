"""What a call launches and the scratch it takes, written down while it goes the long way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Launched:
    """A launch as the long way made it: what it compiled, and arguments as the kernel has them."""

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


@dataclass
class Record:
    """What a call launched, and the memory it used beside its arguments and results.

    scratch: name -> (shape, dtype, address). tables: of its schedule, with what builds them.
    """

    launches: list[Launched] = field(default_factory=list)
    scratch: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = field(default_factory=dict)
    tables: dict[Callable[..., Any], torch.Tensor] = field(default_factory=dict)


_recording: ContextVar[Record | None] = ContextVar("recording", default=None)


@contextmanager
def recording() -> Iterator[Record]:
    """The record of what this context launches.

    >>> with recording() as record:
    ...     pass
    >>> record.launches
    []
    """
    record = Record()
    token = _recording.set(record)
    try:
        yield record
    finally:
        _recording.reset(token)


def current_record() -> Record | None:
    """The record that is being made, if any."""
    return _recording.get()
