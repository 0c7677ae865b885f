"""The runner of known-bad builds: edits apply once, kills mean something, survivors are told."""

import ast
import dataclasses

import pytest
from click.testing import CliRunner

from headstart import Gate
from headstart.cli.commands import headstart as command
from headstart.cli.verify_mutants import _failures
from headstart.evidence import runs
from headstart.evidence.mutants import Mutant, chosen, drawn, named, run_mutants, runner
from headstart.evidence.mutants.cases import OF_128
from headstart.evidence.mutants.checks import CHECKS, GENERAL
from headstart.evidence.mutants.edits import NO_RESULTS, SIZING, edits
from headstart.evidence.mutants.equivalent import EQUIVALENTS, Equivalent, expect_current
from headstart.evidence.mutants.generated import OPS, SOURCES, generated
from headstart.evidence.mutants.record import Found
from headstart.ops.gated_delta_rule import spec

CONVOLVE = "convolution/decomposed.py"


def mutant(**changes) -> Mutant:
    given = {
        "name": "nothing",
        "fault": "None at all.",
        "op": "convolution",
        "implementation": "torch",
        "file": CONVOLVE,
        "old": "def convolve(call: ConvolutionCall) -> Convolution:",
        "new": "def convolve(call: ConvolutionCall) -> Convolution:  # as before",
        "checks": ("norm",),
    }
    return Mutant(**given | changes)


@pytest.mark.parametrize("one", named(), ids=lambda one: one.name)
def test_every_listed_edit_applies_and_names_checks_that_exist(one):
    compile(runner.expect_applies(one), one.file, "exec")
    assert one.checks
    assert set(one.checks) <= set(CHECKS)


def test_names_are_distinct():
    names = [one.name for one in named()]
    assert len(set(names)) == len(names)
    assert len(names) >= 40


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"old": "no such text"}, "found it 0 times"),
        ({"old": "call"}, "expected its old text once"),
        ({"file": "../runtime/dispatch.py"}, "ops has no file"),
        ({"new": mutant().old}, "expected another text"),
    ],
)
def test_an_edit_that_does_not_apply_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        runner.expect_applies(mutant(**changes))


SHORT = [name for name in OF_128 if name.startswith("rule short")]


@pytest.mark.parametrize("name", SHORT)
def test_cases_of_short_sequences_are_taken_by_their_kernel(name):
    short_call = pytest.importorskip("headstart.ops.gated_delta_rule.hopper.short_call")
    given = dict.fromkeys(("snapshots", "state", "scale", "reproducible", "workspace", "out"))
    given |= {"gate": Gate.log(), "return_state": False, "qk_l2norm": False}
    assert short_call.takes(spec.bind(**given | OF_128[name].steps()[-1]))


def test_a_check_of_short_sequences_is_an_error_where_their_kernel_does_not_run():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="kernel of short sequences did not run"):
        CHECKS["rule short of 128"].run("torch", "cpu")


def test_what_the_compiler_may_contract_is_told_by_the_launches():
    pytest.importorskip("triton")
    (found,) = run_mutants(chosen(names=("kernel-fused-arithmetic",)))
    assert found.killed_by == "rule contraction"
    assert "launches may be contracted" in found.failure


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no mutant is called 'nobody'"):
        chosen(names=("nobody",))


def test_a_fault_is_killed_and_an_edit_without_one_survives():
    (fault,) = chosen(names=("convolution-norm-eps-outside",))
    killed, survivor = run_mutants([fault, mutant()])
    assert killed.killed_by == "norm"
    assert killed.excess > 1
    assert survivor.killed_by is None


def test_a_check_that_the_unedited_package_fails_is_asked_of_nobody(monkeypatch):
    own = runner.judge

    def judge(one, checks, *more, **options):
        outcome = own(one, checks, *more, **options)
        if one is not None:
            return outcome
        said = [
            verdict.model_copy(update={"failure": "is broken"} if verdict.check == "norm" else {})
            for verdict in outcome.verdicts
        ]
        return dataclasses.replace(outcome, verdicts=said)

    monkeypatch.setattr(runner, "judge", judge)
    (fault,) = chosen(names=("convolution-norm-eps-outside",))
    assert fault.checks == ("norm",)
    other = mutant(checks=("norm", "convolution without tokens"))
    with pytest.raises(ValueError, match="the unedited package fails 'norm' under torch"):
        run_mutants([fault])
    doubts: list[str] = []
    (found,) = run_mutants([fault, other], doubted=doubts.append)
    assert (found.mutant, found.checks) == (other.name, 1)
    assert doubts == [
        "mutants: the unedited package fails 'norm' under torch: is broken",
        f"mutants: no sound check is left for {fault.name}",
    ]


