"""The runner of known-bad builds: edits apply once, kills mean something, survivors are told."""

import pytest

from headstart.evidence.mutants import Mutant, chosen, named, run_mutants, runner
from headstart.evidence.mutants.checks import CHECKS

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


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no mutant is called 'nobody'"):
        chosen(names=("nobody",))


def test_a_fault_is_killed_and_an_edit_without_one_survives():
    (fault,) = chosen(names=("convolution-norm-eps-outside",))
    killed, survivor = run_mutants([fault, mutant()])
    assert killed.killed_by == "norm"
    assert killed.excess > 1
    assert survivor.killed_by is None


def test_a_build_that_does_not_load_shows_nothing():
    with pytest.raises(ValueError, match="nothing does not load"):
        runner.run_mutant(mutant(new="import nothing_of_this_name\n" + mutant().old))
