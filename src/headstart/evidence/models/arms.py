"""Whoever computes the attention layers of a transformers model: headstart, or its own paths."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

import torch
from transformers import DynamicCache

from headstart.evidence.arms import Arm, MissingPeer, Unfit, peer
from headstart.evidence.arms.fla import BACKENDS
from headstart.evidence.models.records import Routed
from headstart.evidence.prefill.loading import Loaded, quiet
from headstart.evidence.prefill.runs import Run, prefill
from headstart.integrations.transformers import HybridCache, disable, enable, statistics

OURS = {"headstart": DynamicCache, "reproducible": HybridCache}
"""Arms of this package -> the cache that they prefill into."""
OWN = (
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "sdpa",
    "eager",
    "fla",
)
"""transformers' own attention by its names; fla: sdpa, with linear layers by fla's kernels."""
ARMS = (*OURS, *OWN)

MAIN = {"linear_attention": "gated_delta_rule"}
"""Kind of layer -> the operation that it must call; softmax layers call extend_attention."""


class Stand:
    """A model, and for which arm it stands at the moment.

    loaded: the model. ids: the prompt. step: tokens of a step, None: the whole prompt.
    """

    def __init__(self, loaded: Loaded, ids: list[int], step: int | None) -> None:
        self.loaded, self.ids, self.step = loaded, ids, step
        self.steps = -(-len(ids) // (step or len(ids)))
        self._name = ""
        self._first = loaded.model.config._attn_implementation

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.loaded.model.device

    def arm(self, name: str) -> Arm:
        """The arm called `name`: a call is one prefill and returns its `Run`.

        What makes the model stand for the arm happens in `restore`, outside of what is timed.
        Raises `MissingPeer` or `Unfit` where the arm cannot be had for this model.
        """
        self.turn_to(name)
        made: list[Any] = []

        def restore() -> None:
            self.turn_to(name)
            made[:] = [self._cache(name)]
            if name in OURS:
                statistics(self.loaded.model).reset()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)

        def call() -> Run:
            with quiet():
                cache = made.pop()
                return prefill(self.loaded, self.ids, cache, step=self.step, projections_apart=True)

        return Arm(name, call, lambda run: {"hidden": run.hidden}, restore=restore)

    def turn_to(self, name: str) -> None:
        """Give the layers to the arm called `name`; "" gives them back as they were found."""
        if name == self._name:
            return
        model = self.loaded.model
        if self._name in OURS:
            disable(model)
        self._name = ""
        if name in OURS:
            self._ask(self._first)
            enable(model, reproducible=name == "reproducible")
        elif name == "fla":
            if "linear_attention" not in self.loaded.kinds:
                raise Unfit("the model has no linear layers")
            os.environ.update(dict.fromkeys(BACKENDS, "0"))
            peer("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
            if self._rule_from() != "fla":
                raise MissingPeer("transformers has not taken the gated delta rule from fla")
            self._ask("sdpa")
        else:
            self._ask(name or self._first)
        self._name = name

    def served(self) -> str:
        """What computed the attention layers in the last call."""
        if self._name in OURS:
            calls = statistics(self.loaded.model).calls
            return ", ".join(dict.fromkeys(who for (*_, who), _ in sorted(calls.items())))
        softmax = self.loaded.model.config._attn_implementation
        if "linear_attention" not in self.loaded.kinds:
            return softmax
        own = "by fla" if self._rule_from() == "fla" else "in PyTorch"
        return f"{softmax}, linear layers {own}"

    def _rule_from(self) -> str:
        """The package whose gated delta rule transformers runs in the model's linear layers.

        It takes fla's as it is first imported, or in silence a path of its own.
        """
        layers = self.loaded.model.get_decoder().layers
        layer = layers[self.loaded.kinds.index("linear_attention")].linear_attn
        rule = vars(sys.modules[type(layer).__module__])["torch_chunk_gated_delta_rule"]
        taken = inspect.getclosurevars(rule).nonlocals["implementation"]
        return taken.__module__.partition(".")[0]

    def routed(self) -> tuple[Routed, ...]:
        """headstart's calls in the last prefill, against layers times steps."""
        if self._name not in OURS:
            return ()
        kinds = self.loaded.kinds
        found: dict[tuple[str, str], dict[str, int]] = {
            (kind, MAIN.get(kind, "extend_attention")): {} for kind in dict.fromkeys(kinds)
        }
        for (kind, operation, who), count in sorted(statistics(self.loaded.model).calls.items()):
            found.setdefault((kind, operation), {})[who] = count
        return tuple(
            Routed(
                kind=kind,
                operation=operation,
                calls=calls,
                expected=kinds.count(kind) * self.steps,
            )
            for (kind, operation), calls in found.items()
        )

    def _cache(self, name: str) -> Any:
        model = self.loaded.model
        if OURS.get(name) is HybridCache:
            return HybridCache(model)
        return DynamicCache(config=model.config.get_text_config())

    def _ask(self, attention: str) -> None:
        """Have transformers run the attention called so, and nothing in its place."""
        model = self.loaded.model
        try:
            with quiet():
                model.set_attn_implementation(attention)
        except ImportError as error:
            raise MissingPeer(_first_sentence(error)) from error
        except ValueError as error:
            raise Unfit(_first_sentence(error)) from error
        if model.config._attn_implementation != attention:
            raise Unfit(f"transformers runs {model.config._attn_implementation} in its place")


def _first_sentence(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