def test_a_build_that_does_not_load_shows_nothing():
    with pytest.raises(ValueError, match="nothing does not load"):
        runner.run_mutant(mutant(new="import nothing_of_this_name\n" + mutant().old))


def test_a_build_that_does_not_load_costs_itself_alone():
    broken = mutant(name="broken", new="import nothing_of_this_name\n" + mutant().old)
    (fault,) = chosen(names=("convolution-norm-eps-outside",))
    doubts: list[str] = []
    (found,) = run_mutants([broken, fault], doubted=doubts.append)
    assert found.mutant == fault.name
    (words,) = doubts
    assert words.startswith("mutants: broken does not load: ")
    assert "nothing_of_this_name" in words


def test_a_check_that_waits_for_a_processor_is_not_ended():
    patient = mutant(
        new=mutant().old + "\n    import time\n    time.sleep(3)\n", checks=("convolution",)
    )
    found = runner.run_mutant(patient, limits={"convolution": 1.0})
    assert found.killed_by is None


def test_a_check_that_does_not_end_is_ended(monkeypatch):
    endless = mutant(
        new=mutant().old + "\n    while True:\n        pass\n", checks=("convolution",)
    )
    found = runner.run_mutant(endless, limits={"convolution": 1.0})
    assert found.killed_by == "hang"
    assert "convolution" in found.failure
    assert found.seconds < 60


def test_sizes_gone_wrong_are_errors_of_the_build():
    greedy = mutant(
        new=mutant().old + "\n    torch.zeros(2**34)\n", checks=("convolution without tokens",)
    )
    found = runner.run_mutant(greedy)
    assert found.killed_by == "convolution without tokens"
    assert "memory" in found.failure


def test_a_drawn_build_that_does_not_load_is_drawn_again():
    broken = mutant(
        new="import nothing_of_this_name\n" + mutant().old,
        checks=("convolution",),
        generated=True,
    )
    fault = mutant(
        old="for w in range(1, len(self.taps)):",
        new="for w in range(2, len(self.taps)):",
        checks=("convolution",),
        generated=True,
    )
    (found,) = run_mutants([broken], spare=iter([fault]))
    assert found.killed_by == "convolution"


# Generated ones

SOURCE = '''
LIMIT = 1 + 2


def expect_small(x):
    return x + 1


def scratch_bytes(x):
    return 4 * x


def f(x: int = 3, *, y: "a < b" = 4) -> list[int]:
    """1 + 1 < 2"""
    assert x > 0, "x + 1"
    if x < 0 and y < 0:
        raise ValueError(f"x: expected {x + 1}")
    for i in range(9):
        if x == i:
            raise ValueError("no")
    total: int = min(x, y)  # ünïcode
    total += x // y
    return "é", (total) <= x - 1, -1
'''


def test_only_lines_that_compute_are_edited():
    lines = SOURCE.splitlines()
    changed = []
    for edit in edits(SOURCE):
        compile(edit.apply(SOURCE), "f", "exec")
        after = edit.apply(SOURCE).splitlines()
        (n,) = [n for n, line in enumerate(lines) if line != after[n]]
        changed.append(after[n].strip())
    assert changed == [
        "total: int = max(x, y)  # ünïcode",
        "total -= x // y",
        "total += x % y",
        'return "é", (total) < x - 1, -1',
        'return "é", (total) <= x + 1, -1',
        'return "é", (total) <= x - 2, -1',
        'return "é", (total) <= x - 0, -1',
        'return "é", (total) <= x - 1, 0',
    ]


