"""What a terminal is shown of a command at work, and that nobody else is shown anything."""

import sys

from headstart.cli import progress


def on_a_terminal(monkeypatch):
    """To be called in a test that has `capsys`: of what that puts in its place it is asked."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


def test_a_bar_is_shown_only_to_those_who_wait(monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    with progress.progress_bar("prefill", 2) as show:
        show(1)
        show(2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    with progress.progress_bar("prefill", 2) as show:
        show(1)
        show(2)
    assert "prefill" in capsys.readouterr().err


def test_words_take_the_place_of_those_before(monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    show = progress.progress_words("bench")
    show("building fla")
    show("timing")
    assert capsys.readouterr().err == (
        f"{progress.CLEAR}bench: building fla\r{progress.CLEAR}bench: timing\r"
    )


def test_a_count_leaves_nothing_behind(monkeypatch, capsys):
    on_a_terminal(monkeypatch)
    with progress.progress_count("static") as show:
        show(3, 40, "scan on cuda:90")
    said = capsys.readouterr().err
    assert "static: 3 of 40, scan on cuda:90" in said
    assert said.endswith(progress.CLEAR)


def test_a_pipe_is_shown_nothing(capsys):
    progress.progress_words("bench")("timing")
    with progress.progress_count("static") as show:
        show(3, 40, "scan on cuda:90")
    with progress.progress_bar("prefill", 2) as show:
        show(1)
    assert capsys.readouterr() == ("", "")
