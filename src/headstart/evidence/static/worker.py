"""Compiles kernels and writes one JSON line for each; a process of its own.

    python -m headstart.evidence.static.worker REQUEST.json RESULTS.jsonl

The request names places, targets, a pattern, a part and how many to skip. The first line lists
kernels.
Before a kernel is compiled a line names it, so that the parent knows which one took the compiler
down with it.
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from headstart.evidence.static import machine_code
from headstart.evidence.static.budgets import resident_blocks
from headstart.evidence.static.parts import Part
from headstart.runtime.static import TARGETS, StaticKernel, Target


def compile_kernel(kernel: StaticKernel, target: Target) -> Any:
    """Triton's compiled kernel of one configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    names = list(kernel.fn.arg_names)
    given = set(kernel.signature) | set(kernel.constexprs)
    if given != set(names):
        raise ValueError(
            f"signature: missing {sorted(set(names) - given)}, unknown {sorted(given - set(names))}"
        )
    signature = {name: kernel.signature.get(name, "constexpr") for name in names}
    attrs = {
        (names.index(name),): [["tt.divisibility", divisor]]
        for name, divisor in kernel.divisors().items()
    }
    source = GluonASTSource if isinstance(kernel.fn, GluonJITFunction) else ASTSource
    return triton.compile(
        source(kernel.fn, signature, constexprs=dict(kernel.constexprs), attrs=attrs),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={
            "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages,
            **kernel.options,
        },
    )


def inspect_kernel(kernel: StaticKernel, target: Target) -> dict[str, Any]:
    """Everything that `headstart static` shows of one configuration on one target."""
    began = time.perf_counter()
    compiled = compile_kernel(kernel, target)
    if target.backend == "cuda":
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(compiled.asm["cubin"])
            code = machine_code.sass(
                _cuobjdump("-res-usage", cubin), _cuobjdump("-sass", cubin), compiled.asm["ptx"]
            )
    else:
        code = machine_code.amdgcn(compiled.asm["amdgcn"])
    shared = compiled.metadata.shared
    return {
        "registers": code.registers,
        "vector_spills": code.vector_spills,
        "scalar_spills": code.scalar_spills,
        "shared": shared,
        "resident_blocks": resident_blocks(
            target.name,
            registers=code.registers,
            threads=code.threads,
            warp_size=target.warp_size,
            shared=shared,
        ),
        "threads": code.threads,
        "matrix": code.matrix,
        "loads": code.loads,
        "instructions": code.instructions,
        "opcodes": code.opcodes,
        "fingerprint": code.fingerprint,
        "seconds": round(time.perf_counter() - began, 3),
    }


def _cuobjdump(option: str, cubin: Path) -> str:
    import triton

    shipped = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    tool = str(shipped) if shipped.is_file() else "cuobjdump"
    return subprocess.run(
        [tool, option, str(cubin)], capture_output=True, text=True, check=True
    ).stdout


def listed(
    places: dict[str, str], targets: list[str], strict: bool
) -> Iterator[tuple[str, StaticKernel, str]]:
    """(operation, kernel, target) of every configuration at these places.

    strict: a place whose module is not there is an error, as where a user names it.
    """
    for operation, place in places.items():
        module, function = place.split(":")
        try:
            kernels = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            # Another revision may not have a place's module yet; a broken import is an error.
            if strict or error.name is None or not module.startswith(error.name):
                raise
            continue
        for target in targets:
            found = list(kernels(TARGETS[target]))
            names = [kernel.name for kernel in found]
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{place}: several kernels called {sorted(twice)} for {target}")
            for kernel in found:
                if kernel.targets is None or target in kernel.targets:
                    yield operation, kernel, target


def work(request: dict[str, Any], results: TextIO) -> None:
    """Compile what the request asks for; a line before and a line after each."""
    import triton

    def write(**line: Any) -> None:
        results.write(json.dumps(line) + "\n")
        results.flush()

    part = Part.parse(request["part"])
    chosen = [
        (operation, kernel, target)
        for operation, kernel, target in listed(
            request["places"], request["targets"], request["strict"]
        )
        if fnmatch.fnmatch(kernel.name, request["pattern"])
        and part.holds(operation, kernel.name, target)
    ]
    kernels = [(operation, kernel.name, target) for operation, kernel, target in chosen]
    write(event="list", triton=triton.__version__, kernels=kernels)
    for index, (operation, kernel, target) in enumerate(chosen):
        if index < request["skip"]:
            continue
        identity = {
            "kernel": kernel.name,
            "operation": operation,
            "target": target,
            "triton": triton.__version__,
            "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages,
            "has_product": kernel.has_product,
        }
        write(event="begin", index=index, result=identity)
        try:
            result = identity | {"error": ""} | inspect_kernel(kernel, TARGETS[target])
        except Exception as error:  # whatever a compiler raises is this kernel's result
            words = str(error).strip().splitlines() or [""]
            result = identity | {"error": f"{type(error).__name__}: {words[-1][:200]}"}
        write(event="end", index=index, result=result)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("static: Triton compiles nothing where TRITON_INTERPRET is on")
    with open(sys.argv[1]) as source, open(sys.argv[2], "a") as sink:
        work(json.load(source), sink)
