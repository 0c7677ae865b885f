"""Tuning against a clock whose truth is planted, and once for real in Triton's interpreter."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("click")
pytest.importorskip("pydantic")

from tests.implementations import KERNELS

from headstart.cli import main
from headstart.evidence import cases, runs
from headstart.evidence.simulated_clock import SimulatedClock
from headstart.evidence.tuning import points as points_module
from headstart.evidence.tuning import sweep as sweep_module
from headstart.evidence.tuning.candidates import LADDERS, candidates, neighbours
from headstart.evidence.tuning.job import Kept, chosen_points, table_at, tune
from headstart.evidence.tuning.points import points_of, shortened
from headstart.evidence.tuning.results import KeyResult, LeftOut, worst
from headstart.evidence.tuning.sweep import compiled, plan, rehearsed, sweep
from headstart.ops.extend_attention.triton.config import Config, configuration
from headstart.ops.gated_delta_rule.triton.scan import ScanConfig
from headstart.runtime import dispatch, tables
from headstart.runtime.bundle import Bundle
from headstart.runtime.bundle_launch import BUNDLE
from headstart.runtime.static import TARGETS
from headstart.runtime.table_files import Device, Row, Table

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")

CPU = torch.device("cpu")
CASE = "edge-11-small"  # one token under a window of 127


@pytest.fixture
def swept(monkeypatch):
    """The keys of a case that `torch` computes in place of the kernels, and their points."""
    monkeypatch.setattr(points_module, "KERNELS", "torch")
    return plan(chosen_points("extend_attention", [CASE], dtype="float16"), CPU)


class Clock:
    """A simulated clock on which configurations truly take what `truth` says."""

    name, flushed = "simulated", "nothing"

    def __init__(self, truth, seed=1):
        self._clock, self._truth = SimulatedClock(seed), truth

    def __call__(self, arms, device):
        return self

    def round(self, arms):
        return [self._clock.launch(self._truth(arm.name), i) for i, arm in enumerate(arms)]


def level(name):
    return 1.0


def found_with(swept, truth, **options):
    key, (rule, points) = next(iter(swept.keys.items()))
    return sweep(key, rule, points, device=CPU, clocks=Clock(truth), rounds=40, **options)


def test_the_faster_one_is_chosen_and_the_rules_regret_is_told(swept):
    def truth(name):
        return 0.8 if "BN=16" in name else 0.9 if "BN=64" in name else 1.0

    found = found_with(swept, truth)
    assert found.decided
    assert found.chosen.configuration == replace(found.rule, BN=16)
    assert found.regret == pytest.approx(0.25, abs=0.03)
    assert [point.moved for point in found.points()] == [False]
    row = found.row("3.6.0", "2026-11-30")
    assert row.configuration == found.chosen.configuration
    assert row.runner_up.fields == asdict(replace(found.rule, BN=64))
    assert row.runner_up.ratio == pytest.approx(0.9 / 0.8, abs=0.03)
    assert list(row.milliseconds) == [CASE]
    # Up to a regret that is asked for the rule's is kept, and what was faster stands beside it.
    assert found.row("3.6.0", "2026-11-30", gain=0.2) == row
    kept = found.row("3.6.0", "2026-11-30", gain=0.3)
    assert kept.fields == asdict(found.rule)
    assert kept.runner_up.fields == row.fields
    assert kept.runner_up.ratio == pytest.approx(0.8, abs=0.03)
    assert kept.milliseconds != row.milliseconds
    assert worst(found.points()) == found.points()[0].rule_regret == pytest.approx(0.25, abs=0.03)
    cells = dict(zip(KeyResult.COLUMNS, found.result("cpu").cells, strict=True))
    assert cells["chosen"] == f"BN {found.rule.BN} -> 16"
    assert cells["second"].endswith(" BN 16 -> 64")
    assert float(cells["ratio"]) == pytest.approx(0.8, abs=0.02)
    assert (cells["points"], cells["out"]) == (1, 0)


def test_where_nothing_is_faster_beyond_doubt_the_rule_stays(swept):
    found = found_with(swept, level)
    assert not found.decided
    assert found.chosen.configuration == found.rule
    assert found.regret < 0.01
    assert worst(found.points()) == 0.0
    assert len(found.trials) == len(candidates(found.key, found.rule, "cuda:90")) + 1
    result = found.result("cpu")
    assert result.cells[1:3] == ("the rule's", "1.000")
    assert result.chosen == result.rule == asdict(found.rule)


def test_walks_go_on_from_the_fastest(swept):
    def truth(name):
        return 0.7 if "BN=128" in name else 0.9 if "BN=64" in name else 1.0

    assert found_with(swept, truth).chosen.configuration.BN == 64
    assert found_with(swept, truth, walks=3).chosen.configuration.BN == 128


def test_a_ranking_that_moves_with_the_length_is_told(monkeypatch):
    monkeypatch.setattr(points_module, "KERNELS", "torch")
    chosen = chosen_points("extend_attention", ["oss-512-on-512-win-small"], [1, 0.1], "float16")
    swept = plan([point for point in chosen if not point.reproducible], CPU)
    clocks = iter([
        Clock(lambda name: 0.7 if "BN=16" in name else 1.0),
        Clock(lambda name: 0.9 if "BN=64" in name else 1.0),
    ])  # fmt: skip
    ((key, (rule, points)),) = swept.keys.items()
    found = sweep(
        key, rule, points, device=CPU, rounds=40, clocks=lambda arms, device: next(clocks)
    )
    assert found.chosen.configuration == replace(found.rule, BN=16)
    whole, short = found.points()
    assert (whole.moved, short.moved) == (False, True)
    assert short.fastest["BN"] == 64
    assert short.chosen_regret == pytest.approx(1 / 0.9 - 1, abs=0.03)


def changing(monkeypatch, change):
    """Let what configurations of tiles of 16 keys compute be changed."""
    run = dispatch.run

    def computed(operation, call, name=None):
        found = run(operation, call, name)
        rows = tables._using.get() or {}
        return change(found) if any(x.BN == 16 for x in rows.values()) else found

    monkeypatch.setattr(dispatch, "run", computed)


def fails(found):
    raise RuntimeError("out of\nshared memory")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o * 1.02, "o: relative 0.02"),
        (lambda o: torch.full_like(o, math.nan), "NaN"),
        (lambda o: o + 2**-6 * torch.rand_like(o).round(), "o: two runs give different bits"),
        (fails, "RuntimeError: out of shared memory"),
    ],
)
def test_a_wrong_configuration_is_out_however_fast(swept, monkeypatch, change, words):
    changing(monkeypatch, change)
    found = found_with(swept, lambda name: 0.5 if "BN=16" in name else 1.0)
    refused = [trial for trial in found.trials if trial.refused]
    assert [trial.configuration.BN for trial in refused] == [16]
    assert words in refused[0].refused
    assert found.chosen.configuration == found.rule


def test_every_configuration_begins_with_the_histories_of_the_first(monkeypatch):
    monkeypatch.setattr(points_module, "KERNELS", "torch")
    swept = plan(chosen_points("causal_conv1d", ["block-residual-512-small"]), CPU)
    found = found_with(swept, level)
    assert len(found.trials) > 2
    assert not any(trial.refused for trial in found.trials)


def test_a_rule_that_fails_is_an_error(swept, monkeypatch):
    monkeypatch.setattr(dispatch, "run", lambda *call: fails(None))
    with pytest.raises(ValueError, match=r"unified|extend.*the rule's own configuration fails"):
        found_with(swept, level)


def test_what_was_measured_is_kept_when_it_is_interrupted(swept, tmp_path):
    rounds = iter(range(1000))

    def truth(name):
        if next(rounds) > 400:  # in the second key
            raise KeyboardInterrupt
        return 0.8 if "BN=16" in name else 1.0

    table, record = tmp_path / "table.json", tmp_path / "run.json"
    keep = Kept(table_at(table, CPU), record, {"op": "extend_attention"})
    assert len(swept.keys) == 2
    with pytest.raises(KeyboardInterrupt):
        tune(swept, CPU, keep, clocks=Clock(truth), rounds=20)
    assert sorted(os.listdir(tmp_path)) == ["run.json", "table.json"]
    first = next(iter(swept.keys))
    assert [row.key for row in Table.read(table).rows] == [first]
    result, left = runs.load(record, KeyResult | LeftOut, "tune").results
    assert result.key == str(first)
    assert left == LeftOut(what=str(next(reversed(swept.keys))), why="not reached")
    # The next run adds to it.
    keep = Kept(table_at(table, CPU))
    tune(swept, CPU, keep, clocks=Clock(level), rounds=5)
    assert {row.key for row in Table.read(table).rows} == set(swept.keys)


def test_no_key_is_begun_after_the_time(swept):
    keep, done = Kept(), []
    tune(swept, CPU, keep, seconds=0, clocks=Clock(level), count=done.append)
    assert (list(keep.left_out), keep.found, done) == ([str(key) for key in swept.keys], [], [])
    tune(swept, CPU, keep, rounds=3, clocks=Clock(level), count=done.append)
    assert (keep.left_out, done) == ({}, [1, 2])
    assert [one.key for one in keep.found] == [str(key) for key in swept.keys]


def test_what_no_kernel_computes_is_told():
    found = plan(chosen_points("extend_attention", ["fp8-cache-small"]), CPU)
    keep = Kept()
    tune(replace(found, keys={}), CPU, keep)
    assert keep.left_out == found.left_out
    assert "new_in_cache=True" in keep.left_out["fp8-cache-small reproducible"]


def test_what_others_compute_by_default_is_left_out(monkeypatch):
    for module in (sweep_module, tables):
        monkeypatch.setattr(module, "target_of", lambda device: TARGETS["cuda:90"])
    monkeypatch.setattr(sweep_module, "processors", lambda device: 132)
    points = [*points_of("gated_delta_rule", cases.get("gdn-next-8k"))]
    points += points_of("gated_delta_rule", cases.get("gdn-dk256"))
    found = plan(points, torch.device("cuda", 0))
    assert found.left_out == {"gdn-next-8k": "hopper computes it, whose kernels have no rows."}
    assert {key.sizes for key in found.keys} == {(256, 256)}


def test_a_table_of_another_device_is_not_written(tmp_path):
    Table(tmp_path / "table.json", Device("NVIDIA H200", "cuda:90"), ()).write()
    with pytest.raises(ValueError, match=r"output: expected a table for interpreter"):
        table_at(tmp_path / "table.json", CPU)


@pytest.mark.parametrize("width", [64, 128, 256, 512])
@pytest.mark.parametrize("windowed", [False, True])
def test_what_is_tried_is_one_change_away_and_can_be_built(width, windowed):
    rule = configuration(width, width, torch.bfloat16, windowed=windowed)
    tried = neighbours(rule)
    assert rule not in tried
    assert len(set(tried)) == len(tried) > 6
    for one in tried:
        changed = {name for name, x in asdict(one).items() if getattr(rule, name) != x}
        assert len(changed) == 1 or changed == {"BM", "warps"}
        assert all(getattr(one, name) in LADDERS[name] for name in changed)
        assert one.piece % one.BN == 0


def test_pieces_hold_whole_tiles():
    assert not [one for one in neighbours(Config(64, 128, 1, 4, piece=512)) if one.piece % one.BN]
    assert ScanConfig(64, 8, 3) in neighbours(ScanConfig(64, 4, 3))


def test_only_what_changes_a_launch_is_swept():
    """Attention asks twice where cached keys cannot be copied as the first answer would."""
    found = plan(chosen_points("extend_attention", ["paged-1-small"]), CPU)
    assert [key.switches for key in found.keys] == [("scattered", "listed"), (), ("scattered",)]
    assert [key.kernel for key in found.keys] == ["extend", "unified", "unified"]
    mixed = plan(chosen_points("extend_attention", ["fp8-cache-small"]), CPU)
    assert [key.switches for key in mixed.keys] == [("scattered", "fp8")]
    assert list(mixed.left_out) == ["fp8-cache-small reproducible"]


@pytest.mark.parametrize(
    ("operation", "case", "kernels"),
    [
        ("gated_delta_rule", "gdn-next-8k", ["prepare", "scan"]),
        ("gated_delta_rule", "block-residual-512", ["prepare", "scan"]),
        ("causal_conv1d", "block-residual-512", ["convolve"]),
        ("causal_conv1d", "conv-next-18778", ["convolve"]),
        ("rms_norm_gated", "block-residual-512", ["norm"]),
    ],
)
def test_every_operation_has_its_keys(operation, case, kernels):
    found = plan(list(points_of(operation, cases.get(case))), CPU)
    assert sorted(key.kernel for key in found.keys) == kernels


def test_keys_that_share_an_order_of_sums_are_swept_one_after_the_other(tmp_path):
    """What the first found holds for the second, which is measured with it and no other."""
    points = chosen_points("extend_attention", ["paged-1-small"], dtype="float16")
    planned = plan(points, CPU)
    first, second = (key for key in planned.keys if key.kernel == "unified")
    (point,) = planned.keys[second][1]
    rule, _ = planned.keys[first]
    other = replace(rule, BN=rule.BN // 2)
    day = {"milliseconds": {}, "runner_up": None, "triton": "3.6.0", "date": "2026-11-30"}
    old = [Row(second, asdict(rule), **day)]
    keep = Kept(Table(tmp_path / "table.json", tables.INTERPRETER, tuple(old)))
    assert keep.beside(first) == keep.beside(second) == {}
    assert keep.table is not None
    keep.table = keep.table.changed([Row(first, asdict(other), **day)])
    assert [row.key for row in keep.table.rows] == [first]  # the old one would have other sums
    assert keep.beside(second) == {first: other}
    asked = rehearsed(point, keep.beside(second), CPU).asked
    assert asked == {first: other, second: other}


def test_states_at_given_positions_forbid_shorter_lengths():
    given = [case for case in cases.catalogue("gated_delta_rule") if case.snapshot_positions]
    assert given
    assert shortened(given[0], 0.5) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--op", "extend_attention", "--cases", "none-*"], "no case of extend_attention fits"),
        (["--op", "causal_conv1d", "--cases", "llama-16k"], "no case of causal_conv1d fits"),
        (["--op", "extend_attention", "--shares", "1,2"], "shares: expected numbers in"),
        (["--op", "extend_attention", "--shares", "0.5,0.50"], "each once"),
        (["--op", "extend_attention", "--dtype", "int8"], "dtype: expected one of"),
        (["--op", "extend_attention", "--seconds", "nan"], "'--seconds': nan is no number of"),
        (["--op", "extend_attention", "--device", "tpu"], "device: tpu"),
        (["--op", "extend_attention", "--device", "cpu"], "only in Triton's interpreter"),
        (["--op", "extend_attention", "-o", "/nowhere/t.json"], "output: no folder for"),
        (["--op", "extend_attention", "--json", "/nowhere/r.json"], "json: no folder for"),
        (["--op", "extend_attention", "-o", "t.json", "--json", "./t.json"], "would replace it"),
    ],
)
def test_mistakes_at_the_command_line_are_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["tune", *words])
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.slow
def test_the_command_tunes_in_the_interpreter(tmp_path):
    words = "tune --op causal_conv1d --cases block-residual-512-small --dtype float16 --rounds 3"
    words += " --gain 1000"  # whatever is the fastest
    table, record = tmp_path / "table.json", tmp_path / "run.json"
    run = subprocess.run(
        [sys.executable, "-m", "headstart.cli", *words.split(), "-o", table, "--json", record],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    assert "causal_conv1d/convolve" in run.stdout
    (row,) = Table.read(table).rows
    assert row.key.operation == "causal_conv1d"
    (result,) = json.loads(record.read_text())["results"]
    assert row.fields == result["rule"]
    assert all(len(trial["measured"]) == 1 for trial in result["trials"] if not trial["refused"])


@pytest.mark.slow
def test_first_steps_are_compiled_side_by_side_beforehand(monkeypatch, tmp_path):
    """As for a device: into a bundle that is used while the sweep lasts."""
    device = torch.device("cuda", 0)
    for module in (sweep_module, tables):
        monkeypatch.setattr(module, "target_of", lambda device: TARGETS["cuda:90"])
    monkeypatch.setattr(sweep_module, "processors", lambda device: 132)
    monkeypatch.delenv(BUNDLE, raising=False)
    swept = plan(chosen_points("rms_norm_gated", ["block-next-8k"]), device)
    ((key, (rule, _)),) = swept.keys.items()
    told = []
    with compiled(swept, device, 2, told.append):
        folder = Path(os.environ[BUNDLE])
        held = Bundle(folder)
        names = {artefact.fields["kernel"] for artefact in held.artefacts()}
        tried = candidates(key, rule, "cuda:90")
        assert len(list(held.artefacts())) == len(tried) + 1 == len(told)
    assert names == {"norm_kernel"}
    assert BUNDLE not in os.environ
    assert not folder.exists()
