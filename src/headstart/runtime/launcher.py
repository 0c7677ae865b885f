"""Where Triton kernels run, and how host facts reach them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter (TRITON_INTERPRET=1)."""
    if not installed():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def declines_tensors(device: torch.device, dtype: torch.dtype) -> str | None:
    """The sentence why kernels cannot run on such tensors at all, or None.

    >>> declines_tensors(torch.device("meta"), torch.float64)
    'it computes in float32; float64 is for the reference.'
    """
    if dtype == torch.float64:
        return "it computes in float32; float64 is for the reference."
    if not installed():
        return "Triton is not installed."
    if device.type in ("cuda", "meta"):
        return None
    if device.type != "cpu":
        return f"its kernels run on CUDA and ROCm devices, not on {device.type}."
    if not interpreted():
        return (
            "on CPU tensors it runs only in Triton's interpreter, in a process of its own "
            "(TRITON_INTERPRET=1)."
        )
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly."
    return None


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a device; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def current(device: torch.device) -> AbstractContextManager:
    """Make `device` the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_ints(values: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Integers or flags as a contiguous tensor on `device`; lists travel without a wait.

    >>> device_ints([3, -1], torch.device("cpu")).dtype
    torch.int32
    """
    if not isinstance(values, torch.Tensor):
        values = torch.tensor([int(value) for value in values], dtype=torch.int32)
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    if values.device == device:
        return values.contiguous()
    if values.device.type == "cpu" and device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True).contiguous()
