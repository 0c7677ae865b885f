"""`headstart bench model`: what it builds, runs, compares and counts; one line for mistakes."""

import inspect
import json

import pytest
import torch
from click.testing import CliRunner
from torch.utils import _device

pytest.importorskip("transformers")

from headstart.cli.commands import headstart
from headstart.evidence import runs
from headstart.evidence.arms.sources import NOISE
from headstart.evidence.models import arms, benching, building
from headstart.evidence.models.arms import Stand
from headstart.evidence.models.records import ModelResult
from headstart.evidence.models.witness import Witness
from headstart.integrations.transformers import layers

CPU = torch.device("cpu")
SMALL = {
    "gpt-oss-20b": {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
    },
    "qwen3-next-80b": {
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "vocab_size": 128,
    },
}
"""The public configurations, small."""


@pytest.fixture
def folder(tmp_path):
    def make(name):
        public = json.loads(building.CONFIGURATIONS.read_text())[name]["configuration"]
        (tmp_path / "config.json").write_text(json.dumps(public | SMALL[name]))
        return str(tmp_path)

    return make


def run(*arguments):
    return CliRunner().invoke(
        headstart, ["bench", "model", *map(str, arguments)], prog_name="headstart"
    )


@pytest.mark.parametrize(
    ("name", "names", "kinds"),
    [
        ("gpt-oss-20b", "headstart,eager,sdpa", {"sliding_attention": 2, "full_attention": 2}),
        ("qwen3-next-80b", "headstart,sdpa,fla", {"linear_attention": 3, "full_attention": 1}),
    ],
)
def test_arms_of_a_model_with_random_weights(folder, tmp_path, name, names, kinds):
    file = tmp_path / "run.json"
    result = run("--model", folder(name), "--layers", 4, "--experts", 3, "--arms", names,
                 "--prompt-tokens", 70, "--step", 32, "--rounds", 3, "--top", 2, "--device", "cpu",
                 "--json", file)  # fmt: skip
    assert result.exit_code == 0, result.output
    (found,) = runs.load(file, ModelResult, kind="model").results
    assert (found.layers, found.steps, found.weights) == (kinds, 3, "random")
    assert "3 of 4 experts" in found.cut
    assert ("4 of 8 layers" in found.cut) == (name == "qwen3-next-80b")
    ours, again, other, left = found.arms
    assert [ours.arm, again.arm] == ["headstart", NOISE]
    assert [arm.status for arm in (ours, again, other)] == ["timed"] * 3
    assert left.status == ("declined" if name == "gpt-oss-20b" else "missing")
    assert left.sentence in result.stderr
    assert other.difference is not None
    assert 0 < other.difference < 1e-5
    assert other.same_token
    assert not other.routed
    assert {one.kind: one.expected // 3 for one in ours.routed} == kinds
    assert all(one.complete for one in ours.routed)
    for arm in (ours, again, other):
        assert len(arm.ttft_ms) == 3
        assert set(arm.split_ms) == {*kinds, "projections", "mlp", "rest"}
        attention = sum(arm.split_ms[kind] for kind in kinds)
        whole = sum(arm.split_ms.values())
        assert arm.bound == pytest.approx(whole / (whole - attention))
    assert ours.ratio is None
    assert other.ratio is not None
    assert len(ours.kernels) > 2


def test_rounds_of_a_run_that_is_cut_short_are_kept(folder, tmp_path, monkeypatch):
    file, keep, left = tmp_path / "run.json", benching.Prepared.keep, [2]

    def until_interrupted(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        keep(*arguments)

    monkeypatch.setattr(benching.Prepared, "keep", until_interrupted)
    result = run("--model", folder("gpt-oss-20b"), "--layers", 4, "--experts", 3, "--arms",
                 "eager", "--prompt-tokens", 9, "--rounds", 3, "--no-noise-floor",
                 "--device", "cpu", "--json", file)  # fmt: skip
    assert result.exit_code == 130
    (found,) = runs.load(file, ModelResult, kind="model").results
    assert found.rounds == 2
    assert len(found.arms[0].ttft_ms) == 2
    assert found.arms[0].status == "timed"


def test_a_report_takes_the_run(folder, tmp_path):
    file, page = tmp_path / "run.json", tmp_path / "page.html"
    made = run("--model", folder("gpt-oss-20b"), "--prompt-tokens", 9, "--rounds", 3, "--device",
               "cpu", "--json", file)  # fmt: skip
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(headstart, ["report", str(file), "-o", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "eager" in page.read_text()


def test_wrong_attention_is_not_timed(folder, monkeypatch):
    right = layers.attention

    def unwindowed(*arguments, sliding_window=None, **options):
        return right(*arguments, **options)

    monkeypatch.setattr(layers, "attention", unwindowed)
    result = run("--model", folder("gpt-oss-20b"), "--arms", "eager,headstart", "--prompt-tokens",
                 70, "--rounds", 3, "--device", "cpu")  # fmt: skip
    assert result.exit_code == 1, result.output
    assert "headstart: headstart: an attention layer differs by" in result.stderr


def test_fla_that_transformers_has_not_taken_is_missing(folder, monkeypatch):
    built = building.build(folder("qwen3-next-80b"), layers=4, device=CPU, dtype=torch.float32)
    monkeypatch.setattr(arms, "peer", lambda module, name: [print])
    found = benching.bench_model(built, ["fla", "sdpa"], prompt_tokens=9, rounds=3)
    fla, sdpa, _ = found.arms
    assert (fla.status, "not taken the gated delta rule" in fla.sentence) == ("missing", True)
    assert sdpa.served == "sdpa, linear layers in PyTorch"


def test_an_arm_answers_for_its_attention_alone(folder):
    built = building.build(folder("gpt-oss-20b"), device=CPU, dtype=torch.float32)
    stand = Stand(built.loaded, list(range(40)), 16)
    decoder = built.loaded.model.get_decoder().layers
    arm, witness = stand.arm("eager"), Witness(decoder, 20)

    def prefill():
        arm.restore()
        arm.call()

    with witness.first():
        prefill()
    with torch.no_grad():
        decoder[0].mlp.experts.down_proj.mul_(5)
    with witness.later() as differences:
        prefill()
    assert [float(one) for one in differences] == [0.0] * 4
    with torch.no_grad():
        decoder[2].self_attn.o_proj.weight.mul_(1.01)
        decoder[2].self_attn.o_proj.bias.mul_(1.01)
    with witness.later() as differences:
        prefill()
    assert [float(one) for one in differences] == [0.0, 0.0, pytest.approx(0.01, rel=1e-3), 0.0]


def test_a_lost_call_is_not_timed(folder, monkeypatch):
    built = building.build(folder("gpt-oss-20b"), device=CPU, dtype=torch.float32)
    routed = Stand.routed

    def one_less(self):
        first, *rest = routed(self)
        calls = {who: count - 1 for who, count in first.calls.items()}
        return first.model_copy(update={"calls": calls}), *rest

    monkeypatch.setattr(Stand, "routed", one_less)
    found = benching.bench_model(built, ["headstart"], prompt_tokens=9, step=4, rounds=3)
    assert found.arms[0].status == "wrong"
    assert "5 calls of extend_attention, not 6" in found.arms[0].sentence


def test_the_model_stands_as_before_afterwards(folder):
    built = building.build(folder("qwen3-next-80b"), layers=4, device=CPU, dtype=torch.float32)
    config = built.loaded.model.config
    before = config._attn_implementation
    benching.bench_model(built, ["eager", "reproducible"], prompt_tokens=9, rounds=3)
    assert built.loaded.model.config is config
    assert config._attn_implementation == before
    assert not hasattr(built.loaded.model, "headstart")


def test_an_arm_that_takes_too_long_is_given_up(folder, monkeypatch):
    built = building.build(folder("gpt-oss-20b"), device=CPU, dtype=torch.float32)

    def endless(stand, entry, witness):
        while True:
            pass

    monkeypatch.setattr(benching, "_cold", endless)
    found = benching.bench_model(built, ["eager"], prompt_tokens=9, rounds=3, limit=0.2)
    assert (found.arms[0].status, found.arms[0].sentence) == (
        "failed",
        "was not prepared within 0.2 s of all arms",
    )


def test_weights_are_of_the_scale_that_a_model_has(folder):
    model = building.build(
        folder("qwen3-next-80b"), device=CPU, dtype=torch.bfloat16, seed=3
    ).loaded.model
    weights = dict(model.named_parameters())
    projection = weights["model.layers.0.linear_attn.in_proj_qkvz.weight"].float()
    assert projection.std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["model.layers.0.linear_attn.A_log"].exp().min() > 0
    assert all(weight.isfinite().all() for weight in weights.values())
    again = building.build(
        folder("qwen3-next-80b"), device=CPU, dtype=torch.bfloat16, seed=3
    ).loaded.model
    assert all(map(torch.equal, weights.values(), again.parameters()))


@pytest.mark.parametrize(
    ("free", "layers"), [(10**9, 8), (0.7, 4), (0.62, 4)], ids=["all", "most", "some"]
)
def test_layers_are_cut_to_whole_periods(folder, monkeypatch, free, layers):
    whole = building.build(folder("qwen3-next-80b"), layers=8, device=CPU, dtype=torch.float32)
    room = free if free > 1 else free * whole.bytes / building.ROOM
    monkeypatch.setattr(building, "free_bytes", lambda device: room)
    built = building.build(folder("qwen3-next-80b"), device=CPU, dtype=torch.float32)
    assert len(built.loaded.kinds) == layers
    assert built.bytes <= building.ROOM * room


def test_a_period_that_does_not_fit_is_told(folder, monkeypatch):
    monkeypatch.setattr(building, "free_bytes", lambda device: 1000)
    result = run("--model", folder("qwen3-next-80b"), "--device", "cpu")
    assert result.exit_code == 2, result.output
    assert "too little for 4 layers" in result.stderr


def test_public_configurations_have_their_published_sizes(monkeypatch):
    # A device's context looks for the functions that there were at first, not for poisoned ones.
    monkeypatch.setattr(torch, "empty", inspect.unwrap(torch.empty))
    _device._device_constructors.cache_clear()
    parameters = {}
    for name, public in json.loads(building.CONFIGURATIONS.read_text()).items():
        with torch.device("meta"):
            model = building._model(public["configuration"], torch.bfloat16)
        parameters[name] = building.weight_bytes(model) / 2e9
    assert parameters == {
        "gpt-oss-20b": pytest.approx(20.9, abs=0.1),
        "qwen3-next-80b": pytest.approx(79.7, abs=0.3),
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '--model'"),
        (["--model", "gpt-5"], "model: expected gpt-oss-20b, qwen3-next-80b, tiny-gpt-oss"),
        (["--model", "tiny-gpt-oss", "--arms", "flex"], "arms: expected some of"),
        (["--model", "tiny-gpt-oss", "--arms", "sdpa,sdpa"], "arms: expected one or more, each"),
        (["--model", "tiny-gpt-oss", "--step", "0"], "step: expected a positive number or whole"),
        (["--model", "tiny-gpt-oss", "--layers", "2"], "layers: expected none with trained"),
        (["--model", "gpt-oss-20b", "--layers", "25"], "layers: expected an integer"),
        (["--model", "gpt-oss-20b", "--layers", "0"], "layers: expected an integer"),
        (["--model", "gpt-oss-20b", "--experts", "3"], "experts: expected an integer"),
        (["--model", "tiny-gpt-oss", "--prompt-tokens", "32769"], "prompt-tokens: expected 1 to"),
        (["--model", "tiny-gpt-oss", "--device", "toaster"], "device: toaster"),
        (["--model", "tiny-gpt-oss", "--json", "/"], "json: expected a file to write"),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("headstart: ")
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr
