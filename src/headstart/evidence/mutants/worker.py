"""Runs checks in a process of its own, on whatever copy of the package is first on its path.

Reads {"implementation", "device", "checks", "processor", "clock", "all"} as JSON from standard
input; prints where the package lies, then a verdict a line. Stops at the first failure unless
"all". A check that takes more seconds of the processor, or by the clock, than its limit (0: none)
ends the process by a signal, whatever the build is at.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import headstart
from headstart.evidence.mutants.record import Verdict
from headstart.runtime import dispatch

MOST_WORDS = 300
MEMORY = 8 * 2**30
"""Bytes that a build may take on a CPU: a size gone wrong is an error, not the machine's end."""


def main() -> None:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    if job["device"] == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    # Whatever the build prints, verdicts alone go to the runner.
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A build that does not load says nothing at all: implementations are imported at first use.
    for operation in dispatch.operations().values():
        for name in operation.places:
            operation.implementation(name)
    print(Path(headstart.__file__).parent, file=verdicts, flush=True)
    limits = zip(job["checks"], job["processor"], job["clock"], strict=True)
    for name, processor, clock in limits:
        # Nobody handles the signals: the kernel ends a process that holds Python's lock as well.
        signal.setitimer(signal.ITIMER_PROF, processor)
        signal.setitimer(signal.ITIMER_REAL, clock)
        verdict = judged(name, job["implementation"], job["device"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(verdict.model_dump_json(), file=verdicts, flush=True)
        if verdict.failure and not job["all"]:
            break


def judged(name: str, implementation: str, device: str) -> Verdict:
    """One check; an exception of the build is a failure that every gate sees."""
    from headstart.evidence.mutants.checks import CHECKS

    began = time.perf_counter()
    try:
        verdict = CHECKS[name].run(implementation, device).model_copy(update={"check": name})
    except Exception as error:
        words = " ".join(f"raised {type(error).__name__}: {error}".split())[:MOST_WORDS]
        verdict = Verdict(
            check=name,
            failure=words,
            excess=float("inf"),
            cosine_passes=False,
            declined=isinstance(error, dispatch.Declined),
        )
    return verdict.model_copy(update={"seconds": time.perf_counter() - began})


if __name__ == "__main__":
    main()
