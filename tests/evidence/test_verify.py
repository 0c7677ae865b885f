"""What `verify` measures, that it fails where it must, and its truths."""

import json
import re
import shlex
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import headstart
from headstart.cli.commands import headstart as command
from headstart.evidence import cases, runs
from headstart.evidence.oracles import delta, foreign
from headstart.evidence.verify import (
    COSINE_GATE,
    Tolerance,
    Verification,
    computing,
    verification,
    verify_case,
)
from headstart.evidence.verify.figures import Meter
from headstart.evidence.verify.references import truths
from headstart.evidence.verify.tolerances import tolerance

TIGHT = Tolerance(relative=1e-3, last_half=1e-3, row=1e-3, reason="a test")
SMALL = replace(cases.get("gdn-ragged-7seq-small"), id="test", H=1, HV=2, K=32, V=16,
                lengths=(15, 0, 70, 130))  # fmt: skip


def measured(found, truth, **options):
    meter = Meter("o", found, late=torch.arange(len(found)) >= len(found) // 2, **options)
    meter.add(slice(0, None), truth)
    return meter.measured(TIGHT)


def truth_of(rows=100, heads=3, size=8):
    return torch.randn(rows, heads, size, generator=torch.Generator().manual_seed(0)).double()


def test_equal_outputs_have_no_error():
    truth = truth_of()
    found = measured(truth.float(), truth)
    assert found.passed
    assert found.cosine == pytest.approx(1)
    assert found.excess < 1e-3


def test_one_wrong_row_is_found_where_it_is_though_the_cosine_is_blind():
    truth = truth_of(rows=2000)
    found = truth.float()
    found[77, 2] += 1.0
    one = measured(found, truth)
    assert (one.row, one.head) == (77, 2)
    assert not one.passed
    assert one.cosine_passes
    assert "row 77, head 2" in " ".join(one.failures)


def test_drift_shows_in_the_last_half():
    truth = truth_of()
    found = truth.clone()
    found[50:] *= 1.01
    one = measured(found.float(), truth)
    assert one.last_half == pytest.approx(0.01, rel=1e-3)
    assert one.relative < one.last_half
    assert one.cosine > COSINE_GATE


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_fail(value):
    truth = truth_of()
    found = truth.float()
    found[3, 1, 2] = value
    one = measured(found, truth)
    assert not one.passed
    assert one.excess == inf
    assert (one.nan, one.infinite) == ((1, 0) if value != value else (0, 1))


def test_an_infinity_that_belongs_there_is_right():
    truth = torch.tensor([[[-inf]], [[1.0]]], dtype=torch.float64)
    assert measured(truth.float(), truth, unit=1.0).passed
    assert not measured(-truth.float(), truth, unit=1.0).passed


@pytest.mark.parametrize(
    ("op", "output", "spacings"),
    [("gated_delta_rule", "o", 1.3), ("gated_delta_rule", "state", 1.6),
     ("extend_attention", "o", 0.48)],
)  # fmt: skip
def test_kernels_may_round_their_operands_and_no_more(op, output, spacings):
    truth = truth_of(rows=500, size=64)
    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)).double()
    asked = tolerance(op, output, "bfloat16", "bfloat16", "triton")

    def off_by(spacings):
        meter = Meter(output, truth * (1 + spacings * 2**-8 * noise))
        meter.add(slice(0, None), truth)
        return meter.measured(asked)

    assert off_by(spacings).passed
    assert not off_by(2.5 * spacings).passed


def test_pieces_of_heads_add_up_to_the_whole():
    truth = truth_of()
    found = (truth + 1e-4 * truth_of().flip(0)).float()
    whole = measured(found, truth)
    meter = Meter("o", found, late=torch.arange(100) >= 50)
    for heads in (slice(0, 1), slice(1, 3)):
        meter.add(heads, truth[:, heads])
    parts = meter.measured(TIGHT)
    assert parts.relative == pytest.approx(whole.relative)
    assert parts.row_error == pytest.approx(whole.row_error)
    assert (parts.row, parts.head) == (whole.row, whole.head)


def test_a_truth_that_leaves_heads_out_is_refused():
    meter = Meter("o", truth_of().float())
    meter.add(slice(0, 1), truth_of()[:, :1])
    with pytest.raises(ValueError, match="3 heads, got 1"):
        meter.measured(TIGHT)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_a_case_passes(implementation):
    found = verify_case(SMALL, implementation, kept=False)
    assert found.passed, found.failures
    assert [one.output for one in found.outputs] == ["o", "state"]
    assert 0 < found.excess <= 1


def spoiled(monkeypatch, change):
    """`gated_delta_rule` whose outputs are changed."""
    rule = headstart.gated_delta_rule

    def run(*args, **kwargs):
        found = rule(*args, **kwargs)
        change(found)
        return found

    monkeypatch.setattr(headstart, "gated_delta_rule", run)


def test_a_state_one_percent_off_fails_and_a_cosine_lets_it_live(monkeypatch):
    spoiled(monkeypatch, lambda found: found.state.mul_(0.99))
    found = verify_case(SMALL, "torch", kept=False)
    assert not found.passed
    assert found.cosine_passes
    assert found.excess > 100


