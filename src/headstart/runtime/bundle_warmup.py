"""Programs made ready before the first request, rather than by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import torch

from headstart.runtime.bundle_launch import Programs, active_driver, obtain, programs
from headstart.runtime.bundle_programs import Program
from headstart.runtime.checks import expect_int, expect_place, shown
from headstart.runtime.launcher import current, processors, target_of
from headstart.runtime.tables import configurations_of, rows_of

Progress = Callable[[int, int, str], None]
"""Called with (done, all, the kernel done last)."""


def warmup(
    models: str | Sequence[str] = (),
    *,
    device: torch.device | str = "cuda",
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Programs:
    """Load or compile, in parallel, every program that calls of these models can launch.

    Programs come from the bundle HEADSTART_BUNDLE, else from Triton's compiler, unless
    HEADSTART_JIT=forbid; they are then on the device, and no call of the models' waits for one.

    Parameters
    ----------
    models: names of profiles, "qwen3-next-80b" for example, as `headstart bundle build --models`
        takes them; none: all that there are.
    device: a CUDA or ROCm device.
    jobs: how many threads; None: one a core, at most 16.
    progress: called with (done, all, the kernel done last).

    Returns how many programs were loaded and compiled, and the seconds that compiling took, summed
    over threads; those that this process had already are not among them.

    Raises
    ------
    ValueError: another device; a profile that does not exist; a bundle that cannot be used.
    CompileForbidden: a program is in no bundle, and HEADSTART_JIT=forbid.

    >>> import headstart
    >>> headstart.warmup("qwen3-next-80b", device="cpu")
    Traceback (most recent call last):
        ...
    ValueError: device: expected a CUDA or ROCm device that is here, got cpu
    """
    place = expect_place("device", device)
    there = torch.cuda.device_count() if place.type == "cuda" else 0
    if (place.index or 0) >= there:
        raise ValueError(f"device: expected a CUDA or ROCm device that is here, got {place}")
    if jobs is not None:
        expect_int("jobs", jobs, least=1)
    from headstart.evidence.cases.profiles import reach

    names = (models,) if isinstance(models, str) else models
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"models: expected names of profiles, got {shown(models)}")
    rows = configurations_of(rows_of(place))
    found = reach(target_of(place), names, processors(place), [rows])
    return make_ready(found.programs.values(), place, jobs, progress)


def make_ready(
    wanted: Collection[Program],
    device: torch.device,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Programs:
    """As `warmup`, for these programs."""
    before = programs()
    with current(device):
        index = active_driver().get_current_device()
        for kernel in {program.kernel for program in wanted}:
            # Made here: of two threads that ask a kernel for it first, the later one's stays alone.
            _ = kernel.device_caches[index]

    def ready(program: Program) -> str:
        with current(device):
            kept = program.kernel.device_caches[index][0]
            if program.slot not in kept:
                found = obtain(replace(program, device=index))
                if found is not None:
                    # Triton gives a program to the driver when it is first asked to run it.
                    kept[program.slot] = found
                    _ = found.run
        return program.name

    most = jobs or min(16, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(most) as pool:
        futures = [pool.submit(ready, program) for program in wanted]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                name = future.result()
                if progress is not None:
                    progress(done, len(futures), name)
        finally:
            pool.shutdown(cancel_futures=True)
    return programs().since(before)
