"""What a table is, and the file that holds it: JSON, every field of which is checked when read.

    {"format": 1, "device": "NVIDIA H200", "target": "cuda:90", "rows": [
      {"operation": "extend_attention", "kernel": "extend", "sizes": {"D": 64, "DV": 64},
       "dtype": "bfloat16", "ratio": 8, "windowed": true, "switches": [],
       "configuration": {"BM": 64, "BN": 32, "stages": 3, "warps": 4, ...},
       "milliseconds": {"oss-16k-win": 0.186},
       "runner_up": {"configuration": {...}, "ratio": 1.03},
       "triton": "3.6.0", "date": "2026-11-30"}]}

Of lengths a key may say that a batch decodes. Two rows of one key that say different things are an
error. All is checked without a kernel's module, which takes longer to import than a table to read.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headstart.runtime.checks import dtype_name, shown

FORMAT = 1
DTYPES = {dtype_name(x): x for x in (torch.bfloat16, torch.float16, torch.float32)}


class Key(NamedTuple):
    """What a configuration may depend on, beside the kind of device.

    operation, kernel: whose configuration: a name in `KERNELS`.
    sizes: sizes of heads or rows, in the order of `Kernel.sizes`.
    ratio: query heads of a key head as a `ratio_class`; 0 where it does not matter.
    windowed: whether there is a window that counts as one (docs/tables.md): long ones are as none.
    switches: what else changes the program, in the order of `Kernel.switches`.
    """

    operation: str
    kernel: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    ratio: int = 0
    windowed: bool = False
    switches: tuple[str, ...] = ()

    def __str__(self) -> str:
        """In one line.

        >>> print(Key("extend_attention", "extend", (64, 64), torch.bfloat16, 8, True, ("fp8",)))
        extend_attention/extend 64x64 bfloat16 ratio 8 window fp8
        """
        sizes = "x".join(map(str, self.sizes))
        words = [f"{self.operation}/{self.kernel}", sizes, dtype_name(self.dtype)]
        words += [f"ratio {self.ratio}"] if self.ratio else []
        words += ["window"] if self.windowed else []
        return " ".join([*words, *self.switches])


def order_of_sums(fields: Mapping[str, int]) -> tuple[int, ...]:
    """What a row's bits follow from in a configuration of attention's reproducible kernel.

    Keys of a tile and of a block, and how products are spread: warps that share a row split its
    sums, and tiles of fewer than 64 rows take other products on Hopper. How many rows there are
    beyond, stages and registers change no bits.

    >>> narrow = {"BM": 64, "BN": 32, "warps": 4, "piece": 1024}
    >>> order_of_sums(narrow) == order_of_sums(narrow | {"BM": 128, "warps": 8})
    True
    >>> order_of_sums(narrow) == order_of_sums(narrow | {"warps": 8})
    False
    """
    rows = fields["BM"]
    return fields["BN"], fields["piece"], rows // fields["warps"], min(rows, 64)


class Kernel(NamedTuple):
    """What a table may say of a kernel.

    sizes: names of a key's sizes. place: "module:class" of its configuration, a dataclass of ints.
    fields: that dataclass's. grouped, windowed: whether a key may hold a ratio or a window.
    switches: those it may hold. sums: of a kernel whose bits may not depend on switches, what they
    follow from in a configuration: one value for all keys that differ in switches alone.
    """

    sizes: tuple[str, ...]
    place: str
    fields: tuple[str, ...]
    grouped: bool = False
    windowed: bool = False
    switches: tuple[str, ...] = ()
    sums: Callable[[Mapping[str, int]], tuple[int, ...]] | None = None

    @property
    def configuration(self) -> type:
        """The class of its configurations; the kernel's module may be imported for it."""
        module, name = self.place.split(":")
        return getattr(importlib.import_module(module), name)


