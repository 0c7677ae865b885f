"""Canonical states and pages of keys as the layers of a transformers cache."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from headstart import DeltaCache, ExtendPlan, KVCache, Schedule, write_kv
from headstart.ops.gated_delta_rule.schedule import CHUNK

if TYPE_CHECKING:
    from headstart.integrations.transformers.forward import Forward

PAGE = CHUNK
"""Tokens of a page: a kept prefix ends on a page's border, so pages are shared, never copied."""


class DeltaSlots:
    """A DeltaCache that grows, and which of its slots are free."""

    def __init__(self, slots: int, **sizes: Any) -> None:
        self._sizes = sizes
        self.cache = DeltaCache(slots, **sizes)
        self._free = list(range(slots))

    def take(self, count: int) -> list[int]:
        """Empty slots; more memory where none are left."""
        if len(self._free) < count:
            old = self.cache
            self.cache = DeltaCache(2 * old.slots + count, **self._sizes)
            for name, tensor in self.cache.tensors.items():
                tensor[: old.slots] = old.tensors[name]
            self._free += range(old.slots, self.cache.slots)
        taken, self._free = self._free[:count], self._free[count:]
        self.cache.reset(taken)
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Return slots for others to take."""
        self._free += slots


class KeyPages:
    """Pages of keys and values that grow, and how many holders each page has."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = (x.new_zeros(0, PAGE, x.shape[1], x.shape[3]) for x in (k, v))
        self._free: list[int] = []
        self._holders: list[int] = []

    def take(self, count: int) -> list[int]:
        """Pages with one holder each."""
        if len(self._free) < count:
            have = self.k.shape[0]
            more = max(count, have, 4)
            self.k, self.v = (
                torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in (self.k, self.v)
            )
            self._free += range(have, have + more)
            self._holders += [0] * more
        taken, self._free = self._free[:count], self._free[count:]
        self.share(taken)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One holder more for each page."""
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder less; a page that nobody holds is free."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    @property
    def cache(self) -> KVCache:
        """The pages as an argument of `extend_attention`."""
        return KVCache(self.k, self.v)


class DeltaLayer(LinearAttentionCacheLayerMixin):
    """A linear layer of any transformers cache: canonical states instead of plain ones."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.slots: DeltaSlots | None = None
        self.rows: list[int] = []
        self.kept: dict[tuple[int, int], int] = {}
        """(sequence, position) -> slot of a snapshot."""
        self._held: list[int] = []

    def prepare(self, batch: int, slots: DeltaSlots | None = None, **sizes: Any) -> DeltaCache:
        """The cache, with a slot for each sequence; memory is made at first use."""
        if self.slots is None:
            self.slots = slots or DeltaSlots(batch, **sizes)
            weakref.finalize(self, self.slots.give_back, self._held)
        if not self.rows:
            self.rows = self._take(batch)
        if len(self.rows) != batch:
            raise ValueError(
                f"past_key_values: expected a batch of {len(self.rows)}, as before, got {batch}"
            )
        self.has_previous_state[0] = True
        return self.slots.cache

    def _take(self, count: int) -> list[int]:
        assert self.slots is not None
        taken = self.slots.take(count)
        self._held += taken
        return taken

    def snapshot_slots(self, wanted: Sequence[Sequence[int]]) -> list[int]:
        """Slots for snapshots at these positions of each sequence, in order."""
        pairs = [(n, p) for n, positions in enumerate(wanted) for p in positions]
        slots = self._take(len(pairs))
        self.kept.update(zip(pairs, slots, strict=True))
        return slots

    def restored(self, row: int, position: int) -> DeltaLayer:
        """A layer of one sequence that stands at a kept position."""
        layer = DeltaLayer()
        if self.slots is None:
            raise ValueError("position: the cache is empty")
        cache = layer.prepare(1, slots=self.slots)
        if position:
            if (row, position) not in self.kept:
                kept = sorted(p for n, p in self.kept if n == row)
                raise ValueError(f"position: expected a kept one of {kept}, got {position}")
            cache = self.slots.cache
            cache.copy([self.kept[row, position]], layer.rows)
        return layer

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Memory is made by `prepare`, which knows the sizes."""

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's own path cannot use a canonical state."""
        raise ValueError(
            "past_key_values: this cache holds headstart's states; enable(model) first"
        )

    update_recurrent_state = update_conv_state

    def reset(self) -> None:
        """Empty the slots."""
        if self.slots is not None:
            self.slots.cache.reset(self.rows)
        self.has_previous_state[0] = False

    def offload(self) -> None:
        """Canonical states stay where they are."""

    def prefetch(self) -> None:
        """Canonical states stay where they are."""

    @property
    def is_croppable(self) -> bool:
        """Rolling back is passing a smaller start, as far as the tail reaches."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Positions are read on the host."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do: the next step's smaller start drops the rows (or is refused)."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence n becomes what sequence beam_idx[n] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        if self.slots is None:
            return
        sources = [self.rows[n] for n in indices.tolist()]
        fresh = self._take(len(sources))
        self.slots.cache.copy(sources, fresh)
        self.slots.give_back(self.rows)
        for slot in self.rows:
            self._held.remove(slot)
        self.rows = fresh

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        count = len(self.rows)
        self.batch_select_indices(torch.arange(count).repeat_interleave(repeats))


class PagedLayer(CacheLayerMixin):
    """A softmax layer of a `HybridCache`: all keys in pages, whatever the window."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.pages: KeyPages | None = None
        self.table: list[list[int]] = []
        self.lengths: list[int] = []
        self.seen = 0
        self.forward: Forward | None = None
        self._held: list[int] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the memory for heads and sizes like these."""
        if self.pages is None:
            self._hold(KeyPages(key_states, value_states))
        if not self.table:
            self.table = [[] for _ in range(key_states.shape[0])]
            self.lengths = [0] * key_states.shape[0]
        self.is_initialized = True

    def _hold(self, pages: KeyPages) -> None:
        self.pages = pages
        weakref.finalize(self, pages.give_back, self._held)

    def reserve(self, n: int, length: int) -> None:
        """Pages for the first `length` tokens of sequence n."""
        assert self.pages is not None
        more = -(-length // PAGE) - len(self.table[n])
        if more > 0:
            taken = self.pages.take(more)
            self._held += taken
            self.table[n] += taken

    def page_table(self) -> list[list[int]]:
        """Pages of each sequence, padded to one length."""
        most = max((len(pages) for pages in self.table), default=0)
        return [pages + [0] * (most - len(pages)) for pages in self.table]

    def slots(self, n: int, start: int, end: int) -> list[int]:
        """Slots of the tokens start to end of sequence n."""
        return [self.table[n][p // PAGE] * PAGE + p % PAGE for p in range(start, end)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys [B, HK, L, D] to their pages; returns the new ones alone."""
        if self.forward is None:
            raise ValueError("past_key_values: a HybridCache needs enable(model)")
        self.lazy_initialization(key_states, value_states)
        forward = self.forward
        slots = []
        for n, (start, length) in enumerate(zip(forward.starts, forward.lengths, strict=True)):
            self.reserve(n, start + length)
            slots += self.slots(n, start, start + length)
            self.lengths[n] = start + length
        assert self.pages is not None
        k, v = (forward.rows(x.transpose(1, 2)) for x in (key_states, value_states))
        if slots:
            index = torch.tensor(slots, dtype=torch.int64, device=k.device)
            write_kv(k, v, self.pages.cache, index)
        self.seen += key_states.shape[2]
        return key_states, value_states

    def plan(self, lengths: Sequence[int], ends: Sequence[int], device: Any) -> ExtendPlan:
        """New tokens of each sequence that end at `ends`, over the pages."""
        table = torch.tensor(self.page_table(), dtype=torch.int32, device=device)
        return ExtendPlan.from_pages(
            lengths, ends, table.view(len(lengths), -1), PAGE, new_in_cache=True
        )

    def restored(self, row: int, position: int) -> PagedLayer:
        """A layer of one sequence that shares the pages of the first `position` tokens."""
        layer = PagedLayer()
        if self.pages is None:
            raise ValueError("position: the cache is empty")
        layer._hold(self.pages)
        shared = self.table[row][: position // PAGE]
        self.pages.share(shared)
        layer._held += shared
        layer.table, layer.lengths, layer.seen = [list(shared)], [position], position
        layer.is_initialized = True
        return layer

    def get_seq_length(self) -> int:
        """Tokens seen of each row, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows that a mask would cover, and the first of them."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Pages grow without a limit."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget all tokens; the pages stay for the next ones."""
        self.seen, self.lengths = 0, [0] * len(self.lengths)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens of every sequence."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: expected minus the number of tokens to remove, got {tokens_to_remove}"
            )
        self.seen += tokens_to_remove
        self.lengths = [max(length + tokens_to_remove, 0) for length in self.lengths]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Pages are not reordered."""
        raise ValueError("HybridCache does not serve beam search; use the model's default cache")

    batch_select_indices = batch_repeat_interleave = reorder_cache


class HybridCache(Cache):
    """A cache of a hybrid model whose prefix hits equal a cold prefill bit for bit.

    Linear layers keep canonical states, softmax layers keep all keys in pages of 64 tokens.
    Pass it to an enabled model as the cache of a forward or of `generate`.

    Parameters
    ----------
    model: an enabled model, or its configuration.
    snapshot_positions: multiples of 64 at which the states of every sequence are kept, as the
        prefill passes them.
    snapshot_every: keep them at all multiples of this multiple of 64.
    """

    def __init__(
        self,
        model: Any,
        *,
        snapshot_positions: Sequence[int] = (),
        snapshot_every: int = 0,
    ) -> None:
        config = getattr(model, "config", model).get_text_config()
        for position in (*snapshot_positions, snapshot_every):
            if position < 0 or position % CHUNK:
                raise ValueError(
                    f"snapshot_positions: expected multiples of {CHUNK}, got {position}"
                )
        self.snapshot_positions = sorted(set(snapshot_positions))
        self.snapshot_every = snapshot_every
        layers = [
            DeltaLayer() if kind == "linear_attention" else PagedLayer()
            for kind in config.layer_types
        ]
        super().__init__(layers=layers)

    def wanted(self, forward: Forward) -> tuple[tuple[int, ...], ...] | None:
        """Positions of each sequence that the forward passes and that are to be kept."""
        if not self.snapshot_positions and not self.snapshot_every:
            return None
        found = []
        for start, length in zip(forward.starts, forward.lengths, strict=True):
            positions = {p for p in self.snapshot_positions if start < p <= start + length}
            if self.snapshot_every:
                first = (start // self.snapshot_every + 1) * self.snapshot_every
                positions |= set(range(first, start + length + 1, self.snapshot_every))
            found.append(tuple(sorted(positions)))
        return tuple(found)

    def begin(self, forward: Forward) -> None:
        """Tell the softmax layers which rows the coming forward brings."""
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.forward = forward

    def restored(self, position: int, row: int = 0) -> HybridCache:
        """A cache of one sequence that stands at `position`, a kept snapshot of sequence `row`.

        The state is copied, the pages before `position` are shared. ValueError if no snapshot was
        kept there.
        """
        if position < 0 or position % CHUNK:
            raise ValueError(f"position: expected a multiple of {CHUNK}, got {position}")
        twin = HybridCache.__new__(HybridCache)
        Cache.__init__(twin, layers=[layer.restored(row, position) for layer in self.layers])
        twin.snapshot_positions = self.snapshot_positions
        twin.snapshot_every = self.snapshot_every
        return twin

    def arguments(self, layer: int, start: int, length: int) -> dict[str, dict[str, Any]]:
        """By operation, the arguments that place `length` tokens from `start` in layer `layer`.

        For a linear layer {"causal_conv1d": {schedule, state}, "gated_delta_rule": {...}}, for a
        softmax layer {"write_kv": {cache, slots}, "extend_attention": {plan, cache}}; the first
        sequence, whose pages are reserved here.
        """
        place = self.layers[layer]
        if isinstance(place, DeltaLayer):
            assert place.slots is not None
            cache = place.slots.cache
            arguments = {
                "schedule": Schedule([length], start_positions=start, device=cache.device),
                "state": cache.at(place.rows[:1]),
            }
            return {"causal_conv1d": arguments, "gated_delta_rule": arguments}
        assert isinstance(place, PagedLayer)
        place.reserve(0, start + length)
        assert place.pages is not None
        device = place.pages.k.device
        slots = torch.tensor(place.slots(0, start, start + length), device=device)
        return {
            "write_kv": {"cache": place.pages.cache, "slots": slots},
            "extend_attention": {
                "plan": place.plan([length], [start + length], device),
                "cache": place.pages.cache,
            },
        }
