"""`headstart prefill` on the shipped checkpoints: figures, exit codes, and all bad input."""

import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

import headstart as package
from headstart import checkpoints
from headstart.cli import prefill as module
from headstart.cli.commands import headstart
from headstart.integrations.transformers import HybridCache

MODELS = checkpoints.names()
PROCESS = (sys.executable, "-m", "headstart.cli", "prefill", "--model", "tiny-qwen3-next")


def run(*arguments, continuation=2, device="cpu"):
    """The command in-process; a short continuation, since that is most of the time."""
    words = ["prefill", *map(str, arguments), "--continuation", str(continuation)]
    words += ["--device", device]
    return CliRunner().invoke(headstart, words, prog_name="headstart", catch_exceptions=False)


def assert_refused(result, words):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("headstart: ")
    assert re.search(words, lines[0]), lines[0]


@pytest.fixture
def prompt(tmp_path):
    """A function that writes the first bytes of the sample to a file."""

    def write(count=300, data=None):
        path = tmp_path / "prompt"
        path.write_bytes(checkpoints.sample_text().read_bytes()[:count] if data is None else data)
        return path

    return write


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a shipped checkpoint that a test may spoil."""
    return shutil.copytree(checkpoints.path("tiny-qwen3-next"), tmp_path / "copy")


@pytest.mark.parametrize("model", MODELS)
def test_compare_and_prefix_cache(model, prompt, tmp_path):
    figures = tmp_path / "figures.json"
    result = run(
        *("--model", model, "--prompt-file", prompt(700), "--compare", "--prefix-cache"),
        *("--json", figures),
        continuation=32,
    )
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for words in ("time to first token", "tokens per second", "peak memory", "continuation"):
        assert words in result.stdout
    assert "0 differing bits" in result.stdout
    found = json.loads(figures.read_text())
    assert found["schema"] == 1
    assert found["versions"]["headstart"] == package.__version__
    assert found["tokens"] == 700
    assert found["hit"]["position"] == 640
    assert found["hit"]["replay"]["differing_bits"] == 0
    assert found["hit"]["replay"]["values"] > 10_000
    assert found["hit"]["comparison"]["rows"] == 60
    assert found["comparison"]["rows"] == 700
    assert found["comparison"]["disagreeing"] == 0
    assert found["comparison"]["perplexity_difference"] < 1e-4
    assert found["breaches"] == []
    assert len(found["continuation"]) == 32
    kinds = {row["layer_kind"] for row in found["served"]}
    assert kinds == set(found["seconds_by_kind"]) - {"mlp"}
    assert all(
        row["calls"] == row["of"] and row["implementation"] == "torch" for row in found["served"]
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step", [[], ["--step", 100]])
def test_fixed_tiles_make_logits_equal_in_bits(model, step, prompt, tmp_path):
    figures = tmp_path / "figures.json"
    result = run(
        *("--model", model, "--prompt-file", prompt(333), "--prefix-cache", "--fixed-tiles"),
        *("--json", figures, *step),
    )
    assert result.exit_code == 0, result.output
    hit = json.loads(figures.read_text())["hit"]
    assert hit["position"] == 320
    assert hit["comparison"]["differing_bits"] == 0
    assert hit["replay"]["differing_bits"] == 0


@pytest.mark.parametrize("model", MODELS)
def test_steps_off_the_grid_agree_with_the_own_path(model, prompt):
    result = run("--model", model, "--prompt-file", prompt(), "--compare", "--step", 100)
    assert result.exit_code == 0, result.output
    assert "in steps of 100" in result.stdout
    assert re.search(r"extend_attention +torch +(6 of 6|9 of 9) calls", result.stdout)


def test_a_named_implementation_serves_every_call(prompt):
    result = run(
        *("--model", "tiny-qwen3-next", "--prompt-file", prompt(100), "--prefix-cache"),
        *("--implementation", "reference"),
    )
    assert result.exit_code == 0, result.output
    assert "reference" in result.stdout
    assert " torch " not in result.stdout


def test_any_bytes_are_a_prompt(prompt):
    data = bytes(range(256)) + b"\xff\xfe\x80"
    result = run("--model", "tiny-gpt-oss", "--prompt-file", prompt(data=data))
    assert result.exit_code == 0, result.output
    assert "259 tokens" in result.stdout


@pytest.mark.parametrize(("count", "code"), [(1, 1), (64, 1), (65, 0)])
def test_the_last_token_is_never_hit(count, code, prompt):
    result = run(
        "--model", "tiny-gpt-oss", "--prompt-file", prompt(count), "--prefix-cache", "--compare"
    )
    assert result.exit_code == code, result.output
    if code:
        assert result.stderr.startswith(f"headstart: no hit: a prompt of {count} tokens")
    else:
        assert "64 of 65 tokens" in result.stdout


def worn_state(cache):
    cache.layers[0].cache.tensors["state"] *= 1 + 2**-20


def lost_history(cache):
    cache.layers[0].cache.tensors["history"].zero_()


def shuffled_pages(cache):
    cache.pages.table[0].reverse()


@pytest.mark.parametrize(
    ("model", "spoil"),
    [
        ("tiny-qwen3-next", worn_state),
        ("tiny-qwen3-next", lost_history),
        ("tiny-qwen3-next", shuffled_pages),
        ("tiny-gpt-oss", shuffled_pages),
    ],
)
def test_what_was_not_restored_exactly_is_found(model, spoil, monkeypatch, prompt):
    stand = HybridCache.stand

    def spoilt(self, pages, layers):
        stand(self, pages, layers)
        if pages.table:  # behind a hit
            spoil(self)

    monkeypatch.setattr(HybridCache, "stand", spoilt)
    result = run("--model", model, "--prompt-file", prompt(), "--prefix-cache")
    assert result.exit_code == 1, result.output
    assert re.search(
        r"^headstart: prefix cache: [1-9]\d* differing bits in \d+ values", result.stderr
    )


def test_a_broken_tolerance_names_the_figure(monkeypatch, prompt):
    norm = package.rms_norm_gated
    monkeypatch.setattr(
        package, "rms_norm_gated", lambda *args, **kwargs: norm(*args, **kwargs) * 1.05
    )
    result = run("--model", "tiny-qwen3-next", "--prompt-file", prompt(), "--compare")
    assert result.exit_code == 1, result.output
    assert re.search(r"headstart: compare: perplexity differs by \d\.\d+e-\d+", result.stderr)


def test_a_missing_prompt_is_refused(tmp_path):
    result = run("--model", "tiny-gpt-oss", "--prompt-file", tmp_path / "none")
    assert_refused(result, "prompt-file: cannot read .*none: No such file")


def test_a_folder_is_no_prompt(tmp_path):
    assert_refused(run("--model", "tiny-gpt-oss", "--prompt-file", tmp_path), "Is a directory")


def test_an_empty_prompt_is_refused(prompt):
    result = run("--model", "tiny-gpt-oss", "--prompt-file", prompt(data=b""))
    assert_refused(result, "prompt-file: .* is empty")


def test_an_unknown_model_is_refused(prompt):
    result = run("--model", "tiny-mamba", "--prompt-file", prompt())
    assert_refused(
        result, "model: expected tiny-gpt-oss, tiny-qwen3-next or a folder.*'tiny-mamba'"
    )


def test_a_model_without_supported_layers_is_refused(prompt, checkpoint):
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "llama"}))
    result = run("--model", checkpoint, "--prompt-file", prompt())
    assert_refused(result, "model: expected a model of Qwen3-Next, Qwen3.5, gpt-oss, got 'llama'")


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\udcff"])
def test_a_spoilt_configuration_is_refused(text, prompt, checkpoint):
    (checkpoint / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(run("--model", checkpoint, "--prompt-file", prompt()), "model: .*config.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 9}, r"config.json: layer_types: expected one for each of num_hid"),
        ({"num_hidden_layers": "six"}, r"config.json: num_hidden_layers: expected an integer >= 1"),
        ({"hidden_size": 97}, r"embed_tokens.weight: expected \[264, 97\] as config.json says"),
        ({"hidden_size": 2**40}, r"model: cannot load .*"),
        ({"hidden_size": 2**62}, r"model: cannot load .*: RuntimeError: "),
        ({"rms_norm_eps": "small"}, r"model: cannot load .*'rms_norm_eps'"),
        ({"hidden_act": "snake"}, r"model: cannot load .*: KeyError: 'snake'"),
        ({"quantization_config": "int4"}, r"model: cannot load .*: AttributeError: "),
        ({"pad_token_id": 10**6}, r"model: cannot load .*: AssertionError: "),
        ({"dtype": "float33"}, r"model: cannot load .*: AttributeError: .*float33"),
        ({"model_type": ["gpt_oss"]}, r"got \['gpt_oss'\] in .*config.json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_configuration_that_does_not_fit_is_refused(changes, words, prompt, checkpoint):
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert_refused(run("--model", checkpoint, "--prompt-file", prompt()), words)


def test_layers_beyond_those_of_the_configuration_are_refused(prompt, checkpoint):
    config = checkpoint / "config.json"
    found = json.loads(config.read_text())
    fewer = {"num_hidden_layers": 4, "layer_types": found["layer_types"][:4]}
    config.write_text(json.dumps(found | fewer))
    result = run("--model", checkpoint, "--prompt-file", prompt())
    assert_refused(result, "expected weights of num_hidden_layers = 4 layers, got .*layers.4.")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"model": 3}'])
def test_a_spoilt_tokenizer_is_refused_or_does_without_the_file(file, text, prompt, checkpoint):
    (checkpoint / file).write_text(text)
    result = run("--model", checkpoint, "--prompt-file", prompt(70))
    if result.exit_code:
        assert_refused(result, "model: cannot load")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(prompt, checkpoint, monkeypatch):
    from headstart.evidence.prefill import loading

    monkeypatch.setattr(loading, "text_directions", lambda _: (lambda data: [3, 264], bytes))
    result = run("--model", checkpoint, "--prompt-file", prompt(70))
    assert_refused(result, "expected tokens below vocab_size = 264, got 264 from its tokenizer")


def test_truncated_weights_are_refused(prompt, checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(run("--model", checkpoint, "--prompt-file", prompt()), "model: cannot load")


def test_missing_weights_are_refused(prompt, checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert_refused(run("--model", checkpoint, "--prompt-file", prompt()), "model: cannot load")


def test_weights_of_other_layers_are_refused(prompt, checkpoint):
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    (lost,) = (name for name in weights if name.endswith("layers.0.linear_attn.A_log"))
    del weights[lost]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    result = run("--model", checkpoint, "--prompt-file", prompt())
    assert_refused(result, "model: .* 1 missing weights, the first is .*A_log")


def test_an_over_long_prompt_is_refused(prompt, checkpoint):
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 64}))
    result = run("--model", checkpoint, "--prompt-file", prompt(65))
    assert_refused(result, r"expected at most 64 tokens \(max_position_embeddings of .*got 65")


def test_16_bits_keep_a_hits_bits_and_the_text(prompt, tmp_path):
    """Over 1,200 tokens: over 300 the model's own path may be 1.4e-3 from what it is in float32."""
    figures = tmp_path / "figures.json"
    result = run(
        *("--model", "tiny-gpt-oss", "--prompt-file", prompt(1200), "--compare"),
        "--prefix-cache",
        *("--dtype", "bfloat16", "--json", figures),
    )
    assert result.exit_code == 0, result.output
    assert "tiny-gpt-oss, bfloat16 on cpu" in result.stdout
    found = json.loads(figures.read_text())
    assert found["hit"]["replay"]["differing_bits"] == 0
    assert found["comparison"]["tolerance"]["perplexity"] == 2e-3
    assert 0 < found["comparison"]["perplexity_difference"] < 2e-3


