"""What Triton's interpreter gets wrong, put right for the tests that run in it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def comparisons_give_bits() -> Iterator[None]:
    """Give what a comparison returns the type int1, as the compiler does.

    The interpreter keeps the type of the operands. It shows where a comparison of scalars is spread
    over a block: the mask becomes one of int32, and Triton 3.9.0 loads with none but bool.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def giving_bits(compare):
        return lambda self, lhs, rhs: TensorHandle(compare(self, lhs, rhs).data, tl.int1)

    with pytest.MonkeyPatch.context() as patch:
        for name in dir(InterpreterBuilder):
            if name.startswith(("create_icmp", "create_fcmp")):
                patch.setattr(
                    InterpreterBuilder, name, giving_bits(getattr(InterpreterBuilder, name))
                )
        yield
