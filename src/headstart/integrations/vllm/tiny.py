"""The tiny checkpoints in the form that vLLM loads: other names and settings, the same function."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from headstart import checkpoints


def write(name: str, folder: Path) -> Path:
    """Write the checkpoint called `name` into `folder` as vLLM wants it, and return the folder.

    vLLM reads the output matrix of both models by its own name. It builds every gpt-oss model with
    YaRN, which scales nothing at a factor of 1, and wants a layer of experts in every Qwen3-Next
    model: the last layer's network becomes its only expert, beside a shared one that gives zero.
    Raises ValueError for a name that is not one of `checkpoints.names()`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in write("tiny-gpt-oss", Path(folder)).iterdir())
    ['config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', ...]
    """
    from safetensors.torch import load_file, save_file

    source = checkpoints.path(name)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    if config["model_type"] == "gpt_oss":
        _scale_nothing(config)
    else:
        _last_layer_of_experts(config, weights)
    config["tie_word_embeddings"] = False
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _scale_nothing(config: dict[str, Any]) -> None:
    config["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


def _last_layer_of_experts(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    last, hidden, inner = (
        config["num_hidden_layers"] - 1,
        config["hidden_size"],
        config["intermediate_size"],
    )
    config["mlp_only_layers"] = list(range(last))
    config |= {
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }
    network = f"model.layers.{last}.mlp"
    for part in ("gate_proj", "up_proj", "down_proj"):
        matrix = weights.pop(f"{network}.{part}.weight")
        weights[f"{network}.experts.0.{part}.weight"] = matrix
        weights[f"{network}.shared_expert.{part}.weight"] = torch.zeros_like(matrix)
    # One expert has all the weight whatever its gate says.
    for gate in ("gate", "shared_expert_gate"):
        weights[f"{network}.{gate}.weight"] = matrix.new_zeros(1, hidden)
