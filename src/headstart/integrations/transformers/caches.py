"""A transformers cache whose prefix hits equal a cold prefill bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
)

from headstart.integrations.transformers.delta_layer import DeltaLayer, expect_multiple
from headstart.integrations.transformers.forward import Forward
from headstart.integrations.transformers.pages import PAGE, PagedLayer, Pages
from headstart.runtime.checks import expect_int, host_ints, shown


class HybridCache(Cache):
    """A cache of a hybrid model whose prefix hits equal a cold prefill bit for bit.

    Linear layers keep canonical states, softmax layers keep all keys in pages of 64 tokens (also
    those with a window: a hit may need them). It grows with the sequences. Pass it to an enabled
    model as the cache of a forward or of `generate`; its softmax layers are reproducible. One
    thread at a time may use a cache and those restored from it: they share memory that grows.

    Parameters
    ----------
    model: a Qwen3-Next, Qwen3.5 or gpt-oss model, or its configuration.
    snapshot_positions: multiples of 64 at which the states of every sequence are kept as the
        prefill passes them.
    snapshot_every: keep them at all multiples of this multiple of 64.

    >>> from transformers import GptOssConfig
    >>> cache = HybridCache(GptOssConfig(num_hidden_layers=2), snapshot_every=64)
    >>> cache.get_seq_length(), cache.snapshots()
    (0, [])
    """

    def __init__(
        self,
        model: Any,
        *,
        snapshot_positions: Sequence[int] = (),
        snapshot_every: int = 0,
    ) -> None:
        config = getattr(model, "config", model)
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(
                f"model: expected a model of transformers or its configuration, got {shown(model)}"
            )
        config = config.get_text_config()
        positions = host_ints("snapshot_positions", snapshot_positions)
        self.snapshot_positions = sorted(
            {expect_multiple("snapshot_positions", p) for p in positions}
        )
        self.snapshot_every = expect_multiple("snapshot_every", snapshot_every)
        self.pages = Pages()
        layers: list[Any] = [
            DeltaLayer() if kind == "linear_attention" else PagedLayer(self.pages)
            for kind in config.layer_types
        ]
        super().__init__(layers=layers)

    def begin(self, forward: Forward) -> None:
        """A forward of the model begins."""
        self.pages.begin(forward)

    def wanted(self, forward: Forward) -> tuple[tuple[int, ...], ...] | None:
        """Positions of each sequence that the forward passes and that are to be kept."""
        found = []
        for start, end in zip(forward.starts, forward.ends, strict=True):
            positions = {p for p in self.snapshot_positions if start < p <= end}
            if self.snapshot_every:
                first = (start // self.snapshot_every + 1) * self.snapshot_every
                positions |= set(range(first, end + 1, self.snapshot_every))
            found.append(tuple(sorted(positions)))
        return tuple(found) if any(found) else None

    def snapshots(self, row: int = 0) -> list[int]:
        """Positions of sequence `row` that `restored` takes, besides 0.

        A model without linear layers can be restored at every multiple of 64 that it has seen.
        """
        expect_int("row", row, 0, max(self._batch, 1) - 1)
        places: list[set[int]] = []
        for layer in self._layers:
            if isinstance(layer, DeltaLayer):
                places.append({p for n, p in layer.kept if n == row})
            else:
                end = layer.lengths[row] if layer.lengths else 0
                places.append(set(range(PAGE, end + 1, PAGE)))
        return sorted(set.intersection(*places))

    def restored(self, position: int, row: int = 0) -> HybridCache:
        """A cache of one sequence that stands at `position`, a snapshot of sequence `row`.

        State and history are copied; the pages before `position` are shared until one of the
        caches writes to them. ValueError if nothing was kept there.
        """
        expect_multiple("position", position)
        kept = self.snapshots(row)
        if position and position not in kept:
            raise ValueError(f"position: expected a kept one, of {shown(kept)}, got {position}")
        twin = HybridCache.__new__(HybridCache)
        twin.snapshot_positions, twin.snapshot_every = self.snapshot_positions, self.snapshot_every
        pages = self.pages.restored(row, position)
        layers: list[Any] = [
            layer.restored(row, position)
            if isinstance(layer, DeltaLayer)
            else layer.restored(pages, position)
            for layer in self._layers
        ]
        twin.stand(pages, layers)
        return twin

    def stand(self, pages: Pages, layers: list[Any]) -> None:
        """Take over the pages and layers of one sequence in place of those there are."""
        self.pages = pages
        Cache.__init__(self, layers=layers)

    def arguments(self, layer: int, start: int, length: int) -> dict[str, dict[str, Any]]:
        """By operation, the arguments that place `length` tokens from `start` in layer `layer`.

        For a linear layer {"causal_conv1d": {schedule, state}, "gated_delta_rule": the same}; for a
        softmax layer {"write_kv": {cache, slots}, "extend_attention": {plan, cache}}. For a cache
        of one sequence, whose pages are reserved here; it counts no tokens.
        """
        expect_int("layer", layer, 0, len(self.layers) - 1)
        place = self.layers[layer]
        if isinstance(place, DeltaLayer):
            cache = place.cache
            step = Forward(1, length, past=start, device=cache.device)
            arguments = {"schedule": step.schedule(), "state": cache.at([0])}
            return {"causal_conv1d": arguments, "gated_delta_rule": arguments}
        memory = self.pages.pool.cache(layer)
        pages = self.pages
        pages.begin(Forward(1, length, past=start, device=memory.device))
        memory = pages.pool.cache(layer)  # it may have grown
        found = {
            "write_kv": {"cache": memory, "slots": pages.slots},
            "extend_attention": {"plan": pages.plan, "cache": memory},
        }
        pages.end()
        return found

    @property
    def bytes(self) -> int:
        """Memory of states, snapshots and pages (those that others share included)."""
        layers = sum(layer.bytes for layer in self._layers if isinstance(layer, DeltaLayer))
        return layers + self.pages.pool.bytes

    def reset(self) -> None:
        """Forget all tokens and snapshots."""
        super().reset()
        self.pages.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens of every sequence; see `DeltaLayer.crop`."""
        for layer in sorted(self._layers, key=lambda x: not isinstance(x, DeltaLayer)):
            layer.crop(tokens_to_remove)  # the one that may refuse comes first

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence n becomes what sequence beam_idx[n] was; pages are shared."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order."""
        self._select(torch.arange(self._batch, device="cpu")[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence; pages are shared."""
        self._select([n for n in range(self._batch) for _ in range(repeats)])

    @property
    def _layers(self) -> list[DeltaLayer | PagedLayer]:
        return self.layers  # type: ignore[return-value]

    @property
    def _batch(self) -> int:
        return len(self.pages.table)

    def _select(self, rows: list[int]) -> None:
        if not self._batch:
            return
        self.pages.select(rows)
        for layer in self._layers:
            layer.select(rows)


def adopt(cache: Any, linear: Sequence[int], softmax: Sequence[int]) -> None:
    """Make a cache ready for headstart: its empty linear layers become canonical ones.

    Raises ValueError if it is no cache of this model, or one that the model's own path has filled.
    """
    if linear and len(cache.layers) <= max(linear):
        raise ValueError(
            "past_key_values: expected a cache made for this model, such as "
            f"DynamicCache(config=model.config), got {type(cache).__name__} of "
            f"{len(cache.layers)} layers"
        )
    for index in linear:
        layer = cache.layers[index]
        if isinstance(layer, DeltaLayer):
            continue
        if not isinstance(layer, LinearAttentionCacheLayerMixin) or isinstance(
            layer, CacheLayerMixin
        ):
            raise ValueError(
                f"past_key_values: expected a linear layer at {index}, got {type(layer).__name__}"
            )
        if any(layer.has_previous_state.values()):
            raise ValueError(
                "past_key_values: the model's own path has filled this cache; "
                "headstart needs one that it fills from the first token"
            )
        canonical = DeltaLayer()
        canonical.record_past = layer.record_past
        cache.layers[index] = canonical
    for index in softmax:
        layer = cache.layers[index] if index < len(cache.layers) else None
        if layer is not None and not isinstance(layer, CacheLayerMixin):
            raise ValueError(
                f"past_key_values: expected a softmax layer at {index}, got {type(layer).__name__}"
            )


def known_lengths(cache: Any) -> list[int] | None:
    """Tokens of each sequence, where canonical or paged layers count them; else None.

    Raises ValueError if they differ, as after a forward that an error has ended.
    """
    counted = [x for x in cache.layers if isinstance(x, (DeltaLayer, PagedLayer))]
    counts = [x.lengths for x in counted]
    if any(count != counts[0] for count in counts) or not all(x.whole for x in counted):
        raise ValueError(
            "past_key_values: its layers stand at different places, since an error ended a "
            "forward; reset() it"
        )
    return counts[0] if counts and counts[0] else None
