"""Giving the layers of one model instance to headstart, and back."""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

import headstart
from headstart.integrations.transformers import layers
from headstart.integrations.transformers.caches import HybridCache
from headstart.integrations.transformers.forward import Forward, packed_lengths
from headstart.runtime import dispatch

NAME = "headstart"
LINEAR = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
SOFTMAX = ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention", "GptOssAttention")
DECODERS = ("Qwen3NextModel", "Qwen3_5TextModel", "Qwen3_5MoeTextModel", "GptOssModel")

Observer = Callable[[int, str, dict[str, Any], Any], None]


@dataclass
class Statistics:
    """What headstart has served in a model.

    calls: (layer kind, operation, implementation) -> calls.
    seconds: the same -> host seconds.
    """

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def reset(self) -> None:
        """Start counting again."""
        self.calls.clear()
        self.seconds.clear()


class Adapter:
    """What the layers of one enabled model share."""

    def __init__(self, implementation: str | None, reproducible: bool) -> None:
        self.implementation, self.reproducible = implementation, reproducible
        self.statistics = Statistics()
        self.observers: list[Observer] = []
        self.undo: list[Callable[[], None]] = []
        self._current = threading.local()

    def begin(self, forward: Forward) -> None:
        """A forward of the decoder begins."""
        self._current.forward = forward

    def forward(self, batch: int, length: int) -> Forward:
        """The facts of the forward that is under way."""
        current = getattr(self._current, "forward", None)
        if current is None or (current.batch, current.length) != (batch, length):
            raise ValueError(
                "model: a layer ran outside its decoder's forward, so headstart knows no positions"
            )
        return current

    def call(self, layer: int, kind: str, operation: str, **arguments: Any) -> Any:
        """Run `headstart.<operation>`, count and time it, and tell the observers."""
        began = time.perf_counter()
        with dispatch.watching() as ran:
            result = getattr(headstart, operation)(**arguments, implementation=self.implementation)
        key = (kind, operation, ran[-1][1])
        self.statistics.calls[key] += 1
        self.statistics.seconds[key] += time.perf_counter() - began
        for observer in self.observers:
            observer(layer, operation, arguments, result)
        return result


def enable(model: Any, *, implementation: str | None = None, reproducible: bool = False) -> Any:
    """Let headstart compute the attention layers of a transformers model; returns the model.

    Parameters
    ----------
    model: a Qwen3-Next, Qwen3.5 or gpt-oss model (with or without a head).
    implementation: run this implementation of every operation, strictly. None: the first that
        accepts.
    reproducible: promise bits of softmax layers with every cache (with a `HybridCache` they always
        are). Linear layers with a cache always keep the promise.

    Raises ValueError if the model has no layer that headstart serves, or is already enabled.
    """
    if getattr(model, "headstart", None) is not None:
        raise ValueError("model: it is already enabled; disable(model) first")
    found = [m for m in model.modules() if _is(m, LINEAR) or _is(m, SOFTMAX)]
    decoders = [m for m in model.modules() if _is(m, DECODERS)]
    if not found or not decoders:
        raise ValueError(
            "model: expected Qwen3-Next, Qwen3.5 or gpt-oss layers, "
            f"got {type(model).__name__}, which has none that headstart serves"
        )
    # Registering a name changes no model that does not ask for it.
    AttentionInterface.register(NAME, layers.attention)
    AttentionMaskInterface.register(NAME, layers.key_range)
    adapter = Adapter(implementation, reproducible)
    _own_configurations(model, adapter)
    for module in found:
        _set(adapter, module, "headstart", adapter)
        if _is(module, LINEAR):
            _set(adapter, module, "forward", layers.linear_attention(module))
    for decoder in decoders:
        hook = decoder.register_forward_pre_hook(_opening(adapter), with_kwargs=True)
        adapter.undo.append(hook.remove)
    if model not in found:
        _set(adapter, model, "headstart", adapter)
    return model


def disable(model: Any) -> Any:
    """Give the layers back to the model, exactly as they were; returns the model."""
    adapter = _adapter(model)
    for undo in reversed(adapter.undo):
        undo()
    return model


def statistics(model: Any) -> Statistics:
    """Calls and host seconds of an enabled model, by layer kind, operation and implementation."""
    return _adapter(model).statistics


@contextmanager
def observe(model: Any, observer: Observer) -> Iterator[None]:
    """Call observer(layer index, operation, arguments, result) after every operation.

    The arguments are those that went into `headstart.<operation>`, possibly views.
    """
    adapter = _adapter(model)
    adapter.observers.append(observer)
    try:
        yield
    finally:
        adapter.observers.remove(observer)


def _adapter(model: Any) -> Adapter:
    adapter = getattr(model, "headstart", None)
    if adapter is None:
        raise ValueError("model: it is not enabled; enable(model) first")
    return adapter


def _is(module: Any, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _set(adapter: Adapter, module: Any, name: str, value: Any) -> None:
    """Set an attribute of one instance, to be undone."""
    had = name in vars(module)
    old = vars(module).get(name)
    setattr(module, name, value)

    def undo() -> None:
        if had:
            setattr(module, name, old)
        else:
            delattr(module, name)

    adapter.undo.append(undo)


def _own_configurations(model: Any, adapter: Adapter) -> None:
    """Copies of the configurations of this instance that ask for headstart's attention.

    Configurations may be shared with other instances, so they are not changed themselves.
    """
    text = model.config.get_text_config()
    own = copy.copy(text)
    own._attn_implementation = NAME
    copies = {id(text): own}
    if model.config is not text:
        top = copy.copy(model.config)
        for name, value in vars(top).items():
            if value is text:
                setattr(top, name, own)
        copies[id(model.config)] = top
    for module in model.modules():
        config = vars(module).get("config")
        if id(config) in copies:
            _set(adapter, module, "config", copies[id(config)])


def _opening(adapter: Adapter) -> Callable[..., None]:
    """A hook that reads the positions of a forward before its first layer."""

    def hook(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given["inputs_embeds"]
        batch, length = tokens.shape[:2]
        cache = given.get("cache")
        if cache is None:
            cache = given.get("past_key_values")
        past = int(cache.get_seq_length()) if cache is not None else 0
        mask = _mask(given.get("attention_mask"))
        caching = given.get("use_cache")
        if caching is None:
            caching = cache is not None or getattr(decoder.config, "use_cache", False)
        packed = None
        if mask is None and past == 0 and not caching:  # as transformers itself detects packing
            packed = packed_lengths(given.get("position_ids"), batch)
        forward = Forward(batch, length, past, mask, packed, cache, tokens.device)
        adapter.begin(forward)
        if isinstance(cache, HybridCache):
            cache.begin(forward)

    return hook


def _mask(given: Any) -> torch.Tensor | None:
    """The padding mask [B, tokens] in what a decoder was given, or None."""
    if isinstance(given, dict):
        ranges = [value for value in given.values() if isinstance(value, layers.KeyRange)]
        given = ranges[0].attention_mask if ranges else None
    if isinstance(given, torch.Tensor) and given.dim() != 2:
        raise ValueError(f"attention_mask: expected [B, tokens], got {list(given.shape)}")
    return given
