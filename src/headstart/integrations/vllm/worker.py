"""What a vLLM worker tells of itself: calls served by headstart, and seconds by kind of layer."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

from headstart.integrations.vllm.counting import STATISTICS

KINDS = {
    "GatedDeltaNetAttention": "linear_attention",
    "Attention": "softmax_attention",
    "Qwen3NextMLP": "feed_forward",
    "Qwen3NextSparseMoeBlock": "feed_forward",
    "MLPBlock": "feed_forward",
}
"""Class of a module, or of one of its bases -> kind of layer. What headstart never computes is the
control of a comparison."""


class WorkerExtension:
    """Methods for vLLM's workers (`--worker-extension-cls`), called by `collective_rpc`.

    They work with the plugin and without.
    """

    def headstart_statistics(self) -> dict[str, Any]:
        """Counts of this process: served, and calls as [kind, operation, implementation, calls]."""
        calls = [[*key, count] for key, count in STATISTICS.calls.items()]
        return {"served": dict(STATISTICS.served), "calls": calls}

    def headstart_time_layers(self) -> dict[str, int]:
        """Time every layer from now on, by host clock; how many layers there are of each kind."""
        model: Any = self.get_model()  # type: ignore[attr-defined]
        self.headstart_times = LayerTimes()
        return self.headstart_times.watch(model)

    def headstart_layer_times(self) -> dict[str, Any]:
        """Seconds of each kind of layer and of the whole model, and the model's forwards."""
        times = self.headstart_times
        return {"seconds": dict(times.seconds), "forwards": times.forwards["model"]}


class LayerTimes:
    """Host seconds of modules, by kind. A layer inside another of its kind counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.forwards: Counter[str] = Counter()
        self._began: dict[str, tuple[float, Any]] = {}

    def watch(self, model: Any) -> dict[str, int]:
        """Time the model and its layers; how many of each kind."""
        found = Counter()
        watched = [("model", model)]
        for module in model.modules():
            names = [kind.__name__ for kind in type(module).__mro__]
            kind = next((KINDS[name] for name in names if name in KINDS), None)
            if kind is not None:
                watched.append((kind, module))
                found[kind] += 1
        for kind, module in watched:
            module.register_forward_pre_hook(self._begin(kind, module))
            module.register_forward_hook(self._end(kind, module), always_call=True)
        return dict(found)

    def _begin(self, kind: str, module: Any) -> Any:
        def begin(*_: Any) -> None:
            self._began.setdefault(kind, (time.perf_counter(), module))

        return begin

    def _end(self, kind: str, module: Any) -> Any:
        def end(*_: Any) -> None:
            began, outermost = self._began[kind]
            if outermost is module:
                del self._began[kind]
                self.seconds[kind] += time.perf_counter() - began
                self.forwards[kind] += 1

        return end
