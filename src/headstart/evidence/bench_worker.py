"""Prepares one case, waits for its turn, times it: a process of `headstart.evidence.bench_jobs`.

Reads a `Job` from standard input, prints what it is at and then "ready", waits for a line, prints
a `CaseResult`.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from headstart.evidence import cases
from headstart.evidence.arms.sources import Sources
from headstart.evidence.bench_jobs import READY, Job
from headstart.evidence.benching import DeviceLost, Prepared


def main() -> None:
    """Do the job on standard input."""
    # Whoever is ended removes the copies of the package that it runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    job = Job.model_validate_json(sys.stdin.readline())
    # Whatever arms print, answers alone go to the parent.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(words: str) -> None:
        print(words, file=answers, flush=True)

    with Sources(job.arms) as sources:
        prepared = Prepared(
            cases.get(job.case),
            job.arms,
            sources,
            device=torch.device(job.device),
            seed=job.seed,
            groups=job.groups,
            noise_floor=job.noise_floor,
            first=job.first,
            until=job.until,
            progress=say,
        )
        say(READY)
        # Without a line the parent is gone.
        result = prepared.time(job.rounds, job.clock) if sys.stdin.readline() else None
    # Said last: the parent ends a worker that has answered, and copies must be gone by then.
    if result is not None:
        say(result.model_dump_json())


if __name__ == "__main__":
    try:
        main()
    except DeviceLost as lost:
        sys.exit(str(lost))
