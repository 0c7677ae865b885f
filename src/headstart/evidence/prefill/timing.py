"""Time by layer kind, peak memory, and progress, from hooks on a model's layers."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PARTS = {"linear_attn": None, "self_attn": None, "mlp": "mlp"}
"""Attributes of a decoder layer -> kind; None: the layer's own kind."""


class LayerTimes:
    """Seconds by layer kind: "linear_attention", "full_attention", "sliding_attention", "mlp".

    On a GPU of events around each module, so that a layer does not wait for the one before it.
    What is outside of these (norms, embedding, residuals) is nobody's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, Any, Any]] = []

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by kind so far; waits for a GPU."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        found: dict[str, float] = defaultdict(float)
        for kind, began, ended in self._spans:
            found[kind] += began.elapsed_time(ended) / 1000 if on_gpu else ended - began
        return dict(found)

    def now(self) -> float:
        """Seconds on a clock that waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def watching(
        self, layers: Any, kinds: list[str], progress: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Measure the given decoder layers; `progress` is called after each layer."""
        handles = []
        for layer, kind in zip(layers, kinds, strict=True):
            for attribute, part in PARTS.items():
                module = getattr(layer, attribute, None)
                if module is not None:
                    handles += self._watch(module, part or kind)
            if progress is not None:
                handles.append(layer.register_forward_hook(lambda *_: progress()))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, module: Any, kind: str) -> list[Any]:
        began: Any = None

        def before(*_: Any) -> None:
            nonlocal began
            began = self._mark()

        def after(*_: Any) -> None:
            self._spans.append((kind, began, self._mark()))

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _mark(self) -> Any:
        """This moment: of the device, which is not waited for, or seconds of the host."""
        if self._device.type != "cuda":
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record(torch.cuda.current_stream(self._device))
        return moment


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held so far: on the device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
