"""A bundle: compiled programs in a directory, which may be moved, shared and mounted read-only.

    DIR/cuda-90/scan_kernel-<key>/artefact.json   what it is, and the hashes of the other two
                                  metadata.json   Triton's, for its launcher
                                  program.cubin   or program.hsaco

A program's folder appears whole, by one rename, so builders may share a directory and readers never
see half of one. What a folder says is checked whenever a program is taken from it: a damaged one
raises an error that names file and field, and so does one that was built from other sources or by
another Triton.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.runtime import bundle_host
from headstart.runtime.bundle_files import damaged, place, read, spoiled
from headstart.runtime.bundle_host import Python
from headstart.runtime.bundle_programs import Program

FORMAT = 1
KEY = 32
"""Digits of a key in the name of a folder."""
DESCRIPTION, METADATA = "artefact.json", "metadata.json"
BINARIES = {"cuda": "cubin", "hip": "hsaco"}
FIELDS = {
    "format": int, "key": str, "specialisation": str, "kernel": str, "target": str, "triton": str,
    "types": dict, "constants": dict, "metadata": str, "program": str,
}  # fmt: skip
"""Fields of a description and their types; `metadata` and `program` are hashes of those files."""


@dataclass(frozen=True)
class Artefact:
    """A program in a bundle: its folder, and what the description there says."""

    folder: Path
    fields: Mapping[str, Any]

    @staticmethod
    def read(folder: Path) -> Artefact:
        """The artefact in a folder; ValueError names what is wrong with its description."""
        file = folder / DESCRIPTION
        text = read(file)
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise spoiled(file, f"is damaged: {error}") from None
        for name, kind in FIELDS.items():
            if not isinstance(fields, dict) or not isinstance(fields.get(name), kind):
                raise damaged(file, name, f"a value of type {kind.__name__}", "none")
        if fields["format"] != FORMAT:
            raise damaged(file, "format", FORMAT, fields["format"])
        if not folder.name.endswith(f"-{fields['key'][:KEY]}"):
            raise damaged(file, "key", "that in the folder's name", fields["key"])
        return Artefact(folder, fields)

    @property
    def metadata(self) -> Path:
        """The file that Triton's launcher reads."""
        return self.folder / METADATA

    @property
    def program(self) -> Path:
        """The file that the driver loads."""
        return self.folder / f"program.{BINARIES[self.fields['target'].split(':')[0]]}"

    def size(self) -> int:
        """Bytes of the program; ValueError where it is not there."""
        try:
            return self.program.stat().st_size
        except OSError as error:
            raise spoiled(self.program, f"cannot be read: {error.strerror}") from None

    def check(self) -> None:
        """Raise ValueError unless both files are what they were when the program was built."""
        for name, file in (("metadata", self.metadata), ("program", self.program)):
            found = _hash(read(file))
            if found != self.fields[name]:
                raise damaged(file, name, self.fields[name], found)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Bundle:
    """The programs in a directory.

    >>> sorted(Bundle(Path("/nowhere")).artefacts())
    Traceback (most recent call last):
        ...
    ValueError: bundle: /nowhere is no directory
    """

    path: Path

    def make(self) -> None:
        """Make the directory unless it is there; ValueError where nothing could be kept in it."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"bundle: expected a directory, got the file {self.path}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"bundle: cannot make {self.path}: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"bundle: cannot write in {self.path}")

    def folder(self, program: Program) -> Path:
        """Where a program lies, or would."""
        return self._of_target(program.target_name) / f"{program.name}-{program.key[:KEY]}"

    def _of_target(self, target: str) -> Path:
        return self.path / target.replace(":", "-")

    def folders(self, target: str = "*:*") -> list[Path]:
        """Where programs lie, of all targets or of one; ValueError where there is no directory."""
        if not self.path.is_dir():
            raise ValueError(f"bundle: {self.path} is no directory")
        found = self._of_target(target).parent.glob(f"{self._of_target(target).name}/*-*")
        return sorted(one for one in found if one.is_dir() and not one.name.startswith("."))

    def artefacts(self) -> Iterator[Artefact]:
        """Every artefact, read but not checked."""
        return map(Artefact.read, self.folders())

    def find(self, program: Program) -> Artefact | None:
        """The artefact of a program, checked; None where the bundle has nothing like it.

        Raises ValueError where it is damaged, and where the bundle holds the same specialisation
        from other sources or of another Triton alone.
        """
        folder = self.folder(program)
        if folder.is_dir():
            found = Artefact.read(folder)
            if found.fields["key"] != program.key:
                raise damaged(folder / DESCRIPTION, "key", program.key, found.fields["key"])
            found.check()
            return found
        if not self.path.is_dir():
            raise ValueError(f"bundle: {self.path} is no directory")
        for other in folder.parent.glob(f"{program.name}-*"):
            stale = Artefact.read(other)
            if stale.fields["specialisation"] == program.specialisation:
                raise ValueError(
                    f"bundle: {other} is stale: it was built by Triton {stale.fields['triton']} "
                    f"from other sources of {program.name} or under other settings than are used "
                    "now; build the bundle again"
                )
        return None

    def compiled(self, program: Program) -> Any:
        """What `find` gives, as Triton's compiled kernel, not yet given to the driver."""
        artefact = self.find(program)
        if artefact is None:
            return None
        from triton.compiler import CompiledKernel

        files = {
            f"{program.name}.json": artefact.metadata,
            f"{program.name}{artefact.program.suffix}": artefact.program,
        }
        return CompiledKernel(program.source, files, program.key)

    def add(self, program: Program, compiled: Any) -> bool:
        """Keep a compiled program; False if another builder was first.

        Raises ValueError where the directory cannot be written.
        """
        import triton

        folder = self.folder(program)
        binary = compiled.kernel
        metadata = json.dumps(_relocatable(compiled.metadata), sort_keys=True).encode()
        description = {
            "format": FORMAT, "key": program.key, "specialisation": program.specialisation,
            "kernel": program.name, "target": program.target_name, "triton": triton.__version__,
            **program.described(), "metadata": _hash(metadata), "program": _hash(binary),
        }  # fmt: skip
        made = Artefact(folder, description)
        files = {
            made.program.name: binary,
            METADATA: metadata,
            DESCRIPTION: json.dumps(description, indent=1).encode(),
        }
        return place(folder, files)

    def add_launcher(self, program: Program, compiled: Any, pythons: Sequence[Python] = ()) -> None:
        """Keep what a program is launched with on an NVIDIA device, for this Python or for others.

        Raises ValueError where there is no C compiler.
        """
        if (source := bundle_host.launcher(program, compiled)) is not None:
            for python in pythons or (Python.here(),):
                bundle_host.keep(self.path, source, python)
                bundle_host.keep(self.path, bundle_host.driver_module(), python)

    def lend_launcher(self, program: Program, compiled: Any) -> bool:
        """Have Triton find what it launches a program with; whether it does, or needs nothing.

        Raises ValueError where that is damaged, OSError where Triton's cache cannot be written.
        """
        return bundle_host.lend(self.path, bundle_host.launcher(program, compiled))

    def without_launcher(
        self, program: Program, compiled: Any, pythons: Sequence[str]
    ) -> list[str]:
        """Those of the Pythons for which what a program is launched with is not there.

        Raises ValueError where it is damaged.
        """
        source = bundle_host.launcher(program, compiled)
        if source is None:
            return []
        needed = [one for one in (source, bundle_host.driver_module()) if one is not None]
        return [x for x in pythons if any(one.held(self.path, x) is None for one in needed)]


def _relocatable(metadata: Any) -> dict[str, Any]:
    """Triton's metadata as plain data, libraries by name instead of by where they lay."""
    plain = json.loads(json.dumps(metadata._asdict(), default=vars))
    libraries = plain.get("extern_libs") or ()
    return plain | {"extern_libs": [[name, Path(path).name] for name, path in libraries]}