def test_a_device_that_is_not_here_is_refused(prompt):
    arguments = ["--model", "tiny-gpt-oss", "--prompt-file", prompt(70)]
    assert_refused(run(*arguments, device="toaster"), "device: toaster")


def test_a_folder_runs_like_a_name_and_to_its_last_position(prompt, checkpoint):
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 64}))
    result = run("--model", checkpoint, "--prompt-file", prompt(64))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "0"], "'--step': 0 is not in the range"),
        (["--step", "x"], "'--step': 'x' is not a valid integer"),
        (["--implementation", "cuda"], "implementation: expected one of .*'cuda'"),
        (["--implementation", "triton"], "triton"),
        (["--dtype", "float8"], "'--dtype': 'float8' is not one of"),
        (["--json", "/nowhere/at/all.json"], "json: no folder for"),
        (["--fast"], "No such option"),
    ],
)
def test_bad_options_are_refused(arguments, words, prompt):
    base = ["--model", "tiny-qwen3-next", "--prompt-file", prompt(70)]
    assert_refused(run(*base, *arguments), words)


def test_a_missing_extra_is_named(monkeypatch, prompt):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "safetensors" else find(name, *rest),
    )
    result = run("--model", "tiny-gpt-oss", "--prompt-file", prompt())
    assert_refused(result, r"needs safetensors: pip install 'headstart\[models\]'")


