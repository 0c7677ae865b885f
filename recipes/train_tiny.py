"""Train a tiny checkpoint on text and associative recall.

    python recipes/train_tiny.py --model tiny-qwen3-next --text kjv.txt --device cuda --out DIR

OUT receives log.jsonl and master.safetensors (float32, renewed at every evaluation) while it runs
and the finished checkpoint in OUT/MODEL. docs/checkpoints.md says where the text comes from.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import corpus
import measures
import tiny_models
import torch
import training_paths
from batches import ANSWER, LONGEST, TEXT, Batches
from safetensors.torch import save_file
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

WARM_UP = 200
WEIGHT_DECAY = 0.1
# The runs behind the checkpoints that ship: what an option that is not given stands for.
RUNS = {
    "tiny-qwen3-next": {"steps": 2200, "stop": 1000, "rate": 2e-3, "seed": 0},
    "tiny-gpt-oss": {"steps": 4000, "stop": 4000, "rate": 1e-3, "seed": 1},
}


def optimizer(model: PreTrainedModel, rate: float) -> torch.optim.AdamW:
    """Decay for matrices alone: neither norms, biases, sinks nor the parameters of the gates."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=model.device.type == "cuda")


def rate_at(step: int, steps: int) -> float:
    """Share of the peak rate: linear warm-up, then a cosine down to 2 %."""
    warm = min(WARM_UP, max(1, steps // 10))
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def losses(
    model: PreTrainedModel, ids: torch.Tensor, kinds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of text and of answers, in nats."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.is_cuda):
        logits = model(ids[:, :-1], use_cache=False).logits
    targets, kinds = ids[:, 1:].flatten(), kinds.flatten()
    each = functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
    text, answer = ((each * of).sum() / of.sum() for of in (kinds == TEXT, kinds == ANSWER))
    return text, answer


def evaluation(
    model: PreTrainedModel, held_out: bytes, lengths: list[int], prompts: int
) -> dict[str, float]:
    on_cuda = model.device.type == "cuda"
    model.eval()
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=on_cuda):
        result = {"bits_per_byte": measures.bits_per_byte(model, held_out[-32_768:])}
        for length in lengths:
            score = measures.recall(
                model, held_out, length, prompts=prompts, pairs=20, questions=10
            )
            result[f"recall_{length}"] = score["accuracy"]
    model.train()
    return result


def save_master(model: PreTrainedModel, out: Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    state.pop("lm_head.weight")  # tied to the embedding
    save_file(state, out / "master.new")
    (out / "master.new").replace(out / "master.safetensors")


def train(options: argparse.Namespace) -> None:
    text = corpus.load(options.text)
    model = tiny_models.new_model(options.model, options.seed)
    model.to(options.device).train()
    adam = optimizer(model, options.rate)
    data = Batches(text.train, options.steps, options.tokens, options.seed)
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=8 if options.workers else None,
    )
    training_paths.use(model)
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    log = (options.out / "log.jsonl").open("a")
    begun, recent = time.monotonic(), []
    for step, (ids, kinds) in enumerate(loader):
        for group in adam.param_groups:
            group["lr"] = options.rate * rate_at(step, options.steps)
        ids, kinds = ids.to(options.device).long(), kinds.to(options.device)
        text_loss, answer_loss = losses(model, ids, kinds)
        (text_loss + answer_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        recent.append(torch.stack([text_loss.detach(), answer_loss.detach(), norm]))
        done = step + 1
        last = done == min(options.steps, options.stop)
        if done % options.log_every and not last:
            continue
        means = torch.stack(recent).mean(0).tolist()
        recent.clear()
        entry = {"step": done, "seconds": round(time.monotonic() - begun, 1)}
        entry |= dict(zip(("text_loss", "answer_loss", "gradient_norm"), means, strict=True))
        if not all(map(math.isfinite, means)):
            raise RuntimeError(f"training diverged by step {done}: {entry}")
        if done % options.evaluate_every == 0 or last:
            save_master(model, options.out)
            entry |= evaluation(model, text.held_out, options.lengths, options.prompts)
        print(json.dumps(entry), file=log, flush=True)
        print(options.model, json.dumps(entry), flush=True)
        if last:
            break
    tiny_models.save(model.cpu().float(), options.out / options.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=["tiny-qwen3-next", "tiny-gpt-oss"])
    parser.add_argument(
        "--text", required=True, type=Path, help="output of bible -f Gen1:1-Rev22:21"
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, help="length of the schedule")
    parser.add_argument("--stop", type=int, help="end after this step of the schedule")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens a step")
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--workers", type=int, default=6, help="processes that draw batches")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=250)
    parser.add_argument("--prompts", type=int, default=8, help="recall prompts an evaluation")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 2048, LONGEST], help="of those prompts"
    )
    options = parser.parse_args()
    for name, value in RUNS[options.model].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device; use --device cpu")
    try:
        train(options)
    except ValueError as error:
        sys.exit(f"train_tiny: {error}")


if __name__ == "__main__":
    main()
