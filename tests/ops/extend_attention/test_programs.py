"""Programs as launches make them compile, with all that they know of pointers: no GPU is needed."""

import pytest
import torch
from tests.implementations import KERNELS

import headstart
from headstart import ExtendPlan, KVCache
from headstart.runtime.bundle_programs import programs_of
from headstart.runtime.rehearsal import rehearsing
from headstart.runtime.static import TARGETS

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(KERNELS, reason="compiles, which the interpreter's process cannot"),
]

HQ, HK, D = 8, 2, 64


def plan_of(layout):
    """30 new tokens behind 40 cached ones, and the cache's shape."""
    table = torch.zeros(1, 3, dtype=torch.int32)
    if layout == "run":
        return ExtendPlan.from_lengths([30], [40], device="meta"), (64, HK, D)
    if layout == "list":
        slots = torch.zeros(40, dtype=torch.int32)
        plan = ExtendPlan.from_slots([30], [0, 40], slots, new_in_cache=False, device="meta")
        return plan, (64, HK, D)
    plan = ExtendPlan.from_pages([30], [70], table, 16, new_in_cache=False, device="meta")
    return plan, (4, 16, HK, D)


@pytest.mark.parametrize("target", ["hip:gfx942", "hip:gfx1151", "cuda:80"])
@pytest.mark.parametrize("layout", ["run", "list", "pages"])
def test_reproducible_tiles_with_cached_and_packed_keys_compile(layout, target):
    """AMD's compiler gave up on a pointer into one of two tensors of less than 2 GiB."""
    q, k, v = (torch.empty(30, n, D, dtype=torch.bfloat16, device="meta") for n in (HQ, HK, HK))
    plan, shape = plan_of(layout)
    cache = KVCache(*(torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in "kv"))
    with rehearsing(TARGETS[target], 64) as rehearsal:
        headstart.extend_attention(
            q, k, v, plan=plan, cache=cache, reproducible=True, implementation="triton"
        )
    (program,) = [p for p in programs_of(rehearsal).values() if p.name == "unified_kernel"]
    code = program.compile().asm["ttir"]
    assert "tt.dot" in code
    assert ("tt.pointer_range = 32" in code) == target.startswith("hip")


NAMES = {
    "cuda:90": ("extend-D64-bf16", "extend-D64-bf16-pages", "extend-D192-DV128-bf16"),
    "cuda:120": ("extend-D192-DV128-bf16",),
    "hip:gfx942": ("extend-D192-DV128-bf16",),
    "hip:gfx1151": (
        "extend-D512-bf16", "extend-D128-fp32", "unified-D64-bf16-mask", "unified-D128-bf16-win",
        "unified-D192-DV128-bf16-pages", "unified-D256-bf16-pages", "unified-D512-bf16-win",
        "unified-D128-fp32-pages",
    ),
}  # fmt: skip
"""Target -> programs whose registers are scarce there."""


@pytest.mark.parametrize(
    ("target", "name"), [(target, name) for target, names in NAMES.items() for name in names]
)
def test_programs_keep_their_budgets_where_registers_are_scarce(target, name):
    """All programs of all targets are for `headstart static`."""
    from headstart.evidence.static.budgets import broken
    from headstart.evidence.static.worker import inspect_kernel
    from headstart.ops.extend_attention.triton.static import kernels

    place = TARGETS[target]
    (kernel,) = [kernel for kernel in kernels(place) if kernel.name == name]
    found = inspect_kernel(kernel, place) | {"error": "", "has_product": kernel.has_product}
    assert not broken(target, found)
