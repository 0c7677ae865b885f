"""Processes that were forked from one that has computed, and such as begin anew.

A forked child computes with one of PyTorch's threads, as those of its data loaders do: GNU OpenMP
hangs in a child whose parent has used several.
"""

import multiprocessing
import queue

import pytest
import torch
from tests.runtime.traced_calls import FORMS, World, outcome, same_bits

import headstart
from headstart import DeltaCache, Schedule

SECONDS = 120
"""A child that is not back by then hangs."""
NAMES = ("rule_cache", "convolution_cache", "attention", "attention_parts", "norm", "write")


def bits(x: torch.Tensor) -> bytes:
    # PyTorch would share a tensor's memory through a file that ends with the child.
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def results() -> list[torch.Tensor]:
    """What calls of every operation give, and what they change."""
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        for name in NAMES:
            world = World()
            found += outcome(world, FORMS[name](world)())
    return found


def answer(sink) -> None:
    torch.set_num_threads(1)
    sink.put([*map(bits, results())])


@pytest.fixture
def threads_put_back():
    """What sets the number of PyTorch's threads, which is put back."""
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_computes_what_its_parent_does(method, threads_put_back):
    results()  # with threads, where PyTorch has some
    threads_put_back(1)
    wanted = results()
    context = multiprocessing.get_context(method)
    sinks = [context.Queue() for _ in range(2)]
    children = [context.Process(target=answer, args=(sink,), daemon=True) for sink in sinks]
    for child in children:
        child.start()
    try:
        answers = [sink.get(timeout=SECONDS) for sink in sinks]
        for child in children:
            child.join(SECONDS)
        assert [child.exitcode for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
    mine = [*map(bits, wanted)]
    assert all(theirs == mine for theirs in answers)
    assert same_bits(results(), wanted)


def go_on(schedule, cache, rows, sink) -> None:
    torch.set_num_threads(1)
    how = {"schedule": schedule, "state": cache.at([0]), "qk_l2norm": True}
    with torch.inference_mode():
        sink.put(bits(headstart.gated_delta_rule(*rows, **how).o))


@pytest.mark.usefixtures("threads_put_back")
def test_a_forked_child_goes_on_with_its_copy_of_a_cache():
    """And leaves its parent's where it was."""
    H, HV, K, V = 1, 2, 16, 16
    cache = DeltaCache(1, H=H, HV=HV, K=K, V=V, dtype=torch.float32, device="cpu")
    rows = torch.randn(70, H, K), torch.randn(70, H, K), torch.randn(70, HV, V), None, None
    context, here = multiprocessing.get_context("fork"), queue.SimpleQueue()
    go_on(Schedule([70], device="cpu"), cache, rows, here)
    here.get()
    before = {name: x.clone() for name, x in cache.tensors.items()}
    later = Schedule([70], start_positions=[70], device="cpu")
    sink = context.Queue()
    child = context.Process(target=go_on, args=(later, cache, rows, sink), daemon=True)
    child.start()
    theirs = sink.get(timeout=SECONDS)
    child.join(SECONDS)
    assert all(torch.equal(cache.tensors[name], x) for name, x in before.items())
    go_on(later, cache, rows, here)
    assert here.get() == theirs
