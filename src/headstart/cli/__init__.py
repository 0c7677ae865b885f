"""The command line: `headstart env | cases | explain | prefill | static ...`, one file a command.

It needs the extra `cli`; a command that needs more says so. Exit codes: 0 success, 1 a check that
failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

__all__ = ["end_interrupted", "main"]

INTERRUPTED = "headstart: interrupted"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments` (by default those of the process) and exit."""
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"headstart: the command line needs {' and '.join(missing)}: "
            "pip install 'headstart[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from headstart.cli.commands import headstart

        headstart.main(None if arguments is None else list(arguments), prog_name="headstart")
    except KeyboardInterrupt:  # before the command, or after it has dealt with its own
        end_interrupted()


def end_interrupted() -> NoReturn:
    """Say on standard error that Ctrl-C ended the command, and exit as shells expect."""
    print(INTERRUPTED, file=sys.stderr)
    sys.exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does: KeyboardInterrupt, or the end at once while a module is imported.

    Compiled modules make something else of an exception that meets them half imported: an abort, an
    error of their own, or nothing at all. Nothing is at work then that would have to be ended well.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{INTERRUPTED}\n".encode())
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt
