"""Configurations, tokenizer, initial weights and storage of the two tiny models."""

import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 264  # 256 bytes, one special token, the rest padding to a multiple of 8
END_OF_TEXT = 256
MAX_POSITIONS = 32_768


def config(name: str) -> Qwen3NextConfig | GptOssConfig:
    """Configuration of the model called `name`: head sizes as in the large ones, all else small."""
    shared = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT,
    }
    if name == "tiny-qwen3-next":
        layers = 8
        return Qwen3NextConfig(
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            mlp_only_layers=list(range(layers)),
            num_experts=0,
            num_experts_per_tok=0,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
            **shared,
        )
    if name == "tiny-gpt-oss":
        return GptOssConfig(
            hidden_size=128,
            intermediate_size=96,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            sliding_window=128,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
            **shared,
        )
    raise ValueError(f"model: expected tiny-qwen3-next or tiny-gpt-oss, got {name!r}")


def new_model(name: str, seed: int) -> PreTrainedModel:
    """A float32 model with seeded initial weights."""
    torch.manual_seed(seed)
    if name == "tiny-gpt-oss":
        return GptOssForCausalLM(config(name)).float()
    model = Qwen3NextForCausalLM(config(name)).float()
    for module in model.modules():
        if hasattr(module, "A_log"):
            spread_decays(module)
    return model


@torch.no_grad()
def spread_decays(layer: nn.Module) -> None:
    """Start the heads of a linear layer with half-lives from a few tokens to thousands.

    transformers starts every head at a decay of exp(-A softplus(1)), A up to 16: nothing outlives
    a few tokens and recall over thousands has no gradient to begin with.
    """
    heads = layer.A_log.numel()
    rates = torch.logspace(math.log10(0.1), math.log10(5e-5), heads)
    layer.A_log.zero_()
    layer.dt_bias.copy_(torch.log(torch.expm1(rates)))


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: the id of a token is the value of its byte; a str is read as UTF-8."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # The byte-level alphabet: printable bytes stand for themselves, the rest for U+0100 onwards.
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(others)}
    backend = Tokenizer(BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a checkpoint: weights rounded to bfloat16, to be loaded as float32 by default."""
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    stored = type(model)(type(model.config).from_dict(model.config.to_dict())).bfloat16()
    stored.load_state_dict(state)
    stored.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
