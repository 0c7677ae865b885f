"""A soak finds other bits, values far off, lost memory and hanging threads, and passes without."""

import functools
import os
import random
import threading
import time

import pytest
import torch
from click.testing import CliRunner
from tests.implementations import DEVICE, INTERPRETED, KERNELS

import headstart
from headstart import DeltaCache
from headstart.cli.commands import headstart as command
from headstart.evidence import runs
from headstart.evidence.verify import soak as soaks
from headstart.evidence.verify.soak import Sample, Soak, soak
from headstart.runtime.static import TARGETS

MIB = 2**20


def changed(monkeypatch, name, change):
    """Let what an operation gives be changed: `change(result, call's keywords)`."""
    real = getattr(headstart, name)

    @functools.wraps(real)
    def call(*args, **kwargs):
        return change(real(*args, **kwargs), kwargs)

    monkeypatch.setattr(headstart, name, call)


def next_float(x):
    return torch.nextafter(x, x + 1)


def in_a_batch(given):
    return given.get("schedule", given.get("plan")).N > 1


def drafted(given):
    return any(given["schedule"].drafts)


def resumed(given):
    """Slot 0 is that of sequences alone; after a hit they bring other counts than drafts do."""
    schedule, state = given["schedule"], given.get("state")
    alone = state is not None and list(state.slots) == [0]
    return alone and schedule.starts[0] and schedule.T != soaks.DRAFTS


@pytest.mark.kernels
@pytest.mark.skipif(INTERPRETED, reason="a lap takes minutes in the interpreter")
@pytest.mark.parametrize("implementation", ["triton", "hopper"] if KERNELS else ["torch"])
def test_threads_keep_their_bits_and_the_process_its_memory(implementation):
    device = torch.device(DEVICE)
    if implementation == "hopper" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("Hopper's kernels are for Hopper")
    jobs = len(os.sched_getaffinity(0))
    found = soak(implementation, device=device, seconds=3.0, threads=3, jobs=jobs)
    assert found.failures == []
    assert found.laps > found.threads
    assert found.compared > found.laps
    assert set(found.calls) == {
        "causal_conv1d", "extend_attention", "gated_delta_rule", "write_kv",
    }  # fmt: skip
    assert len(found.samples) > 1
    assert found.samples[-1].seconds >= 3.0


def test_what_laps_launch_on_a_gpu_is_known_beforehand(monkeypatch):
    monkeypatch.setattr(soaks, "target_of", lambda device: TARGETS["cuda:90"])
    monkeypatch.setattr(soaks, "processors", lambda device: 132)
    monkeypatch.setattr(soaks, "REHEARSED", 3)
    found = soaks._programs("triton", torch.device("cuda"), 0, 2)
    names = {program.name for program in found.values()}
    assert names >= {"convolve_kernel", "prepare_kernel", "scan_kernel", "write_kernel",
                     "extend_kernel", "unified_kernel"}  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "when", "says"),
    [
        ("gated_delta_rule", in_a_batch, "o of the rule"),
        ("gated_delta_rule", drafted, "o of the rule of drafts"),
        ("gated_delta_rule", resumed, "o of the rule after a hit"),
        ("causal_conv1d", in_a_batch, "the convolution"),
        ("causal_conv1d", drafted, "the convolution of drafts"),
        ("causal_conv1d", resumed, "the convolution after a hit"),
        ("extend_attention", in_a_batch, "o of attention"),
    ],
)
def test_a_bit_that_depends_on_the_batch_ends_it(monkeypatch, operation, when, says):
    def jitter(found, given):
        if not when(given):
            return found
        if isinstance(found, torch.Tensor):
            return next_float(found)
        name = found._fields[0]
        return found._replace(**{name: next_float(getattr(found, name))})

    changed(monkeypatch, operation, jitter)
    found = soak("torch", seconds=5.0, threads=1)
    assert f"{says} has other bits alone than in its batch" in found.failure
    assert found.failures == [found.failure]


