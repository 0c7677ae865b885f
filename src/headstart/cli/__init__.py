"""The command line: `headstart env | cases | explain | prefill | static ...`, one file a command.

It needs the extra `cli`; a command that needs more says so. Exit codes: 0 success, 1 a check that
failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main"]


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
    from headstart.cli.commands import headstart

    headstart.main(None if arguments is None else list(arguments), prog_name="headstart")
