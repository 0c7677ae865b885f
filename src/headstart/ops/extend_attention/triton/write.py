"""Storing keys and values of new tokens in the slots of a cache.

Rounding to float8 e4m3 is done in integers: conversions are not the same on all devices, and not
there on some.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headstart.ops.extend_attention.kv_cache import FP8, FP8_MAX, page_strides
from headstart.ops.extend_attention.triton.keys import find, offsets, read_scale
from headstart.ops.extend_attention.write_spec import WriteCall
from headstart.runtime.launcher import current, start

ROWS = 16
"""Tokens that a program stores."""

_MOST = tl.constexpr(FP8_MAX)


@triton.jit
def to_e4m3(x):
    """Bytes of float32 values, rounded to nearest even and saturated."""
    size = tl.minimum(tl.abs(x), _MOST)
    bits = size.to(tl.uint32, bitcast=True)
    # Normal values: 20 bits of mantissa go, and the bias of the exponent falls from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 there are multiples of 2**-9: adding 2**14 leaves no finer bits.
    tiny = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    found = tl.where(size < 0.015625, tiny, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return tl.where(x != x, 0x7F, found | sign).to(tl.uint8)


@triton.jit(do_not_specialize=["tokens", "page_rows"])
def write_kernel(
    rows, store, slots, scale, number, tokens, page_rows, row_token, row_head, row_channel,
    page, row, head, channel, scale_head,
    SIZE: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """BT tokens of one head; a negative slot is not written. PAGE, page_rows: as for `find`."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    o_d = tl.arange(0, BD)
    m_d = (o_d < SIZE)[None, :]
    m_t = o_t < tokens
    slot = tl.load(slots + o_t, mask=m_t, other=-1)
    p_x = rows + (o_t.to(tl.int64) * row_token)[:, None] + (o_d * row_channel)[None, :]
    b_x = tl.load(p_x + h.to(tl.int64) * row_head, mask=m_t[:, None] & m_d, other=0.0)
    found = find(slot, 0, slot, page_rows, "list", PAGE)
    at = offsets(found[0], found[1], (page, row, channel), PAGE) + h.to(tl.int64) * head
    p_store = store + at[:, None] + (o_d * channel)[None, :]
    if FP8:
        divisor = tl.full((BT, BD), read_scale(scale, number, h * scale_head), tl.float32)
        b_x = to_e4m3(tl.math.div_rn(b_x.to(tl.float32), divisor))
    else:
        b_x = b_x.to(store.dtype.element_ty)
    tl.store(p_store, b_x, mask=(slot >= 0)[:, None] & m_d)


def write(call: WriteCall) -> None:
    """Store the rows of a call."""
    cache = call.cache
    tokens = call.k.shape[0]
    if not tokens:
        return
    quantised = cache.k.dtype == FP8
    grid = (triton.cdiv(tokens, ROWS), cache.HK)
    for rows, store, scale in (
        (call.k, cache.k, cache.k_scale),
        (call.v, cache.v, cache.v_scale),
    ):
        tensor = isinstance(scale, torch.Tensor)
        page, row = page_strides(store, cache.page_size)
        flat = page == cache.page_size * row
        given = (
            rows, store.view(torch.uint8) if quantised else store, call.slots.contiguous(),
            scale if tensor else None, 1.0 if tensor or scale is None else float(scale),
            tokens, cache.page_size, *rows.stride(), row if flat else page, row,
            store.stride(-2), store.stride(-1),
            int(tensor and scale.numel() > 1), rows.shape[-1],
            triton.next_power_of_2(rows.shape[-1]), ROWS, int(flat), quantised,
        )  # fmt: skip
        arguments = dict(zip(write_kernel.arg_names, given, strict=True))
        with current(call.device):
            start(write_kernel, grid, arguments, num_warps=4)
