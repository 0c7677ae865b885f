"""Argument checks shared by every operation: one wording for one kind of mistake.

A caller's mistake is a `ValueError` that names the argument, what was expected and what came:

>>> import torch
>>> expect_shape("k", torch.zeros(4, 2, 8), "[T, H, K]", (4, 1, 8))
Traceback (most recent call last):
    ...
ValueError: k: expected [T, H, K] = [4, 1, 8], got [4, 2, 8]
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
INT32_MAX = 2**31 - 1
"""Largest position, length or row: tables on a device hold 32 bits."""
INT64_MAX = 2**63 - 1


def asked_for() -> bool:
    """What HEADSTART_CHECK says; a word that says neither must not pass for no."""
    word = os.environ.get("HEADSTART_CHECK") or "0"
    if word not in ("0", "1"):
        raise ValueError(f"HEADSTART_CHECK: expected 0 or 1, got {word!r}")
    return word == "1"


asked = asked_for()


def checking() -> bool:
    """Whether HEADSTART_CHECK=1 asked, at import, for checks of values (they synchronise)."""
    return asked


def shown(value: Any) -> str:
    """What came, as an error says it: no values of a tensor, the head of anything long.

    >>> shown(torch.zeros(2, 3)), shown(list(range(100))), shown("x" * 100)[:8]
    ('a float32 tensor [2, 3]', '[0, 1, 2, 3, ...] of 100 entries', "'xxxxxxx")
    """
    if isinstance(value, torch.Tensor):
        return f"a {dtype_name(value.dtype)} tensor {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        head = ", ".join(shown(entry) for entry in value[:4])
        begin, end = "[]" if isinstance(value, list) else "()"
        if len(value) > 4:
            return f"{begin}{head}, ...{end} of {len(value)} entries"
        return f"{begin}{head}{',' if (end, len(value)) == (')', 1) else ''}{end}"
    plain = (str, bytes, numbers.Number, torch.dtype, torch.device, range)
    text = repr(value) if value is None or isinstance(value, plain) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def expect_tensor(name: str, value: Any) -> torch.Tensor:
    """`value` itself, or a ValueError if it is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        came = "a nested one" if value.is_nested else f"layout {value.layout}"
        raise ValueError(f"{name}: expected a dense tensor, got {came}")
    if is_batchedtensor(value):
        raise ValueError(
            f"{name}: expected a batch as an axis of its own, got one that torch.vmap has hidden"
        )
    return value


def expect_int(
    name: str, value: Any, least: int, most: int = INT64_MAX, words: str = "an integer"
) -> int:
    """`value` as an int in [least, most]; a bool, a float or a string is none.

    words: what an error calls it.

    >>> expect_int("slots", 4, 1)
    4
    >>> expect_int("slots", 4.0, 1)
    Traceback (most recent call last):
    ValueError: slots: expected an integer >= 1, got 4.0
    """
    found = _integer(value)
    if found is None or not least <= found <= most:
        beyond = found is not None and found > most
        wanted = f"in [{least}, {most}]" if beyond or most != INT64_MAX else f">= {least}"
        raise ValueError(f"{name}: expected {words} {wanted}, got {shown(value)}")
    return found


def expect_number(
    name: str,
    value: Any,
    words: str = "a finite number",
    fits: Callable[[float], bool] | None = None,
) -> float:
    """`value` as a finite float; a bool, a tensor or a string is none.

    words, fits: what is asked of it, for the error and, beside being finite, as a condition.

    >>> expect_number("eps", 0, "a finite number >= 0", lambda eps: eps >= 0)
    0.0
    >>> expect_number("scale", float("nan"))
    Traceback (most recent call last):
    ValueError: scale: expected a finite number, got nan
    """
    found = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:  # an int beyond every float
            found = math.inf
    if not math.isfinite(found) or (fits is not None and not fits(found)):
        raise ValueError(f"{name}: expected {words}, got {shown(value)}")
    return found


def in_float32(value: float) -> bool:
    """Whether kernels, which compute in float32, see a number as more than 0 or an infinity.

    >>> in_float32(0.125), in_float32(0.0), in_float32(1e300), in_float32(1e-300)
    (True, True, False, False)
    """
    limits = torch.finfo(torch.float32)
    return value == 0 or limits.tiny <= abs(value) <= limits.max


def expect_flag(name: str, value: Any) -> bool:
    """`value` as a bool; anything else that Python takes for true or false is none."""
    if not _is_flag(value):
        raise ValueError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def expect_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Raise unless `value` is one of a few words (or None, where that is a choice).

    >>> expect_choice("layout", "hv", ("kv", "vk"))
    Traceback (most recent call last):
    ValueError: layout: expected one of ['kv', 'vk'], got 'hv'
    """
    if not isinstance(value, str | None) or value not in choices:
        raise ValueError(f"{name}: expected one of {list(choices)}, got {shown(value)}")


def expect_place(name: str, device: Any) -> torch.device:
    """The device that `device` names."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f'{name}: expected a device such as "cpu" or "cuda:0", got {shown(device)}'
        ) from error


