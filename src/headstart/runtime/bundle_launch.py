"""Where a launch's program comes from: this process, a bundle, or Triton's compiler.

HEADSTART_BUNDLE=DIR   programs are taken from that bundle first; a damaged or stale one is an error
HEADSTART_JIT=forbid   a program that no bundle gives is an error that names kernel and key, and so
                       is a launch for which Triton would have a C compiler build something
HEADSTART_JIT=warn     it is compiled, and logged with the time that took

`programs()` counts. Launches that repeat earlier ones (`runtime/steady.py`) ask for nothing.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headstart.runtime import bundle_host
from headstart.runtime.bundle import Bundle
from headstart.runtime.bundle_programs import Program, program
from headstart.runtime.checks import expect_choice

BUNDLE, JIT = "HEADSTART_BUNDLE", "HEADSTART_JIT"
POLICIES = ("allow", "warn", "forbid")
LOG = logging.getLogger("headstart")


class CompileForbidden(RuntimeError):
    """A launch needs what no bundle gives, and HEADSTART_JIT=forbid."""


class Programs(NamedTuple):
    """Where the programs of this process came from.

    loaded: those from a bundle. compiled: those from Triton, be it from its own cache on disk.
    seconds: what the compiled ones took.
    """

    loaded: int
    compiled: int
    seconds: float

    def since(self, before: Programs) -> Programs:
        """How many more these are than before."""
        return Programs(
            self.loaded - before.loaded,
            self.compiled - before.compiled,
            self.seconds - before.seconds,
        )


_lock = threading.Lock()
_programs = Programs(0, 0, 0.0)
_making: dict[tuple[int, int, str], threading.Lock] = {}
"""One lock for each program that a kernel of a device has missed."""


def programs() -> Programs:
    """How many programs of kernels this process has loaded and compiled so far, on all devices.

    >>> import headstart
    >>> headstart.programs()
    Programs(loaded=..., compiled=..., seconds=...)
    """
    return _programs


def active_driver() -> Any:
    """Triton's driver of this process; what it would build for itself, a bundle gives first."""
    from triton.runtime import driver

    if directory := os.environ.get(BUNDLE):
        _lend_driver_module(Path(directory))
    return driver.active


@functools.cache
def _lend_driver_module(bundle: Path) -> None:
    wanted = "Triton's driver"
    with _told_where_it_cannot_write(wanted):
        lent = bundle_host.lend(bundle, bundle_host.driver_module())
    _expect_lent(lent, wanted, bundle)


def _expect_lent(lent: bool, wanted: str, bundle: Path) -> None:
    """What Triton needs from C for this Python is there, or its C compiler may be asked for it."""
    words = (
        f"{wanted}: what {bundle_host.Python.here().name} launches it with is not in the bundle "
        f"{bundle}, built with --python"
    )
    if not lent and policy() == "forbid":
        raise CompileForbidden(f"{JIT}=forbid: {words}")
    if not lent and policy() == "warn":
        LOG.warning("%s: a C compiler builds it", words)


def supply(kernel: Any) -> None:
    """Let a kernel ask here, rather than Triton's compiler, for programs that it does not have.

    Where Triton would compile is the one place that costs launches nothing which have theirs. A
    launch then raises CompileForbidden where none may be compiled, and ValueError for a bundle that
    cannot be used or a setting that does not exist.
    """
    if "_do_compile" not in vars(kernel) and hasattr(kernel, "device_caches"):
        active_driver()
        kernel._do_compile = functools.partial(_missing, kernel)


def _missing(
    kernel: Any, slot: str, signature: Any, device: int, constants: Any, options: Any,
    attrs: Any, warmup: bool,
) -> Any:  # fmt: skip
    """What Triton's `run` gets for a specialisation that its kernel has not met on this device."""
    _, _, target, _, _ = kernel.device_caches[device]
    asked = program(kernel, target, signature, constants, attrs, options, slot, device)
    with _lock:
        making = _making.setdefault((id(kernel), device, slot), threading.Lock())
    with making:  # other threads wait for the first rather than compile it too
        # Read anew: two threads that meet a device first may each give the kernel a cache of it.
        found = kernel.device_caches[device][0].get(slot)
        if found is None and (found := obtain(asked)) is not None:
            kernel.device_caches[device][0][slot] = found
    return found


def policy() -> str:
    """What HEADSTART_JIT says; ValueError for a word that it does not know."""
    word = os.environ.get(JIT) or "allow"
    expect_choice(JIT, word, POLICIES)
    return word


def obtain(program: Program) -> Any:
    """Triton's compiled kernel of a program: from the bundle, else from the compiler."""
    jit, directory = policy(), os.environ.get(BUNDLE)
    wanted = f"{program.name} for {program.target_name}, key {program.key}"
    if directory:
        bundle = Bundle(Path(directory))
        found = bundle.compiled(program)
        if found is not None:
            with _told_where_it_cannot_write(wanted):
                lent = bundle.lend_launcher(program, found)
            _expect_lent(lent, wanted, bundle.path)
            _count(loaded=1)
            return found
    if jit == "forbid":
        held = f"is not in the bundle {directory}" if directory else f"has no bundle: {BUNDLE}"
        held += "" if directory else " is not set"
        raise CompileForbidden(f"{JIT}=forbid: {wanted}, {held}; {program.described()}")
    began = time.perf_counter()
    with _told_where_it_cannot_write(wanted):
        compiled = program.compile()
    seconds = time.perf_counter() - began
    _count(compiled=1, seconds=seconds)
    if jit == "warn":
        LOG.warning("compiled %s in %.3f s", wanted, seconds)
    return compiled


UNWRITABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST,
}  # fmt: skip


@contextmanager
def _told_where_it_cannot_write(wanted: str) -> Iterator[None]:
    """Errors of Triton's cache, which has no room or may not be written, say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        from triton import knobs

        raise OSError(
            error.errno,
            f"{wanted}: Triton's cache {knobs.cache.dir} cannot take it ({error.strerror}); set "
            "TRITON_CACHE_DIR to a directory that can",
        ) from error


def _count(loaded: int = 0, compiled: int = 0, seconds: float = 0.0) -> None:
    global _programs
    with _lock:
        before = _programs
        _programs = Programs(
            before.loaded + loaded, before.compiled + compiled, before.seconds + seconds
        )