def test_a_row_that_nobody_wrote_is_counted(monkeypatch):
    def leave(found):
        found.o[40] = computing.poison(torch.empty_like(found.o[40]))

    spoiled(monkeypatch, leave)
    found = verify_case(SMALL, "torch", kept=False)
    assert found.outputs[0].unwritten == 1
    assert any("unwritten rows 1" in words for words in found.failures)


def test_a_pool_slot_of_nobody_must_keep_its_bits(monkeypatch):
    case = replace(SMALL, state="pool")
    assert verify_case(case, "torch", kept=False).passed
    rule = headstart.gated_delta_rule

    def trespass(*args, state, **kwargs):
        found = rule(*args, state=state, **kwargs)
        free = next(n for n in range(64) if n not in state.read_slots)
        state.tensor[free] = 0
        return found

    monkeypatch.setattr(headstart, "gated_delta_rule", trespass)
    found = verify_case(case, "torch", kept=False)
    assert found.outputs[1].trespassed == 1
    assert not found.passed


def test_bits_that_waver_fail(monkeypatch):
    case = cases.get("gdn-1x128-small")
    found = verify_case(case, "torch", kept=False, repeats=3)
    assert (found.passed, found.repeats, found.differing) == (True, 3, ())
    compute, runs_so_far = verification.compute, []

    def wavering(*arguments, **options):
        found = compute(*arguments, **options)
        runs_so_far.append(found)
        if len(runs_so_far) == 2:
            found.outputs["state"].values = found.outputs["state"].values + 1e-6
        return found

    monkeypatch.setattr(verification, "compute", wavering)
    found = verify_case(case, "torch", kept=False, repeats=3)
    assert found.differing == ("state",)
    assert found.failures == ["state: other bits within 3 runs"]
    assert not found.passed


def test_a_named_implementation_that_declines_says_so():
    found = verify_case(SMALL, "torch", dtype=torch.float64, kept=False)
    assert "float64" in found.declined
    assert found.outputs == ()


def test_the_chunk_form_is_the_token_by_token_form():
    for values in ("typical", "late-forget", "repeat"):
        case = replace(SMALL, lengths=(150,), values=values)
        (call,) = case.steps(1, dtype=torch.float64)
        rows = [delta.wide(call[name]) for name in ("q", "k", "v", "g", "beta")]
        rows[:2] = (x.repeat(2, axis=1) for x in rows[:2])
        one = delta.replay(*rows, scale=0.5)
        other = delta.chunked(*rows, scale=0.5)
        for a, b in ((one.o, other.o), (one.state, other.state)):
            assert np.linalg.norm(a - b) <= 1e-12 * np.linalg.norm(a)
        places = delta.replay(*rows, scale=0.5, device="cpu")
        assert np.abs(places.o.numpy() - one.o).max() < 1e-14


def test_truths_are_kept_by_case_seed_and_inputs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = list(truths(SMALL))
    (file,) = tmp_path.rglob("*.pt")
    assert file.parent.parent.name == "test"
    calls = []
    replay = delta.replay
    monkeypatch.setattr(delta, "replay", lambda *a, **k: calls.append(1) or replay(*a, **k))
    again = list(truths(SMALL))
    assert not calls
    assert all(torch.equal(first[0][1][name], again[0][1][name]) for name in first[0][1])
    list(truths(SMALL, seed=1))
    list(truths(replace(SMALL, values="flat")))
    assert len(calls) == 2 * 4
    file.write_bytes(b"cut short")
    assert torch.equal(next(truths(SMALL))[1]["o"], first[0][1]["o"])
    list(truths(SMALL, kept=False))
    assert len(list(tmp_path.rglob("*.pt"))) == 3


@pytest.mark.parametrize("id", ["edge-4-small", "oss-512-on-512-win-small", "fp8-cache-small"])
def test_attention_by_parts_and_merged(id):
    case = cases.get(id)
    case = replace(case, lengths=(min(case.lengths[0], 40),), prefixes=(100,))
    found = verify_case(case, "torch", kept=False)
    assert found.passed, found.failures
    assert [one.output for one in found.outputs] == ["o", "LSE", "merged o", "merged LSE"]


def test_a_whole_layer_with_its_history():
    case = replace(cases.get("block-next-8k-small"), H=1, HV=2, K=32, V=32, lengths=(100,))
    found = verify_case(case, "torch", kept=False)
    assert found.passed, found.failures
    assert [one.output for one in found.outputs] == [
        "convolution", "o", "norm", "state", "history",
    ]  # fmt: skip


@pytest.mark.parametrize("against", ["onnxruntime", "transformers"])
def test_neighbours_agree(against):
    pytest.importorskip(against)
    case = replace(SMALL, lengths=(130,), dtype="float32")
    found = verify_case(case, "torch", against=against, kept=False)
    assert found.declined is None
    assert found.passed, found.failures


def test_an_unknown_neighbour_is_refused():
    with pytest.raises(ValueError, match="against"):
        foreign.outputs("oracle", SMALL, 0, torch.device("cpu"), None)


