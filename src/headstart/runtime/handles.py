"""Handles: host objects as tensors, for a graph that carries tensors and numbers alone.

A registered op is told which schedule, plan or workspace is meant by the object's handle, a tensor
on the CPU that holds a number. A compiled graph takes it as an input like any other, so what the
object describes may change between calls, and another object may take its place, without another
compile.
"""

from __future__ import annotations

import copy
import itertools
import secrets
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Self, TypeVar

import torch

NAMES = ("schedule", "plan", "workspace")
"""What ops call arguments that are handles."""
_numbers = itertools.count(secrets.randbits(62))
_living: weakref.WeakValueDictionary[int, Handled] = weakref.WeakValueDictionary()


class Handled:
    """An object that a handle stands for in this process, as long as it lives.

    A copy, `copy.copy` included, has a handle and memory of its own: what one describes next, the
    other does not. `derived` is not copied: what is kept of places in memory, made again when it is
    asked for.

    >>> class Plan(Handled):
    ...     def __init__(self):
    ...         self.take_handle()
    >>> plan = Plan()
    >>> found(Plan, plan.handle) is plan
    True
    """

    handle: torch.Tensor
    derived: tuple[str, ...] = ()
    """Attributes that are dictionaries of what is derived from the others."""

    def take_handle(self) -> None:
        """Be found by a number that no other object has had, here or in another process."""
        if torch.compiler.is_compiling():
            raise ValueError(
                f"{type(self).__name__}: expected to be made before the compiled function is "
                "called, got one made inside it"
            )
        number = next(_numbers)
        # A plain tensor even when made under inference mode: a graph may outlive it.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            self.handle = torch.scalar_tensor(number, dtype=torch.int64, device="cpu")
        _living[number] = self

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "handle"}
        return state | {name: {} for name in self.derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.take_handle()


Kind = TypeVar("Kind", bound=Handled)


def handle_of(held: Handled | None) -> torch.Tensor | None:
    """What a traced call passes on in place of an object; None for None."""
    return None if held is None else held.handle


def expect_no_handles(given: Mapping[str, Any]) -> None:
    """Refuse the arguments of an op that is exported where handles are among them.

    >>> expect_no_handles({"plan": torch.tensor(7)})
    Traceback (most recent call last):
        ...
    ValueError: plan: expected none in an exported program, which outlives it
    """
    for name in NAMES:
        if given.get(name) is not None:
            raise ValueError(f"{name}: expected none in an exported program, which outlives it")


def found(kind: type[Kind], handle: torch.Tensor | None) -> Kind | None:
    """The object that a handle stands for; None for None.

    Raises ValueError if there is none: it is gone, or of another process.
    """
    if handle is None:
        return None
    held = _living.get(int(handle))
    if not isinstance(held, kind):
        raise ValueError(
            f"handle: expected that of a {kind.__name__} that lives in this process, "
            f"got {int(handle)}"
        )
    return held
