"""Programs: a kernel in Triton's compiler's terms, and the key under which a bundle keeps it.

A launch specialises its kernel for the types of its arguments, for what divides them, for constants
and for options of the compiler. Triton's own binder works that out, with a driver or without one,
so that a program has the same key where it is built and where it is launched. The key holds the
kernel's source with that of every function it calls, the version of Triton and the target; neither
Python's version nor PyTorch's, and no path.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.runtime.rehearsal import Launch, Rehearsal
from headstart.runtime.static import Target


@dataclass(frozen=True)
class Program:
    """One kernel, specialised.

    kernel: the function under `triton.jit` or `gluon.jit`.
    source: Triton's source of it: signature, constants and what divides arguments.
    options: those of Triton's compiler for the target.
    slot: the name under which the kernel itself keeps it once it is compiled.
    device: index of the device that is to launch it; None: none, it is compiled for elsewhere.
    """

    kernel: Any
    target: Any
    source: Any
    options: Any
    slot: str
    device: int | None = None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__

    @property
    def target_name(self) -> str:
        """The target as on the command line."""
        return f"{self.target.backend}:{self.target.arch}"

    @functools.cached_property
    def specialisation(self) -> str:
        """Hash of what the launch makes of the kernel, whatever its source."""
        source = self.source
        constants = {path: str(value) for path, value in source.constants.items()}
        return _hash(
            [
                self.target_name,
                f"{self.kernel.__module__}.{self.name}",
                str(sorted(source.signature.items())),
                str(sorted(constants.items())),
                str(sorted(source.attrs.items())),
                _spelled(self.options),
            ]
        )

    @functools.cached_property
    def key(self) -> str:
        """Hash of everything that the compiled program depends on."""
        import triton
        from triton._C.libtriton import get_cache_invalidating_env_vars

        settings = sorted(get_cache_invalidating_env_vars().items())
        constants = self.source.constants.values()
        return _hash(
            [triton.__version__, sources(self.kernel, *constants), self.specialisation, settings]
        )

    def described(self) -> dict[str, Any]:
        """Types and constants by argument, for a reader."""
        names = self.kernel.arg_names
        constants = {
            ".".join([names[path[0]], *map(str, path[1:])]): str(value)
            for path, value in self.source.constants.items()
        }
        types = {name: kind for name, kind in self.source.signature.items() if kind != "constexpr"}
        return {"types": types, "constants": constants}

    def compile(self) -> Any:
        """Triton's compiled kernel, which needs no GPU; with a device, as a launch there does it.

        None where a hook of Triton's takes the compiling over.
        """
        import triton

        source = self.source
        if self.device is None:
            return triton.compile(source, target=self.target, options=self.options.__dict__)
        return type(self.kernel)._do_compile(
            self.kernel, self.slot, source.signature, self.device, source.constants, self.options,
            source.attrs, False,
        )  # fmt: skip


def sources(*values: Any) -> list[tuple[str, str]]:
    """Name and text of every function that the kernels among some values reach, and of constants.

    Triton's own hash of a kernel is no key for a bundle: it counts the constants of the functions
    that a kernel calls where these were hashed before it alone, and it parses every one of them,
    which takes longer than loading the program.
    """
    from triton.language import constexpr, dtype
    from triton.runtime.jit import JITCallable

    found: dict[str, str] = {}
    left = [("", value) for value in values]
    while left:
        name, value = left.pop()
        if isinstance(value, (constexpr, dtype)):
            found[name] = repr(value)
        elif isinstance(value, JITCallable):
            name = f"{value.fn.__module__}.{value.fn.__qualname__}"
            if name not in found:
                # What it was compiled from is told by its text and by the globals that it names.
                found[name] = f"{value.starting_line_number} {value.src} {value.fn.__defaults__}"
                left += _named(value.fn)
    return sorted(found.items())


def _named(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function names of its module, of other modules by attributes, and of its closure."""
    code, scope = function.__code__, inspect.getclosurevars(function)
    for name, value in {**scope.globals, **scope.nonlocals}.items():
        yield f"{function.__module__}.{function.__qualname__}: {name}", value
        if inspect.ismodule(value):
            for attribute in code.co_names:
                yield f"{value.__name__}: {attribute}", getattr(value, attribute, None)


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _spelled(options: Any) -> str:
    """Options of the compiler by name, libraries by what is in them, wherever they lie."""
    given = dict(options.__dict__)
    given["extern_libs"] = [(name, _contents(path)) for name, path in given["extern_libs"]]
    return str(sorted(given.items()))


@functools.cache
def _contents(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def program(
    kernel: Any, target: Any, signature: Any, constants: Any, attrs: Any, options: Any, slot: str,
    device: int | None = None,
) -> Program:  # fmt: skip
    """A kernel with what Triton's binder makes of a launch."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return Program(kernel, target, kind(kernel, signature, constants, attrs), options, slot, device)


def programs_of(rehearsal: Rehearsal, known: Known | None = None) -> dict[str, Program]:
    """The programs that a rehearsal launched, by key.

    known: those of earlier rehearsals of one target; what is found is added.
    """
    known = {} if known is None else known
    found = (_rehearsed(launch, rehearsal.target, known) for launch in rehearsal.launches)
    return {program.key: program for program in found}


Known = dict[tuple[int, str], Program]
"""By the kernel's id and slot: most launches are alike, and a key takes much longer to find than a
slot. (Triton parses a kernel and all that it calls for its hash.)"""


def _rehearsed(launch: Launch, target: Target, known: Known) -> Program:
    """What Triton's `run` makes of a launch before it compiles, without a driver."""
    from triton import knobs
    from triton.runtime.jit import compute_cache_key

    kernel, backend = launch.kernel, _backend(target)
    given = {
        **launch.options,
        "debug": launch.options.get("debug", kernel.debug) or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    bound, specialization, rest = _binder(kernel, target)(**launch.arguments, **given)
    slot = compute_cache_key({}, specialization, rest)
    if (found := known.get((id(kernel), slot))) is None:
        options, signature, constants, attrs = kernel._pack_args(
            backend, {**launch.arguments, **given}, bound, specialization, rest
        )
        found = program(kernel, backend.target, signature, constants, attrs, options, slot)
        known[id(kernel), slot] = found
    return found


@functools.cache
def _backend(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return make_backend(GPUTarget(target.backend, target.arch, target.warp_size))


@functools.cache
def _binder(kernel: Any, target: Target) -> Any:
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, _backend(target))