def test_functions_that_are_passed_over_are_there():
    defined = {
        node.name
        for file in OPS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert defined >= NO_RESULTS
    for end in SIZING:
        assert any(name.endswith(end) for name in defined), end


def test_a_seed_says_what_is_drawn():
    first, _ = drawn(40, seed=5)
    assert drawn(40, seed=5)[0] == first
    assert {(one.old, one.new) for one in drawn(40, seed=6)[0]} != {
        (one.old, one.new) for one in first
    }
    assert len({(one.file, one.old, one.new) for one in first}) == 40
    assert {one.op for one in first} == {"gated_delta_rule", "extend_attention", "convolution"}
    assert {one.implementation for one in first} == {"torch"}


@pytest.mark.parametrize("owner", SOURCES, ids=" ".join)
def test_every_drawn_edit_applies_and_has_checks(owner):
    assert set(GENERAL[owner]) <= set(CHECKS)
    for _, one in zip(range(30), generated(*owner), strict=False):
        compile(runner.expect_applies(one), one.file, "exec")
        assert one.checks == GENERAL[owner]


def test_more_than_there_is_cannot_be_drawn():
    with pytest.raises(ValueError, match="generated: expected at most"):
        drawn(100_000, "convolution", "torch")
    with pytest.raises(ValueError, match="no sources for op any, implementation reference"):
        drawn(1, None, "reference")


def test_explanations_are_current_and_of_edits_that_can_be_drawn():
    expect_current(OPS)
    for known in EQUIVALENTS:
        text = (OPS / known.file).read_text()
        edited = text.replace(known.old, known.new)
        assert any(edit.apply(text) == edited for edit in edits(text)), known
        assert known.reason.endswith(".")


def test_a_stale_explanation_is_an_error(monkeypatch):
    stale = Equivalent(CONVOLVE, "no such text", "x", "It was once so.")
    monkeypatch.setattr("headstart.evidence.mutants.equivalent.EQUIVALENTS", (stale,))
    with pytest.raises(ValueError, match="an explanation is stale"):
        run_mutants([mutant()])


def found(**changes) -> Found:
    given = {
        name: value
        for name, value in vars(mutant()).items()
        if name not in ("name", "checks", "device_only")
    }
    return Found(**given | {"mutant": "one", "device": "cpu"} | changes)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (found(), "one survives"),
        (found(killed_by="norm"), None),
        (found(generated=True, equivalent="Because."), "0 of 1 generated ones are killed"),
        (found(generated=True), "one survives"),
        (found(generated=True, killed_by="norm"), None),
        (found(generated=True, killed_by="norm", equivalent="Because."), "yet 'norm' kills it"),
    ],
)
def test_what_fails_a_run(one, words):
    sentences = _failures([one])
    assert bool(sentences) == (words is not None)
    assert words is None or words in sentences[0]


# The command line


def run(*arguments):
    return CliRunner().invoke(command, ["verify", "mutants", *arguments], prog_name="headstart")


def test_the_command_writes_what_it_found(tmp_path):
    file = tmp_path / "run.json"
    done = run("convolution-norm-eps-outside", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "1 of 1 killed" in done.stdout
    (one,) = runs.load(file, Found, "mutants").results
    assert (one.killed_by, one.generated) == ("norm", False)


def test_the_list_has_drawn_ones_where_they_are_run():
    listed = run("--list", "--op", "convolution", "--implementation", "torch").stdout
    assert listed.count("generated-") == 40
    assert "generated-" not in run("--list", "--implementation", "reference").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody"], "no mutant is called 'nobody'"),
        (["delta-carry-scale"], "near: delta-carry-scaled"),
        (["--list", "--json", "list.json"], "json: --list runs nothing"),
        (["--implementation", "cuda"], "implementation: expected all or one of"),
        (["--implementation", "hopper"], "mutant: none for op any, implementation hopper"),
        (["--op", "attention"], "'attention' is not one of"),
        (["--op", "convolution", "--generated", "100000"], "generated: expected at most"),
        (["--implementation", "reference", "--generated", "1"], "generated: no sources"),
        (["--generated", "-1"], "-1 is not in the range"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--device", "toaster"], "device: toaster"),
        (["--json", "/nowhere/run.json"], "no folder"),
    ],
)
def test_mistakes_give_one_line_and_code_2(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