def test_model_and_prompt_are_required():
    assert_refused(run(), "Missing option '--model'")


def test_the_model_is_given_back(prompt):
    from headstart.evidence.prefill.job import Options, run_job
    from headstart.evidence.prefill.loading import load

    loaded = load("tiny-qwen3-next")
    before = [dict(vars(each)) for each in loaded.model.modules()]
    ids = list(prompt(100).read_bytes())
    report = run_job(
        loaded, ids, Options(prefix_cache=True, fixed_tiles=True, compare=True, continuation=1)
    )
    assert report.breaches == []
    with pytest.raises(ValueError, match="implementation"):
        run_job(loaded, ids, Options(implementation="cuda"))
    assert [list(vars(each)) for each in loaded.model.modules()] == [list(each) for each in before]


def test_as_a_process(prompt):
    asked = "--compare --prefix-cache --continuation 2"
    done = subprocess.run(
        [*PROCESS, "--prompt-file", prompt(200), *asked.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "192 of 200 tokens" in done.stdout


def test_ctrl_c_ends_cleanly_and_a_terminal_sees_a_bar(prompt):
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [*PROCESS, "--prompt-file", prompt(data=b"a" * 32_000), "--step", "16"],
        stdout=subprocess.PIPE,
        stderr=inner,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        # whoever started the tests may ignore it, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(inner)
    seen = b""
    while b"prefill" not in seen:
        seen += os.read(outer, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while piece := os.read(outer, 4096):
            seen += piece
    except OSError:  # how a terminal says that its last writer has gone
        pass
    os.close(outer)
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 130
    assert b"headstart: interrupted" in seen
    assert b"Traceback" not in seen


def test_shown_text_is_one_line():
    assert module.shown_text(b"a\nb\xff") == r"'a\nb\xff'"
    assert "\n" not in module.shown_text(bytes(range(256)))
