"""What a bundle keeps: whole artefacts, anywhere, and nothing that is damaged or stale."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.implementations import KERNELS
from tests.runtime.bundled import rehearsed

from headstart.cli import main
from headstart.ops.convolution.triton.norm import norm_kernel
from headstart.runtime.bundle import KEY, Bundle

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")
ADVICE = "; delete the folder and build it again"


@pytest.fixture
def program():
    return next(iter(rehearsed().values()))


@pytest.fixture
def copied(bundle, tmp_path):
    """The same bundle somewhere else, where it may be damaged."""
    return Bundle(Path(shutil.copytree(bundle.path, tmp_path / "moved")))


def test_a_bundle_says_what_it_holds(bundle):
    told = {
        (a.fields["kernel"], a.fields["target"], a.program.suffix, a.fields["types"]["x"])
        for a in bundle.artefacts()
    }
    assert told == {
        ("norm_kernel", "cuda:90", ".cubin", "*bf16"),
        ("norm_kernel", "hip:gfx942", ".hsaco", "*bf16"),
    }


def test_a_moved_bundle_that_cannot_be_written_is_used(copied, program):
    files = [*copied.path.rglob("*"), copied.path]
    for file in files:
        file.chmod(0o555 if file.is_dir() else 0o444)
    try:
        assert copied.compiled(program).kernel == copied.find(program).program.read_bytes()
    finally:
        for file in files:
            file.chmod(0o755)


def test_what_is_not_there_is_not_found(copied):
    (other,) = rehearsed(channels=96).values()
    assert copied.find(other) is None
    assert copied.compiled(other) is None


@pytest.mark.parametrize("name", ["program.cubin", "metadata.json"])
@pytest.mark.parametrize("change", ["shorter", "another byte"])
def test_a_damaged_file_is_named(copied, program, name, change):
    file = copied.folder(program) / name
    data = file.read_bytes()
    middle = len(data) // 2
    other = bytes([data[middle] ^ 1])
    file.write_bytes(
        data[:-1] if change == "shorter" else data[:middle] + other + data[middle + 1 :]
    )
    with pytest.raises(ValueError, match=f"{file} is damaged: {name.split('.')[0]}: expected "):
        copied.compiled(program)


@pytest.mark.parametrize("name", ["program.cubin", "metadata.json", "artefact.json"])
def test_a_missing_file_is_named(copied, program, name):
    file = copied.folder(program) / name
    file.unlink()
    with pytest.raises(ValueError, match=f"{file} cannot be read: No such file.*{ADVICE}"):
        copied.compiled(program)


@pytest.mark.parametrize(
    ("field", "value"), [("format", 2), ("key", "0" * 64), ("program", None), ("constants", [])]
)
def test_a_damaged_field_is_named(copied, program, field, value):
    file = copied.folder(program) / "artefact.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"{file} is damaged: {field}: expected.*{ADVICE}"):
        copied.compiled(program)


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_a_description_that_is_none_is_named(copied, program, text):
    file = copied.folder(program) / "artefact.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"{file} is damaged.*{ADVICE}"):
        copied.compiled(program)


def test_the_command_lists_what_is_whole_and_names_the_rest(copied, program, capsys):
    folder = copied.folder(program)
    for name in ("description", "program"):
        shutil.copytree(folder, folder.with_name(f"{name}-{folder.name.rpartition('-')[2]}"))
    folder.with_name(f"description-{program.key[:KEY]}").joinpath("artefact.json").write_text("{")
    folder.with_name(f"program-{program.key[:KEY]}").joinpath("program.cubin").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["bundle", "list", str(copied.path)])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [
        ["norm_kernel", "cuda:90"], ["norm_kernel", "hip:gfx942"],
    ]  # fmt: skip
    damaged, gone = said.err.splitlines()
    assert "artefact.json is damaged" in damaged
    assert "program.cubin cannot be read: No such file" in gone
    assert damaged.endswith(ADVICE)
    assert gone.endswith(ADVICE)


def test_a_stale_artefact_is_named(copied, monkeypatch):
    monkeypatch.setattr(norm_kernel, "starting_line_number", 0)
    (program,) = rehearsed().values()
    (folder,) = copied.path.glob("cuda-90/*")
    with pytest.raises(ValueError, match=f"{folder} is stale: it was built by Triton"):
        copied.compiled(program)


def test_a_stale_artefact_beside_the_right_one_does_not_matter(copied, monkeypatch):
    monkeypatch.setattr(norm_kernel, "starting_line_number", 0)
    (later,) = rehearsed().values()
    assert copied.add(later, later.compile())
    assert copied.find(later) is not None
    monkeypatch.undo()
    (before,) = rehearsed().values()
    assert copied.find(before).folder != copied.find(later).folder


def test_the_second_builder_leaves_what_the_first_built(copied, program):
    before = {file: file.stat().st_mtime_ns for file in copied.folder(program).iterdir()}
    assert not copied.add(program, program.compile())
    assert {file: file.stat().st_mtime_ns for file in copied.folder(program).iterdir()} == before
    assert not list(copied.path.rglob(".building-*"))


@pytest.mark.parametrize("name", ["program.cubin", "metadata.json", "artefact.json"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, program, monkeypatch, name):
    compiled, bundle = program.compile(), Bundle(tmp_path / "full")
    write = Path.write_bytes

    def full(self, data):
        if self.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"bundle: cannot write .*: No space left on device"):
        bundle.add(program, compiled)
    assert not [file for file in bundle.path.rglob("*") if file.is_file()]
    monkeypatch.undo()
    assert bundle.add(program, compiled)
    assert bundle.find(program) is not None


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, program):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"bundle: cannot write .*file.*: Not a directory"):
        Bundle(tmp_path / "file").add(program, program.compile())
