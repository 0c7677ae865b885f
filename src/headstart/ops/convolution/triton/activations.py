"""Sigmoid and silu of kernels.

As root * root, root = rsqrt(1 + 2^(-x / ln 2)): both powers are single instructions of a GPU, where
exp and a division take a dozen, most of them for denormal numbers, and hold up what reads memory.
Within a few units in the last place of float32.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false

import triton
import triton.language as tl

_PER_LN2 = tl.constexpr(1.4426950408889634)


@triton.jit
def _root(x):
    return tl.rsqrt(1.0 + tl.exp2(x * -_PER_LN2))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in float32."""
    root = _root(x)
    return root * root


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) in float32."""
    root = _root(x)
    return x * root * root
