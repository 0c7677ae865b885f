"""What Triton builds from C for a launch: kept in a bundle, and found without a compiler."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.implementations import KERNELS
from tests.runtime.bundled import rehearsed
from triton.runtime.cache import get_cache_manager

import headstart
from headstart.runtime import bundle_host, bundle_launch
from headstart.runtime.bundle import Bundle

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")

HERE = bundle_host.Python.here().name
CALLED = (
    "cuGetErrorString", "cuPointerGetAttribute", "cuCtxGetCurrent", "cuCtxSetCurrent",
    "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuLaunchKernelEx", "cuFuncSetAttribute",
)  # fmt: skip
WITHOUT_A_COMPILER = """
import ctypes, sys
from pathlib import Path
from tests.runtime.bundled import rehearsed
from triton.backends.nvidia.driver import CudaLauncher
from headstart.runtime.bundle import Bundle

ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)  # a driver that has every name and does nothing
(program,) = rehearsed().values()
bundle = Bundle(Path(sys.argv[1]))
compiled = bundle.compiled(program)
bundle.lend_launcher(program, compiled)
print(CudaLauncher(compiled.src, compiled.metadata).launch.__name__)
"""


@pytest.fixture(scope="module")
def equipped(tmp_path_factory):
    """A bundle with the launcher of its one program."""
    bundle = Bundle(tmp_path_factory.mktemp("equipped"))
    (program,) = rehearsed().values()
    compiled = program.compile()
    bundle.add(program, compiled)
    assert bundle.without_launcher(program, compiled, [HERE]) == [HERE]
    bundle.add_launcher(program, compiled)
    assert bundle.without_launcher(program, compiled, [HERE]) == []
    assert bundle_host.pythons(bundle.path) == [HERE]
    return bundle


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of Triton's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source_in(bundle):
    (program,) = rehearsed().values()
    return bundle_host.launcher(program, bundle.compiled(program))


@pytest.fixture
def obtained(equipped, cache, monkeypatch):
    """What takes a program from the bundle, and the program without what launches it."""
    monkeypatch.setenv(bundle_launch.BUNDLE, str(equipped.path))
    (program,) = rehearsed().values()
    return lambda: bundle_launch.obtain(program)


def test_loading_a_program_lends_what_launches_it(equipped, cache, obtained):
    source = source_in(equipped)
    assert not cache.exists()
    obtained()
    (file,) = cache.rglob("__triton_launcher*.so")
    assert file.read_bytes() == source.held(equipped.path, HERE)
    assert get_cache_manager(source.key).get_file(file.name) == str(file)
    for needed in (b"PyInit___triton_launcher", b"libcuda.so.1", b"cuLaunchKernelEx"):
        assert needed in file.read_bytes()


def test_triton_takes_it_without_a_compiler(equipped, tmp_path):
    (tmp_path / "stub.c").write_text("".join(f"void {name}(void) {{}}\n" for name in CALLED))
    library = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(["cc", *flags, str(tmp_path / "stub.c")], check=True)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_LIBCUDA_PATH": str(tmp_path),
        "CC": "false", "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    run = [sys.executable, "-c", WITHOUT_A_COMPILER, str(equipped.path), str(library)]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout == "launch\n", ended.stderr
    for module in equipped.path.glob("host/*/module.so"):
        assert module.parent.name.startswith("cpython-")
    # The same without what was kept shows that a compiler would be asked for.
    bare = Bundle(tmp_path / "bare")
    (program,) = rehearsed().values()
    bare.add(program, equipped.compiled(program))
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "another cache")
    run[3] = str(bare.path)
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert "CalledProcessError: Command '['false'," in ended.stderr


def test_the_driver_is_asked_with_what_the_bundle_holds(equipped, cache, driver, monkeypatch):
    bundle_launch._lend_driver_module.cache_clear()
    bundle_launch.active_driver()
    assert not cache.exists()
    monkeypatch.setenv(bundle_launch.BUNDLE, str(equipped.path))
    assert bundle_launch.active_driver() is driver
    (file,) = cache.rglob("cuda_utils*.so")
    assert b"PyInit_cuda_utils" in file.read_bytes()


@pytest.fixture
def bare(equipped, tmp_path, monkeypatch):
    """The same bundle without what launches its program."""
    bundle = Bundle(tmp_path / "bare")
    (program,) = rehearsed().values()
    bundle.add(program, equipped.compiled(program))
    monkeypatch.setenv(bundle_launch.BUNDLE, str(bundle.path))
    return bundle


def test_forbid_forbids_a_c_compiler_too(bare, obtained, equipped, monkeypatch):
    monkeypatch.setenv(bundle_launch.JIT, "forbid")
    obtained()
    monkeypatch.setenv(bundle_launch.BUNDLE, str(bare.path))
    assert obtained() is not None  # Triton has it from before
    monkeypatch.setenv("TRITON_CACHE_DIR", str(bare.path.parent / "another"))
    with pytest.raises(
        headstart.CompileForbidden,
        match=f"forbid: norm_kernel for cuda:90, .*: what {HERE} launches it with .* {bare.path}",
    ):
        obtained()
    bundle_launch._lend_driver_module.cache_clear()
    with pytest.raises(headstart.CompileForbidden, match=f"Triton's driver: .*{bare.path}"):
        bundle_launch.active_driver()


def test_warn_names_what_a_c_compiler_builds(bare, obtained, monkeypatch, caplog):
    monkeypatch.setenv(bundle_launch.JIT, "warn")
    monkeypatch.setenv(bundle_launch.BUNDLE, str(bare.path))
    with caplog.at_level(logging.WARNING, "headstart"):
        assert obtained() is not None
    (record,) = caplog.records
    assert f"what {HERE} launches it with" in record.getMessage()


def test_a_cache_of_tritons_that_cannot_be_written_is_named(obtained, cache, monkeypatch):
    cache.write_text("no folder")
    with pytest.raises(OSError, match=f"norm_kernel for cuda:90.*{cache} cannot take it .*; set "):
        obtained()


def test_a_damaged_module_is_named(equipped, cache, obtained):
    file = source_in(equipped).folder(equipped.path, HERE) / "module.so"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    try:
        with pytest.raises(ValueError, match=f"{file} is damaged: sha256: expected"):
            obtained()
        assert not list(cache.rglob("*.so"))
    finally:
        file.write_bytes(whole)


def test_it_is_built_for_the_pythons_that_will_serve(bundle, tmp_path):
    other = bundle_host.Python(".cpython-99-x86_64-linux-gnu.so", bundle_host.Python.here().include)
    assert bundle_host.Python.at(sys.executable) == bundle_host.Python.here()
    (program,), made = rehearsed().values(), Bundle(tmp_path / "made")
    compiled = bundle.compiled(program)
    made.add_launcher(program, compiled, [other])
    names = sorted(folder.name for folder in (made.path / "host").iterdir())
    assert len(names) == 2
    assert all(name.startswith("cpython-99-x86_64-linux-gnu-") for name in names)
    assert made.without_launcher(program, compiled, [other.name, HERE]) == [HERE]
    made.add_launcher(program, compiled)
    assert made.without_launcher(program, compiled, [other.name, HERE]) == []
    assert bundle_host.pythons(made.path) == [HERE, other.name]


def test_a_python_that_cannot_be_served_is_named(tmp_path):
    odd = tmp_path / "python"
    odd.write_text(f"#!/bin/sh\necho .so {tmp_path}\n")
    odd.chmod(0o755)
    with pytest.raises(ValueError, match=f"python: {odd} has no headers in {tmp_path}"):
        bundle_host.Python.at(str(odd))


def test_amd_needs_nothing_of_the_kind(bundle):
    (program,) = rehearsed("hip:gfx942").values()
    assert bundle_host.launcher(program, bundle.compiled(program)) is None
    assert bundle.without_launcher(program, bundle.compiled(program), [HERE]) == []
    assert bundle.lend_launcher(program, bundle.compiled(program))


def test_without_a_compiler_it_cannot_be_built(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "false")
    (program,) = rehearsed().values()
    with pytest.raises(ValueError, match="bundle: no C compiler for __triton_launcher"):
        Bundle(tmp_path).add_launcher(program, bundle.compiled(program))
    assert not list(tmp_path.iterdir())
