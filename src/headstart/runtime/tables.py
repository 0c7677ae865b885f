"""Tables: configurations that were measured on one kind of device; a rule covers what they lack.

    src/headstart/tables/nvidia-h200.json    the package's, one for each kind of device
    HEADSTART_TABLES=FILE[:FILE...]          a user's, whose rows go before the package's

A launcher asks `configuration` with a `Key`, which holds sizes, dtype and switches, never a length.
Files are read and checked once for a device; then a question is a look into a dictionary. A table
is only ever used on the device that it names: a user's files of which none does are an error.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from headstart.runtime.launcher import target_of
from headstart.runtime.rehearsal import current_rehearsal
from headstart.runtime.table_files import (
    Device,
    Key,
    Row,
    Table,
    contradict,
    plain,
    shown_fields,
    together,
)

VARIABLE = "HEADSTART_TABLES"
FOLDER = Path(__file__).parents[1] / "tables"
LOG = logging.getLogger("headstart")

C = TypeVar("C")


INTERPRETER = Device("interpreter", "interpreter")
"""What stands for a device where kernels run in Triton's interpreter."""


def ratio_class(HQ: int, HK: int) -> int:
    """The least power of two that is not below HQ / HK.

    >>> ratio_class(64, 8), ratio_class(5, 1), ratio_class(16, 16)
    (8, 8, 1)
    """
    return 1 << (-(-HQ // HK) - 1).bit_length()


def configuration(key: Key, device: torch.device, rule: Callable[[], C]) -> C:
    """The configuration of a table's row for this key, or what the rule says.

    Raises ValueError where a table of the device cannot be used.

    >>> key = Key("rms_norm_gated", "norm", (128,), torch.float32)
    >>> with using({key: "measured"}):
    ...     configuration(key, torch.device("cpu"), lambda: "by rule")
    'measured'
    >>> configuration(key, torch.device("meta"), lambda: "by rule")
    'by rule'
    """
    given = _using.get()
    if given is None:
        row = rows_of(device).get(key)
        found = None if row is None else row.configuration
    else:
        found = given.get(key)
    if found is None:
        found = rule()
    if (rehearsal := current_rehearsal()) is not None:
        rehearsal.asked[key] = found
    return found


_using: ContextVar[Mapping[Key, Any] | None] = ContextVar("using", default=None)


@contextmanager
def using(configurations: Mapping[Key, Any]) -> Iterator[None]:
    """Within this context these configurations are all that there are, whatever tables say.

    Calls that repeat earlier ones (`runtime/steady.py`) ask for no configuration any more: whoever
    compares configurations takes the long way, `dispatch.run`.
    """
    token = _using.set(configurations)
    try:
        yield
    finally:
        _using.reset(token)


@functools.cache
def device_of(device: torch.device) -> Device | None:
    """The kind of a device; None for one that no kernel is launched on."""
    if device.type == "cpu":
        return INTERPRETER
    if device.type != "cuda":
        return None
    return Device(torch.cuda.get_device_name(device), target_of(device).name)


@functools.cache
def rows_of(device: torch.device) -> Mapping[Key, Row]:
    """Rows by key: a user's tables for this device, then the package's.

    Raises ValueError for a file that is damaged or contradicts itself or another, and where
    HEADSTART_TABLES names files of which none is for this device.
    """
    kind = device_of(device)
    if kind is None:
        return {}
    packaged = packaged_table(kind)
    listed = user_tables()
    fitting = [table for table in listed if table.device == kind]
    if listed and not fitting:
        there = ", ".join(f"{table.path} is for {table.device}" for table in listed)
        raise ValueError(f"{VARIABLE}: expected a table for {kind}, but {there}")
    own = together(fitting)
    if packaged is not None:
        fitting.append(replace(packaged, rows=tuple(_left(packaged, own))))
    return together(fitting)


def _left(packaged: Table, own: Mapping[Key, Row]) -> Iterator[Row]:
    """The package's rows whose place no row of the user's takes.

    One for scattered keys gives way to a user's for all others, as the rule does.
    """
    for row in packaged.rows:
        mine = own.get(row.key, own.get(plain(row.key)))
        if mine is None or (mine.key != row.key and not contradict(row, mine)):
            yield row
        elif mine.fields != row.fields:
            words = mine.key, shown_fields(mine.fields), row.key, shown_fields(row.fields)
            LOG.info("%s: %s: %s in place of %s: %s", VARIABLE, *words)


def configurations_of(rows: Mapping[Key, Row]) -> dict[Key, Any]:
    """The configurations of rows, for which their kernels' modules are imported."""
    return {key: row.configuration for key, row in rows.items()}


def packaged_table(device: Device) -> Table | None:
    """The package's table of a kind of device; None where it has none."""
    path = FOLDER / f"{'-'.join(device.name.lower().split())}.json"
    if not path.is_file():
        return None
    table = Table.read(path)
    if table.device != device:
        raise ValueError(f"tables: {path}: expected a table for {device}, got {table.device}")
    return table


def user_tables() -> list[Table]:
    """The tables that HEADSTART_TABLES names."""
    names = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [Table.read(Path(name)) for name in names if name]


def packaged_tables() -> list[Table]:
    """The package's tables of all kinds of devices."""
    return [Table.read(path) for path in sorted(FOLDER.glob("*.json"))]


def tables_for(target: str) -> list[Table]:
    """All tables, the package's and the user's, of devices that kernels of a target run on."""
    found = (*packaged_tables(), *user_tables())
    return [table for table in found if table.device.target == target]
