"""Which part of what two Tritons do a commit tries: commits in a row try them all."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests import conftest

from headstart.evidence.static.parts import Part

SCRIPT = Path("tests/house/part.sh")
KERNEL = Path("src/headstart/ops/scan.py")
ROOT = Path(__file__).parents[2]


def run(folder, *command):
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def part(folder, count=5):
    return run(folder, "bash", str(SCRIPT), str(count))


def commit(folder, words):
    (folder / KERNEL).write_text(words)
    run(folder, "git", "add", ".")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    run(folder, "git", *who, "commit", "--no-verify", "-m", words)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "archive"
    for path in (SCRIPT, KERNEL):
        (folder / path).parent.mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, folder / SCRIPT)
    (folder / KERNEL).write_text("first")
    return folder


def test_commits_in_a_row_try_every_part(archive):
    run(archive, "git", "init", "--quiet")
    tried = []
    for index in range(5):
        commit(archive, str(index))
        assert part(archive) == part(archive)
        tried.append(part(archive))
    assert tried == ["2/5", "3/5", "4/5", "5/5", "1/5"]


def test_without_the_whole_history_the_kernels_decide(archive, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(archive, whole)
    run(whole, "git", "init", "--quiet")
    parts = set()
    for index in range(12):
        (archive / KERNEL).write_text(str(index))
        commit(whole, str(index))
        shallow = tmp_path / f"shallow-{index}"
        run(tmp_path, "git", "clone", "--quiet", "--depth=1", whole.as_uri(), str(shallow))
        assert part(shallow) == part(archive)
        parts.add(part(archive))
    assert len(parts) > 2
    assert parts <= {f"{index}/5" for index in range(1, 6)}


class Item:
    """What the selection of tests asks of one."""

    fixturenames = ("implementation",)

    def __init__(self, nodeid):
        self.nodeid = nodeid


def test_parts_hold_every_test_of_kernels_once(monkeypatch):
    dropped = []
    config = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    )
    everything = [Item(f"test_bits.py::test_alone[{index}]") for index in range(100)]
    monkeypatch.setattr(conftest, "KERNELS", True)
    kept = []
    for index in range(3):
        monkeypatch.setattr(conftest, "PART", Part(index + 1, 3))
        items = list(everything)
        conftest.pytest_collection_modifyitems(config, items)
        kept += items
    assert sorted(item.nodeid for item in kept) == sorted(item.nodeid for item in everything)
    assert len(dropped) == 200
