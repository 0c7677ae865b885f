"""The recipe as it is called: a short run on the CPU, and what it says about bad input."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def train(recipes, *arguments: object) -> subprocess.CompletedProcess:
    """In a process of its own, since training puts its layers in place of transformers' own."""
    return subprocess.run(
        [sys.executable, recipes / "train_tiny.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-qwen3-next", "tiny-gpt-oss"])
def test_a_short_run_learns_and_leaves_a_checkpoint(recipes, verses, tmp_path, name):
    run = train(
        recipes, "--model", name, "--text", verses, "--out", tmp_path, "--device", "cpu",
        "--steps", 6, "--stop", 6, "--tokens", 1024, "--rate", 0.01, "--workers", 0,
        "--log-every", 3, "--prompts", 1, "--lengths", 512,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [3, 6]
    assert log[1]["text_loss"] < log[0]["text_loss"]
    assert log[1]["bits_per_byte"] < 8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / name)("é").input_ids == [195, 169]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("train_tiny", ("--text", "{}/none"), "train_tiny: text: cannot read"),
        ("train_tiny", ("--text", "{v}", "--tokens", "9"), "train_tiny: tokens: expected"),
        ("evaluate_tiny", ("--text", "{v}", "{}/none"), "evaluate_tiny: checkpoints: no config"),
    ],
)
def test_bad_input_gets_one_line(verses, tmp_path, monkeypatch, name, arguments, message):
    given = [argument.replace("{v}", str(verses)).format(tmp_path) for argument in arguments]
    if name == "train_tiny":
        given += ["--model", "tiny-gpt-oss", "--device", "cpu", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [name, *given])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(name).main()
    line = str(stop.value)
    assert line.startswith(message)
    assert "\n" not in line


def test_baselines_are_those_of_the_counts():
    import measures

    scores = measures.byte_baselines(b"ababababab" * 100, b"abababab")
    assert scores["unigram"] == pytest.approx(1.0 + 0.33, abs=0.01)  # 1 bit and the smoothing
    assert scores["bigram"] < 0.01


def test_recall_is_measured_by_distance():
    import measures

    class Perfect:
        """Predicts the very next byte."""

        device = torch.device("cpu")

        def __call__(self, ids, use_cache):
            shifted = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
            return type("Out", (), {"logits": torch.nn.functional.one_hot(shifted, 264)})

    score = measures.recall(Perfect(), b"some words and ", 2048, prompts=2)
    assert score["accuracy"] == 1.0
    assert score["questions"] == 32
    assert score["accuracy_by_distance_quarter"] == [1.0, 1.0, 1.0, 1.0]
