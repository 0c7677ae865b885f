"""Hits against cold prefills in single layers, bit by bit, on any device.

Every request is prefilled cold, alone and whole. Then all of them start from their hits, in the
steps of a scheduler, beside each other and cut where the steps end. Rows past a hit must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headstart.evidence.traffic.layers import Layer, Step, layer_of
from headstart.evidence.traffic.records import HitBits
from headstart.evidence.traffic.shapes import SHAPES
from headstart.evidence.traffic.trace import GRAIN
from headstart.evidence.traffic.workloads import schedule
from headstart.runtime import dispatch


def differing_rows(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """Rows of two tensors of one shape that are not equal; NaN equals nothing.

    >>> differing_rows(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [5.0]]))
    1
    """
    if found.shape != wanted.shape:
        raise ValueError(f"found: expected {list(wanted.shape)}, got {list(found.shape)}")
    if torch.equal(found, wanted):
        return 0
    return int((found != wanted).flatten(1).any(1).sum())


def compare_hits(
    prompts: Sequence[int],
    hits: Sequence[int],
    *,
    model: str,
    device: torch.device,
    step_tokens: int = 8192,
    seed: int = 0,
    progress: Callable[[str], None] = lambda words: None,
) -> list[HitBits]:
    """Compare the rows past the hits of some requests with a cold prefill's, by kind of layer.

    prompts: tokens of each request. hits: multiples of 64 below them.
    """
    shape = SHAPES[model]
    found = []
    for kind in shape.layers:
        progress(f"hits in a layer of {kind}")
        layer = layer_of(
            shape,
            kind,
            rows=step_tokens,
            slots=2 * len(prompts),
            pages=sum(-(-prompt // GRAIN) for prompt in prompts),
            device=device,
        )
        with dispatch.watching() as ran:
            rows, differing = _compare(layer, prompts, hits, step_tokens, seed)
        found.append(
            HitBits(
                kind=kind,
                model=model,
                device=str(device),
                served=", ".join(dict.fromkeys(who for _, who in ran)),
                requests=len(prompts),
                hit_tokens=sum(hits),
                rows=rows,
                differing=differing,
            )
        )
    return found


@torch.inference_mode()
def _compare(
    layer: Layer,
    prompts: Sequence[int],
    hits: Sequence[int],
    step_tokens: int,
    seed: int,
) -> tuple[int, int]:
    """Rows past the hits, and those of them that differ."""
    source = torch.Generator().manual_seed(seed)
    # Each request takes the drawn rows in an order of its own.
    index = [
        torch.randint(step_tokens, (prompt,), generator=source).to(layer.device)
        for prompt in prompts
    ]
    places, hit_places = layer.places(prompts), layer.hit_places(prompts)
    wanted = []
    for n, (prompt, hit) in enumerate(zip(prompts, hits, strict=True)):
        keep = ([[hit]], [hit_places[n]]) if hit else None
        cold = layer.call(Step([prompt], [0], [places[n]]), index[n], keep)()
        wanted.append(cold[hit:].clone())
        layer.forget(places[n], hit)
    rows = differing = 0
    brought = [(prompt - hit, hit) for prompt, hit in zip(prompts, hits, strict=True)]
    for pieces in schedule(brought, step_tokens):
        numbers, new, prefixes = zip(*pieces, strict=True)
        step = Step(new, prefixes, [hit_places[n] for n in numbers])
        which = [index[n][prefix : prefix + count] for n, count, prefix in pieces]
        found = layer.call(step, torch.cat(which))()
        for (n, count, prefix), part in zip(pieces, found.split(list(new)), strict=True):
            begin = prefix - hits[n]
            differing += differing_rows(part, wanted[n][begin : begin + count])
            rows += count
    return rows, differing
