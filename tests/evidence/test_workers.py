"""Calls shared out among processes: in order, ended by Ctrl-C, and one line where one dies."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from headstart.evidence.workers import spread


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_calls(processes):
    calls = (partial(divmod, n, 2) for n in range(7))
    assert list(spread(calls, processes)) == [divmod(n, 2) for n in range(7)]


def test_an_error_of_a_call_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        list(spread([partial(divmod, 1, 0), partial(divmod, 1, 1)], 2))


def test_a_process_that_is_ended_is_one_sentence():
    with pytest.raises(ValueError, match="jobs: one of 2 processes was ended from outside"):
        list(spread([partial(os._exit, 9)], 2))


SCRIPT = """
import time
from functools import partial
from headstart.evidence.workers import spread
if __name__ == "__main__":
    calls = [partial(print, "here", flush=True), *[partial(time.sleep, 600)] * 5]
    try:
        list(spread(calls, 2))
    except KeyboardInterrupt:
        raise SystemExit(130)
"""


def started(script, on_interrupt):
    """A process group of its own, which meets an interrupt in this way."""
    return subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, on_interrupt),
    )


@pytest.mark.parametrize("while_they", ["start", "work"])
def test_an_interrupt_ends_all_without_a_word(while_they, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = started(script, signal.default_int_handler)
    if while_they == "work":
        assert process.stdout.readline() == "here\n"
    else:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 3:  # two and the tracker of their resources
            time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert complaints == ""
    assert process.returncode == 130


def test_an_interrupt_that_is_ignored_here_is_ignored_there(tmp_path):
    """As of a command that a script has put in the background."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("600", "1").replace("raise SystemExit(130)", "raise"))
    process = started(script, signal.SIG_IGN)
    assert process.stdout.readline() == "here\n"
    os.killpg(process.pid, signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert complaints == ""
    assert process.returncode == 0
