"""A linear layer of any transformers cache: canonical states instead of plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from headstart import DeltaCache
from headstart.ops.gated_delta_rule.schedule import CHUNK, floor_chunk
from headstart.runtime.checks import expect_int, shown

if TYPE_CHECKING:
    from headstart.integrations.transformers.forward import Forward

DRAFT_TOKENS = 16
"""Tokens that may be cropped off, and the most of a step that only brings drafts."""
MOST_DRAFT_TOKENS = 64


class DeltaLayer(LinearAttentionCacheLayerMixin):
    """Canonical states of a batch, one slot a sequence; memory is made at the first step.

    Attributes
    ----------
    lengths: tokens of each sequence, [] before the first step.
    whole: False from the first operation of a step to its last; an error may leave it so.
    kept: (sequence, position) -> (state [HV, K, V] float32, history [width - 1, channels]).
    """

    is_sliding = False

    def __init__(self) -> None:
        # Not the parent's: its plain states are what this layer does not have.
        self.number_of_states = 1
        self.has_previous_state = {0: False}
        self.record_past = False
        self.lengths: list[int] = []
        self.whole = True
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._cache: DeltaCache | None = None
        self._floors: list[int] = []  # position of each state
        self._firsts: list[int] = []  # oldest input of the convolution that each ring still holds

    def prepare(self, batch: int, **sizes: Any) -> DeltaCache:
        """The cache for a step, one slot a sequence; sizes as for `DeltaCache`, for first use.

        `advance` ends the step.
        """
        if self._cache is None:
            drafts = MOST_DRAFT_TOKENS if self.record_past else DRAFT_TOKENS
            self._cache = DeltaCache(batch, draft_tokens=drafts, **sizes)
        if not self.lengths:
            self.lengths, self._floors, self._firsts = ([0] * batch for _ in range(3))
        if (len(self.lengths), self._cache.slots) != (batch, batch):
            raise ValueError(
                f"past_key_values: expected a batch of {self._cache.slots}, as before, got {batch}"
            )
        self.whole = False
        return self._cache

    @property
    def cache(self) -> DeltaCache:
        """The cache, after the first step."""
        if self._cache is None:
            raise ValueError("past_key_values: the cache is empty")
        return self._cache

    def drafts(self, length: int) -> bool:
        """Whether a step of `length` tokens is one that `crop` must be able to undo."""
        return self.record_past and self._cache is not None and length <= self._cache.draft_tokens

    def advance(self, forward: Forward, drafts: bool) -> None:
        """The step of `forward` has been computed."""
        rows = self.cache.history_rows
        self._firsts = [
            max(0 if start == 0 else first, end - rows)
            for first, start, end in zip(self._firsts, forward.starts, forward.ends, strict=True)
        ]
        self.lengths, self.whole = forward.ends, True
        self._floors = [floor_chunk(p) for p in (forward.starts if drafts else forward.ends)]
        self.has_previous_state[0] = True

    def keep(
        self, positions: Sequence[Sequence[int]], states: torch.Tensor, histories: torch.Tensor
    ) -> None:
        """Remember packed snapshots at these positions of each sequence."""
        pairs = [(n, p) for n, found in enumerate(positions) for p in found]
        self.kept.update(zip(pairs, zip(states, histories, strict=True), strict=True))

    def forget(self, after: int, before: int) -> None:
        """Drop what was kept at positions between these two."""
        self.kept = {key: one for key, one in self.kept.items() if not after < key[1] < before}

    def restored(self, row: int, position: int) -> DeltaLayer:
        """A layer of one sequence that stands at a kept position of sequence `row`."""
        if not position:
            layer = DeltaLayer()
            if self._cache is not None:  # its sizes are known: it can be written to at once
                layer.prepare(1, **self.sizes)
                layer.lengths, layer.whole = [], True
            return layer
        if (row, position) not in self.kept:
            found = sorted(p for n, p in self.kept if n == row)
            raise ValueError(f"position: expected a kept one, of {shown(found)}, got {position}")
        layer = DeltaLayer.standing(position, *self.kept[row, position], self.sizes)
        layer.kept = {(0, p): kept for (n, p), kept in self.kept.items() if n == row}
        return layer

    @staticmethod
    def standing(
        position: int, state: torch.Tensor, history: torch.Tensor, sizes: dict[str, Any]
    ) -> DeltaLayer:
        """A layer of one sequence that stands at `position`, with what a layer of `sizes` kept."""
        layer = DeltaLayer()
        layer.prepare(1, **sizes).load([0], [position], state[None], history[None])
        layer.whole, layer.has_previous_state[0] = True, True
        layer.lengths, layer._floors = [position], [position]
        layer._firsts = [max(position - len(history), 0)]
        return layer

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes, dtype and device of the cache, as `DeltaCache` takes them."""
        names = ("H", "HV", "K", "V", "conv_channels", "conv_width", "dtype", "device")
        return {name: getattr(self.cache, name) for name in names}

    @property
    def snapshot_bytes(self) -> int:
        """Memory of one kept state with its history."""
        cache = self.cache
        state = cache.tensors["state"][0]
        history = (cache.conv_width - 1) * cache.conv_channels * cache.dtype.itemsize
        return state.numel() * state.dtype.itemsize + history

    @property
    def bytes(self) -> int:
        """Memory of slots and snapshots."""
        slots = 0 if self._cache is None else self._cache.slots * self._cache.bytes_per_slot
        pieces = (x for pair in self.kept.values() for x in pair)
        return slots + sum(x.numel() * x.dtype.itemsize for x in pieces)

    def reset(self) -> None:
        """Forget all tokens and snapshots; the next batch may have another size."""
        self._cache, self.whole = None, True
        self.lengths, self._floors, self._firsts = [], [], []
        self.kept.clear()
        self.has_previous_state[0] = False

    def select(self, rows: Sequence[int]) -> None:
        """Sequence n becomes what sequence rows[n] was."""
        if self._cache is None:
            return
        old, index = self._cache, torch.tensor(rows, device=self._cache.device)
        # Plain tensors even under inference mode: the cache may be used outside it.
        with torch.inference_mode(False):
            chosen = {name: x.index_select(0, index) for name, x in old.tensors.items()}
        self._cache = DeltaCache(
            len(rows), draft_tokens=old.draft_tokens, tensors=chosen, **self.sizes
        )
        self.lengths = [self.lengths[row] for row in rows]
        self._floors = [self._floors[row] for row in rows]
        self._firsts = [self._firsts[row] for row in rows]
        self.kept = {
            (n, p): kept
            for n, row in enumerate(rows)
            for (of, p), kept in self.kept.items()
            if of == row
        }

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence n becomes what sequence beam_idx[n] was."""
        self.select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        self.select(torch.arange(len(self.lengths), device="cpu")[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self.select([n for n in range(len(self.lengths)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens of every sequence, as far as is remembered.

        Nothing is copied: the next step starts earlier. Raises ValueError where the canonical state
        lies behind the new end already, or the convolution's inputs before it have been overwritten
        (16 tokens are kept, or 64); `activate_past_recording()` before the first step keeps both
        for steps of drafts.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected minus the number to remove, got {tokens_to_remove}"
            )
        if not tokens_to_remove or self._cache is None:
            return
        before = self._cache.conv_width - 1
        for length, floor, first in zip(self.lengths, self._floors, self._firsts, strict=True):
            reach = length - max(floor, first + before if first else 0)
            if -tokens_to_remove > reach:
                raise ValueError(
                    f"tokens_to_remove: expected at most {reach} from {length} tokens (the state "
                    f"stands at {floor}, the convolution's inputs begin at {first}), "
                    f"got {-tokens_to_remove}; call activate_past_recording() before such steps"
                )
        self.lengths = [length + tokens_to_remove for length in self.lengths]

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` undoes the steps that follow `activate_past_recording`."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Positions are read on the host."""
        return False

    def offload(self) -> None:
        """Canonical states stay where they are."""

    def prefetch(self) -> None:
        """Canonical states stay where they are."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Memory is made by `prepare`, which knows the sizes."""

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's own path cannot use a canonical state."""
        raise _not_plain()

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's own path cannot use a canonical state."""
        raise _not_plain()

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:  # type: ignore[override]
        """The model's own path cannot use a canonical state."""
        raise _not_plain()

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:  # type: ignore[override]
        """The model's own path cannot use a canonical state."""
        raise _not_plain()


def _not_plain() -> ValueError:
    return ValueError(
        "past_key_values: this cache holds headstart's canonical states, which the model's own "
        "path cannot read; enable(model), or start again with a new cache"
    )


def expect_multiple(name: str, position: int) -> int:
    """The position itself, if it lies on the chunk grid."""
    if expect_int(name, position, 0) % CHUNK:
        raise ValueError(f"{name}: expected a multiple of {CHUNK}, got {position}")
    return position
