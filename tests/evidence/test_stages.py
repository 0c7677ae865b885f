"""`headstart bench stages`: where a call's time goes, with variants of the case."""

import json
import sys
import types

import pytest
import torch
from click.testing import CliRunner

import headstart as package
from headstart.cli.commands import headstart
from headstart.evidence import cases
from headstart.evidence.runs import load
from headstart.evidence.stages import StagesResult, stages_of_case, variants

CPU = torch.device("cpu")
TINY = "gdn-1x1-small"


def run(*arguments):
    return CliRunner().invoke(headstart, ["bench", *arguments], prog_name="headstart")


def test_stages_run_every_variant_and_compare():
    case = cases.get("gdn-1x128-small")
    found = stages_of_case(
        case, ["torch", "headstart", "fa4"], device=CPU, against="headstart", rounds=3
    )
    mine = {one.variant: one for one in found if one.arm == "torch"}
    assert set(mine) == {words for words, _ in variants(case, "torch")}
    assert {"the case", "schedule made in the call", "states in a pool", "states in a cache",
            "a snapshot at the end", "a snapshot every 64 tokens"} <= set(mine)  # fmt: skip
    for one in mine.values():
        assert one.sentence == ""
        assert one.launches > 0
        assert one.device_us > 0
        assert one.wall_us >= one.launch_us > 0
        assert one.copies_to_host == 0
        assert sum(stage.microseconds for stage in one.stages) == pytest.approx(one.device_us)
        assert one.against.rounds == 3
    as_it_stands = mine.pop("the case")
    assert as_it_stands.scratch == package.workspace_bytes(
        case.op, **case.blank(), implementation="torch"
    )
    assert {one.scratch for one in mine.values()} == {None}
    (base,) = (one for one in found if one.arm == "headstart" and one.variant == "the case")
    assert base.against is None
    (unfit,) = (one for one in found if one.arm == "fa4")
    assert unfit.sentence.startswith("declined: ")


def test_stages_of_arms_that_do_not_run_say_why(monkeypatch):
    missing = run("stages", TINY, "--arms", "fa4", "--device", "cpu", "--rounds", "3")
    assert (missing.exit_code, "declined: " in missing.stdout) == (0, True), missing.output

    def breaks(**options):
        raise RuntimeError("no such luck")

    broken = types.ModuleType("broken")
    broken.fused_recurrent_gated_delta_rule = breaks
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", broken)
    failed = run("stages", TINY, "--arms", "fla", "--device", "cpu", "--rounds", "3")
    assert failed.exit_code == 1
    assert "failed: RuntimeError: no such luck" in failed.stdout


def test_stages_see_what_other_threads_compute():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = stages_of_case(cases.get(TINY), ["torch"], device=CPU, rounds=3)
    finally:
        torch.set_num_threads(before)
    (base,) = (one for one in found if one.variant == "the case")
    assert "aten::bmm" in {stage.name for stage in base.stages}


def test_stages_command_writes_a_run(tmp_path, capfd):
    file = tmp_path / "stages.json"
    result = run(
        "stages", TINY, "--arms", "torch", "--rounds", "3", "--device", "cpu", "--json", str(file)
    )
    assert result.exit_code == 0, result.output
    assert "Summary" in result.stdout
    assert "profiler_start" not in capfd.readouterr().err
    written = load(file, StagesResult, kind="stages")
    assert written.results[0].case == TINY
    assert json.loads(file.read_text())["schema_version"] == 1
