"""What this installation and this machine offer: the block of facts beside every measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "headstart",
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "tokenizers",
    "onnxruntime",
    "numpy",
    "pydantic",
)
PEERS = (
    "flash-linear-attention",
    "flashinfer-python",
    "flash-qla",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "sglang",
)
"""What arms of benchmarks run; told where it is installed."""


MISSING = "not installed"


def environment() -> dict[str, dict[str, Any]]:
    """Facts by heading: versions, devices, implementations, tables, files, variables.

    >>> sorted(environment())
    ['checkpoint', 'device', 'implementations', 'table', 'variable', 'version']
    """
    from headstart import checkpoints
    from headstart.runtime.dispatch import operations

    return {
        "version": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            **{name: found for name in PEERS if (found := _version(name)) != MISSING},
        },
        "device": _devices(),
        "implementations": {
            name: ", ".join(operation.places) for name, operation in sorted(operations().items())
        },
        "table": _tables(),
        "checkpoint": {name: _checkpoint(checkpoints.path(name)) for name in checkpoints.names()},
        "variable": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("HEADSTART_")
        },
    }


def revision() -> str:
    """The commit that the package's source lies at, "-dirty" with changes; "" outside a checkout.

    A checkout is known by its own layout, so that a wheel installed somewhere inside another
    repository does not report that one's commit.
    """
    package = Path(__file__).resolve().parents[1]
    root = package.parents[1]
    if package != root / "src" / "headstart" or not (root / ".git").exists():
        return ""
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def _devices() -> dict[str, str]:
    import torch

    devices = {"cpu": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices[f"cuda:{index}"] = (
                f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
                f"{properties.total_memory / 2**30:.0f} GiB"
            )
    return devices


def _tables() -> dict[str, str]:
    """Files of measured configurations, the package's and the user's: for which device."""
    from headstart.runtime.tables import packaged_tables, user_tables

    try:
        found = [*packaged_tables(), *user_tables()]
    except ValueError as error:  # what is wrong with an installation is what this is asked for
        return {"damaged": str(error)}
    return {str(table.path): f"{table.device}, {len(table.rows)} rows" for table in found}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _checkpoint(path: os.PathLike) -> str:
    weights = os.path.join(path, "model.safetensors")
    if not os.path.isfile(weights):
        return "missing"
    return f"{os.path.getsize(weights) / 2**20:.1f} MiB"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
