"""The recipe as it is called: a short run on the CPU, and what it says about bad input."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def script(recipes, name: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, recipes / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-qwen3-next", "tiny-gpt-oss"])
def test_a_short_run_learns_and_leaves_a_checkpoint(recipes, verses, tmp_path, name):
    short = ("--device", "cpu", "--tokens", 512, "--workers", 0, "--prompts", 1)
    short += ("--lengths", 512, "--model", name, "--text", verses)
    run = script(
        recipes, "train_tiny.py", *short, "--steps", 8, "--stop", 8, "--log-every", 4,
        "--rate", 0.01, "--out", tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [4, 8]
    assert log[1]["text_loss"] < log[0]["text_loss"]
    assert log[1]["bits_per_byte"] < 8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / name)("é").input_ids == [195, 169]

    again = script(
        recipes, "train_tiny.py", *short, "--steps", 1, "--first-stage", 0.99,
        "--init", tmp_path / "master.safetensors", "--out", tmp_path / "again",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    (entry,) = map(json.loads, (tmp_path / "again" / "log.jsonl").read_text().splitlines())
    assert entry["text_loss"] < log[0]["text_loss"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("train_tiny.py", ("--text", "{}/none"), "train_tiny: text: cannot read"),
        ("train_tiny.py", ("--text", "{v}", "--init", "{}/none"), "train_tiny: init: "),
        ("train_tiny.py", ("--text", "{v}", "--tokens", "9"), "train_tiny: tokens: expected"),
        ("evaluate_tiny.py", ("--text", "{v}", "{}/none"), "evaluate_tiny: checkpoints: no config"),
    ],
)
def test_bad_input_gets_one_line(recipes, verses, tmp_path, name, arguments, message):
    given = [argument.replace("{v}", str(verses)).format(tmp_path) for argument in arguments]
    if name == "train_tiny.py":
        given += ["--model", "tiny-gpt-oss", "--device", "cpu", "--out", str(tmp_path / "out")]
    run = script(recipes, name, *given)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith(message)
    assert "Traceback" not in run.stderr


def test_baselines_are_those_of_the_counts():
    import measures

    scores = measures.byte_baselines(b"ababababab" * 100, b"abababab")
    assert scores["unigram"] == pytest.approx(1.0 + 0.33, abs=0.01)  # 1 bit and the smoothing
    assert scores["bigram"] < 0.01


def test_recall_is_measured_by_distance():
    import measures

    class Perfect:
        """Predicts the very next byte, and nothing in the last quarter of the distances."""

        device = torch.device("cpu")

        def __call__(self, ids, use_cache):
            shifted = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
            return type("Out", (), {"logits": torch.nn.functional.one_hot(shifted, 264)})

    score = measures.recall(Perfect(), b"some words and ", 2048, prompts=2)
    assert score["accuracy"] == 1.0
    assert score["questions"] == 32
    assert score["accuracy_by_distance_quarter"] == [1.0, 1.0, 1.0, 1.0]