# The command line


def run(*arguments):
    return CliRunner().invoke(command, ["verify", *arguments], prog_name="headstart")


def test_what_is_left_out_for_one_reason_is_one_line():
    done = run("gdn-1x128-small", "gdn-residual-512-small", "--implementation", "all")
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if "it runs on NVIDIA Hopper alone" in line]
    assert len(lines) == 1
    assert lines[0].startswith("gdn-1x128-small and 1 more")
    assert "4 passed, 0 failed, 4 declined" in done.output


def test_commands_of_the_document_are_commands():
    document = (Path(__file__).parents[2] / "docs/verify.md").read_text()
    lines = re.findall(r"^\$ headstart (.*)$", document, re.M)
    assert {line.split()[1] for line in lines} >= {"bits", "transcript", "tiles", "mutants"}
    for line in lines:
        # Options are parsed before help is shown.
        done = CliRunner().invoke(command, [*shlex.split(line), "--help"])
        assert done.exit_code == 0, f"{line}: {done.output}"


def test_the_command_writes_a_record_that_reads_back(tmp_path):
    file = tmp_path / "run.json"
    done = run("gdn-1x1-small", "--no-cache", "--jobs", "1", "--implementation", "torch",
               "--json", str(file))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "1 passed, 0 failed" in done.stdout
    record = runs.load(file, Verification, "verify")
    assert record.results[0].passed
    assert record.results[0].outputs[0].tolerance.reason
    assert record.environment.version["torch"] == torch.__version__


@pytest.mark.parametrize("jobs", [1, 2])
def test_cases_of_a_run_that_is_cut_short_are_kept(monkeypatch, tmp_path, jobs):
    file = tmp_path / "run.json"
    (one,) = verification.verify_many([(cases.get("gdn-1x1-small"), "torch")], kept=False)

    def found():
        yield one
        raise KeyboardInterrupt

    answers = found()
    monkeypatch.setattr(verification, "spread", lambda calls, processes: answers)
    monkeypatch.setattr(verification, "verify_case", lambda *_, **__: next(answers))
    done = run("gdn-1x1-small", "gdn-1x128-small", "--implementation", "torch",
               "--jobs", str(jobs), "--json", str(file))  # fmt: skip
    assert done.exit_code == 130
    assert runs.load(file, Verification, "verify").results == [one]


def test_a_failure_exits_with_1_and_names_the_figure(monkeypatch):
    spoiled(monkeypatch, lambda found: found.state.mul_(0.99))
    done = run("gdn-1x1-small", "--no-cache", "--jobs", "1", "--implementation", "torch")
    assert done.exit_code == 1
    assert "gdn-1x1-small: torch: state: relative 0.01 >" in done.stderr
    assert "a cosine gate would have let 1 of 1 failures pass" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gdn-nxt-8k"], "near: gdn-next-8k"),
        (["gpt-oss-20b"], "whole model"),
        (["gdn-1x1-small", "--op", "extend_attention"], "is a case of gated_delta_rule"),
        (["gdn-1x1-small", "--implementation", "cuda"], "implementation: expected all or one of"),
        (["gdn-1x1-small", "--implementation", "hopper"], "nothing was verified"),
        (["gdn-1x1-small", "--against", "sdpa"], "sdpa: computes softmax attention, not"),
        (["gdn-1x1-small", "--device", "toaster"], "device: toaster"),
        (["gdn-1x1-small", "--json", "/nowhere/run.json"], "no folder"),
        (["tiles", "--tiling", "64"], "tiling: expected ROWSxKEYS"),
        (["transcript", "--implementation", "hopper"], "nothing was verified"),
        (["bits", "--implementation", "hopper"], "nothing was verified"),
    ],
)
def test_mistakes_give_one_line_and_code_2(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert len(done.stderr.strip().splitlines()) == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: "not json", "is no JSON"),
        (lambda data: "[]", "schema_version: missing"),
        (lambda data: json.dumps(data | {"schema_version": 99}), "expected 1, got 99"),
        (lambda data: json.dumps(data | {"kind": "bench"}), "kind: expected 'verify', got 'bench'"),
        (lambda data: json.dumps(data | {"results": [{"case": 1}]}), "results.0"),
    ],
)
def test_records_that_do_not_read_name_file_and_field(tmp_path, change, words):
    file = tmp_path / "run.json"
    runs.save(file, "verify", [])
    file.write_text(change(json.loads(file.read_text())))
    with pytest.raises(ValueError, match=r"run\.json") as caught:
        runs.load(file, Verification, "verify")
    assert words in str(caught.value)


def test_records_keep_no_folders_of_the_machine_they_were_made_on(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_BUNDLE", str(tmp_path / "programs"))
    file = tmp_path / "run.json"
    runs.save(file, "trace", [], {"trace_file": str(tmp_path / "trace.jsonl"), "ratio": "1/2"})
    assert str(tmp_path) not in file.read_text()
    kept = runs.load(file)
    assert kept.options == {"trace_file": "trace.jsonl", "ratio": "1/2"}
    assert kept.environment.variable["HEADSTART_BUNDLE"] == "programs"
