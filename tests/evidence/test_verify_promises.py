"""The checks of the promises find what they must: bits, transcripts and their commands."""

import contextlib
import functools

import pytest
import torch
from click.testing import CliRunner

import headstart
from headstart.cli.commands import headstart as command
from headstart.evidence import runs
from headstart.evidence.verify import bits, transcript
from headstart.evidence.verify.bits import CHECKS, Bits, verify_bits
from headstart.evidence.verify.transcript import (
    FORMS,
    Transcript,
    verify_transcript,
    verify_transcripts,
)
from headstart.runtime.dispatch import Declined
from headstart.runtime.static import TARGETS


@pytest.mark.parametrize("op", CHECKS)
def test_bits_are_equal(op):
    found = verify_bits(op, "torch")
    assert {one.check for one in found} == set(CHECKS[op][2])
    assert all(one.passed and one.compared for one in found), [one.where for one in found]


def test_processes_share_the_checks():
    told = []
    shared = verify_bits("causal_conv1d", "torch", jobs=2, told=told.append)
    assert shared == verify_bits("causal_conv1d", "torch")
    assert told == shared


def test_bits_of_a_run_that_is_cut_short_are_kept(monkeypatch, tmp_path):
    file, left = tmp_path / "bits.json", [3]
    compare = bits._bits

    def until_interrupted(*which):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return compare(*which)

    monkeypatch.setattr(bits, "_bits", until_interrupted)
    words = ["verify", "bits", "--op", "causal_conv1d", "--implementation", "torch", "--jobs", "1"]
    assert CliRunner().invoke(command, [*words, "--json", str(file)]).exit_code == 130
    assert len(runs.load(file, Bits, "bits").results) == 3


def test_what_a_device_is_about_to_launch_is_compiled_for_it_first(monkeypatch):
    """All of it: a rehearsal of the checks, whose programs come in the order of no check."""
    monkeypatch.setattr(bits, "target_of", lambda device: TARGETS["cuda:90"])
    monkeypatch.setattr(bits, "processors", lambda device: 132)
    compiled = []

    @contextlib.contextmanager
    def told(programs, jobs):
        compiled.extend(program.name for program in programs.values())
        yield

    monkeypatch.setattr(bits, "compiled", told)
    monkeypatch.setattr(bits, "spread", lambda calls, processes: calls if processes == 1 else None)
    monkeypatch.setattr(bits, "_bits", lambda *_: None)
    found = verify_bits("extend_attention", "triton", device="cuda", jobs=8)
    assert len(found) == 15
    # Long forms are cut, and have more work than programs.
    assert set(compiled) == {"unified_kernel", "join_kernel", "clear_kernel"}


def test_a_last_bit_that_depends_on_the_batch_is_found(monkeypatch):
    attend = headstart.extend_attention

    @functools.wraps(attend)
    def jitter(*args, plan, **kwargs):
        o, lse = attend(*args, plan=plan, **kwargs)
        if plan.N > 1:
            lse = torch.nextafter(lse, lse + 1)
        return o, lse

    monkeypatch.setattr(headstart, "extend_attention", jitter)
    found = {one.check: one for one in verify_bits("extend_attention", "torch")}
    assert not found["batches"].passed
    assert found["batches"].where.endswith("LSE")
    assert found["heads"].passed


@pytest.mark.parametrize("depends_on", ["batch", "history", "share"])
def test_a_convolution_that_depends_on_more_than_its_row_is_found(monkeypatch, depends_on):
    convolve = headstart.causal_conv1d

    @functools.wraps(convolve)
    def jitter(x, *args, schedule=None, state=None, **kwargs):
        found = convolve(x, *args, schedule=schedule, state=state, **kwargs)
        wrong = {
            "batch": schedule is not None and schedule.N > 1,
            "history": isinstance(state, torch.Tensor),
            "share": x.shape[1] < 72,
        }[depends_on]
        return found._replace(y=torch.nextafter(found.y, found.y + 1)) if wrong else found

    monkeypatch.setattr(headstart, "causal_conv1d", jitter)
    found = verify_bits("causal_conv1d", "torch")
    failed = {one.check for one in found if not one.passed}
    assert failed == {"batch": {"batches"}, "history": {"plain"}, "share": {"heads"}}[depends_on]


def test_transcripts_leave_out_the_forms_that_nobody_runs(monkeypatch):
    real = transcript.verify_transcript

    def picky(implementation, form, seed, **options):
        if form == "float32":
            raise Declined("only 16 bits")
        return real(implementation, form, seed, **options)

    monkeypatch.setattr(transcript, "verify_transcript", picky)
    found, left = verify_transcripts("torch", 5, 3, turns=5)
    assert left == {"float32": "only 16 bits"}
    _, second, third = FORMS
    assert [(one.form, one.seed) for one in found] == [(second, 5), (third, 6), (second, 7)]


def test_transcripts_in_processes_are_the_same_transcripts():
    alone, _ = verify_transcripts("torch", 0, 3, turns=4)
    shared, _ = verify_transcripts("torch", 0, 3, turns=4, processes=2)
    assert shared == alone


def test_a_transcript_is_as_its_replay_says():
    found = verify_transcript("torch", "float32", seed=3, turns=45)
    assert found.failure is None
    assert found.rows > 100
    assert 0 < found.excess <= 1
    assert found.events["stepped"] > 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [("scale", "is off by"), ("refuse", "a legal call was refused"), ("nan", "is off by")],
)
def test_a_transcript_that_goes_wrong_says_how(monkeypatch, fault, words):
    rule = headstart.gated_delta_rule

    def wrong(*args, schedule, **kwargs):
        found = rule(*args, schedule=schedule, **kwargs)
        if max(schedule.starts, default=0) > 0:
            if fault == "refuse":
                raise ValueError("start_positions: no")
            found.o.mul_(0.99 if fault == "scale" else torch.nan)
        return found

    monkeypatch.setattr(headstart, "gated_delta_rule", wrong)
    found = [verify_transcript("torch", "float32", seed=seed, turns=30) for seed in range(2)]
    assert any(words in (one.failure or "") for one in found)


def run(*arguments):
    return CliRunner().invoke(command, ["verify", *arguments], prog_name="headstart")


def test_the_commands_write_records(tmp_path):
    file = str(tmp_path / "run.json")
    done = run("transcript", "--count", "1", "--turns", "5", "--json", file)
    assert done.exit_code == 0, done.output
    assert runs.load(file, Transcript, "transcript").results[0].failure is None
    done = run("bits", "--op", "causal_conv1d", "--json", file)
    assert done.exit_code == 0, done.output
    # Once, not for each check.
    assert done.stdout.count("it runs only in Triton's interpreter") == 1
    assert " tensors compared, 0 with another bit" in done.stdout
    done = run("bits", "--op", "extend_attention", "--implementation", "torch", "--json", file)
    assert done.exit_code == 0, done.output
    assert all(one.passed for one in runs.load(file, Bits, "bits").results)
