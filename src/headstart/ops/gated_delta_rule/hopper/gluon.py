"""What Triton 3.6 and later releases call by different names in Gluon."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _named(place: Any, early: str, late: str) -> Any:
    # The late one first: early names may still be there later, to say that they are gone.
    return getattr(place, late if hasattr(place, late) else early)


thread_barrier = _named(gl, "thread_barrier", "barrier")
"""All threads of the group meet."""
copy_in = _named(tma, "async_copy_global_to_shared", "async_load")
"""The copy engine reads: descriptor, coordinates, barrier, tile."""
copy_out = _named(tma, "async_copy_shared_to_global", "async_store")
"""The copy engine writes: descriptor, coordinates, tile."""
gather_in = _named(async_copy, "async_copy_global_to_shared", "async_load")
"""Every thread has its own words copied: tile, pointers, mask."""
reinterpret = _named(gl.shared_memory_descriptor, "_reinterpret", "reinterpret")
"""The same shared memory in another shape: tile, dtype, shape, layout."""


@gluon.jit
def in_pairs(x, dtype: gl.constexpr):
    """x.to(dtype) of two numbers an instruction, where the compiler leaves them apart."""
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return pairs
