"""Whether values are checked: what HEADSTART_CHECK says, read once."""

import subprocess
import sys

import pytest

from headstart.runtime import checks


@pytest.mark.parametrize(
    ("word", "says"), [(None, False), ("", False), ("0", False), ("1", True)], ids=repr
)
def test_the_environment_asks_for_checks(monkeypatch, word, says):
    if word is None:
        monkeypatch.delenv("HEADSTART_CHECK", raising=False)
    else:
        monkeypatch.setenv("HEADSTART_CHECK", word)
    assert checks.asked_for() is says


def test_another_word_does_not_pass_for_no():
    program = "import headstart\ntry: headstart.Schedule\nexcept ValueError as error: print(error)"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"HEADSTART_CHECK": "true", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "HEADSTART_CHECK: expected 0 or 1, got 'true'\n"
