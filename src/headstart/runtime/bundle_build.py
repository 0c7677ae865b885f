"""Compiles programs into a bundle, in parallel, on any machine that has Triton."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from headstart.runtime.bundle import Bundle
from headstart.runtime.bundle_host import Python
from headstart.runtime.bundle_programs import Program


class Built(NamedTuple):
    """What became of a program: the seconds it took to compile, and how that failed, or ""."""

    program: Program
    seconds: float
    error: str


PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent ends."""
Progress = Callable[[int, int, str], None]
"""Called with (done, all, the program done last)."""


def build(
    bundle: Bundle,
    programs: Sequence[Program],
    jobs: int,
    progress: Progress | None = None,
    pythons: Sequence[Python] = (),
) -> list[Built]:
    """Compile those of the programs that a bundle lacks, in `jobs` processes, and keep each.

    pythons: those that will launch them on an NVIDIA device; none: this one.

    A program that does not compile is told in the result; the others are kept. Raises ValueError
    where the directory cannot be written, where what it holds is damaged, and where the compiler
    takes a process down.
    """
    lacking = [program for program in programs if not _held(bundle, program, pythons)]
    done: list[Built] = []
    # A forked process has the programs already: kernels and layouts need not be written out.
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("fork"), _begin, (bundle, lacking, pythons)
    )
    try:
        futures = [pool.submit(_build, index) for index in range(len(lacking))]
        for future in as_completed(futures):
            index, seconds, error = future.result()
            done.append(Built(lacking[index], seconds, error))
            if progress is not None:
                progress(len(done), len(lacking), lacking[index].name)
    except BrokenProcessPool:
        left = sorted(
            {program.name for program in lacking} - {built.program.name for built in done}
        )
        raise ValueError(
            f"bundle: the compiler took its process down, in one of {', '.join(left) or 'the rest'}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
    return done


def _held(bundle: Bundle, program: Program, pythons: Sequence[Python]) -> bool:
    """Whether a program lies there, whole, with what launches it."""
    if not bundle.folder(program).is_dir():
        return False
    names = [python.name for python in pythons or (Python.here(),)]
    return not bundle.without_launcher(program, bundle.compiled(program), names)


_work: tuple[Bundle, Sequence[Program], Sequence[Python]]


def _begin(bundle: Bundle, programs: Sequence[Program], pythons: Sequence[Python]) -> None:
    global _work
    # Of a kernel that it cannot compile, Triton writes all it has; what is told is the error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # The parent ends the pool. What a terminal interrupts is a group of processes: out of it, or
    # compilers that are cut short tell stories of thousands of lines.
    os.setpgid(0, 0)
    # A process of a pool waits for its next program whether its parent lives or not.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _work = bundle, programs, pythons


def _build(index: int) -> tuple[int, float, str]:
    bundle, programs, pythons = _work
    began = time.perf_counter()
    try:
        held = bundle.folder(programs[index]).is_dir()
        compiled = bundle.compiled(programs[index]) if held else programs[index].compile()
    except Exception as error:  # whatever a compiler raises is this program's result
        words = str(error).strip().splitlines() or [""]
        return index, time.perf_counter() - began, f"{type(error).__name__}: {words[-1][:200]}"
    if not held:
        bundle.add(programs[index], compiled)
    bundle.add_launcher(programs[index], compiled, pythons)
    return index, time.perf_counter() - began, ""
