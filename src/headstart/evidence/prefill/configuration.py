"""The config.json of a checkpoint, read and looked over before transformers builds a model of it.

transformers checks types, not sense: sizes below 1 end deep inside of it, and an impossible rotary
base or number of chosen experts only shows in what the model computes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.runtime.checks import expect_int, expect_number, shown

LAYER_TYPES = ("linear_attention", "full_attention", "sliding_attention")

# Fields that count something, and the least that makes sense; those a family lacks are absent.
LEAST = {
    "num_hidden_layers": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "vocab_size": 1,
    "max_position_embeddings": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "sliding_window": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 1,
    "linear_value_head_dim": 1,
    "linear_conv_kernel_dim": 2,
    "decoder_sparse_step": 1,
    "num_experts": 0,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}
# Fields that may say null: then the family has a rule, or does without.
NULLABLE = ("head_dim", "sliding_window", "layer_types")


def read_configuration(file: Path) -> dict[str, Any]:
    """The fields of a config.json; ValueError if it holds no JSON object."""
    try:
        found = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"model: cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"model: {file}: expected an object with fields, got {shown(found)}")
    return found


def expect_sound(file: Path, configuration: dict[str, Any]) -> None:
    """Raise ValueError, with the file and the field, for values no model can be made of.

    >>> expect_sound(Path("config.json"), {"num_hidden_layers": "six"})
    Traceback (most recent call last):
    ValueError: model: config.json: num_hidden_layers: expected an integer >= 1, got 'six'
    """
    text = configuration.get("text_config", configuration)
    if not isinstance(text, dict):
        raise ValueError(f"model: {file}: text_config: expected an object, got {shown(text)}")
    where = f"model: {file}: "
    for field, least in LEAST.items():
        if field in text and not (field in NULLABLE and text[field] is None):
            expect_int(where + field, text[field], least)
    _expect_multiple(where, text, "num_attention_heads", "num_key_value_heads")
    _expect_multiple(where, text, "linear_num_value_heads", "linear_num_key_heads")
    _expect_layers(where, text)
    _expect_experts(where, text)
    _expect_rotation(where + "rope_parameters", text.get("rope_parameters"))
    _expect_rotation(where + "rope_scaling", text.get("rope_scaling"))


def _expect_multiple(where: str, text: dict[str, Any], field: str, of: str) -> None:
    if field in text and of in text and text[field] % text[of]:
        raise ValueError(
            f"{where}{field}: expected a multiple of {of} = {text[of]}, got {text[field]}"
        )


def _expect_layers(where: str, text: dict[str, Any]) -> None:
    types = text.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list):
        raise ValueError(f"{where}layer_types: expected a list, got {shown(types)}")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise ValueError(
                f"{where}layer_types: expected {', '.join(LAYER_TYPES)}, got {shown(kind)}"
            )
    count = text.get("num_hidden_layers", len(types))
    if len(types) != count:
        raise ValueError(
            f"{where}layer_types: expected one for each of num_hidden_layers = {count} layers, "
            f"got {len(types)}"
        )
    if "sliding_attention" in types and text.get("sliding_window", 1) is None:
        raise ValueError(f"{where}sliding_window: expected an integer >= 1, got None")


def _expect_experts(where: str, text: dict[str, Any]) -> None:
    experts = text.get("num_local_experts", text.get("num_experts"))
    if experts and "num_experts_per_tok" in text:
        expect_int(f"{where}num_experts_per_tok", text["num_experts_per_tok"], 1, experts)


def _expect_rotation(where: str, rotation: Any) -> None:
    if rotation is None:
        return
    if not isinstance(rotation, dict):
        raise ValueError(f"{where}: expected an object, got {shown(rotation)}")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kinds = {"default", *ROPE_INIT_FUNCTIONS}
    for field, value in rotation.items():
        if field in LAYER_TYPES:  # one for each kind of layer
            _expect_rotation(f"{where}.{field}", value)
        elif field in ("rope_type", "type") and not (isinstance(value, str) and value in kinds):
            raise ValueError(
                f"{where}.{field}: expected one of {', '.join(sorted(kinds))}, got {shown(value)}"
            )
        elif field == "rope_theta":
            words = "a finite number > 0"
            expect_number(f"{where}.{field}", value, words, lambda base: base > 0)
        elif field == "partial_rotary_factor":
            words = "a number in (0, 1]"
            expect_number(f"{where}.{field}", value, words, lambda share: 0 < share <= 1)
