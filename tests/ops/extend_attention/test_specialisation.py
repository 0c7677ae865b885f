"""Lengths, prefixes and positions compile nothing new: a kernel is compiled for the same.

On a GPU the kernels are launched and the compiled ones counted. Elsewhere the launches are caught
and Triton's own function tells what it would compile for.
"""

import inspect
import random
from contextlib import ExitStack, contextmanager

import pytest
import torch
from tests.implementations import DEVICE, INTERPRETED

import headstart
from headstart import ExtendPlan, KVCache

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter"),
]

HQ, HK, D = 8, 2, 64


@contextmanager
def compiled(*kernels):
    """A set that receives what the kernels are compiled for."""
    found = set()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for kernel in kernels:
            run = counted(kernel, found) if DEVICE != "cpu" else caught(kernel, found)
            patch.setattr(kernel, "run", run)
        if DEVICE == "cpu":
            patch.setattr(
                "headstart.ops.extend_attention.triton.call.declines_tensors", lambda *_: None
            )
            # A device is asked for its programs, and there is none.
            patch.setattr("headstart.runtime.launcher.supply", lambda *_: None)
        yield found


def counted(kernel, found):
    run = kernel.run

    def launch(*args, **kwargs):
        found.add((kernel.__name__, run(*args, **kwargs).hash))

    return launch


def caught(kernel, found):
    """In place of `kernel.run`: nothing runs."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    target = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(inspect.signature(kernel.fn), kernel.params, target)

    def launch(*args, grid, warmup, **kwargs):
        _, key, options = bind(*args, **kwargs)
        found.add((kernel.__name__, repr((key, options))))

    return launch


def kernels():
    from headstart.ops.extend_attention.triton.extend import extend_kernel
    from headstart.ops.extend_attention.triton.pieces import join_kernel
    from headstart.ops.extend_attention.triton.unified import clear_kernel, unified_kernel

    return extend_kernel, unified_kernel, clear_kernel, join_kernel


def batches(count):
    """Random batches: new lengths and prefixes, decodes among them."""
    draw = random.Random(0)
    sizes = [0, 1, 2, 3, 16, 17, 64, 128]
    for _ in range(count):
        N = draw.randint(1, 5)
        lengths = [draw.choice([*sizes, draw.randint(0, 900)]) for _ in range(N)]
        lengths[-1] = max(lengths[-1], 1)
        prefix = [draw.choice([*sizes, 4096, draw.randint(0, 3000)]) for _ in range(N)]
        yield lengths, prefix


def attend(lengths, prefix, layout, dtype=torch.float16, **options):
    T = sum(lengths)
    q, k, v = (torch.zeros(T, heads, D, dtype=dtype, device=DEVICE) for heads in (HQ, HK, HK))
    total = [old + new for old, new in zip(prefix, lengths, strict=True)]
    room = (512, 16, HK, D)
    cache = KVCache(*(torch.zeros(room, dtype=dtype, device=DEVICE) for _ in "kv"))
    if layout == "none":
        plan, cache = ExtendPlan.from_lengths(lengths, device=DEVICE), None
    elif layout == "pages":
        table = torch.zeros(len(lengths), -(-max(total) // 16), dtype=torch.int32)
        plan = ExtendPlan.from_pages(lengths, total, table, 16, new_in_cache=True, device=DEVICE)
        k = v = None
    else:
        indptr = [0]
        for old in prefix:
            indptr.append(indptr[-1] + old)
        indices = torch.zeros(indptr[-1], dtype=torch.int32)
        plan = ExtendPlan.from_slots(lengths, indptr, indices, new_in_cache=False, device=DEVICE)
    headstart.extend_attention(q, k, v, plan=plan, cache=cache, implementation="triton", **options)


@pytest.mark.parametrize("layout", ["none", "pages", "slots"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 100}, {"reproducible": True, "return_lse": True}], ids=str
)
def test_fifty_batches_compile_each_kernel_once(layout, options):
    with compiled(*kernels()) as found:
        for lengths, prefix in batches(50):
            attend(lengths, prefix, layout, **options)
    names = [name for name, _ in found]
    assert len(names) == len(set(names))
    assert names


def test_windows_compile_one_kernel_for_short_ones_and_one_for_long_ones():
    from headstart.ops.extend_attention.triton.config import LONG_WINDOW

    counts = []
    with compiled(*kernels()) as found:
        for window in (1, 2, 16, 100, 128, LONG_WINDOW - 1, LONG_WINDOW, 4096, 10**6):
            attend([70, 3], [200, 64], "pages", window=window)
            counts.append(len(found))
        for window in (100, 10**6):
            attend([70, 3], [200, 64], "pages", window=window, reproducible=True)
            counts.append(len(found))
    # The last call has more work than programs, so a kernel clears what they draw it from.
    assert counts == [1] * 6 + [2] * 3 + [3, 5]


@pytest.mark.parametrize("options", [{}, {"reproducible": True}], ids=str)
def test_caches_that_grow_compile_one_kernel(options):
    """Those of transformers are as long as what they hold, with heads before rows."""
    from headstart.ops.extend_attention.triton.write import write_kernel

    with compiled(*kernels(), write_kernel) as found:
        for length in range(100, 120):
            room = torch.zeros(4, 2, HK, length, D, dtype=torch.float16, device=DEVICE)
            cache = KVCache(*(room[i].transpose(1, 2) for i in (0, 1)))
            q, k, v = (
                torch.zeros(2, n, D, dtype=torch.float16, device=DEVICE) for n in (HQ, HK, HK)
            )
            slots = torch.tensor([length - 1, 2 * length - 1], device=DEVICE)
            headstart.write_kv(k, v, cache, slots, implementation="triton")
            for new_in_cache in (True, False):
                old = length if new_in_cache else length - 1
                plan = ExtendPlan.from_padded(
                    [1, 1], [length, old], length, new_in_cache=new_in_cache, device=DEVICE
                )
                new = (None, None) if new_in_cache else (k, v)
                headstart.extend_attention(
                    q, *new, plan=plan, cache=cache, implementation="triton", **options
                )
    kernel = "unified_kernel" if options else "extend_kernel"
    # One where new keys are in the cache, one where they are beside it. Draws are cleared where a
    # device has fewer programs than there is work.
    names = sorted(name for name, _ in found if name != "clear_kernel")
    assert names == [kernel, kernel, "write_kernel"]


def test_kernels_are_told_apart():
    """What is counted above does differ between kinds of call."""
    with compiled(*kernels()) as found:
        attend([70], [200], "pages")
        attend([70], [200], "pages", window=5)
        attend([70], [200], "none")
        attend([70], [200], "pages", dtype=torch.float32)
    assert len(found) == 4
