"""An online softmax over tiles of queries and keys, in plain PyTorch operations.

It serves what no fused kernel takes (softcap, custom masks, windows without the causal rule, keys
at any positions) and every device. Per tile of keys, for all heads at once:

    s = softcap(scale q k^T), hidden where not seen;  m' = max(m, max s);  p = exp(s - m')
    l' = l exp(m - m') + sum p;  acc' = acc exp(m - m') + p v;      at the end o = acc / l

A row that sees no key of a tile has m' = m and p = 0: nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headstart.ops.extend_attention.keys import load, view
from headstart.ops.extend_attention.merging import add_sinks
from headstart.ops.extend_attention.scratch import Layout
from headstart.ops.extend_attention.spec import ExtendCall
from headstart.ops.extend_attention.tiles import unmasked_tiles, visible_keys

QUERIES = 128
KEYS = 256
"""Rows and keys of a tile: scores of 16 heads take 2 MB, and products are large enough."""

Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class KeyTile:
    """Keys [begin, end) of a sequence that a block of queries visits."""

    begin: int
    end: int
    masked: bool


def layout(call: ExtendCall, n: int) -> Layout:
    """Scratch for sequence n."""
    rows = min(QUERIES, call.plan.lengths[n])
    keys = min(KEYS, len(call.keys(n)))
    stacked = rows * call.HQ
    sizes = {
        "q": stacked * call.D,
        "s": stacked * keys,
        "pv": stacked * call.DV,
        "acc": stacked * call.DV,
        "m": stacked,
        "l": stacked,
        "k": keys * call.HK * call.D,
        "v": keys * call.HK * call.DV,
    }
    return {f"tiled.{name}": ((size,), torch.float32) for name, size in sizes.items()}


def run(
    call: ExtendCall, n: int, buffers: Buffers, out: torch.Tensor, out_lse: torch.Tensor
) -> None:
    """Compute sequence n into out [length, HQ, DV] and out_lse [length, HQ]."""
    length, first = call.plan.lengths[n], call.plan.offsets[n]
    HK, G = call.HK, call.HQ // call.HK
    mask = call.mask(n)
    bounds = _position_bounds(call, n)
    for begin in range(0, length, QUERIES):
        rows = slice(begin, min(begin + QUERIES, length))
        count = rows.stop - begin

        def grouped(name: str, width: int, count: int = count) -> torch.Tensor:
            return _fit(buffers[f"tiled.{name}"], HK, G, count, width)

        q, acc, pv = grouped("q", call.D), grouped("acc", call.DV), grouped("pv", call.DV)
        m, l = grouped("m", 1), grouped("l", 1)  # noqa: E741
        packed = call.q[first + begin : first + rows.stop]
        q.copy_(packed.unflatten(1, (HK, G)).permute(1, 2, 0, 3)).mul_(call.scale)
        acc.zero_()
        l.zero_()
        m.fill_(-torch.inf)
        for tile in _visits(call, n, rows, bounds):
            k, v = _keys_values(call, n, tile, buffers)
            s = grouped("s", tile.end - tile.begin)
            torch.bmm(q.flatten(1, 2), k.permute(1, 2, 0), out=s.flatten(1, 2))
            if call.softcap is not None:
                s.div_(call.softcap).tanh_().mul_(call.softcap)
            if tile.masked:
                s.masked_fill_(~_visible(call, n, rows, tile, mask), -torch.inf)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
            s.sub_(safe).exp_()
            decay = torch.exp(m - safe)
            torch.bmm(s.flatten(1, 2), v.transpose(0, 1), out=pv.flatten(1, 2))
            acc.mul_(decay).add_(pv)
            l.mul_(decay).add_(s.sum(-1, keepdim=True))
            m.copy_(m_new)
        empty = l == 0
        m.add_(torch.log(l.masked_fill(empty, 1.0)))
        acc.div_(l.masked_fill_(empty, 1.0))
        lse = m.squeeze(-1)
        if call.sinks is not None:
            lse, share = add_sinks(lse, call.sinks.view(HK, G, 1))
            acc.mul_(share.unsqueeze(-1))
        out[rows].unflatten(1, (HK, G)).copy_(acc.permute(2, 0, 1, 3))
        out_lse[rows].unflatten(1, (HK, G)).copy_(lse.permute(2, 0, 1))


def _fit(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    return buffer[: math.prod(shape)].view(shape)


def _keys_values(
    call: ExtendCall, n: int, tile: KeyTile, buffers: Buffers
) -> tuple[torch.Tensor, torch.Tensor]:
    found = view(call, n, tile.begin, tile.end, torch.float32)
    if found is not None:
        return found
    count = tile.end - tile.begin
    k = _fit(buffers["tiled.k"], count, call.HK, call.D)
    v = _fit(buffers["tiled.v"], count, call.HK, call.DV)
    load(call, n, tile.begin, tile.end, k, v)
    return k, v


def _position_bounds(call: ExtendCall, n: int) -> list[tuple[int, int]] | None:
    """Lowest and highest position of every tile of prefix keys that sit anywhere, or None."""
    plan = call.plan
    if plan.key_positions is None or not plan.prefix[n]:
        return None
    found = plan.key_positions[plan.prefix_offsets[n] : plan.prefix_offsets[n + 1]]
    tiles = [found[at : at + KEYS] for at in range(0, len(found), KEYS)]
    return [(min(tile), max(tile)) for tile in tiles]


def _visits(
    call: ExtendCall, n: int, rows: slice, bounds: list[tuple[int, int]] | None
) -> Iterator[KeyTile]:
    """Tiles of the part's keys that rows `rows` of sequence n must visit, from left to right."""
    plan = call.plan
    start, prefix = plan.query_start[n], plan.prefix[n]
    first, last = start + rows.start, start + rows.stop - 1
    covers_prefix = call.custom_mask is not None and plan.mask_covers == "all"
    if call.part != "extend" and prefix:
        causal = call.causal and not covers_prefix
        if bounds is None:
            yield from _run_of_tiles(
                call, first, last, plan.key_start[n], prefix, 0, causal, covers_prefix
            )
        else:
            for i, (lowest, highest) in enumerate(bounds):
                late = causal and lowest > last
                early = call.window is not None and highest <= first - call.window
                if not late and not early:
                    yield KeyTile(i * KEYS, min((i + 1) * KEYS, prefix), True)
    if call.part != "prefix":
        masked = call.custom_mask is not None
        causal = call.causal and not masked
        yield from _run_of_tiles(call, first, last, start, plan.lengths[n], prefix, causal, masked)


