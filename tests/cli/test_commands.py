"""The command line in-process: what it prints, and one line and an exit code for mistakes."""

import importlib.util
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import headstart as package
from headstart import cli
from headstart.cli.commands import COMMANDS, headstart
from headstart.evidence import cases


def run(*arguments):
    return CliRunner().invoke(headstart, list(arguments), prog_name="headstart")


def assert_one_line(result, words, code=2):
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("headstart: ")
    assert words in lines[0]


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_says_what_a_command_does(arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    assert "Usage: headstart" in result.stdout
    if arguments == ["--help"]:
        assert all(name in result.stdout for name in COMMANDS)


def test_version():
    assert package.__version__ in run("--version").stdout


def test_cases_list_names_every_case():
    shown = run("cases", "list").stdout
    table, _, note = shown.partition("\n\n")
    rows = [line.split()[0] for line in table.splitlines()[1:]]
    assert rows == [case.id for case in cases.catalogue(small=False)]
    assert "-small" in note


def test_cases_list_of_one_operation():
    shown = run("cases", "list", "--op", "extend_attention", "--small").stdout
    assert "oss-16k-full-nosink-small" in shown
    assert "gdn-" not in shown


def test_cases_list_as_json():
    records = json.loads(run("cases", "list", "--json").stdout)
    assert [record["id"] for record in records] == [case.id for case in cases.catalogue()]
    (record,) = (record for record in records if record["id"] == "gdn-256x64")
    assert record["lengths"] == [64] * 256
    assert record["floor_operations"] == 6 * 16384 * 32 * 128 * 128


def test_cases_show():
    shown = run("cases", "show", "gdn-mixed").stdout
    assert "1 x 64, 2048, 4000" in shown
    assert json.loads(run("cases", "show", "gdn-mixed", "--json").stdout)["HV"] == 32


def test_env_names_versions_devices_and_variables(monkeypatch):
    monkeypatch.setenv("HEADSTART_CHECK", "1")
    found = json.loads(run("env", "--json").stdout)
    assert found["version"]["headstart"] == package.__version__
    assert "threads" in found["device"]["cpu"]
    assert "torch" in found["implementations"]["gated_delta_rule"]
    assert found["variable"]["HEADSTART_CHECK"] == "1"
    shown = run("env").stdout
    assert "HEADSTART_CHECK" in shown


@pytest.mark.parametrize("id", ["gdn-next-8k", "oss-fp8-page16", "block-next-8k"])
def test_explain(id):
    result = run("explain", id, "--device", "cpu")
    assert result.exit_code == 0, result.output
    first, *rows = (line.split() for line in result.stdout.splitlines())
    assert first == ["implementation", "accepted", "sentence"]
    assert {row[0]: row[1] for row in rows}["torch"] == "yes"
    assert rows[-1][0] == "reference"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "No such command 'serve'"),
        (["env", "--colour"], "No such option"),
        (["cases", "list", "--op", "softmax"], "'softmax' is not one of"),
        (["cases", "show"], "Missing argument 'CASE'"),
        (["cases", "show", "gdn-nex-8k"], "near: gdn-next-8k"),
        (["explain", "gdn-nex-8k"], "near: gdn-next-8k"),
        (["explain", "gpt-oss-20b"], "whole model"),
        (["explain", "gdn-1x1", "--device", "toaster"], "device: toaster"),
    ],
)
def test_mistakes_give_one_line_and_code_2(arguments, words):
    assert_one_line(run(*arguments), words)


def test_an_interrupt_ends_cleanly(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cases, "catalogue", interrupted)
    assert_one_line(run("cases", "list"), "interrupted", code=130)


def test_a_missing_extra_is_one_line(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else find(name)
    )
    with pytest.raises(SystemExit) as caught:
        cli.main(["env"])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "headstart: the command line needs rich: pip install 'headstart[cli]'\n"


def test_as_a_process():
    done = subprocess.run(
        [sys.executable, "-m", "headstart.cli", "cases", "show", "gdn-1x1", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tokens"] == 1
    done = subprocess.run(
        [sys.executable, "-m", "headstart.cli", "cases", "show", "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headstart: case: no case is called 'nothing'")


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m headstart.cli cases list --json | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[\n", "")
