"""What signatures hold of tensors: how they are laid out, and which memory they share.

See `runtime/steady.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import gcd
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # It is not public. Without it layouts are read one by one.
    TensorGuards = None

TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
ADDRESS = torch.Tensor.data_ptr
_GRADED = attrgetter("requires_grad")
_NEGATED = torch.Tensor.is_neg


def plain(tensors: Sequence[Any]) -> bool:
    """Whether these are tensors, none of which needs a gradient now or may carry a tangent.

    >>> plain([torch.zeros(2)]), plain([[0.0, 0.0]])
    (True, False)
    """
    if not TENSORS.issuperset(map(type, tensors)) or forward_ad._current_level >= 0:
        return False
    return not torch.is_grad_enabled() or not any(map(_GRADED, tensors))


def layouts(tensors: Sequence[Any]) -> list[Any] | None:
    """What signatures hold of tensors, beside addresses.

    None where they are none, have no strides, are negated when they are read, or one of them needs
    a gradient now. An index tells devices apart, since a process has one kind of accelerator.

    >>> layouts([torch.zeros(2, 3), [0.0]]), layouts([torch.zeros(2, 3).to_sparse_csr()])
    (None, None)
    """
    if not plain(tensors) or any(map(_NEGATED, tensors)):
        return None
    try:
        return [(x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
    except RuntimeError:
        return None


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where tensors begin; RuntimeError where one is sparse."""
    return list(map(ADDRESS, tensors))


USUAL = None, None


def memory(addresses: list[int]) -> tuple[Any, Any]:
    """What a signature holds of addresses: which are aligned to 16 bytes, and which are the same.

    Where there is no memory, as of tensors without elements and of those that were freed, the
    address is 0: such are the same as the place before the first.

    >>> memory([32, 64]), memory([32, 40, 32]), memory([32, 0])
    ((None, None), ((0, 8, 0), (1, 2, 1)), (None, (1, 0)))
    """
    aligned = tuple(x & 15 for x in addresses) if gcd(*addresses) & 15 else None
    if len({0, *addresses}) > len(addresses):
        return aligned, None
    return aligned, tuple(map([0, *addresses].index, addresses))


def key_of(rows: Sequence[Any], tensors: Sequence[Any]) -> Hashable | None:
    """Layouts of the rows and the memory of all tensors; None: the call goes the long way."""
    of_rows = layouts(rows)
    if of_rows is None:
        return None
    try:
        return (*of_rows, memory(addresses_of(tensors)))
    except RuntimeError:  # one of the others is sparse
        return None


def guard_of(rows: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether other tensors, as many, have the types and layouts of these, and need no gradient.

    >>> alike = guard_of([torch.zeros(2, 3)])
    >>> alike(torch.ones(2, 3)), alike(torch.ones(3, 2).t())
    (True, False)
    """
    if TensorGuards is not None:
        shapes, strides = [list(x.shape) for x in rows], [list(x.stride()) for x in rows]
        sizes = {"dynamic_dims_sizes": shapes, "dynamic_dims_strides": strides}
        check = TensorGuards(*rows, **sizes).check
        if check(*rows):  # it takes no tensor twice
            return check
    of_rows = layouts(rows)
    return lambda *others: layouts(others) == of_rows
