"""Small models with random weights of every family, whose logits and memories are of size one."""

import functools
import inspect

import torch
import transformers
from tests.implementations import DEVICE, KERNELS

from headstart.integrations.transformers import enable, statistics

VOCABULARY = 97
# transformers 5.24 renamed the argument
_ARGUMENTS = inspect.signature(transformers.GptOssModel.forward).parameters
CACHE = "cache" if "cache" in _ARGUMENTS else "past_key_values"
WINDOW = 64
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
QWEN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "initializer_range": 0.12,
    **LINEAR,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def qwen3_next():
    """A linear layer with experts, a full one with a dense feed-forward part."""
    config = transformers.Qwen3NextConfig(
        **QWEN, **EXPERTS, head_dim=128, intermediate_size=96, mlp_only_layers=[1]
    )
    return transformers.Qwen3NextForCausalLM(config)


def qwen3_5():
    """Dense."""
    config = transformers.Qwen3_5TextConfig(**QWEN, head_dim=64, intermediate_size=96)
    return transformers.Qwen3_5ForCausalLM(config)


def qwen3_5_moe():
    """Experts in every layer."""
    config = transformers.Qwen3_5MoeTextConfig(**QWEN, **EXPERTS, head_dim=64)
    return transformers.Qwen3_5MoeForCausalLM(config)


def gpt_oss():
    """A sliding and a full layer, with sinks."""
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return transformers.GptOssForCausalLM(config)


MAKERS = {
    "qwen3-next": qwen3_next,
    "qwen3.5": qwen3_5,
    "qwen3.5-moe": qwen3_5_moe,
    "gpt-oss": gpt_oss,
}
FAMILIES = tuple(MAKERS)


def make(family: str, dtype: torch.dtype = torch.float32):
    """A model that headstart does not serve; equal weights at every call."""
    # Parameters are made as an application makes them, outside inference mode.
    with torch.random.fork_rng(), torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(11)
        model = MAKERS[family]().eval()
        for module in model.modules():
            parameters = dict(module.named_parameters(recurse=False))
            if "A_log" in parameters:  # from memories of a few tokens to some hundreds
                heads = parameters["A_log"].numel()
                parameters["A_log"].copy_(torch.logspace(-2.5, 0, heads).log())
                parameters["dt_bias"].normal_()
            if "sinks" in parameters:
                torch.nn.init.normal_(parameters["sinks"])
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.to(DEVICE, dtype)


@functools.cache
def pair(family: str, dtype: torch.dtype = torch.float32):
    """(a model as transformers runs it, one with the same weights that headstart serves)."""
    return make(family, dtype), enable(make(family, dtype))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids other than the padding's 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, shape, generator=generator).to(DEVICE)


def served_calls(model) -> dict[tuple[str, str], int]:
    """(layer kind, operation) -> calls of an enabled model; all of this device's implementations.

    On a CPU that is `torch`; where kernels are tested nothing else may run.
    """
    found: dict[tuple[str, str], int] = {}
    for (kind, operation, who), count in statistics(model).calls.items():
        if (who == "torch") == KERNELS:
            raise ValueError(f"{operation} in {kind}: ran {who} on {DEVICE}")
        found[kind, operation] = found.get((kind, operation), 0) + count
    return found


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest wanted value."""
    if found.shape != wanted.shape:
        raise ValueError(f"found: expected {list(wanted.shape)}, got {list(found.shape)}")
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def steps_of(total: int, sizes) -> list[tuple[int, int]]:
    """(start, end) of steps of these sizes, repeated until `total`."""
    borders, start = [], 0
    while start < total:
        size = sizes[len(borders) % len(sizes)]
        borders.append((start, min(start + size, total)))
        start += size
    return borders


def stepped(model, ids: torch.Tensor, borders, cache, mask: torch.Tensor | None = None):
    """Logits of a prefill in steps (start, end); with a mask, positions count its ones."""
    logits = []
    for start, end in borders:
        arguments = {CACHE: cache}
        if mask is not None:
            arguments["attention_mask"] = mask[:, :end]
            arguments["position_ids"] = positions_of(mask)[:, start:end]
        logits.append(model(ids[:, start:end], **arguments).logits)
    return torch.cat(logits, 1)


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Position of every token among the tokens of its sequence."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def left_padding(length: int, *pads: int) -> torch.Tensor:
    """A mask [B, length] with so many zeros at the left of each sequence."""
    mask = torch.ones(len(pads), length, dtype=torch.long)
    for n, pad in enumerate(pads):
        mask[n, :pad] = 0
    return mask.to(DEVICE)


def alone(own, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Own logits of every sequence of a padded batch, each computed without the others."""
    logits = torch.zeros(*ids.shape, own.config.vocab_size, dtype=own.dtype, device=ids.device)
    for n, row in enumerate(mask.bool()):
        if row.any():
            logits[n, row] = own(ids[n : n + 1, row]).logits[0]
    return logits
