"""Scratch of the decomposed path, declared before it is taken so that its size can be told."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from headstart.runtime.workspace import Workspace

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Buffer name -> shape and dtype."""


def largest(layouts: Iterable[Layout]) -> Layout:
    """One layout whose buffers are as large as any of the same name."""
    found: Layout = {}
    for layout in layouts:
        for name, (shape, dtype) in layout.items():
            if name not in found or _bytes(shape, dtype) > _bytes(*found[name]):
                found[name] = (shape, dtype)
    return found


def layout_bytes(layout: Layout) -> int:
    """Bytes of all buffers."""
    return sum(_bytes(shape, dtype) for shape, dtype in layout.values())


def take(workspace: Workspace, layout: Layout) -> dict[str, torch.Tensor]:
    """The buffers, from the workspace."""
    return {
        name: workspace.buffer(f"extend_attention.{name}", shape, dtype)
        for name, (shape, dtype) in layout.items()
    }


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
