"""C functions through which Triton reaches NVIDIA's driver, kept in a bundle beside the programs.

Triton 3.6 writes one for the types of a kernel's arguments and has the system's C compiler build it
at the first launch, which takes longer than loading the kernel; another, once on a machine, for
what it asks the driver. A bundle keeps them for the Python that built it, and lends them to Triton
where Triton looks first: in its own cache. What C makes of such a function depends on Python's
version; a Python that the bundle has none for builds its own, as without a bundle.

    DIR/host/cpython-311-x86_64-linux-gnu-<key>/module.so   and its hash, sha256
"""

from __future__ import annotations

import hashlib
import importlib
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.runtime.bundle_files import damaged, place, read

if TYPE_CHECKING:
    from headstart.runtime.bundle_programs import Program

KEY = 32
"""Digits of a key in the name of a folder."""


class Python(NamedTuple):
    """An interpreter that launches: the end of its modules' names, the folder of its headers."""

    suffix: str
    include: str

    @property
    def name(self) -> str:
        """As a bundle names its modules: "cpython-311-x86_64-linux-gnu"."""
        return self.suffix.removesuffix(".so").strip(".")

    @staticmethod
    def here() -> Python:
        """This process's."""
        return Python(sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_paths()["include"])

    @staticmethod
    def at(program: str) -> Python:
        """That of an executable; ValueError where it does not run or has no headers.

        >>> Python.at("no-such-python")
        Traceback (most recent call last):
            ...
        ValueError: python: cannot run no-such-python
        """
        asked = (
            "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'), s.get_paths()['include'])"
        )
        try:
            run = [program, "-c", asked]
            told = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"python: cannot run {program}") from error
        found = Python(*told.stdout.split())
        if not Path(found.include, "Python.h").is_file():
            raise ValueError(f"python: {program} has no headers in {found.include}")
        return found


class Source(NamedTuple):
    """A module in C: its name and its text, as Triton knows them."""

    name: str
    text: str

    @property
    def key(self) -> str:
        """Under which Triton's cache has it."""
        from triton.runtime.build import platform_key

        return hashlib.sha256((self.text + platform_key()).encode()).hexdigest()

    def folder(self, bundle: Path, python: str) -> Path:
        """Where a bundle has it for a Python of this name, or would."""
        return bundle / "host" / f"{python}-{self.key[:KEY]}"

    def held(self, bundle: Path, python: str) -> bytes | None:
        """The module for a Python of this name; None where a bundle has none.

        Raises ValueError where it is damaged.
        """
        folder = self.folder(bundle, python)
        if not folder.is_dir():
            return None
        module, wanted = read(folder / "module.so"), read(folder / "sha256").decode()
        if (found := hashlib.sha256(module).hexdigest()) != wanted:
            raise damaged(folder / "module.so", "sha256", wanted, found)
        return module


def pythons(bundle: Path) -> list[str]:
    """Names of the Pythons that a bundle has modules for."""
    return sorted({folder.name.rpartition("-")[0] for folder in bundle.glob("host/*-*")
                   if not folder.name.startswith(".")})  # fmt: skip


def launcher(program: Program, compiled: Any) -> Source | None:
    """What launches a compiled program; None where Triton needs nothing of the kind for it."""
    if program.target.backend != "cuda":
        return None
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_launcher"):
        return None
    about = getattr(compiled.metadata, "tensordesc_meta", None)
    source = program.source
    return Source(
        "__triton_launcher", driver.make_launcher(source.constants, dict(source.signature), about)
    )


def driver_module() -> Source | None:
    """What Triton asks NVIDIA's driver with; None where it does not build that from C."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    file = Path(driver.__file__ or "").with_name("driver.c")
    if not hasattr(driver, "compile_module_from_src") or not file.is_file():
        return None
    return Source("cuda_utils", file.read_text())


def keep(bundle: Path, source: Source | None, python: Python) -> None:
    """Build a module for a Python into a bundle, unless it is there.

    Raises ValueError where there is no C compiler or the directory cannot be written.
    """
    if source is None or source.held(bundle, python.name) is not None:
        return
    module = _built(source, python)
    digest = hashlib.sha256(module).hexdigest()
    folder = source.folder(bundle, python.name)
    place(folder, {"module.so": module, "sha256": digest.encode()})


def lend(bundle: Path, source: Source | None) -> bool:
    """Put a module from a bundle where Triton looks for it, if Triton has none of its own.

    Whether it has one now, or needs none. Raises ValueError where the bundle's is damaged, OSError
    where Triton's cache cannot be written.
    """
    if source is None:
        return True
    from triton.runtime.cache import get_cache_manager

    kept, here = get_cache_manager(source.key), Python.here()
    if kept.get_file(f"{source.name}{here.suffix}") is not None:
        return True
    module = source.held(bundle, here.name)
    if module is not None:
        kept.put(module, f"{source.name}{here.suffix}", binary=True)
    return module is not None


def _built(source: Source, python: Python) -> bytes:
    """The module, built as Triton builds it, but where the driver may be missing."""
    from triton.backends.nvidia.driver import include_dirs
    from triton.runtime.build import _build

    with tempfile.TemporaryDirectory() as folder:
        # The driver's library as far as the linker is concerned: its name, and what is called.
        called = sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\()", source.text)))
        stub, module = Path(folder, "stub.c"), Path(folder, "module.c")
        stub.write_text("".join(f"void {name}(void) {{}}\n" for name in called))
        module.write_text(source.text)
        headers = [*include_dirs, python.include]  # before those of this process
        try:
            named = ["-Wl,-soname,libcuda.so.1"]
            Path(_build("stub", str(stub), folder, [], [], [], named)).rename(
                Path(folder, "libcuda.so.1")
            )
            made = _build(source.name, str(module), folder, [folder], headers, ["libcuda.so.1"], [])
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"bundle: no C compiler for {source.name}: {error}") from None
        return Path(made).read_bytes()
