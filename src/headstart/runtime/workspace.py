"""Scratch memory: named buffers that are kept between calls and grow on demand."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from headstart.runtime.checks import expect_place
from headstart.runtime.handles import Handled
from headstart.runtime.record import current_record


class Workspace(Handled):
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

    derived = ("_memory", "bound")

    def __init__(self, device: torch.device | str) -> None:
        self.device = expect_place("device", device)
        self._memory: dict[str, torch.Tensor] = {}
        self.bound: dict[object, tuple] = {}
        """What others derive from where the buffers lie, by whom; forgotten when one moves."""
        self.take_handle()

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` and `dtype` in the memory kept under `name`.

        Raises torch.OutOfMemoryError where there is no room for it. Implementations take all of
        their buffers before they write anything that outlives a call, so the call may be repeated.
        """
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            self._memory.pop(name, None)
            self.bound.clear()
            memory = self._allocate(name, size)
            if type(memory) is not torch.Tensor:  # under FakeTensorMode, as of torch.export
                raise ValueError(
                    f"workspace: expected real memory, got a {type(memory).__name__}; such calls "
                    f"cannot be traced"
                )
            self._memory[name] = memory
        if (record := current_record()) is not None:
            record.scratch[name] = tuple(shape), dtype, memory.data_ptr()
        return memory[:size].view(dtype).view(tuple(shape))

    def _allocate(self, name: str, size: int) -> torch.Tensor:
        try:
            # A plain tensor even when first asked for under inference mode: it outlives the mode.
            with torch.inference_mode(False):
                return torch.empty(size, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            # On a CPU PyTorch's error has no type of its own.
            if self.device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
                raise
            raise torch.OutOfMemoryError(
                f"workspace: {size} bytes for {name!r} do not fit on {self.device} beside the "
                f"{self.bytes} bytes held; workspace_bytes tells what a call takes, release() "
                "gives back what is held"
            ) from error

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return sum(memory.numel() for memory in self._memory.values())

    def release(self) -> None:
        """Give all memory back; the next call takes what it needs."""
        self._memory.clear()
        self.bound.clear()


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.workspaces: dict[tuple[torch.device, int], Workspace] = {}


_per_thread = _PerThread()


def default_workspace(device: torch.device) -> Workspace:
    """The workspace of calls that bring none: one per thread, device and current stream."""
    cuda = device.type == "cuda"
    return workspace_of(device, torch.cuda.current_stream(device).cuda_stream if cuda else 0)


def workspace_of(device: torch.device, stream: int) -> Workspace:
    """The workspace of this thread for a device and a stream."""
    key = (device, stream)
    found = _per_thread.workspaces.get(key)
    if found is None:
        found = _per_thread.workspaces[key] = Workspace(device)
    return found
