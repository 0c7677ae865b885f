"""Lengths, batches and positions compile nothing new: what a kernel is compiled for stays the same.

On a GPU the kernels are launched and the compiled ones counted. Elsewhere the launches are caught
and Triton's own function tells what it would compile for.
"""

import inspect
import random
from contextlib import contextmanager

import pytest
import torch
from tests.implementations import DEVICE, INTERPRETED

from headstart import DeltaCache, Pool, Schedule
from headstart.ops.convolution import spec

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter"),
]


@contextmanager
def compiled(kernel):
    """A set that receives what `kernel` is compiled for."""
    found, run = set(), kernel.run

    def counted(*args, **kwargs):
        found.add(run(*args, **kwargs).hash)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "run", counted if DEVICE != "cpu" else caught(kernel, found))
        if DEVICE == "cpu":
            # A device is asked for its programs, and there is none.
            patch.setattr("headstart.runtime.launcher.supply", lambda *_: None)
        yield found


def caught(kernel, found):
    """In place of `kernel.run`: nothing runs."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    target = CUDABackend(GPUTarget("cuda", 90, 32))
    signature = inspect.signature(kernel.fn)
    bind = create_function_from_signature(signature, kernel.params, target)

    def launch(*args, grid, warmup, **kwargs):
        _, key, options = bind(*args, **kwargs)
        found.add(repr((key, options)))

    return launch


def steps(count):
    """Random batches: lengths, starts, snapshots."""
    draw = random.Random(0)
    for _ in range(count):
        lengths = [
            draw.choice([1, 2, 3, 16, 17, draw.randint(0, 900)]) for _ in range(draw.randint(1, 6))
        ]
        starts = [64 * draw.randint(0, 40) + draw.choice([0, 1, 16, 63]) for _ in lengths]
        yield Schedule(lengths, start_positions=starts, snapshot_every=64, device=DEVICE)


FORMS = ["plain", "pool", "cache"]


@pytest.mark.parametrize("form", FORMS)
def test_fifty_batches_compile_one_convolution(form):
    from headstart.ops.convolution.triton.convolve import convolve, convolve_kernel

    weight, bias = torch.ones(64, 4, device=DEVICE), torch.ones(64, device=DEVICE)
    cache = DeltaCache(8, H=1, HV=1, K=2, V=2, conv_channels=64, dtype=torch.float32, device=DEVICE)
    pool = torch.zeros(8, 3, 64, device=DEVICE)
    seen = set()
    for schedule in steps(50):
        slots = torch.randperm(8)[: schedule.N].to(DEVICE)
        state = {"plain": None, "pool": Pool(pool, slots), "cache": cache.at(slots)}[form]
        x = torch.zeros(schedule.T, 64, device=DEVICE)
        call = spec.bind(
            x, weight, bias, schedule=schedule, state=state, snapshots=x.dtype,
            return_state=form == "plain", activation="silu", out=None,
        )  # fmt: skip
        with compiled(convolve_kernel) as found:
            convolve(call)
        seen |= found
    assert len(seen) == 1


def test_a_convolution_compiles_for_its_width():
    """What is counted above does tell kernels apart."""
    from headstart.ops.convolution.triton.convolve import convolve, convolve_kernel

    seen = set()
    for width in (3, 4):
        call = spec.bind(
            torch.zeros(5, 64, device=DEVICE), torch.ones(64, width, device=DEVICE), None,
            schedule=None, state=None, snapshots=None, return_state=False, activation=None,
            out=None,
        )  # fmt: skip
        with compiled(convolve_kernel) as found:
            convolve(call)
        seen |= found
    assert len(seen) >= 2


def test_fifty_lengths_compile_one_norm():
    from headstart.ops.convolution.triton.norm import norm, norm_kernel

    draw, seen = random.Random(1), set()
    weight = torch.ones(128, device=DEVICE)
    for _ in range(50):
        shape = (draw.choice([1, 2, 16, draw.randint(1, 3000)]), draw.choice([1, 2, 16, 32]), 128)
        x = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        call = spec.bind_norm(x, weight, x, 1e-6, "silu")
        with compiled(norm_kernel) as found:
            norm(call)
        seen |= found
    assert len(seen) == 1
