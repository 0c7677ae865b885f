"""Operations as ops of PyTorch: what `torch.compile`, `torch.export` and fake tensors are shown.

A public function asks `traced` first. A traced call goes to the op, whose schema holds tensors and
numbers alone and says which of them it changes; a fake implementation gives the results' shapes.
When a graph runs, the op puts the objects together again and calls the public function, so compiled
and eager calls are the same calls. Those that are not traced never meet PyTorch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from headstart.runtime import dispatch
from headstart.runtime.handles import expect_no_handles

LIBRARY = torch.library.Library(__name__.split(".")[0], "FRAGMENT")
"""A copy of the package under another name has ops of its own."""


def traced(tensor: Any) -> bool:
    """Whether a call on this tensor is being written down instead of computed.

    >>> traced(torch.zeros(1))
    False
    """
    return is_compiling() or type(tensor) is FakeTensor


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Register `torch.ops.headstart.<name>` for the operation of this name.

    run: takes the public function, and the op's arguments by name. fake: takes these alone, and
    makes results of the same shapes, strides and dtypes.
    """

    def compute(*arguments: Any) -> Any:
        return run(dispatch.operations()[name].function, **by_name(arguments))

    def imagine(*arguments: Any) -> Any:
        given = by_name(arguments)
        # Asked here, where nothing is traced: in graphs of PyTorch 2.11 it is always true.
        if torch.compiler.is_exporting():
            expect_no_handles(given)
        return fake(**given)

    # `torch.library.custom_op` would count versions of changed arguments in Python at every call,
    # which gradients alone need.
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headstart::{name}", imagine, lib=LIBRARY)
    op = getattr(torch.ops.headstart, name).default
    names = [argument.name for argument in op._schema.arguments]

    def by_name(arguments: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(names, arguments, strict=True))


def present(like: torch.Tensor, *results: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Results, with an empty tensor in place of those that are not there.

    >>> [x.shape for x in present(torch.ones(2), None, torch.ones(3))]
    [torch.Size([0]), torch.Size([3])]
    """
    return tuple(like.new_empty(0) if x is None else x for x in results)
