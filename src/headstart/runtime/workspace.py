"""Scratch memory: named buffers that are kept between calls and grow on demand."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from headstart.runtime.checks import expect_place


class Workspace:
    """Scratch of one device and one stream of calls; two streams need two workspaces.

    A buffer keeps its memory between calls under its name and grows when a call needs more; its
    contents are undefined. `release()` gives the memory back.

    Parameters
    ----------
    device: where the buffers live.

    >>> workspace = Workspace("cpu")
    >>> workspace.buffer("state", (2, 4), torch.float32).shape
    torch.Size([2, 4])
    >>> workspace.bytes
    32
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = expect_place("device", device)
        self._memory: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` and `dtype` in the memory kept under `name`."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            self._memory.pop(name, None)
            # A plain tensor even when first asked for under inference mode: the memory outlives it.
            with torch.inference_mode(False):
                memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._memory[name] = memory
        return memory[:size].view(dtype).view(tuple(shape))

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return sum(memory.numel() for memory in self._memory.values())

    def release(self) -> None:
        """Give all memory back; the next call takes what it needs."""
        self._memory.clear()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspaces: dict[tuple[torch.device, int], Workspace] = {}


_per_thread = _PerThread()


def default_workspace(device: torch.device) -> Workspace:
    """The workspace of calls that bring none: one per thread, device and current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream)
    if key not in _per_thread.workspaces:
        _per_thread.workspaces[key] = Workspace(device)
    return _per_thread.workspaces[key]