def _run_of_tiles(
    call: ExtendCall,
    first: int,
    last: int,
    start: int,
    length: int,
    number: int,
    causal: bool,
    masked: bool,
) -> Iterator[KeyTile]:
    """Tiles over keys at positions start, start + 1, ...; `number` is the first key's number."""
    keys = visible_keys(first, last, start, length, window=call.window, causal=causal)
    for lower in range(keys.start, keys.stop, KEYS):
        upper = min(lower + KEYS, keys.stop)
        clear = unmasked_tiles(
            first,
            last,
            start,
            length,
            tile=upper - lower,
            window=call.window,
            causal=causal,
            anchor=lower,
        )
        yield KeyTile(number + lower - start, number + upper - start, masked or 0 not in clear)


def _visible(
    call: ExtendCall, n: int, rows: slice, tile: KeyTile, mask: torch.Tensor | None
) -> torch.Tensor:
    """Which keys of the tile each row sees: bool [rows, keys]."""
    plan, prefix, device = call.plan, call.plan.prefix[n], call.device
    start = plan.query_start[n]
    own = torch.arange(start + rows.start, start + rows.stop, device=device)[:, None]
    in_prefix = tile.begin < prefix
    if not in_prefix:
        shift = start - prefix
        position = torch.arange(tile.begin + shift, tile.end + shift, device=device)
    elif plan.position_tensor is not None:
        offset = plan.prefix_offsets[n]
        position = plan.position_tensor[offset + tile.begin : offset + tile.end].to(device)
    else:
        shift = plan.key_start[n]
        position = torch.arange(tile.begin + shift, tile.end + shift, device=device)
    skipped = prefix if plan.mask_covers == "new" else 0
    if mask is not None and tile.begin >= skipped:
        visible = mask[rows, tile.begin - skipped : tile.end - skipped]
    elif call.causal:
        visible = position <= own
    else:
        visible = torch.ones(own.shape[0], len(position), dtype=torch.bool, device=device)
    if call.window is not None:
        visible = visible & (position > own - call.window)
    return visible
