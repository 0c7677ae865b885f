"""Windowed causal attention: blocks of queries, each against the band of keys that it can see.

Row i of a block sees columns i to i + window - 1 of the block's window - 1 + BLOCK keys, so one
additive mask serves every block, and the fused kernel takes a whole span of blocks as a batch: its
keys are overlapping views of one run. The cost does not depend on the length of the prefix.
"""

from __future__ import annotations

import torch

from headstart.ops.extend_attention.flash import (
    SPAN,
    Buffers,
    attend,
    copies_queries,
    finish,
    keys_values,
    plain,
    queries,
)
from headstart.ops.extend_attention.keys import view
from headstart.ops.extend_attention.scratch import Layout
from headstart.ops.extend_attention.spec import ExtendCall

WIDEST = 4096
"""Windows beyond this take the tiled route: the mask would no longer be small."""


def suits(call: ExtendCall, n: int) -> bool:
    """Whether this route computes sequence n."""
    plan = call.plan
    if not plain(call, n) or call.window is None or call.window > WIDEST:
        return False
    if not call.causal or call.part == "prefix":
        return False
    joined = plan.key_start[n] + plan.prefix[n] == plan.query_start[n]
    return call.part == "extend" or not plan.prefix[n] or joined


def block_rows(window: int, length: int) -> int:
    """Queries of a block: wide enough for the kernel, narrow enough to visit little in vain."""
    rows = 64 if window <= 256 else 128 if window <= 1024 else 256
    return min(rows, length)


def layout(call: ExtendCall, n: int) -> Layout:
    """Scratch for sequence n."""
    window, length = _window(call), call.plan.lengths[n]
    width = max(call.D, call.DV)
    block = block_rows(window, length)
    found: Layout = {"band.mask": ((block, window - 1 + block), torch.float32)}
    if copies_queries(call):
        found["flash.q"] = ((min(SPAN, length), call.HQ, width), torch.float32)
    rows = 0
    for begin in range(0, length, SPAN):
        lower, upper = _band(call, n, begin, min(begin + SPAN, length))
        if call.D != call.DV or view(call, n, lower, upper, torch.float32) is None:
            rows = max(rows, upper - lower)
    if rows:
        for name in ("flash.k", "flash.v"):
            found[name] = ((rows, call.HK, width), torch.float32)
    return found


def run(
    call: ExtendCall, n: int, buffers: Buffers, out: torch.Tensor, out_lse: torch.Tensor
) -> None:
    """Compute sequence n into out [length, HQ, DV] and out_lse [length, HQ]."""
    window, length, first = _window(call), call.plan.lengths[n], call.plan.offsets[n]
    block = block_rows(window, length)
    mask = _mask(buffers["band.mask"], window, block)
    for begin in range(0, length, SPAN):
        end = min(begin + SPAN, length)
        q = queries(call, first + begin, first + end, buffers)
        lower, upper = _band(call, n, begin, end)
        k, v = keys_values(call, n, lower, upper, buffers)
        for row, blocks in _blocks(end - begin, block, window, upper - lower - (end - begin)):
            rows = slice(row, min(row + blocks * block, end - begin))
            o, lse = _attend(call, q[rows], k, v, upper - lower, end - begin, row, blocks, mask)
            finish(call, o[..., : call.DV], lse, out[begin:end][rows], out_lse[begin:end][rows])


def _attend(
    call: ExtendCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: int,
    span: int,
    row: int,
    blocks: int,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`blocks` blocks of queries from row `row` of the span on; keys ends at the span's end."""
    window, count = _window(call), q.shape[0]
    first = keys - span + row - (window - 1)
    if blocks == 1:
        lower, upper = max(first, 0), first + window - 1 + count
        seen = mask[:count, lower - first : window - 1 + count]
        k, v = k[lower:upper], v[lower:upper]
        if count == 1:
            return attend(q, k, v, call.scale)
        return attend(q, k, v, call.scale, mask=seen[None, None])
    block = count // blocks
    k, v = (_bands(x[first:], blocks, block, window - 1 + block) for x in (k, v))
    o, lse = attend(q.unflatten(0, (blocks, block)), k, v, call.scale, mask=mask[None, None])
    return o.flatten(0, 1), lse.flatten(0, 1)


def _bands(rows: torch.Tensor, blocks: int, step: int, width: int) -> torch.Tensor:
    """Overlapping views [blocks, width, HK, E], one every `step` rows."""
    token, head, element = rows.stride()
    return rows.as_strided((blocks, width, *rows.shape[1:]), (step * token, token, head, element))


def _blocks(rows: int, block: int, window: int, before: int) -> list[tuple[int, int]]:
    """(first row, count of blocks): early blocks whose band is cut, the whole ones, the rest.

    before: keys in front of the span's first row.
    """
    cut = min(-(-max(window - 1 - before, 0) // block), -(-rows // block))
    found = [(i * block, 1) for i in range(cut)]
    whole = max(rows // block - cut, 0)
    if whole:
        found.append((cut * block, whole))
    if rows % block and cut * block < rows:
        found.append((rows // block * block, 1))
    return found


def _band(call: ExtendCall, n: int, begin: int, end: int) -> tuple[int, int]:
    """First and end key that rows [begin, end) of sequence n can see."""
    prefix = call.plan.prefix[n]
    return max(call.keys(n).start, prefix + begin - (_window(call) - 1)), prefix + end


def _mask(buffer: torch.Tensor, window: int, block: int) -> torch.Tensor:
    """Additive mask [block, window - 1 + block]: row i sees columns i to i + window - 1."""
    mask = buffer.flatten()[: block * (window - 1 + block)].view(block, window - 1 + block)
    row = torch.arange(block, device=mask.device)[:, None]
    column = torch.arange(window - 1 + block, device=mask.device)[None, :]
    return mask.zero_().masked_fill_((column < row) | (column >= row + window), -torch.inf)


def _window(call: ExtendCall) -> int:
    """The window of a call that this route suits."""
    if call.window is None:
        raise ValueError("window: expected a window")
    return call.window
