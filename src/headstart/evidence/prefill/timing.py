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

    What is outside of these (norms, embedding, residuals) is nobody's.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device

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
        began = 0.0

        def before(*_: Any) -> None:
            nonlocal began
            began = self.now()

        def after(*_: Any) -> None:
            self.seconds[kind] += self.now() - began

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held so far: on the device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
