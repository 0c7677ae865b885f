"""How kernels declare their configurations, so that they can be compiled where no GPU is.

A module of kernels offers `kernels(target) -> list[StaticKernel]`, every configuration that its
rules or tables can choose on that target, and its place stands in `STATIC`:

    def kernels(target: Target) -> list[StaticKernel]:
        return [
            StaticKernel(
                name="scan-K128-V128-bf16",
                fn=scan_kernel,  # under @triton.jit
                signature={"q": "*bf16", "state": "*fp32", "tokens": "i32", "scale": "fp32"},
                constexprs={"K": 128, "BV": 32, "bias": None},
                num_warps=4,
                num_stages=3,
                has_product=True,
            )
        ]

`headstart static` then shows registers, spills, shared memory and instructions of each. A feature
that is switched off is a configuration of its own name; `--diff` shows that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for.

    name: as on the command line, "cuda:90" or "hip:gfx942".
    backend: "cuda" or "hip".
    arch: the compute capability times ten, or the name of the AMD architecture.
    warp_size: lanes of a warp or wave.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int


TARGETS = {
    target.name: target
    for target in (
        *(Target(f"cuda:{arch}", "cuda", arch, 32) for arch in (80, 89, 90, 100, 120)),
        *(Target(f"hip:{arch}", "hip", arch, 64) for arch in ("gfx942", "gfx950")),
        Target("hip:gfx1151", "hip", "gfx1151", 32),
    )
}


@dataclass(frozen=True)
class StaticKernel:
    """One configuration of one kernel.

    name: unique within its place; names the kernel, sizes, dtype and switches.
    fn: the function under `triton.jit` or `gluon.jit`.
    signature: type of every run-time argument as Triton spells it ("*bf16", "i32", "fp32"); a
        tuple of types for a tuple.
    constexprs: value of every other argument; a pointer that is absent is None here.
    has_product: whether matrix instructions are expected in it.
    targets: names of the targets it is for; None: all.
    attrs: what an argument is known to be a multiple of; None: 16 for every pointer.
    options: further options of the compiler, `maxnreg` or `waves_per_eu` for example.
    """

    name: str
    fn: Any
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    has_product: bool
    targets: tuple[str, ...] | None = None
    attrs: Mapping[str, int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def divisors(self) -> Mapping[str, int]:
        """`attrs`, or 16 for every pointer.

        >>> StaticKernel("copy", None, {"x": "*fp32", "n": "i32"}, {}, 4, 1, False).divisors()
        {'x': 16}
        """
        if self.attrs is not None:
            return self.attrs
        return {name: 16 for name, kind in self.signature.items() if kind.startswith("*")}


STATIC = {
    "gated_delta_rule": "headstart.ops.gated_delta_rule.triton.static:kernels",
    "gated_delta_rule/hopper": "headstart.ops.gated_delta_rule.hopper.static:kernels",
    "causal_conv1d": "headstart.ops.convolution.triton.static:kernels",
    "extend_attention": "headstart.ops.extend_attention.triton.static:kernels",
}
"""Operation, or operation/implementation -> "module:function" that lists its kernels."""
