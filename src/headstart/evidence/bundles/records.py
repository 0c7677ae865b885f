"""What commands about bundles write down, for reports."""

from __future__ import annotations

from headstart.evidence.runs import Record

WITHIN = 0.3
"""Seconds that a first call may take beyond the device's own start."""


class Built(Record):
    """Programs of a target compiled into a bundle.

    programs: that the models' calls launch; before: those that were there. seconds: of all of it,
    writing included; compiling: summed over the processes (jobs), which may share cores. failed: a
    sentence for each that does not compile.
    """

    target: str
    triton: str
    models: tuple[str, ...]
    programs: int
    before: int
    compiled: int
    seconds: float
    compiling: float
    jobs: int
    failed: tuple[str, ...]


class Checked(Record):
    """A bundle against what the models' calls launch on a target.

    held: programs that are there, whole, with what launches them. others: those that no call
    launches. declined: calls that no kernel computes. said: what is missing, stale or damaged.
    """

    target: str
    triton: str
    models: tuple[str, ...]
    reachable: int
    held: int
    others: int
    declined: int
    said: tuple[str, ...]


class FirstCall(Record):
    """The first call of a fresh process, part by part, in seconds.

    torch: until PyTorch is imported. start: until the device has computed something. package:
    until this one is imported. first, second: calls until they are done, of inputs that are there.
    loaded, compiled: programs from the bundle, and from a compiler. failed: why there was no call,
    or "".
    """

    call: str
    device: str
    python: str = ""
    torch: float = 0.0
    start: float = 0.0
    package: float = 0.0
    first: float = 0.0
    second: float = 0.0
    loaded: int = 0
    compiled: int = 0
    failed: str = ""

    @property
    def good(self) -> bool:
        """Whether it was soon enough, and nothing was compiled."""
        return not self.failed and not self.compiled and self.first <= WITHIN
