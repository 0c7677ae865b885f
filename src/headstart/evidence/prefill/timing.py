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

PROJECTIONS = "projections"
"""What `LayerTimes` calls the matrix products at both ends of attention layers."""
PARTS = {"linear_attn": None, "self_attn": None, "mlp": "mlp"}
"""Attributes of a decoder layer -> kind; None: the layer's own kind."""


class LayerTimes:
    """Seconds by layer kind: "linear_attention", "full_attention", "sliding_attention", "mlp".

    On a GPU of events around each module, so that a layer does not wait for the one before it.
    What is outside of these (norms, embedding, residuals) is nobody's.

    apart: give the Linear modules of attention layers a kind of their own, "projections", and the
        layers only what is left.
    """

    def __init__(self, device: torch.device, *, apart: bool = False) -> None:
        self._device, self._apart = device, apart
        self._spans: list[tuple[str, str | None, Any, Any]] = []  # kind, inside of, begin, end

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by kind so far; waits for a GPU."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        found: dict[str, float] = defaultdict(float)
        for kind, inside, began, ended in self._spans:
            spent = began.elapsed_time(ended) / 1000 if on_gpu else ended - began
            found[kind] += spent
            if inside is not None:
                found[inside] -= spent
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
                if module is None:
                    continue
                handles += self._watch(module, part or kind)
                for inner in module.modules() if self._apart and part is None else ():
                    if isinstance(inner, torch.nn.Linear):
                        handles += self._watch(inner, PROJECTIONS, kind)
            if progress is not None:
                handles.append(layer.register_forward_hook(lambda *_: progress()))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, module: Any, kind: str, inside: str | None = None) -> list[Any]:
        began: Any = None

        def before(*_: Any) -> None:
            nonlocal began
            began = self._mark()

        def after(*_: Any) -> None:
            self._spans.append((kind, inside, began, self._mark()))

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
