"""Giving the layers of one model instance to headstart, and back."""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache

import headstart
from headstart.integrations.transformers import layers
from headstart.integrations.transformers.caches import HybridCache, adopt, known_lengths
from headstart.integrations.transformers.forward import Forward, lengths_of, packed_lengths
from headstart.integrations.transformers.pages import PagedLayer
from headstart.integrations.transformers.uncompiled import uncompiled
from headstart.runtime import dispatch
from headstart.runtime.checks import expect_choice, expect_flag, shown

NAME = "headstart"
LINEAR = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
SOFTMAX = ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention", "GptOssAttention")
DECODERS = ("Qwen3NextModel", "Qwen3_5TextModel", "Qwen3_5MoeTextModel", "GptOssModel")

Observer = Callable[[int, str, dict[str, Any], Any], None]


@dataclass
class Statistics:
    """What headstart has served in a model, and what it leaves to it.

    calls: (layer kind, operation, implementation) -> calls.
    seconds: the same -> host seconds.
    left: class of attention modules that run as they did -> how many there are.
    """

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    left: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        """Start counting again."""
        self.calls.clear()
        self.seconds.clear()


class Adapter:
    """What the layers of one enabled model share.

    Positions are facts of the host, so a compiled model is left before its first layer and in each
    attention layer; what lies between is compiled, once for all lengths.
    """

    def __init__(self, decoder: Any, implementation: str | None, reproducible: bool) -> None:
        self.linear = [m.layer_idx for m in decoder.modules() if _is(m, LINEAR)]
        self.softmax = [m.layer_idx for m in decoder.modules() if _is(m, SOFTMAX)]
        self.names = list(inspect.signature(type(decoder).forward).parameters)[1:]
        self.implementation, self.reproducible = implementation, reproducible
        self.statistics = Statistics()
        self.observers: list[Observer] = []
        self.changed: list[tuple[Any, str, Any]] = []
        self.hooks: list[Any] = []
        self._current: dict[int, Forward] = {}  # by thread

    @uncompiled
    def begin(self, decoder: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Read the positions of a forward before its first layer (a hook of the decoder)."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        # transformers has renamed the argument on the way from 5.17 to 5.24.
        name = "cache" if "cache" in self.names else "past_key_values"
        caches = [given.pop(key, None) for key in ("cache", "past_key_values")]
        cache = next((one for one in caches if one is not None), None)
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(f"past_key_values: expected a Cache, got {type(cache).__name__}")
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given.get("inputs_embeds")
        if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
            raise ValueError("input_ids: expected [B, L] (or inputs_embeds [B, L, hidden size])")
        batch, length = tokens.shape[:2]
        mask = _padding(given.get("attention_mask"))
        packed = _packed(given, cache, mask, batch, length)
        if packed is not None:
            given["use_cache"] = False  # rows of many sequences are no cache of one
        elif cache is None and _use_cache(decoder, given):
            cache = DynamicCache(config=decoder.config)
        given[name] = cache
        forward = self._forward(batch, length, mask, packed, cache, tokens.device)
        if given.get("position_ids") is None and (positions := forward.position_ids()) is not None:
            given["position_ids"] = positions  # a model counts padding too
        if isinstance(cache, HybridCache):
            cache.begin(forward)
        self._current[threading.get_ident()] = forward
        return (), given

    def _forward(
        self,
        batch: int,
        length: int,
        mask: torch.Tensor | None,
        packed: list[int] | None,
        cache: Any,
        device: torch.device,
    ) -> Forward:
        if cache is None:
            return Forward(batch, length, mask=mask, packed=packed, device=device)
        adopt(cache, self.linear, self.softmax)
        past = int(cache.get_seq_length())
        known = known_lengths(cache)
        if self.linear and known is None and past:
            raise ValueError(
                f"past_key_values: expected linear layers after {past} tokens as the others, got "
                "empty ones (reset() of older transformers keeps the keys); start a new cache"
            )
        forward = Forward(
            batch, length, past=past, mask=mask, known=known, cache=cache, device=device
        )
        plain = any(
            index < len(cache.layers) and not isinstance(cache.layers[index], PagedLayer)
            for index in self.softmax
        )
        if mask is None and plain and forward.padded_before:
            raise ValueError(
                f"attention_mask: expected [B, past + new] = [{batch}, {past + length}] with the "
                "padding that the cache has seen, got None"
            )
        return forward

    @uncompiled
    def end(self, decoder: Any, args: tuple, output: Any) -> None:
        """The forward is over, by an error perhaps (a hook of the decoder)."""
        forward = self._current.pop(threading.get_ident(), None)
        if forward is not None and isinstance(forward.cache, HybridCache):
            forward.cache.pages.end()

    def forward(self, batch: int, length: int) -> Forward:
        """The facts of the forward that is under way."""
        current = self._current.get(threading.get_ident())
        if current is None or (current.batch, current.length) != (batch, length):
            raise ValueError(
                "model: a layer ran outside its decoder's forward, so headstart knows no positions"
            )
        return current

    def call(self, layer: int, kind: str, operation: str, **arguments: Any) -> Any:
        """Run `headstart.<operation>`, count and time it, and tell the observers."""
        result = self._counted(kind, operation, arguments)
        for observer in self.observers:
            observer(layer, operation, arguments, result)
        return result

    def write(self, kind: str, **arguments: Any) -> None:
        """Run `headstart.write_kv`, counted and timed."""
        self._counted(kind, "write_kv", arguments)

    def _counted(self, kind: str, operation: str, arguments: dict[str, Any]) -> Any:
        began = time.perf_counter()
        with dispatch.watching() as ran:
            result = getattr(headstart, operation)(**arguments, implementation=self.implementation)
        key = (kind, operation, ran[-1][1])
        with _COUNTING:
            self.statistics.calls[key] += 1
            self.statistics.seconds[key] += time.perf_counter() - began
        return result

    def change(self, module: Any, name: str, value: Any) -> None:
        """Set an attribute of one instance, to be undone."""
        self.changed.append((module, name, vars(module).get(name, _NOTHING)))
        setattr(module, name, value)

    def undo(self) -> None:
        """Put everything back as it was."""
        for hook in self.hooks:
            hook.remove()
        for module, name, old in reversed(self.changed):
            if old is _NOTHING:
                delattr(module, name)
            else:
                setattr(module, name, old)


_NOTHING = "headstart: there was no such attribute"
_COUNTING = threading.Lock()  # one for all, since an adapter is copied with its model


def enable(model: Any, *, implementation: str | None = None, reproducible: bool = False) -> Any:
    """Let headstart compute the attention layers of a transformers model; returns the model.

    Softmax layers run `extend_attention`, linear layers `causal_conv1d`, `gated_delta_rule` and
    `rms_norm_gated`; all else stays the model's own. The model then takes any cache of
    transformers' (or none), whose linear layers become canonical as long as they are empty, and
    `HybridCache`. Left, right and inner padding by attention_mask [B, past + new], whose tokens
    position_ids count where none are given; batches packed by position_ids that restart at 0 or by
    cu_seq_lens_q, which leave no cache; steps of any length; `generate`; `torch.compile`, for what
    lies between attention layers. Call it under torch.inference_mode() or torch.no_grad().

    While enabled, `model.config` is a copy, since others may share the configuration.

    Parameters
    ----------
    model: a Qwen3-Next, Qwen3.5 or gpt-oss model (with or without a head).
    implementation: run this implementation of every operation, strictly. None: the first that
        accepts.
    reproducible: promise bits of softmax layers with every cache, and of linear layers without one.
        (With a `HybridCache` all layers keep the promise; linear layers do with every cache.)

    Raises ValueError if the model has no layer that headstart serves, one whose configuration it
    does not serve, or is already enabled.
    """
    if implementation is not None:
        expect_choice("implementation", implementation, dispatch.NAMES)
    expect_flag("reproducible", reproducible)
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    if any(NAME in vars(module) for module in modules):
        raise ValueError("model: it is already enabled; disable(model) first")
    found = [m for m in modules if _is(m, LINEAR) or _is(m, SOFTMAX)]
    decoders = [m for m in modules if _is(m, DECODERS)]
    if not found or not decoders:
        raise ValueError(
            "model: expected Qwen3-Next, Qwen3.5 or gpt-oss layers, "
            f"got {type(model).__name__}, which has none that headstart serves"
        )
    if len(decoders) > 1:
        raise ValueError(f"model: expected one decoder, got {len(decoders)}")
    for module in found:
        _expect_served(module)
    # Registering a name changes no model that does not ask for it.
    AttentionInterface.register(NAME, layers.attention)
    AttentionMaskInterface.register(NAME, layers.padding_mask)
    (decoder,) = decoders
    adapter = Adapter(decoder, implementation, reproducible)
    _own_configurations(model, decoder.config, adapter)
    for module in found:
        adapter.change(module, NAME, adapter)
        if _is(module, LINEAR):
            adapter.change(module, "forward", MethodType(layers.linear_attention, module))
    adapter.hooks += [
        decoder.register_forward_pre_hook(adapter.begin, with_kwargs=True),
        decoder.register_forward_hook(adapter.end, always_call=True),
    ]
    adapter.change(model, NAME, adapter)
    if hasattr(model, "_valid_auto_compile_criteria"):
        # `generate` compiles models with static caches on a device; positions are host facts here.
        adapter.change(model, "_valid_auto_compile_criteria", _never)
    for module in modules:
        kind = type(module).__name__
        if module not in found and kind.endswith(("Attention", "GatedDeltaNet")):
            adapter.statistics.left[kind] += 1
    return model


def disable(model: Any) -> Any:
    """Give the layers back to the model, exactly as they were; returns the model."""
    _adapter(model).undo()
    return model


def statistics(model: Any) -> Statistics:
    """Calls and host seconds of an enabled model, by layer kind, operation and implementation."""
    return _adapter(model).statistics


@contextmanager
def observe(model: Any, observer: Observer) -> Iterator[None]:
    """Call observer(layer index, operation, arguments, result) after every operation.

    The arguments are those that went into `headstart.<operation>`, possibly views. Writing keys
    into a `HybridCache` is counted, not observed.
    """
    adapter = _adapter(model)
    adapter.observers.append(observer)
    try:
        yield
    finally:
        adapter.observers.remove(observer)


def _adapter(model: Any) -> Adapter:
    adapter = getattr(model, NAME, None)
    if adapter is None:
        raise ValueError("model: it is not enabled; enable(model) first")
    return adapter


def _never(*_: Any, **__: Any) -> bool:
    return False


def _is(module: Any, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _expect_served(module: Any) -> None:
    """Raise ValueError if headstart does not serve the configuration of a layer."""
    where = f"model: layer {module.layer_idx} ({type(module).__name__})"
    if hasattr(module, "_hf_hook") or any(hasattr(m, "_hf_hook") for m in module.modules()):
        raise ValueError(f"{where}: expected weights in place, got some that accelerate moves")
    if _is(module, LINEAR):
        if module.activation != "silu":
            raise ValueError(f"{where}: expected activation 'silu', got {module.activation!r}")
        if module.num_v_heads % module.num_k_heads:
            raise ValueError(
                f"{where}: expected a multiple of {module.num_k_heads} value heads, "
                f"got {module.num_v_heads}"
            )
    elif not getattr(module, "is_causal", True):
        raise ValueError(f"{where}: expected causal attention, got attention to all tokens")


def _own_configurations(model: Any, text: Any, adapter: Adapter) -> None:
    """Copies of the configurations of this instance that ask for headstart's attention.

    Configurations may be shared with other instances, so they are not changed themselves.
    """
    own = copy.copy(text)
    own._attn_implementation = NAME
    copies = {id(text): own}
    if model.config is not text:
        top = copy.copy(model.config)
        for name, value in list(vars(top).items()):
            if value is text:
                setattr(top, name, own)
        copies[id(model.config)] = top
    for module in model.modules():
        config = vars(module).get("config")
        if id(config) in copies:
            adapter.change(module, "config", copies[id(config)])


def _padding(given: Any) -> torch.Tensor | None:
    """The padding mask [B, rows] in what a decoder was given, or None."""
    if isinstance(given, dict):  # made by `generate` for static caches
        given = given.get("full_attention", given.get("sliding_attention"))
    if given is not None and not (isinstance(given, torch.Tensor) and given.dim() == 2):
        raise ValueError(
            f"attention_mask: expected [B, past + new] with 0 for padding, got {shown(given)}; "
            "headstart serves causal and sliding attention"
        )
    return given


def _packed(
    given: dict[str, Any], cache: Any, mask: torch.Tensor | None, batch: int, length: int
) -> list[int] | None:
    """Lengths of packed sequences, or None for one sequence a row."""
    cu_seqlens = given.get("cu_seq_lens_q")
    past = 0 if cache is None else int(cache.get_seq_length())
    if cu_seqlens is not None:
        packed = lengths_of(cu_seqlens, batch, length)
    elif mask is None and not past:
        packed = packed_lengths(given.get("position_ids"), batch)
    else:
        packed = None
    if packed is not None and cache is not None:
        raise ValueError(
            "past_key_values: expected None with a packed batch, whose sequences share rows"
        )
    if packed is not None and mask is not None:
        raise ValueError("attention_mask: expected None with a packed batch")
    return packed


def _use_cache(decoder: Any, given: dict[str, Any]) -> bool:
    asked = given.get("use_cache")
    return bool(getattr(decoder.config, "use_cache", False) if asked is None else asked)
