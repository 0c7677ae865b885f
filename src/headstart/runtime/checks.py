"""Argument checks shared by every operation: one wording for one kind of mistake.

A caller's mistake is a `ValueError` that names the argument, what was expected and what came:

>>> import torch
>>> expect_shape("k", torch.zeros(4, 2, 8), "[T, H, K]", (4, 1, 8))
Traceback (most recent call last):
    ...
ValueError: k: expected [T, H, K] = [4, 1, 8], got [4, 2, 8]
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def checking() -> bool:
    """Whether HEADSTART_CHECK=1 asks for the checks that look at values (they synchronise)."""
    return os.environ.get("HEADSTART_CHECK", "0") == "1"


def expect_tensor(name: str, value: Any) -> torch.Tensor:
    """`value` itself, or a ValueError if it is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    return value


def expect_shape(name: str, tensor: torch.Tensor, words: str, shape: Sequence[int | None]) -> None:
    """Raise unless `tensor` has `shape`; `words` names its axes, None leaves an axis free."""
    expect_tensor(name, tensor)
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want is not None and got != want for got, want in zip(found, shape, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected {words} = [{wanted}], got {list(found)}")


def expect_dtype(name: str, tensor: torch.Tensor, dtypes: Iterable[torch.dtype]) -> None:
    """Raise unless the dtype of `tensor` is one of `dtypes`."""
    dtypes = tuple(dtypes)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name}: expected dtype {wanted}, got {str(tensor.dtype).removeprefix('torch.')}"
        )


def expect_device(name: str, tensor: torch.Tensor, device: torch.device, like: str) -> None:
    """Raise unless `tensor` lies on `device`, the device of the argument called `like`."""
    if tensor.device != device:
        raise ValueError(
            f"{name}: expected device {device} (that of {like}), got device {tensor.device}"
        )


def expect_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the last dimension of `tensor` has stride 1 (any other strides are fine)."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {list(tensor.stride())}"
        )


def expect_own_memory(name: str, tensor: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise unless every element of `tensor` has memory of its own, apart from all `others`.

    Views of one buffer are apart if their ranges are, or if they are columns of the same rows.

    >>> rows = torch.zeros(4, 6)
    >>> expect_own_memory("out", rows[:, :3], x=rows[:, 3:])
    >>> expect_own_memory("out", rows[1:], x=rows[:3])
    Traceback (most recent call last):
    ValueError: out: expected memory of its own, got that of x
    """
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{name}: expected memory of its own for every element, got an expansion")
    if not tensor.numel() or tensor.device.type == "meta":
        return
    begin, end = _range(tensor)
    for other, found in others.items():
        if found is None or not found.numel() or found.device != tensor.device:
            continue
        low, high = _range(found)
        if low < end and begin < high and not _columns_apart(tensor, found):
            raise ValueError(f"{name}: expected memory of its own, got that of {other}")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor that has elements, and the byte after its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _columns_apart(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether x and y are different columns of rows that lie equally far apart, at any level."""
    if not x.dim() or not y.dim():
        return False
    pitch = x.stride(0) * x.element_size()
    if pitch <= 0 or pitch != y.stride(0) * y.element_size():
        return False
    (begin, end), (low, high) = _range(x[0]), _range(y[0])
    shift = (low - begin) % pitch
    if end - begin <= shift and shift + (high - low) <= pitch:
        return True
    # The rows interleave; where pairs of them lie in one pitch, one pair tells for all.
    return max(end, high) - min(begin, low) <= pitch and _columns_apart(x[0], y[0])


def packs(out: torch.Tensor) -> bool:
    """Whether a dense [B, L, ...] can be seen as packed [B L, ...] without a copy.

    >>> packs(torch.zeros(2, 5, 3)), packs(torch.zeros(2, 5, 3)[:, :4])
    (True, False)
    """
    return out.shape[0] < 2 or out.stride(0) == out.shape[1] * out.stride(1)


def expect_no_gradients(operation: str, **tensors: torch.Tensor | None) -> None:
    """Raise if grad mode is on and an input requires grad: these operations have no backward."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name}: requires grad, but {operation} has no backward; "
                "call it under torch.inference_mode() or torch.no_grad()"
            )


def host_ints(name: str, values: Any) -> list[int]:
    """A list of Python ints from a list or an integer tensor (a device tensor is read back here).

    >>> host_ints("lengths", torch.tensor([3, 0, 5], dtype=torch.int32))
    [3, 0, 5]
    """
    if isinstance(values, torch.Tensor):
        if values.dim() != 1:
            raise ValueError(f"{name}: expected one dimension, got shape {list(values.shape)}")
        if values.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: expected dtype int32 or int64, got {values.dtype}")
        return values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{name}: expected a list or tensor of integers, got {values!r}")
    out = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"{name}: expected integers, got {value!r}")
        out.append(value.__index__())
    return out