def _integer(value: Any) -> int | None:
    """The int that `value` is, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, torch.Tensor):
        return int(value) if value.dim() == 0 and value.dtype in INTEGERS else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _is_flag(value: Any) -> bool:
    """Whether `value` is a bool, NumPy's included."""
    return isinstance(value, bool) or getattr(value, "dtype", None) == bool  # noqa: E721


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
        wanted = " or ".join(map(dtype_name, dtypes))
        raise ValueError(f"{name}: expected dtype {wanted}, got {dtype_name(tensor.dtype)}")


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


def expect_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise unless all values are finite, naming the first that is not; reads the device."""
    wrong = ~tensor.isfinite()
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expected finite values, got {int(wrong.sum())} that are not, the first at "
            f"{first}: {float(tensor[tuple(first)])}"
        )


def in_memory(name: str, value: Any) -> torch.Tensor:
    """A tensor whose values lie where kernels look for them: `value` itself, or a copy.

    A view that PyTorch negates when it is read, or zeros that it never wrote, are ordinary values
    of which memory knows nothing. Raises ValueError for a tensor that has no memory.

    >>> x = in_memory("x", torch._neg_view(torch.ones(2)))
    >>> x, x.is_neg()
    (tensor([-1., -1.]), False)
    """
    tensor = expect_tensor(name, value)
    tensor = tensor.clone() if tensor._is_zerotensor() else tensor
    _expect_storage(name, tensor)
    return tensor.resolve_neg()


def all_in_memory(**values: Any) -> list[Any]:
    """Tensors as `in_memory` gives them, in order; what is none, as None, is returned as it is."""
    return [
        in_memory(name, value) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    ]


def expect_in_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the values of `tensor` lie at its address: a copy would not be what is kept.

    >>> expect_in_memory("state", torch._neg_view(torch.ones(2)))
    Traceback (most recent call last):
    ValueError: state: expected values in memory, got ones that PyTorch negates when read
    """
    if tensor.is_neg() or tensor._is_zerotensor():
        zeros, negated = "zeros that were never written", "ones that PyTorch negates when read"
        came = negated if tensor.is_neg() else zeros
        raise ValueError(f"{name}: expected values in memory, got {came}")
    _expect_storage(name, tensor)


def _expect_storage(name: str, tensor: torch.Tensor) -> None:
    """Raise unless all elements have memory; meta tensors, which have none anywhere, pass."""
    if is_functorch_wrapped_tensor(tensor):
        raise ValueError(f"{name}: expected a tensor with memory, got one that torch.func wraps")
    if not tensor.numel() or tensor.device.type == "meta":
        return
    storage, unit = tensor.untyped_storage(), tensor.element_size()
    size = tensor.storage_offset() * unit + _span(_axes(tensor), unit)
    if storage.nbytes() < size:
        raise ValueError(
            f"{name}: expected memory for its {size} bytes, got {storage.nbytes()}: it was freed"
        )
    # Storage of fake tensors is that of a meta tensor; of other subclasses it may be none.
    if storage.device != tensor.device or not tensor.data_ptr():
        raise ValueError(
            f"{name}: expected a tensor with memory, got a {type(tensor).__name__} without"
        )


