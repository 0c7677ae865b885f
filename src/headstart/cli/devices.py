"""Devices by the names that a command line gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_of(name: str | None) -> torch.device:
    """The device called so, by default a GPU if there is one; ValueError where there is none.

    >>> device_of("cpu")
    device(type='cpu')
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(name)
        if found.type in ("cpu", "cuda"):
            torch.empty(0, device=found)
            return found
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: {name}: {str(error).splitlines()[0]}") from error
    raise ValueError(f"device: expected cpu or cuda, got {name}")
