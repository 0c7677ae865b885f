"""What a call does not use costs it nothing: the instructions are those of a build without it.

The other build is the kernels' source with windows, masks, listed positions, sinks and softcap
taken out of it; both are cross-compiled, so no GPU is needed.
"""

import ast
import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.implementations import KERNELS

from headstart.runtime.static import TARGETS

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KERNELS, reason="compiles, which the interpreter's process cannot"),
]

FOLDER = "headstart.ops.extend_attention.triton"
MODULES = ("rows", "sweep", "extend", "unified")
"""In the order in which they import each other."""
OFF = {
    "WINDOWED": False, "MASKED": False, "MASK": "", "LISTED": False, "HAS_SINKS": False,
    "FORM": "plain",
}  # fmt: skip


class _Without(ast.NodeTransformer):
    """Resolves every branch whose condition only asks for what is off."""

    def __init__(self) -> None:
        self.resolved = 0

    def visit_If(self, node):
        asked = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
        if not asked or not asked <= set(OFF):
            self.generic_visit(node)
            return node
        self.resolved += 1
        condition = compile(ast.Expression(node.test), "condition", "eval")
        kept = node.body if eval(condition, dict(OFF)) else node.orelse
        found = []
        for statement in kept:
            visited = self.visit(statement)
            found += visited if isinstance(visited, list) else [visited]
        return found


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Kernel -> its build without what is off."""
    folder = tmp_path_factory.mktemp("without")
    stripped = _Without()
    built = {}
    for name in MODULES:
        source = Path(importlib.import_module(f"{FOLDER}.{name}").__file__).read_text()
        tree = ast.fix_missing_locations(stripped.visit(ast.parse(source)))
        text = ast.unparse(tree)
        for earlier in built:
            text = text.replace(f"from {FOLDER}.{earlier} import", f"from {earlier}_without import")
        path = folder / f"{name}_without.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        built[name] = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(built[name])
    assert stripped.resolved >= 12
    return {name: getattr(built[name], f"{name}_kernel") for name in ("extend", "unified")}


@pytest.mark.parametrize("name", ["extend", "unified"])
def test_what_is_off_leaves_no_instruction(without, name):
    from headstart.evidence.static.worker import inspect_kernel
    from headstart.ops.extend_attention.triton.static import kernels

    target = TARGETS["cuda:90"]
    (full,) = [kernel for kernel in kernels(target) if kernel.name == f"{name}-D64-bf16"]
    found = inspect_kernel(full, target)
    want = inspect_kernel(replace(full, fn=without[name]), target)
    assert found["instructions"] > 500
    assert found["fingerprint"] == want["fingerprint"]
