"""What a config.json may say, and the file and the field in an error about what it may not."""

import json

import pytest

from headstart import checkpoints
from headstart.evidence.prefill.configuration import expect_sound, read_configuration

ROPE = {"rope_type": "default", "rope_theta": 1e4}
WRONG = [
    ({"num_hidden_layers": "six"}, "num_hidden_layers: expected an integer >= 1, got 'six'"),
    ({"num_hidden_layers": 6.0}, "num_hidden_layers: expected an integer >= 1, got 6.0"),
    ({"num_hidden_layers": True}, "num_hidden_layers: expected an integer >= 1, got True"),
    ({"num_hidden_layers": None}, "num_hidden_layers: expected an integer >= 1, got None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer >= 1, got 0"),
    ({"num_hidden_layers": 9}, "layer_types: expected one for each of num_hidden_layers = 9 layer"),
    ({"layer_types": "full"}, "layer_types: expected a list, got 'full'"),
    ({"layer_types": {}}, "layer_types: expected a list, got dict"),
    ({"layer_types": ["mamba"]}, "layer_types: expected linear_attention, full_attention, sliding"),
    ({"layer_types": [[]]}, "layer_types: expected linear_attention, full_attention, sliding_atte"),
    ({"layer_types": ["full_attention"]}, "layer_types: expected one for each of num_hidden_layer"),
    ({"hidden_size": -128}, "hidden_size: expected an integer >= 1, got -128"),
    ({"hidden_size": [128]}, "hidden_size: expected an integer >= 1, got [128]"),
    ({"vocab_size": 0}, "vocab_size: expected an integer >= 1, got 0"),
    ({"head_dim": 0}, "head_dim: expected an integer >= 1, got 0"),
    ({"max_position_embeddings": "many"}, "max_position_embeddings: expected an integer >= 1, got"),
    ({"num_attention_heads": 0}, "num_attention_heads: expected an integer >= 1, got 0"),
    ({"num_attention_heads": 3}, "num_attention_heads: expected a multiple of num_key_value_heads"),
    ({"num_key_value_heads": None}, "num_key_value_heads: expected an integer >= 1, got None"),
    ({"rope_parameters": "default"}, "rope_parameters: expected an object, got 'default'"),
    ({"rope_parameters": [1]}, "rope_parameters: expected an object, got [1]"),
    ({"rope_parameters": ROPE | {"rope_type": "spiral"}}, "rope_parameters.rope_type: expected on"),
    ({"rope_parameters": ROPE | {"rope_type": []}}, "rope_parameters.rope_type: expected one of"),
    ({"rope_parameters": ROPE | {"rope_theta": 0}}, "rope_parameters.rope_theta: expected a finit"),
    ({"rope_parameters": ROPE | {"rope_theta": "x"}}, "rope_parameters.rope_theta: expected a fin"),
    ({"rope_parameters": ROPE | {"partial_rotary_factor": 3.0}}, "rope_parameters.partial_rotary_"),
    ({"rope_parameters": {"full_attention": ROPE | {"rope_theta": -1}}}, "rope_parameters.full_at"),
    ({"rope_scaling": {"type": "weird"}}, "rope_scaling.type: expected one of"),
    ({"text_config": 5}, "text_config: expected an object, got 5"),
    ({"text_config": {"hidden_size": 0}}, "hidden_size: expected an integer >= 1, got 0"),
]
OF_ONE = {
    "tiny-gpt-oss": [
        ({"sliding_window": 0}, "sliding_window: expected an integer >= 1, got 0"),
        ({"sliding_window": None}, "sliding_window: expected an integer >= 1, got None"),
        ({"num_local_experts": -2}, "num_local_experts: expected an integer >= 0, got -2"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok: expected an integer in [1, 4], got 99"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: expected an integer in [1, 4], got 0"),
    ],
    "tiny-qwen3-next": [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: expected a multiple of linear_nu"),
        ({"linear_key_head_dim": "128"}, "linear_key_head_dim: expected an integer >= 1, got '128"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: expected an integer >= 2, got 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected an integer >= 1, got 0"),
    ],
}


@pytest.mark.parametrize("model", checkpoints.names())
def test_what_no_model_can_be_made_of_is_named_by_file_and_field(model):
    file = checkpoints.path(model) / "config.json"
    good = read_configuration(file)
    expect_sound(file, good)
    for changes, says in WRONG + OF_ONE[model]:
        with pytest.raises(ValueError) as error:
            expect_sound(file, good | changes)
        assert str(error.value).startswith(f"model: {file}: {says}")


def test_fields_may_be_missing_or_null_where_a_family_has_a_rule():
    file = checkpoints.path("tiny-gpt-oss") / "config.json"
    expect_sound(file, {})
    good = read_configuration(file)
    expect_sound(file, {"text_config": good})
    expect_sound(file, good | {"layer_types": None, "head_dim": None, "rope_parameters": None})
    each = {"full_attention": ROPE, "sliding_attention": ROPE | {"partial_rotary_factor": 0.25}}
    expect_sound(file, good | {"rope_parameters": each})


@pytest.mark.parametrize("text", ["", "{", "nul", "[" * 100_000, "\ufeff{}"])
def test_what_is_no_json_is_refused(text, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"^model: cannot read .*config\.json"):
        read_configuration(file)


@pytest.mark.parametrize("value", [[], 5, "text", None, True, [{"model_type": "gpt_oss"}] * 99])
def test_json_that_is_no_object_is_refused(value, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(value))
    with pytest.raises(
        ValueError, match=r"config\.json: expected an object with fields, got "
    ) as e:
        read_configuration(file)
    assert len(str(e.value)) < len(str(file)) + 100
