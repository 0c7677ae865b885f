"""Disks that are full, and such as cannot be written: real ones, where this process may mount."""

import os
import subprocess

import pytest

triton = pytest.importorskip("triton")

from tests.implementations import KERNELS  # noqa: E402
from tests.runtime.bundled import rehearsed  # noqa: E402

from headstart.runtime import bundle_launch  # noqa: E402
from headstart.runtime.bundle import Bundle  # noqa: E402

pytestmark = pytest.mark.skipif(KERNELS, reason="nothing is compiled in the interpreter")


class Disk:
    """A file system in memory, of a given size in KiB."""

    def __init__(self, path) -> None:
        self.path = path
        self._mount("-t", "tmpfs", "-o", "size=4k", "tmpfs", path)

    def become(self, options: str) -> None:
        self._mount("-o", f"remount,{options}", self.path)

    def _mount(self, *arguments) -> None:
        subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)

    def files(self) -> list[str]:
        return [file.name for file in self.path.rglob("*") if file.is_file()]


@pytest.fixture
def disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    try:
        mounted = Disk(path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this process may not mount a file system")
    yield mounted
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def program():
    (found,) = rehearsed().values()
    return found


@pytest.fixture
def asked(monkeypatch, disk):
    """Programs are asked for without a bundle, and Triton's cache is on the disk."""
    for name in (bundle_launch.BUNDLE, bundle_launch.JIT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(disk.path))
    return bundle_launch.obtain


def test_a_bundle_on_a_full_disk(disk, program):
    compiled, bundle = program.compile(), Bundle(disk.path / "bundle")
    with pytest.raises(ValueError, match=r"bundle: cannot write .*: No space left on device"):
        bundle.add(program, compiled)
    assert not disk.files()
    disk.become("size=4096k")
    assert bundle.add(program, compiled)
    assert bundle.find(program) is not None


def test_a_bundle_on_a_disk_that_cannot_be_written(disk, program):
    disk.become("size=4096k")
    bundle = Bundle(disk.path / "bundle")
    bundle.add(program, program.compile())
    disk.become("ro")
    assert bundle.find(program) is not None
    assert bundle.compiled(program).kernel == program.compile().kernel
    (other,) = rehearsed(channels=96).values()
    with pytest.raises(ValueError, match=r"bundle: cannot write .*: Read-only file system"):
        bundle.add(other, other.compile())


def test_tritons_cache_on_a_full_disk(disk, program, asked):
    with pytest.raises(OSError, match=f"norm_kernel for cuda:90.*{disk.path}.*No space left.*set "):
        asked(program)
    disk.become("size=4096k")
    assert asked(program).kernel[:4] == b"\x7fELF"


def test_tritons_cache_on_a_disk_that_cannot_be_written(disk, program, asked):
    disk.become("size=4096k")
    there = asked(program).kernel
    disk.become("ro")
    assert asked(program).kernel == there  # what it holds is used
    (other,) = rehearsed(channels=96).values()
    with pytest.raises(OSError, match=f"{disk.path}.*Read-only file system"):
        asked(other)


def test_a_bundle_beside_a_cache_that_cannot_be_written(disk, bundle, program, asked, monkeypatch):
    """What launches a program goes through Triton's cache, from a bundle too."""
    monkeypatch.setenv(bundle_launch.BUNDLE, str(bundle.path))
    disk.become("ro")
    with pytest.raises(OSError, match=f"{disk.path}.*Read-only file system"):
        asked(program)
    disk.become("rw,size=4096k")
    there = asked(program).kernel
    disk.become("ro")
    assert asked(program).kernel == there


def test_other_errors_of_the_compiler_stay_what_they_are(monkeypatch, program, tmp_path):
    monkeypatch.delenv(bundle_launch.BUNDLE, raising=False)
    monkeypatch.delenv(bundle_launch.JIT, raising=False)

    def gone(self):
        raise FileNotFoundError(2, os.strerror(2), "ptxas")

    monkeypatch.setattr(type(program), "compile", gone)
    with pytest.raises(FileNotFoundError, match="ptxas"):
        bundle_launch.obtain(program)
