"""Linear layers in tiles of 64 rows on the absolute grid.

A library product may change the bits of a row with the number of rows beside it. In a tile of fixed
shape, with each row at its position modulo 64, it cannot: then two runs that bring the same tokens
in different steps agree bit for bit between the operations too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.nn.functional import pad

TILE = 64


class FixedTiles:
    """While active, every Linear, router and expert of a model runs in tiles of 64 rows.

    `start` is the absolute position of the first row of the next call; whoever runs the model sets
    it. Only instances are changed, and changed back.

    >>> layer = nn.Linear(8, 4)
    >>> x = torch.randn(1, 100, 8)
    >>> with FixedTiles(nn.Sequential(layer)) as tiles:
    ...     whole = layer(x)
    ...     tiles.start = 64
    ...     later = layer(x[:, 64:])
    >>> torch.equal(later, whole[:, 64:])
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self.start = 0
        self._model = model
        self._changed: list[nn.Module] = []

    def __enter__(self) -> Self:
        for module in self._model.modules():
            name = type(module).__name__
            if isinstance(module, nn.Linear) or name.endswith("Router"):
                tiled = self._tiled(module.forward)
            elif name.endswith("Experts"):
                tiled = self._tiled(_each_expert(module.forward))
            else:
                continue
            module.forward = tiled
            self._changed.append(module)
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._changed:
            del module.forward
        self._changed.clear()

    def _tiled(self, forward: Callable) -> Callable:
        def run(*rows: torch.Tensor) -> Any:
            """Each argument [rows, ...] or [1, rows, ...]; results likewise."""
            axis = rows[0].dim() - 2
            count, start = rows[0].shape[axis], self.start
            pieces, several = [], False
            for begin in range(start - start % TILE, start + count, TILE):
                first, last = max(begin, start), min(begin + TILE, start + count)
                before, after = first - begin, begin + TILE - last
                tile = [
                    _padded(x.narrow(axis, first - start, last - first), before, after)
                    for x in rows
                ]
                out = forward(*tile)
                several = isinstance(out, tuple)
                parts = out if several else (out,)
                pieces.append([part.narrow(axis, before, last - first) for part in parts])
            joined = tuple(torch.cat(parts, dim=axis) for parts in zip(*pieces, strict=True))
            return joined if several else joined[0]

        return run


def _padded(rows: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """A fresh tile: the place of its memory is the allocator's for every tile alike."""
    return pad(rows, (0, 0, before, after)) if before or after else rows.clone()


def _each_expert(forward: Callable) -> Callable:
    """Experts one after the other over all rows of a tile, rows routed elsewhere weighing 0.

    Else the number of rows that an expert gets would change its bits.
    """

    def run(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            mine = (weights * (chosen == expert)).sum(dim=-1, keepdim=True)
            out += forward(x, torch.full_like(mine, expert, dtype=chosen.dtype), mine)
        return out

    return run