_ATTENTION = (
    "headstart.ops.extend_attention.triton.config:Config",
    ("BM", "BN", "stages", "warps", "piece", "registers", "resident"),
)
_RULE = "headstart.ops.gated_delta_rule"
_CONVOLUTION = "headstart.ops.convolution.triton"
KERNELS = {
    ("extend_attention", "extend"): Kernel(
        ("D", "DV"), *_ATTENTION, grouped=True, windowed=True,
        switches=("scattered", "few", "listed", "fp8", "mask"),
    ),
    # Bits are promised: one configuration, whatever the heads, and one order of sums wherever keys
    # lie.
    ("extend_attention", "unified"): Kernel(
        ("D", "DV"), *_ATTENTION, windowed=True, switches=("scattered", "few", "mask"),
        sums=order_of_sums,
    ),
    ("gated_delta_rule", "prepare"): Kernel(
        ("K", "V"), f"{_RULE}.passes.config:PrepareConfig", ("BC", "warps")
    ),
    ("gated_delta_rule", "prepare_channels"): Kernel(
        ("K", "V"), f"{_RULE}.passes.channel:ChannelConfig", ("BC", "warps")
    ),
    ("gated_delta_rule", "scan"): Kernel(
        ("K", "V"), f"{_RULE}.triton.scan:ScanConfig", ("BV", "warps", "stages"),
        switches=("channels",),
    ),
    ("causal_conv1d", "convolve"): Kernel(
        ("channels", "width"), f"{_CONVOLUTION}.convolve:Config",
        ("channels", "unroll", "num_warps"),
    ),
    ("rms_norm_gated", "norm"): Kernel(
        ("D",), f"{_CONVOLUTION}.norm:Config", ("rows", "num_warps")
    ),
}  # fmt: skip
"""(operation, kernel) -> what a table may say of it."""


class Device(NamedTuple):
    """A kind of device: its name as the driver says it, and what kernels are compiled for."""

    name: str
    target: str

    def __str__(self) -> str:
        """Name and target: "NVIDIA H200 (cuda:90)"."""
        return f"{self.name} ({self.target})"


@dataclass(frozen=True)
class RunnerUp:
    """The fields of the second best configuration, and how much longer it takes than the best: a
    ratio above 1 (or near it, where the two could not be told apart)."""

    fields: Mapping[str, int]
    ratio: float


@dataclass(frozen=True)
class Row:
    """A configuration, and what it was measured with.

    fields: of the configuration. milliseconds: of a call, by the id of the case. triton, date: the
    version that compiled it, and the day.

    >>> key = Key("rms_norm_gated", "norm", (128,), torch.float32)
    >>> row = Row(key, {"rows": 16, "num_warps": 4}, {}, None, "3.6.0", "2026-11-30")
    >>> row.configuration
    Config(rows=16, num_warps=4)
    """

    key: Key
    fields: Mapping[str, int]
    milliseconds: Mapping[str, float]
    runner_up: RunnerUp | None
    triton: str
    date: str

    @functools.cached_property
    def configuration(self) -> Any:
        """As its kernel takes it, made when that is first launched."""
        return KERNELS[self.key.operation, self.key.kernel].configuration(**self.fields)

    def record(self) -> dict[str, Any]:
        """As plain data."""
        key, second = self.key, self.runner_up
        names = KERNELS[key.operation, key.kernel].sizes
        return {
            "operation": key.operation, "kernel": key.kernel,
            "sizes": dict(zip(names, key.sizes, strict=True)), "dtype": dtype_name(key.dtype),
            "ratio": key.ratio, "windowed": key.windowed, "switches": list(key.switches),
            "configuration": dict(self.fields), "milliseconds": dict(self.milliseconds),
            "runner_up": second and {
                "configuration": dict(second.fields), "ratio": second.ratio,
            },
            "triton": self.triton, "date": self.date,
        }  # fmt: skip


