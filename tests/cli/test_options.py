"""Options that several commands have, and what a record keeps of them."""

import click
import pytest
from click.testing import CliRunner

from headstart.cli.commands import headstart
from headstart.cli.options import Seconds, cores
from headstart.evidence import runs


def kept(tmp_path, *words):
    """The options in the record that a command writes."""
    file = tmp_path / "run.json"
    CliRunner().invoke(headstart, [*words, "--json", str(file)], prog_name="headstart")
    return runs.load(file).options


def test_a_record_says_how_it_was_called_but_not_where_it_lies(tmp_path):
    found = kept(tmp_path, "bench", "simulate", "--experiments", "10", "--rounds", "5")
    assert found == {"experiments": 10, "rounds": 5, "planted": 0.03}


def test_a_record_of_cases_names_them(tmp_path):
    found = kept(tmp_path, "verify", "gdn-1x1-small", "--implementation", "torch")
    assert found["case_ids"] == ["gdn-1x1-small"]
    assert (found["device"], found["dtype"], found["repeats"]) == ("cpu", None, 1)
    assert "json_file" not in found


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "soon"])
def test_seconds_are_a_number_that_clocks_take(value):
    with pytest.raises(click.BadParameter):
        Seconds(0).convert(value, None, None)


def test_cores_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 3, 5})
    assert cores() == 3
