"""`headstart env`: what this installation and this machine offer."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

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


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """Print versions, devices, implementations and HEADSTART_* variables."""
    from headstart.cli.printing import print_json, print_table

    found = environment()
    if as_json:
        print_json(found)
        return
    for title, rows in found.items():
        print_table((title, ""), rows.items() or [("none", "")])
        print()


def environment() -> dict[str, dict[str, Any]]:
    """Facts by heading: versions, devices, implementations, files, variables."""
    import torch

    from headstart import checkpoints
    from headstart.runtime.dispatch import OPERATIONS

    devices: dict[str, Any] = {
        "cpu": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices[f"cuda:{index}"] = (
                f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
                f"{properties.total_memory / 2**30:.0f} GiB"
            )
    return {
        "version": {"python": platform.python_version(), **{n: _version(n) for n in PACKAGES}},
        "device": devices,
        "implementations": {
            name: ", ".join(operation.places) for name, operation in sorted(OPERATIONS.items())
        },
        "checkpoint": {name: _checkpoint(checkpoints.path(name)) for name in checkpoints.names()},
        "variable": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("HEADSTART_")
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


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
