"""Programs compiled ahead of calls: those that the caller's bundle holds are not compiled again."""

import os
from pathlib import Path

import pytest
from tests.runtime.bundled import rehearsed

from headstart.evidence.compiling import compiled
from headstart.runtime.bundle import Bundle
from headstart.runtime.bundle_build import build
from headstart.runtime.bundle_host import Python
from headstart.runtime.bundle_launch import BUNDLE


def test_only_what_the_callers_bundle_lacks_is_compiled(tmp_path, monkeypatch):
    asked, other = rehearsed(), rehearsed(channels=32)
    build(Bundle(tmp_path), [*asked.values(), *other.values()], 1)
    monkeypatch.setenv(BUNDLE, str(tmp_path))
    more, told = rehearsed(channels=16), []
    with compiled(asked | more, 1, told.append):
        folder = Path(os.environ[BUNDLE])
        assert folder != tmp_path
        found = Bundle(folder)
        for program in (*asked.values(), *other.values(), *more.values()):
            assert not found.without_launcher(
                program, found.compiled(program), [Python.here().name]
            )
    assert told == ["compiled 1 of 1: norm_kernel"]
    assert os.environ[BUNDLE] == str(tmp_path)
    assert not folder.exists()
    mine = Bundle(tmp_path)
    assert {artefact.folder for artefact in mine.artefacts()} == {
        mine.folder(program) for program in (*asked.values(), *other.values())
    }
    assert not any(one.is_symlink() for one in tmp_path.glob("*/*"))


def test_a_bundle_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(BUNDLE, str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"bundle: .*none is no directory"), compiled({}, 1):
        pass
