"""A model to prefill: a checkpoint, or random weights in the shape of a public configuration.

Random weights are drawn as the family initialises them (initializer_range, and for gated delta
rules their decays), so that scores, gates and activations are of the size that a model has.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headstart import checkpoints
from headstart.evidence.prefill.loading import Loaded, load, quiet, supported_configuration
from headstart.runtime.checks import expect_int

CONFIGURATIONS = Path(__file__).with_name("configurations.json")
"""Public configurations by name, each with where it was published."""
ROOM = 0.7
"""Share of the free memory that weights may take; the rest is for keys, values and activations."""


@dataclass(frozen=True)
class Built:
    """A model on its device, and how it came about.

    loaded: for `prefill`; tokens are its own ids.
    source: where the configuration is from. weights: "random" or "trained".
    cut: what was left out, in words; "" where nothing was.
    """

    loaded: Loaded
    source: str
    weights: str
    cut: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return weight_bytes(self.loaded.model)


def names() -> list[str]:
    """Names that `build` takes, besides folders.

    >>> names()
    ['gpt-oss-20b', 'qwen3-next-80b', 'tiny-gpt-oss', 'tiny-qwen3-next']
    """
    return [*_public(), *checkpoints.names()]


def build(
    name: str,
    *,
    layers: int | None = None,
    experts: int | None = None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Built:
    """The model called `name`, or of the folder `name`, ready to run.

    A shipped checkpoint, or a folder with *.safetensors, is loaded. A public configuration, or a
    folder with a config.json alone, gets random weights.

    Parameters
    ----------
    layers, experts: how many of them, for random weights. layers None: all, or as many whole
        periods of layer kinds as the memory takes.
    dtype: of the weights. seed: of random ones.

    Raises ValueError for an unknown name or folder, one of another family, sizes that the
    configuration has not, a checkpoint that is to be cut, and where one period does not fit.
    """
    public = _public().get(name)
    folder = Path(name)
    trained = name in checkpoints.names() or any(folder.glob("*.safetensors"))
    if public is None and trained:
        for option, value in (("layers", layers), ("experts", experts)):
            if value is not None:
                raise ValueError(
                    f"{option}: expected none with trained weights, which are run as they are, "
                    f"got {value}"
                )
        return Built(load(name, device=device, dtype=dtype), name, "trained")
    if public is not None:
        source, configuration = public["source"], deepcopy(public["configuration"])
    else:
        file = folder / "config.json"
        if not file.is_file():
            raise ValueError(
                f"model: expected {', '.join(names())} or a folder with a config.json, got {name!r}"
            )
        source, configuration = str(file), supported_configuration(file)
    return _random(name, source, configuration, layers, experts, device, dtype, seed)


def _random(
    name: str,
    source: str,
    configuration: dict[str, Any],
    layers: int | None,
    experts: int | None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> Built:
    text = configuration.get("text_config", configuration)
    cuts = []
    if experts is not None:
        field = "num_local_experts" if "num_local_experts" in text else "num_experts"
        if not text.get(field):
            raise ValueError(f"experts: {name} has none, got {experts}")
        expect_int("experts", experts, text.get("num_experts_per_tok", 1), text[field])
        cuts.append(f"{experts} of {text[field]} experts")
        text[field] = experts
    have = text["num_hidden_layers"]
    if layers is None:
        layers = _fitting(name, configuration, device, dtype)
    _keep_layers(text, expect_int("layers", layers, 1, have))
    if layers < have:
        cuts.append(f"{layers} of {have} layers")
    torch.manual_seed(seed)
    with torch.device(device):
        model = _model(configuration, dtype)
    model = model.to(device).eval()
    loaded = Loaded(name, model, list, bytes)
    return Built(loaded, source, "random", ", ".join(cuts))


def _fitting(
    name: str, configuration: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> int:
    """How many layers fit: all, or whole periods of their kinds."""
    with torch.device("meta"):
        model = _model(configuration, dtype)
    layers = model.get_decoder().layers
    kinds = model.config.get_text_config().layer_types
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else 1
    largest = max(weight_bytes(layer) for layer in layers)
    rest = weight_bytes(model) - sum(weight_bytes(layer) for layer in layers)
    room = ROOM * free_bytes(device)
    count = int(room - rest) // largest
    if count >= len(layers):
        return len(layers)
    if count < period:
        raise ValueError(
            f"model: {name} has {largest / 2**30:.1f} GiB of weights in a layer and "
            f"{rest / 2**30:.1f} GiB around them; {room / 2**30:.1f} GiB are free for weights, "
            f"too little for {period} layers: give fewer --experts or --layers"
        )
    return count // period * period


def _keep_layers(text: dict[str, Any], count: int) -> None:
    text["num_hidden_layers"] = count
    if text.get("layer_types") is not None:
        text["layer_types"] = text["layer_types"][:count]
    if text.get("mlp_only_layers"):
        text["mlp_only_layers"] = [at for at in text["mlp_only_layers"] if at < count]


def _model(configuration: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in configuration.items() if name != "model_type"}
    with quiet():
        config = AutoConfig.for_model(configuration["model_type"], **fields)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters, each counted once.

    >>> weight_bytes(torch.nn.Linear(4, 2))
    40
    """
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise ValueError("layers: expected a number, since this machine does not say what is free")


@cache
def _public() -> dict[str, dict[str, Any]]:
    return json.loads(CONFIGURATIONS.read_text())
