"""Run records: the JSON that `verify`, `bench`, `static` and the rest write, and `report` reads.

A record says what it holds (`kind`), when and where it was made, and under which schema; what one
result looks like is the matter of the command that made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from headstart.evidence.environment import environment, revision
from headstart.evidence.files import expect_writable, write

__all__ = ["Environment", "Record", "Run", "expect_writable", "load", "save"]

SCHEMA_VERSION = 1
"""Raised whenever a reader of older records would misread a new one, or the reverse."""

R = TypeVar("R")


class Record(BaseModel):
    """A part of a run record: immutable, no unknown fields, NaN and infinities kept.

    JSON knows no NaN: they are written as the strings "NaN", "Infinity" and "-Infinity", which
    float fields read back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Environment(Record):
    """Where a run was made.

    revision: commit of the checkout, "-dirty" with changes; "" for an installed package.
    version: of Python and of each package, by name.
    device: description of each device, by name.
    variable: the HEADSTART_* variables.
    """

    revision: str
    version: dict[str, str]
    device: dict[str, str]
    variable: dict[str, str]

    @classmethod
    def here(cls) -> Environment:
        """The environment of this process."""
        facts = environment()
        return cls(
            revision=revision(),
            version=facts["version"],
            device=facts["device"],
            variable={name: _without_folder(value) for name, value in facts["variable"].items()},
        )


class Run(Record, Generic[R]):
    """One run of a command.

    kind: "verify", "bits", "transcript", "tiles", "mutants", "bench", "stages", "static", ...
    options: how the command was called, by option name.
    results: one record each, of the kind's own model.
    """

    schema_version: int = SCHEMA_VERSION
    kind: str
    created: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    environment: Environment = Field(default_factory=Environment.here)
    options: dict[str, Any] = {}
    results: list[R]


def save(
    path: Path | str, kind: str, results: Iterable[Any], options: dict[str, Any] | None = None
) -> None:
    """Write a run made here and now; ValueError where the file cannot be written.

    results: pydantic models or plain data. Of an absolute path among the options the record keeps
    the last part: folders of the machine it was made on tell its readers nothing.
    """
    options = {name: _without_folder(value) for name, value in (options or {}).items()}
    run = Run[Any](kind=kind, options=options, results=list(results))
    write(path, run.model_dump_json(indent=2) + "\n")


def _without_folder(value: Any) -> Any:
    absolute = isinstance(value, str | Path) and Path(value).is_absolute()
    return Path(value).name if absolute else value


def load(path: Path | str, model: type[R] = dict, kind: str | None = None) -> Run[R]:  # type: ignore[assignment]
    """Read a run whose results are of `model`.

    Raises ValueError, with the file and the field, for a file that cannot be read, is no JSON, has
    another schema version, another kind than `kind`, or a field that does not fit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/run.json", "tiles", [{"case": "oss-16k-win", "saved": 0.5}])
    ...     load(f"{folder}/run.json", kind="tiles").results
    [{'case': 'oss-16k-win', 'saved': 0.5}]
    """
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no text, no JSON, a number or depth too large
        raise ValueError(f"{path}: is no JSON: {error}") from error
    if not isinstance(data, dict) or "schema_version" not in data:
        raise ValueError(f"{path}: schema_version: missing; this is no run record")
    version = data["schema_version"]
    if version != SCHEMA_VERSION or type(version) is not int:
        raise ValueError(f"{path}: schema_version: expected {SCHEMA_VERSION}, got {version!r}")
    try:
        run = Run[model].model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {field}: {first['msg']}") from error
    if kind is not None and run.kind != kind:
        raise ValueError(f"{path}: kind: expected {kind!r}, got {run.kind!r}")
    return run
