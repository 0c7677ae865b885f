"""What a checkpoint scores: bits per byte, byte baselines, recall, sinks and ablations."""

import copy
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from headstart.checkpoints.recall import answered, recall_prompt

WINDOW = 2048


def token_ids(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device).long()


@torch.inference_mode()
def bits_per_byte(model: PreTrainedModel, data: bytes) -> float:
    """Mean over `data` cut into windows of 2,048 bytes; the first byte of each is context only."""
    bits, count = 0.0, 0
    for start in range(0, len(data) - 1, WINDOW):
        ids = token_ids(data[start : start + WINDOW], model.device)
        logits = model(ids[None], use_cache=False).logits[0, :-1].float()
        bits += functional.cross_entropy(logits, ids[1:], reduction="sum").item() / math.log(2)
        count += len(ids) - 1
    return bits / count


def byte_baselines(train: bytes, data: bytes) -> dict[str, float]:
    """Bits per byte of unigram and bigram counts of `train` on `data`, smoothed by one count."""
    singles, doubles = Counter(train), Counter(pairwise(train))
    followed = Counter(train[:-1])

    def unigram(byte: int) -> float:
        return (singles[byte] + 1) / (len(train) + 256)

    def bigram(last: int, byte: int) -> float:
        return (doubles[last, byte] + unigram(byte)) / (followed[last] + 1)

    one = [-math.log2(unigram(byte)) for byte in data[1:]]
    two = [-math.log2(bigram(last, byte)) for last, byte in pairwise(data)]
    return {"unigram": sum(one) / len(one), "bigram": sum(two) / len(two)}


@torch.inference_mode()
def recall(
    model: PreTrainedModel,
    text: bytes,
    length: int,
    *,
    prompts: int,
    pairs: int = 32,
    questions: int = 16,
) -> dict[str, object]:
    """Share of questions answered, whole and by quarter of the distance back to the pair."""
    right, by_quarter = 0, [[0, 0] for _ in range(4)]
    for seed in range(prompts):
        prompt = recall_prompt(f"held out {seed}", length, text, pairs=pairs, questions=questions)
        ids = token_ids(prompt.data, model.device)
        predictions = model(ids[None], use_cache=False).logits[0].argmax(-1).tolist()
        for answer, correct in zip(prompt.answers, answered(prompt, predictions), strict=True):
            quarter = by_quarter[min(3, 4 * answer.distance // length)]
            quarter[0] += correct
            quarter[1] += 1
            right += correct
    return {
        "accuracy": right / (prompts * questions),
        "questions": prompts * questions,
        "pairs_per_prompt": pairs,
        "accuracy_by_distance_quarter": [r / n if n else None for r, n in by_quarter],
    }


def sinks(model: PreTrainedModel) -> dict[str, object] | None:
    """Sinks of every softmax layer and their spread, in natural units; None without sinks."""
    layers = [
        (index, layer.self_attn.sinks.float().tolist())
        for index, layer in enumerate(model.model.layers)
        if hasattr(getattr(layer, "self_attn", None), "sinks")
    ]
    if not layers:
        return None
    values = torch.tensor([value for _, row in layers for value in row])
    return {
        "smallest_magnitude": values.abs().min().item(),
        "mean": values.mean().item(),
        "minimum": values.min().item(),
        "maximum": values.max().item(),
        "by_layer": {str(index): [round(value, 3) for value in row] for index, row in layers},
    }


@torch.no_grad()
def ablations(model: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    """The model without one of its means, to see what it relies on: first whole, to compare."""
    yield "nothing", model
    kinds = set(model.config.layer_types)
    if "linear_attention" in kinds:
        forgetful = copy.deepcopy(model)
        for layer in forgetful.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.dt_bias += 50.0  # a decay of e^-50 and less a token
        yield "linear layers forget at every token", forgetful
    if "full_attention" in kinds:
        blind = copy.deepcopy(model)
        for layer, kind in zip(blind.model.layers, blind.config.layer_types, strict=True):
            if kind == "full_attention":
                layer.self_attn.o_proj.weight.zero_()
        yield "full attention gives zero", blind
    if sinks(model) is not None:
        bare = copy.deepcopy(model)
        for layer in bare.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        yield "no sinks", bare