@dataclass(frozen=True)
class Table:
    """The rows of a kind of device; path: the file that they are in."""

    path: Path
    device: Device
    rows: tuple[Row, ...]

    @staticmethod
    def read(path: Path) -> Table:
        """The table in a file; ValueError names the file and the field that is wrong with it."""
        try:
            data = json.loads(path.read_bytes(), parse_constant=_no_number)
        except OSError as error:
            raise ValueError(f"tables: {path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tables: {path}: is no JSON: {error}") from error
        fields = _Fields(f"tables: {path}: ", data)
        if (found := fields.take("format", int)) != FORMAT:
            raise fields.wrong("format", str(FORMAT), found)
        device = Device(fields.take("device", str), fields.take("target", str))
        listed = fields.take("rows", list)
        fields.end()
        rows = tuple(
            _row(_Fields(f"tables: {path}: rows[{i}].", row)) for i, row in enumerate(listed)
        )
        table = Table(path, device, rows)
        _ = table.by_key  # conflicts are told now
        return table

    @property
    def by_key(self) -> dict[Key, Row]:
        """Its rows; ValueError where two contradict each other."""
        places = (f"rows[{i}]" for i in range(len(self.rows)))
        return _agreeing(zip(places, self.rows, strict=True), f"tables: {self.path}: ")

    def changed(self, rows: Iterable[Row]) -> Table:
        """This table with these rows in place of those that they contradict, sorted by key."""
        new = {row.key: row for row in rows}
        kept = [row for row in self.rows if not any(contradict(row, x) for x in new.values())]
        both = {row.key: row for row in (*kept, *new.values())}
        return dataclasses.replace(self, rows=tuple(both[key] for key in sorted(both, key=str)))

    def write(self) -> None:
        """Write the file, a row a line, whole or not at all; ValueError where that cannot be."""
        head = {"format": FORMAT, "device": self.device.name, "target": self.device.target}
        rows = ",\n".join(json.dumps(row.record()) for row in self.rows)
        text = f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n'
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_text(text)
            beside.replace(self.path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise ValueError(f"tables: cannot write {self.path}: {error.strerror}") from error


def together(tables: Iterable[Table]) -> dict[Key, Row]:
    """The rows of several tables of one device; ValueError where two contradict."""
    rows = ((str(table.path), row) for table in tables for row in table.by_key.values())
    return _agreeing(rows, "tables: ")


def contradict(one: Row, other: Row) -> bool:
    """Whether no table may hold both rows: they say different things of one key, or of two keys
    that must give the same bits.
    """
    if one.key == other.key:
        return one.fields != other.fields
    sums = KERNELS[one.key.operation, one.key.kernel].sums
    if sums is None or plain(one.key) != plain(other.key):
        return False
    return sums(one.fields) != sums(other.fields)


def plain(key: Key) -> Key:
    """A key without its switches."""
    return key._replace(switches=())


def _agreeing(rows: Iterable[tuple[str, Row]], where: str) -> dict[Key, Row]:
    """Rows by key, each given with its place; ValueError where two contradict."""
    near: dict[Key, list[tuple[str, Row]]] = {}
    for place, row in rows:
        for first, other in near.setdefault(plain(row.key), []):
            if contradict(row, other):
                keys = " and ".join(dict.fromkeys((str(other.key), str(row.key))))
                raise ValueError(
                    f"{where}{first} and {place} contradict each other: {keys}: "
                    f"{shown_fields(other.fields)} and {shown_fields(row.fields)}"
                )
        near[plain(row.key)].append((place, row))
    return {row.key: row for group in near.values() for _, row in group}


def shown_fields(fields: Mapping[str, int]) -> str:
    """The fields of a configuration in one line.

    >>> shown_fields({"BC": 64, "warps": 8})
    'BC 64, warps 8'
    """
    return ", ".join(f"{name} {value}" for name, value in fields.items())


class _Fields:
    """The fields of a JSON object, taken one by one; errors name file and field."""

    def __init__(self, where: str, data: Any) -> None:
        self._where = where
        if not isinstance(data, dict):
            raise ValueError(f"{where.rstrip('.: ')}: expected an object, got {shown(data)}")
        self._left = dict(data)

    def take(self, name: str, kind: type) -> Any:
        """A field's value, of this very type; a float may be written without a point."""
        if name not in self._left:
            raise self.wrong(name, f"a value of type {kind.__name__}", "none")
        value = self._left.pop(name)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.wrong(name, f"a value of type {kind.__name__}", shown(value))
        return value

    def positive(self, name: str) -> float:
        """A field's value, a finite number above 0."""
        found = self.take(name, float)
        if not 0 < found < math.inf:
            raise self.wrong(name, "a number above 0", found)
        return found

    def part(self, name: str) -> _Fields:
        """A field that is an object."""
        return _Fields(f"{self._where}{name}.", self.take(name, dict))

    def skip_null(self, name: str) -> bool:
        """Whether a field is there and null; then it counts as taken."""
        if self._left.get(name, self) is not None:
            return False
        del self._left[name]
        return True

    def names(self) -> list[str]:
        """Of the fields that were not taken yet."""
        return list(self._left)

    def end(self) -> None:
        """Raise ValueError if a field is left that nobody knows."""
        for name in self._left:
            raise self.wrong(name, "no such field", "one")

    def wrong(self, name: str, expected: str, got: object) -> ValueError:
        return ValueError(f"{self._where}{name}: expected {expected}, got {got}")


def _row(fields: _Fields) -> Row:
    operation, name = fields.take("operation", str), fields.take("kernel", str)
    if (operation, name) not in KERNELS:
        known = ", ".join("/".join(pair) for pair in KERNELS)
        raise fields.wrong("kernel", f"one of {known}", f"{operation}/{name}")
    kernel = KERNELS[operation, name]
    sizes = _integers(fields.part("sizes"), kernel.sizes, least=1)
    if (dtype := fields.take("dtype", str)) not in DTYPES:
        raise fields.wrong("dtype", f"one of {list(DTYPES)}", repr(dtype))
    ratio, windowed = fields.take("ratio", int), fields.take("windowed", bool)
    whole = ratio > 0 and ratio & (ratio - 1) == 0
    if not (whole if kernel.grouped else ratio == 0):
        raise fields.wrong("ratio", "a power of two" if kernel.grouped else "0", ratio)
    if windowed and not kernel.windowed:
        raise fields.wrong("windowed", "false", "true")
    switches = fields.take("switches", list)
    if switches != [word for word in kernel.switches if word in switches]:
        raise fields.wrong("switches", f"some of {list(kernel.switches)}, in order", switches)
    key = Key(
        operation, name, tuple(sizes.values()), DTYPES[dtype], ratio, windowed, tuple(switches)
    )
    configuration = _configuration(fields.part("configuration"), kernel)
    times = fields.part("milliseconds")
    milliseconds = {case: times.positive(case) for case in times.names()}
    second = None
    if not fields.skip_null("runner_up"):
        part = fields.part("runner_up")
        other = _configuration(part.part("configuration"), kernel)
        second = RunnerUp(other, part.positive("ratio"))
        part.end()
    triton, day = fields.take("triton", str), fields.take("date", str)
    try:
        date.fromisoformat(day)
    except ValueError:
        raise fields.wrong("date", "a day as 2026-01-31", repr(day)) from None
    fields.end()
    return Row(key, configuration, milliseconds, second, triton, day)


FREE = {"stages": 1, "resident": 1, "unroll": 1, "piece": 0, "registers": 0}
"""Fields of configurations that need be no powers of two, and the least that they may be."""
TILES = "BM", "BN", "BC", "BV"
LEAST_TILE = 16
"""Rows or columns of a tile, which products need."""
MOST = dict.fromkeys(TILES, 256) | {"warps": 32, "num_warps": 32, "stages": 16, "resident": 32}
MOST |= {"registers": 255, "unroll": 256, "rows": 2**16, "channels": 2**16, "piece": 2**30}
"""The most that fields may be: what is beyond cannot be built on any device."""


def _configuration(fields: _Fields, kernel: Kernel) -> dict[str, int]:
    """The fields of a configuration that its kernel can be built with."""
    found = _integers(fields, kernel.fields, least=0)
    for name, value in found.items():
        least = LEAST_TILE if name in TILES else FREE.get(name, 1)
        if name == "piece" and kernel.sums is not None:
            least = found["BN"]  # blocks of no keys
        if value < least:
            raise fields.wrong(name, f"at least {least}", value)
        if name not in FREE and value & (value - 1):
            raise fields.wrong(name, "a power of two", value)
        if value > MOST[name]:
            raise fields.wrong(name, f"at most {MOST[name]}", value)
    if found.get("piece", 0) % found.get("BN", 1):
        raise fields.wrong("piece", f"whole tiles of BN = {found['BN']} keys", found["piece"])
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _integers(fields: _Fields, names: tuple[str, ...], least: int) -> dict[str, int]:
    """All of these fields and no others, integers that are not below `least`."""
    found = {name: fields.take(name, int) for name in names}
    for name, value in found.items():
        if value < least:
            raise fields.wrong(name, f"at least {least}", value)
    fields.end()
    return found
