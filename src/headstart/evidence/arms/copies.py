"""A second headstart in the same process: the noise floor, other revisions, other builds.

The sources are copied under another package name, so that nothing is shared: neither modules, nor
compiled functions, nor registered operations.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

PACKAGE = re.compile(
    r"(?<=\bfrom )headstart\b|(?<=\bimport )headstart\b|(?<=\bops\.)headstart\b"
    r"|\bheadstart(?=\.\w)|\bheadstart(?=::)"
)
_numbers = count(1)


def as_it_is(path: str, text: str) -> str:
    """The source text of a module, unchanged."""
    return text


@contextmanager
def loaded_copy(
    source: Path, name: str, edited: Callable[[str, str], str] = as_it_is
) -> Iterator[str]:
    """The package at `source` loaded under a name that begins with `name`, forgotten afterwards.

    source: the folder that is the package `headstart`. edited: from a module's path below it and
    its source text to the text that the copy has.
    Yields the name to import it by.
    """
    if not (source / "__init__.py").is_file():
        raise ValueError(f"revision: {source} holds no package headstart")
    # PyTorch keeps the operations of one that is forgotten: no two have a name in common.
    name = f"{name}_{next(_numbers)}"
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        copied = Path(folder) / name
        shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
        for path in copied.rglob("*.py"):
            text = edited(path.relative_to(copied).as_posix(), path.read_text())
            path.write_text(renamed(text, name))
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield name
        finally:
            sys.path.remove(folder)
            for module in [one for one in sys.modules if one.split(".")[0] == name]:
                del sys.modules[module]


def renamed(text: str, name: str) -> str:
    """Source text in which every import, place and registered op of headstart names `name` instead.

    >>> renamed('import headstart\\nfrom headstart.ops import api\\n"headstart::rule"', "second")
    'import second\\nfrom second.ops import api\\n"second::rule"'
    >>> renamed("getattr(torch.ops.headstart, name)", "second")
    'getattr(torch.ops.second, name)'
    """
    return PACKAGE.sub(name, text)