def expect_own_memory(name: str, tensor: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise unless every element of `tensor` has memory of its own, apart from all `others`.

    So it may be written. Views of one buffer are apart if their ranges are, or if they are columns
    of the same rows.

    >>> rows = torch.zeros(4, 6)
    >>> expect_own_memory("out", rows[:, :3], x=rows[:, 3:])
    >>> expect_own_memory("out", rows[1:], x=rows[:3])
    Traceback (most recent call last):
    ValueError: out: expected memory of its own, got that of x
    """
    expect_in_memory(name, tensor)
    axes = _axes(tensor)
    for i, (_, stride) in enumerate(axes):
        if stride < _span(axes[i + 1 :], 1):
            raise ValueError(
                f"{name}: expected memory of its own for every element, got shape "
                f"{list(tensor.shape)} with strides {list(tensor.stride())}"
            )
    if not tensor.numel() or tensor.device.type == "meta":
        return
    for other, found in others.items():
        if found is None or not found.numel() or found.device != tensor.device:
            continue
        shift = found.data_ptr() - tensor.data_ptr()
        if _overlap(axes, tensor.element_size(), _axes(found), found.element_size(), shift):
            raise ValueError(f"{name}: expected memory of its own, got that of {other}")


Axes = Sequence[tuple[int, int]]
"""Extent and stride of every axis that moves, the longest stride first."""


def _axes(tensor: torch.Tensor) -> Axes:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return sorted((pair for pair in pairs if pair[0] > 1), key=lambda pair: -pair[1])


def _span(axes: Axes, unit: int) -> int:
    """From the first byte to the one after the last, for strides in elements of `unit` bytes."""
    return (sum((n - 1) * stride for n, stride in axes) + 1) * unit


def _overlap(x: Axes, x_unit: int, y: Axes, y_unit: int, shift: int) -> bool:
    """Whether tensors may share a byte, y beginning `shift` bytes after x.

    Exact for ranges, and for columns at any level of rows that lie equally far apart.
    """
    if shift >= _span(x, x_unit) or -shift >= _span(y, y_unit):
        return False
    pitch = x[0][1] * x_unit if x else 0
    if not x or not y or pitch != y[0][1] * y_unit:
        return True
    rows = x[1:], x_unit, y[1:], y_unit
    if _span(y[1:], y_unit) > pitch:
        return True
    # A row of x can meet the first row of y that begins after it, and the one before that.
    after = shift % pitch
    return _overlap(*rows, after) or _overlap(*rows, after - pitch)


def packs(out: torch.Tensor) -> bool:
    """Whether a dense [B, L, ...] can be seen as packed [B L, ...] without a copy.

    >>> packs(torch.zeros(2, 5, 3)), packs(torch.zeros(2, 5, 3)[:, :4])
    (True, False)
    """
    return out.shape[0] < 2 or out.stride(0) == out.shape[1] * out.stride(1)


def expect_no_gradients(operation: str, **tensors: torch.Tensor | None) -> None:
    """Raise if grad mode is on and an input requires grad: these operations have no backward.

    Nor have they a forward derivative: an input with a tangent is refused in any mode.
    """
    if forward_ad._current_level >= 0:
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor)[1] is not None:
                raise ValueError(
                    f"{name}: carries a tangent, but {operation} has no forward derivative; "
                    "unpack it first"
                )
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name}: requires grad, but {operation} has no backward; "
                "call it under torch.inference_mode() or torch.no_grad()"
            )


def host_ints(
    name: str,
    values: Any,
    words: str = "integers",
    least: int = -INT64_MAX,
    most: int = INT64_MAX,
) -> list[int]:
    """A list of Python ints from a list or an integer tensor (a device tensor is read back here).

    Floats and bools are refused, not rounded. least, most: bounds of every entry, which an error
    calls by `words`.

    >>> host_ints("lengths", torch.tensor([3, 0, 5], dtype=torch.int32))
    [3, 0, 5]
    >>> host_ints("lengths", [3, True])
    Traceback (most recent call last):
    ValueError: lengths: expected integers, got True
    """
    if isinstance(values, torch.Tensor):
        expect_tensor(name, values)
        if values.dim() != 1:
            raise ValueError(f"{name}: expected one dimension, got shape {list(values.shape)}")
        expect_dtype(name, values, INTEGERS)
        if values.device.type == "meta":
            raise ValueError(f"{name}: expected integers in memory, got a meta tensor")
        found = in_memory(name, values).tolist()
    elif _is_list(values):
        found = list(values)
        if set(map(type, found)) - {int}:  # not plain ints all of them
            found = [_listed_integer(name, value) for value in found]
    else:
        raise ValueError(f"{name}: expected a list or tensor of integers, got {shown(values)}")
    if found and min(found) < least:
        raise ValueError(f"{name}: expected {words} >= {least}, got {min(found)}")
    if found and max(found) > most:
        raise ValueError(f"{name}: expected {words} <= {most}, got {max(found)}")
    return found


def host_rows(name: str, values: Any, words: str = "integers") -> list[list[int]]:
    """Lists of Python ints, all of one length, from a list of lists."""
    if not _is_list(values):
        raise ValueError(f"{name}: expected a list of lists of integers, got {shown(values)}")
    rows = [host_ints(f"{name}[{n}]", row, words) for n, row in enumerate(values)]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{name}: expected rows of one length, got lengths {shown([len(row) for row in rows])}"
        )
    return rows


def positions_of_each(name: str, values: Any, count: int) -> list[int]:
    """One position for each of `count` sequences, from one int for all, a list or a tensor.

    >>> positions_of_each("start_positions", 64, 2)
    [64, 64]
    """
    one = _integer(values)
    found = host_ints(name, values if one is None else [one] * count, "positions", 0, INT32_MAX)
    expect_one_each(name, found, count)
    return found


def host_flags(name: str, values: Any, count: int) -> list[bool]:
    """One bool for each of `count` sequences, from a list or a tensor."""
    if isinstance(values, torch.Tensor):
        expect_shape(name, values, "[N]", (count,))
        expect_dtype(name, values, (torch.bool,))
        return values.tolist()
    if not _is_list(values):
        raise ValueError(f"{name}: expected bools, one for each sequence, got {shown(values)}")
    found = [expect_flag(name, value) for value in values]
    expect_one_each(name, found, count)
    return found


def expect_one_each(name: str, found: Sequence[Any], count: int) -> None:
    """Raise unless there is one entry for each of `count` sequences."""
    if len(found) != count:
        raise ValueError(f"{name}: expected one for each of {count} sequences, got {len(found)}")


def _is_list(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set))


def _listed_integer(name: str, value: Any) -> int:
    found = _integer(value)
    if found is None:
        raise ValueError(f"{name}: expected integers, got {shown(value)}")
    return found
