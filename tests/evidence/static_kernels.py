"""Small kernels for the tests of `headstart static`, registered as kernels of the package are."""

import os

import triton
import triton.language as tl

from headstart.runtime.static import StaticKernel


@triton.jit
def product(x, y, out, bias, n, SIDE: tl.constexpr, INNER: tl.constexpr, SCALED: tl.constexpr):
    row = tl.arange(0, SIDE)[:, None]
    column = tl.arange(0, SIDE)[None, :]
    inner = tl.arange(0, INNER)
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, n, INNER):
        a = tl.load(x + row * n + start + inner[None, :])
        b = tl.load(y + (start + inner[:, None]) * SIDE + column)
        acc = tl.dot(a, b, acc)
    if SCALED:
        acc *= 0.5
    if bias is not None:
        acc += tl.load(bias + column)
    tl.store(out + row * SIDE + column, acc)


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def _product(name, side=64, inner=64, stages=3, has_product=True, bias=False, scaled=False, **more):
    signature = {"x": "*bf16", "y": "*bf16", "out": "*fp32", "n": "i32"}
    constexprs = {"SIDE": side, "INNER": inner, "SCALED": scaled}
    if bias:
        signature["bias"] = "*fp32"
    else:
        constexprs["bias"] = None
    pointers = {name: 16 for name, kind in signature.items() if kind[0] == "*"}
    return StaticKernel(
        name,
        product,
        signature,
        constexprs,
        num_warps=4,
        num_stages=stages,
        has_product=has_product,
        attrs=pointers | {"n": 16},
        **more,
    )


def _copy(name, **more):
    signature = {"x": "*fp32", "out": "*fp32", "n": "i32"}
    return StaticKernel(name, copy, signature, {"BLOCK": 1024}, num_warps=4, num_stages=1, **more)


def good(target):
    return [
        _product("product"),
        _product("product-scale-off"),
        _product("product-bias", bias=True),
        _product("product-scaled", scaled=True),
        _copy("copy", has_product=False, attrs={"x": 16, "out": 16, "n": 16}),
        _copy("copy-unaligned", has_product=False, attrs={}, targets=("cuda:90",)),
    ]


def bad(target):
    return [
        _product("spills", side=256, inner=32, stages=1),
        _product("too-much-shared", inner=256, stages=4),
        _copy("no-matrix", has_product=True),
    ]


def broken(target):
    unknown = {"x": "*fp32", "out": "*fp32", "m": "i32"}
    return [
        StaticKernel("wrong-signature", copy, unknown, {"BLOCK": 64}, 4, 1, False),
        _copy("copy", has_product=False),
    ]


def deadly(target):
    # Raised while Triton asks for the arguments' names: as abrupt as a crash of the compiler.
    class Deadly:
        @property
        def arg_names(self):
            os._exit(7)

    return [
        _copy("before", has_product=False),
        StaticKernel("deadly", Deadly(), {}, {}, 4, 1, False),
        _copy("after", has_product=False),
    ]
