"""Score checkpoints on what they were not trained on and print one JSON document.

    python recipes/evaluate_tiny.py --text kjv.txt --json FILE CHECKPOINT [CHECKPOINT ...]

Bits per byte against unigram and bigram counts of the training text, recall at two lengths, sinks,
and the same with one means of the model taken away. Everything in float32.
"""

import argparse
import json
import sys
from pathlib import Path

import corpus
import measures
import torch
import training_paths
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

ABLATION_BYTES = 16_384


def evaluation(
    model: PreTrainedModel, text: corpus.Corpus, prompts: int, long_prompts: int
) -> dict[str, object]:
    result: dict[str, object] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits_per_byte": {
            "held_out": measures.bits_per_byte(model, text.held_out),
            "sample": measures.bits_per_byte(model, text.sample),
        },
        "recall": {
            "2048": measures.recall(model, text.held_out, 2048, prompts=prompts),
            "16384": measures.recall(model, text.held_out, 16_384, prompts=long_prompts),
        },
        "without": {},
    }
    if sinks := measures.sinks(model):
        result["sinks"] = sinks
    for name, lesser in measures.ablations(model):
        result["without"][name] = {
            "bits_per_byte": measures.bits_per_byte(lesser, text.held_out[:ABLATION_BYTES]),
            "recall_2048": measures.recall(
                lesser, text.held_out, 2048, prompts=max(1, prompts // 4)
            )["accuracy"],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument(
        "--text", required=True, type=Path, help="output of bible -f Gen1:1-Rev22:21"
    )
    parser.add_argument("--device", default="cpu", choices=["cuda", "cpu"])
    parser.add_argument("--prompts", type=int, default=16, help="recall prompts of 2,048 bytes")
    parser.add_argument("--long-prompts", type=int, default=8, help="of 16,384 bytes")
    parser.add_argument("--json", type=Path, help="write here as well")
    options = parser.parse_args()
    try:
        text = corpus.load(options.text)
        missing = [str(p) for p in options.checkpoints if not (p / "config.json").is_file()]
        if missing:
            raise ValueError(f"checkpoints: no config.json in {', '.join(missing)}")
    except ValueError as error:
        sys.exit(f"evaluate_tiny: {error}")

    report: dict[str, object] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "baselines_bits_per_byte": {
            "held_out": measures.byte_baselines(text.train, text.held_out),
            "sample": measures.byte_baselines(text.train, text.sample),
        },
        "checkpoints": {},
    }
    for folder in options.checkpoints:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.to(options.device).eval()
        if model.config.model_type == "gpt_oss":
            training_paths.use(model)  # the eager path holds 16,384 x 16,384 scores a head
        report["checkpoints"][folder.name] = evaluation(
            model, text, options.prompts, options.long_prompts
        )
    document = json.dumps(report, indent=2)
    print(document)
    if options.json:
        options.json.write_text(document + "\n")


if __name__ == "__main__":
    main()
