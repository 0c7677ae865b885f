"""Which implementations a behaviour suite runs, and how a test calls one of them by name.

An operation's conftest names them once: `IMPLEMENTATIONS = here("reference", "torch", "triton")`.
In an ordinary process those for the CPU run. With TRITON_INTERPRET=1 (`make test-interpret`) or
HEADSTART_TEST_DEVICE=cuda (on a machine with a GPU) the kernels run instead, and only the tests
that run once for each implementation are collected. On a GPU a test stays as it is, with tensors
on the CPU: `tests.on_device` makes its calls there.
"""

import functools
import os

import pytest
import torch
from tests.on_device import on_device

import headstart

DEVICE = os.environ.get("HEADSTART_TEST_DEVICE", "cpu").replace("cuda", "cuda:0")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = INTERPRETED or DEVICE != "cpu"
"""Whether this process tests kernels rather than what runs on a CPU."""

HEAD_SIZE = os.environ.get("HEADSTART_TEST_HEAD_SIZE")
"""Head size drawn instead of a test's own, for kernels that take one size alone."""

CPU = ("reference", "torch")


def here(*names: str) -> tuple[str, ...]:
    """Those of an operation's implementations that this process tests."""
    return tuple(
        name
        for name in names
        if (name not in CPU) == KERNELS and not (INTERPRETED and name == "hopper")
    )


def by_name(function, implementation):
    """`function` computed by one named implementation; a test that kernels decline is skipped.

    The CPU implementations must run everything.
    """

    @functools.wraps(function)
    def run(*args, **kwargs):
        kwargs["implementation"] = implementation
        try:
            if DEVICE == "cpu":
                return function(*args, **kwargs)
            return on_device(torch.device(DEVICE), function, *args, **kwargs)
        except headstart.Declined as reason:
            if implementation in CPU:
                raise
            pytest.skip(str(reason))
        except ValueError:
            if HEAD_SIZE is None:
                raise
            pytest.skip("it is written for a head size of its own")

    return run


def examples(count: int) -> int:
    """Drawn examples of a test: fewer in the interpreter, which takes milliseconds a program."""
    return max(1, count // 6) if INTERPRETED else count
