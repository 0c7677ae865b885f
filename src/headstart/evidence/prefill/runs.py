"""One prefill of a prompt: whole or in steps, timed, its hidden states kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from headstart.evidence.prefill.loading import Loaded
from headstart.evidence.prefill.tiles import FixedTiles
from headstart.evidence.prefill.timing import LayerTimes


@dataclass(frozen=True, eq=False)
class Run:
    """What a prefill of the tokens from `start` on left behind.

    hidden: last hidden states [n - start, hidden size].
    seconds: time to first token: all steps, the head of the last row and its argmax.
    by_kind: seconds by layer kind.
    token: the first token predicted.
    """

    loaded: Loaded
    start: int
    hidden: torch.Tensor
    seconds: float
    token: int
    by_kind: dict[str, float] = field(default_factory=dict)
    tiled: bool = False

    def logits(self, begin: int, end: int) -> torch.Tensor:
        """Logits [end - begin, vocabulary] of the tokens at positions begin to end."""
        rows = self.hidden[begin - self.start : end - self.start]
        return head(self.loaded, rows, begin, self.tiled)


@torch.inference_mode()
def prefill(
    loaded: Loaded,
    ids: list[int],
    cache: Any,
    *,
    start: int = 0,
    step: int | None = None,
    fixed_tiles: bool = False,
    projections_apart: bool = False,
    progress: Callable[[int], None] | None = None,
    before_step: Callable[[int], None] | None = None,
) -> Run:
    """Run the tokens from `start` on through the model's decoder in steps of `step` tokens.

    cache: what the model takes as `past_key_values`, standing at `start`.
    projections_apart: time the Linear modules of attention layers as a kind of their own.
    progress: called with the layers done so far, over all steps.
    before_step: called with the position at which a step begins.
    """
    decoder = loaded.model.get_decoder()
    device = loaded.model.device
    times = LayerTimes(device, apart=projections_apart)
    rows = torch.tensor([ids], device=device)
    end = len(ids)
    done = 0

    def layer_done() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done)

    hidden = []
    began = times.now()
    with times.watching(decoder.layers, loaded.kinds, layer_done):
        for begin in range(start, end, step or end):
            if before_step is not None:
                before_step(begin)
            piece = rows[:, begin : min(begin + (step or end), end)]
            hidden.append(decode(loaded, piece, cache, begin, fixed_tiles))
    last = head(loaded, hidden[-1][-1:], end - 1, fixed_tiles)
    token = int(last.argmax())
    seconds = times.now() - began
    return Run(loaded, start, torch.cat(hidden), seconds, token, times.seconds, fixed_tiles)


@torch.inference_mode()
def continuation(loaded: Loaded, run: Run, cache: Any, end: int, count: int) -> list[int]:
    """The `count` tokens that follow greedily after a prompt of `end` tokens."""
    found = [run.token]
    most = loaded.config.max_position_embeddings
    for position in range(end, min(end + count - 1, most)):
        row = torch.tensor([found[-1:]], device=run.hidden.device)
        hidden = decode(loaded, row, cache, position, run.tiled)
        found.append(int(head(loaded, hidden, position, run.tiled).argmax()))
    return found


def decode(
    loaded: Loaded, ids: torch.Tensor, cache: Any, position: int, fixed_tiles: bool
) -> torch.Tensor:
    """Hidden states [tokens, size] of ids [1, tokens] whose first token stands at `position`."""
    decoder = loaded.model.get_decoder()
    # transformers has renamed the argument on the way from 5.17 to 5.24.
    known = inspect.signature(type(decoder).forward).parameters
    arguments = {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}
    with FixedTiles(decoder) if fixed_tiles else nullcontext() as tiles:
        if tiles is not None:
            tiles.start = position
        return decoder(input_ids=ids, **arguments).last_hidden_state[0]


@torch.inference_mode()
def head(loaded: Loaded, rows: torch.Tensor, position: int, fixed_tiles: bool) -> torch.Tensor:
    """Logits [rows, vocabulary] of hidden states [rows, size] from `position` on."""
    layer = loaded.model.get_output_embeddings()
    with FixedTiles(layer) if fixed_tiles else nullcontext() as tiles:
        if tiles is not None:
            tiles.start = position
        return layer(rows)
