"""The command line in-process: what it prints, and one line and an exit code for mistakes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import headstart as package
from headstart import cli
from headstart.cli.commands import COMMANDS, Command, headstart
from headstart.cli.printing import print_table
from headstart.evidence import cases
from headstart.evidence.files import expect_writable, write


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
        (["cases", "show", ""], "case: no case is called ''"),
        (["explain", ""], "case: no case is called ''"),
        (["verify", "gdn-1x1-small", "--device", "meta"], "device: expected cpu or cuda, got meta"),
        (["verify", "bits", "--device", "meta"], "device: expected cpu or cuda, got meta"),
        (["explain", "gdn-1x1", "--device", "mps"], "device: expected cpu or cuda, got mps"),
        (["verify", "gdn-1x1-small", "--seed", "9" * 30], "is not in the range 0<=x<="),
        (["verify", "transcript", "--seed", "-1"], "is not in the range 0<=x<="),
        (["bench", "gdn-1x1-small", "--seed", "1.5"], "'1.5' is not a valid integer range"),
        (["bench", "simulate", "--planted", "nan"], "planted: expected a share between 0 and 1"),
        (["bench", "simulate", "--planted", "0"], "planted: expected a share between 0 and 1"),
        (["bench", "simulate", "--rounds", "9" * 20], "is not in the range 3<=x<=10000"),
        (["bench", "gdn-1x1-small", "--rounds", "9" * 20], "is not in the range 3<=x<=10000"),
        (["bench", "gdn-1x1-small", "--limit", "inf"], "is not in the range"),
        (["bench", "gdn-1x1-small", "--limit", "nan"], "nan is no number of seconds"),
        (["verify", "transcript", "--count", "9" * 20], "is not in the range 1<=x<=100000"),
        (["verify", "--op", "causal_conv1d", "--op", "causal_conv1d"], "--op: expected once, got"),
        (["verify", "--cache", "--no-cache"], "--cache: expected once, got it 2 times"),
    ],
)
def test_mistakes_give_one_line_and_code_2(arguments, words):
    assert_one_line(run(*arguments), words)


def every_command(group=headstart, words=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from every_command(found, (*words, name))
        else:
            yield " ".join((*words, name)), found


@pytest.mark.parametrize(("words", "command"), [*every_command()], ids=lambda one: str(one))
def test_an_option_given_twice_is_a_mistake(words, command):
    assert isinstance(command, Command)
    once = [one for one in command.params if isinstance(one, click.Option) and not one.multiple]
    for option in once[:1]:
        given = option.opts[:1] if option.is_flag else [option.opts[0], "1"]
        result = run(*words.split(), *given, *given)
        assert_one_line(result, f"{option.opts[0]}: expected once, got it 2 times")


@pytest.mark.parametrize("arguments", [[], ["cases"], ["bench"]])
def test_without_a_command_the_help_is_shown_as_it_is(arguments):
    result, asked = run(*arguments), run(*arguments, "--help")
    assert result.stderr.strip() == asked.stdout.strip()
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) > 5


WRITERS = (
    "bench run gdn-1x1-small",
    "bench stages gdn-1x1-small",
    "bench simulate",
    "prefill --model tiny-gpt-oss --prompt-file {prompt}",
    "static",
    "verify gdn-1x1-small",
    "verify bits",
    "verify mutants",
    "verify soak",
    "verify tiles",
    "verify transcript",
)


@pytest.mark.parametrize("command", WRITERS)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, monkeypatch):
    for module, work in {
        "headstart.evidence.benching": "bench_case",
        "headstart.evidence.stages": "stages_of_case",
        "headstart.evidence.simulated_clock": "simulate",
        "headstart.evidence.prefill.job": "run_job",
        "headstart.evidence.static.collect": "collect",
        "headstart.evidence.verify": "verify_many",
        "headstart.evidence.verify.bits": "verify_bits",
        "headstart.evidence.mutants": "run_mutants",
        "headstart.evidence.verify.soak": "soak",
        "headstart.evidence.tile_bounds": "brute_force",
        "headstart.evidence.verify.transcript": "verify_transcript",
    }.items():
        monkeypatch.setattr(importlib.import_module(module), work, None)
    (tmp_path / "prompt").write_text("What is written first?")
    words = command.format(prompt=tmp_path / "prompt").split()
    for path, says in (
        (tmp_path, f"json: expected a file to write, got the folder {tmp_path}"),
        (tmp_path / "no" / "a.json", "json: no folder for "),
        (tmp_path / ("a" * 300), "File name too long"),
    ):
        assert_one_line(run(*words, "--json", str(path)), says)
    assert [path.name for path in tmp_path.iterdir()] == ["prompt"]


def test_trying_a_file_leaves_no_trace(tmp_path):
    kept, fresh, link = tmp_path / "kept", tmp_path / "fresh", tmp_path / "link"
    kept.write_text("as it was")
    link.symlink_to(tmp_path / "beyond")
    for path in (kept, fresh, link, "/dev/null"):
        expect_writable(path)
    assert kept.read_text() == "as it was"
    assert not fresh.exists()
    assert link.is_symlink()
    assert not link.exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("as it was")
    kept.chmod(0o640)
    link.symlink_to(kept)
    write(link, "as it is: ×")
    assert kept.read_bytes().decode() == "as it is: ×"
    assert (link.is_symlink(), kept.stat().st_mode & 0o777) == (True, 0o640)

    def cut_short(self, text, **options):
        with open(self, "w") as file:
            file.write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(KeyboardInterrupt):
        write(kept, "never seen")
    assert kept.read_text() == "as it is: ×"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]
    monkeypatch.undo()
    write("/dev/null", "to nobody")
    with pytest.raises(ValueError, match=r"json: cannot write .*: No such file"):
        write(tmp_path / "no" / "a.json", "")


def test_numbers_are_aligned_to_the_right(capsys):
    rows = [("a", 1, "9.50", "-", "78%", "0.9 [0.8, 1.0]"), ("b", 1200, "10.25", "-inf", "9%", "-")]
    print_table(("arm", "n", "device ms", "wall", "share", "ratio"), rows)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "arm      n  device ms  wall  share  ratio",
        "a        1       9.50     -    78%  0.9 [0.8, 1.0]",
        "b    1,200      10.25  -inf     9%  -",
    ]


IMPORTS = {
    "in peace": "time.sleep(60)",
    "and makes something else of the exception": """
try:
    time.sleep(60)
except BaseException:
    pass
""",
}


@pytest.mark.parametrize("how", IMPORTS)
def test_an_interrupt_while_a_module_is_imported_ends_cleanly(how, tmp_path):
    (tmp_path / "click.py").write_text(f"import time\nprint('here', flush=True)\n{IMPORTS[how]}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "headstart.cli", "env"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        # whoever started the tests may ignore it, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"headstart: interrupted\n")
    assert process.returncode == 130


def test_help_needs_no_torch_and_every_name_is_there_at_first_use():
    """The longest imports come when their names are used, so that they can be interrupted."""
    script = """
import sys, headstart, headstart.cli.commands, headstart.cli.prefill
assert "torch" not in sys.modules
assert set(headstart.__all__) <= set(dir(headstart))
assert headstart.Gate.log().kind == "log"
assert all(hasattr(headstart, name) for name in headstart.__all__)
from headstart import public
assert sorted(public.__all__) == sorted(headstart.__all__)
try:
    headstart.gate
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("module 'headstart' has no attribute 'gate'\n", "")


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
