"""C functions through which Triton reaches NVIDIA's driver, kept in a bundle beside the programs.

Triton 3.6 writes one for the types of a kernel's arguments and has the system's C compiler build it
at the first launch, which takes longer than loading the kernel; another, once on a machine, for
what it asks the driver. A bundle keeps them for the Python that built it, and lends them to Triton
where Triton looks first: in its own cache. Another Python builds its own, as without a bundle.

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


class Source(NamedTuple):
    """A module in C: its name and its text, as Triton knows them."""

    name: str
    text: str

    @property
    def key(self) -> str:
        """Under which Triton's cache has it."""
        from triton.runtime.build import platform_key

        return hashlib.sha256((self.text + platform_key()).encode()).hexdigest()

    def folder(self, bundle: Path) -> Path:
        """Where a bundle has it for this Python."""
        python = _suffix().removesuffix(".so").strip(".")
        return bundle / "host" / f"{python}-{self.key[:KEY]}"


def _suffix() -> str:
    return sysconfig.get_config_var("EXT_SUFFIX")


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


def keep(bundle: Path, source: Source | None) -> None:
    """Build a module into a bundle, unless it is there.

    Raises ValueError where there is no C compiler or the directory cannot be written.
    """
    if source is None or source.folder(bundle).is_dir():
        return
    module = _built(source)
    digest = hashlib.sha256(module).hexdigest()
    place(source.folder(bundle), {"module.so": module, "sha256": digest.encode()})


def lend(bundle: Path, source: Source | None) -> None:
    """Put a module from a bundle where Triton looks for it; no more than that if there is none.

    Raises ValueError where it is damaged.
    """
    if source is None or not (folder := source.folder(bundle)).is_dir():
        return
    from triton.runtime.cache import get_cache_manager

    kept = get_cache_manager(source.key)
    if kept.get_file(f"{source.name}{_suffix()}") is None:
        module, wanted = read(folder / "module.so"), read(folder / "sha256").decode()
        if (found := hashlib.sha256(module).hexdigest()) != wanted:
            raise damaged(folder / "module.so", "sha256", wanted, found)
        kept.put(module, f"{source.name}{_suffix()}", binary=True)


def _built(source: Source) -> bytes:
    """The module, built as Triton builds it, but where the driver may be missing."""
    from triton.backends.nvidia.driver import include_dirs
    from triton.runtime.build import _build

    with tempfile.TemporaryDirectory() as folder:
        # The driver's library as far as the linker is concerned: its name, and what is called.
        called = sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\()", source.text)))
        stub, module = Path(folder, "stub.c"), Path(folder, "module.c")
        stub.write_text("".join(f"void {name}(void) {{}}\n" for name in called))
        module.write_text(source.text)
        try:
            named = ["-Wl,-soname,libcuda.so.1"]
            Path(_build("stub", str(stub), folder, [], [], [], named)).rename(
                Path(folder, "libcuda.so.1")
            )
            made = _build(
                source.name, str(module), folder, [folder], include_dirs, ["libcuda.so.1"], []
            )
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"bundle: no C compiler for {source.name}: {error}") from None
        return Path(made).read_bytes()