@pytest.mark.parametrize("hits", [False, True])
def test_a_state_that_differs_ends_it(monkeypatch, hits):
    real, copied = DeltaCache.export, []
    copy = DeltaCache.copy

    def copying(self, *slots):
        copied.append(slots)
        copy(self, *slots)

    def export(self, slots):
        positions, states, histories = real(self, slots)
        other = len(slots) == 1 and copied if hits else len(slots) > 1
        return positions, next_float(states) if other else states, histories

    monkeypatch.setattr(DeltaCache, "copy", copying)
    monkeypatch.setattr(DeltaCache, "export", export)
    says = "a state after a hit" if hits else "a state"
    failure = soak("torch", seconds=5.0, threads=1).failure
    assert f"{says} has other bits alone than in its batch" in failure


def test_sequences_that_bring_no_token_are_not_counted():
    life = soaks.Life("torch", torch.device("cpu"), 0, 0)
    totals = [soaks.Drawn(life, random.Random(seed)).total for seed in range(5)]
    with torch.inference_mode():
        for seed in range(5):
            life.lap(random.Random(seed))
    assert life.sequences == sum(total > 0 for batch in totals for total in batch)
    assert life.sequences < sum(map(len, totals))


def test_many_sequences_are_short_ones_that_bring_tokens():
    life = soaks.Life("torch", torch.device("cpu"), 0, 0)
    life.most = soaks.MOST
    batches = [soaks.Drawn(life, random.Random(seed)).first for seed in range(50)]
    large = [batch for batch in batches if len(batch) == max(soaks.SEQUENCES)]
    assert large
    for batch in large:
        assert sum(batch) <= soaks.MOST
        assert sum(length > 0 for length in batch) > len(batch) / 2


def test_a_default_mode_that_is_far_off_ends_it(monkeypatch):
    def off(found, given):
        return found if given.get("reproducible") else 1.05 * found

    changed(monkeypatch, "extend_attention", off)
    assert "of the default mode is off" in soak("torch", seconds=2.0, threads=1).failure


def test_a_refusal_of_a_legal_call_ends_it(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("slots: expected fewer")

    monkeypatch.setattr(headstart, "write_kv", refuse)
    found = soak("torch", seconds=2.0, threads=2)
    assert "lap 0: ValueError: slots: expected fewer" in found.failure


def test_a_thread_that_hangs_is_told_with_its_stack(monkeypatch, capfd):
    woken = threading.Event()
    monkeypatch.setattr(soaks, "PATIENCE", 1.0)
    monkeypatch.setattr(headstart, "write_kv", lambda *args, **kwargs: woken.wait(60))
    began = time.monotonic()
    found = soak("torch", seconds=5.0, threads=1)
    woken.set()
    assert found.failure == "hangs for 1 s: thread 0 in lap 0"
    assert time.monotonic() - began < 30
    assert "in attention" in capfd.readouterr().err


def held(*megabytes, name="device_bytes"):
    """A soak whose samples hold so much of each name."""
    names = (name,) if isinstance(name, str) else name
    base = {"host_bytes": 10 * MIB, "device_bytes": 10 * MIB, "scratch_bytes": 0}
    samples = [
        Sample(seconds=n, laps=n, **base | dict.fromkeys(names, int(size * MIB)))
        for n, size in enumerate(megabytes)
    ]
    return Soak(implementation="triton", device="cuda", seed=0, threads=1, seconds=9.0, laps=9,
                sequences=9, calls={}, compared=9, samples=samples, failure=None)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "lost"),
    [
        (held(1, 100, 100), False),
        (held(100, 100, 100.5), False),
        (held(100, 100, 102), True),
        (held(100, 102), True),
        (held(100), False),
        (held(100, 100, 100, 102), True),
        (held(100, 100, 120, name=("device_bytes", "scratch_bytes")), False),
        (held(0, 0, 0, name="device_bytes"), False),
        (held(100, 100, 160, name="host_bytes"), False),
        (held(100, 100, 200, name="host_bytes"), True),
    ],
)
def test_memory_may_grow_at_first_but_not_for_ever(found, lost):
    assert bool(found.failures) == lost
    if lost:
        assert "more at the end than in the middle" in found.failures[0]


def test_the_command_keeps_what_it_found(tmp_path):
    file = tmp_path / "soak.json"
    words = ["verify", "soak", "--seconds", "0.5", "--threads", "2", "--json", str(file)]
    result = CliRunner().invoke(command, words, prog_name="headstart")
    assert result.exit_code == 0, result.output
    assert "torch" in result.output
    (found,) = runs.load(file, Soak, "soak").results
    assert found.threads == 2
    assert found.samples[-1].seconds >= 0.5
