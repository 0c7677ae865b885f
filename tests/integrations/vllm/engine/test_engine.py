"""A real vLLM engine on a CPU, with the plugin and without."""

import statistics

import pytest
import torch
from tests.integrations.vllm.engine.conftest import DRAFTS

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make vllm-test")

OSS, HYBRID = "tiny-gpt-oss", "tiny-qwen3-next"
# vLLM's own linear layers run in bfloat16 alone; headstart's run in float32 too.
SERVED = [(OSS, "float32"), (OSS, "bfloat16"), (HYBRID, "float32"), (HYBRID, "bfloat16")]
BOTH = [case for case in SERVED if case != (HYBRID, "float32")]
TIE = {"float32": 1e-4, "bfloat16": 0.1}
"""Margins below which the best token may be another one."""
BOUND = {"float32": 2e-5, "bfloat16": 0.25}
"""Most that a log-probability may differ by, over the same tokens. In bfloat16 a step of a logit is
0.06 here, and an expert chosen by a hair changes many of them."""
LAYERS = {
    OSS: {"sliding_attention": 3, "full_attention": 3},
    HYBRID: {"linear_attention": 6, "full_attention": 2},
}


def requests(result):
    """Every request of a run that came to its end, by name."""
    named = {f"prompt-{n}": one for n, one in enumerate(result.get("prompts", ()))}
    for turn, some in enumerate(result.get("prefixes", ())):
        named |= {f"prefix-{turn}-{n}": one for n, one in enumerate(some)}
    return named | result.get("crowd", {}).get("ended", {})


def compare(found, wanted, dtype):
    """Raise unless tokens agree to the first near-tie; how log-probabilities differ until there."""
    apart = []
    for n, (one, other) in enumerate(zip(found["tokens"], wanted["tokens"], strict=True)):
        if one != other:
            margin = wanted["margins"][n]
            assert 0 <= margin < TIE[dtype], f"token {n} of {found['tokens']}: margin {margin}"
            break
        apart.append(abs(found["logprobs"][n] - wanted["logprobs"][n]))
    assert max(apart, default=0.0) <= BOUND[dtype]
    return apart


def apart(ours, theirs, dtype):
    """How all log-probabilities of two runs differ, and the share of tokens that agree."""
    ours, theirs = requests(ours), requests(theirs)
    common = ours.keys() & theirs.keys()
    assert sum(key.startswith("prompt-") for key in common) == 50
    assert sum(key.startswith("prefix-") for key in common) == 10
    assert sum(key.startswith("crowd-") for key in common) >= 50
    found = [one for key in common for one in compare(ours[key], theirs[key], dtype)]
    return found, len(found) / sum(len(theirs[key]["tokens"]) for key in common)


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_tokens_are_those_of_vllms_own_layers(engine, name, dtype):
    ours, theirs = (engine(name, dtype, plugin=plugin) for plugin in (True, False))
    found, agreed = apart(ours, theirs, dtype)
    print(f"{name} {dtype}: log-probabilities at most {max(found):.2g} apart, {agreed:.1%} agree")
    assert agreed == 1 if dtype == "float32" else agreed > 0.95


@pytest.mark.parametrize("name", [OSS, HYBRID])
def test_bfloat16_is_as_near_to_float32_as_vllms_own(engine, name):
    truth = engine(name, "float32", plugin=True)
    ours, theirs = (
        statistics.fmean(apart(engine(name, "bfloat16", plugin=plugin), truth, "bfloat16")[0])
        for plugin in (True, False)
    )
    print(f"{name}: mean distance from float32 {ours:.3g}, vLLM's own {theirs:.3g}")
    assert ours < 1.25 * theirs


@pytest.mark.parametrize("name", [OSS, HYBRID])
def test_tokens_are_those_of_transformers(engine, models, name):
    from transformers import AutoModelForCausalLM

    result = engine(name, "float32", plugin=True)
    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval()
    most = 0.0
    with torch.inference_mode():
        for one in result["prompts"]:
            tokens = torch.tensor([one["prompt"] + one["tokens"]])
            rows = model(tokens).logits[0, len(one["prompt"]) - 1 : -1].log_softmax(-1)
            best = rows.topk(2).values
            clear = best[:, 0] - best[:, 1] > TIE["float32"]
            assert torch.equal(rows.argmax(-1)[clear], tokens[0, len(one["prompt"]) :][clear])
            chosen = rows.gather(1, tokens[0, len(one["prompt"]) :, None])[:, 0]
            most = max(most, (chosen - torch.tensor(one["logprobs"])).abs().max().item())
    print(f"{name}: log-probabilities at most {most:.2g} from transformers'")
    assert most <= BOUND["float32"]


@pytest.mark.parametrize(("name", "dtype"), SERVED)
def test_every_layer_of_every_step_is_headstarts(engine, name, dtype):
    result = engine(name, dtype, plugin=True)
    assert result["forwards"] > 100
    assert result["served"] == {
        kind: layers * result["forwards"] for kind, layers in LAYERS[name].items()
    }
    assert {implementation for _, _, implementation, _ in result["calls"]} == {"torch"}


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_nothing_is_headstarts_without_the_plugin(engine, name, dtype):
    result = engine(name, dtype, plugin=False)
    assert result["forwards"] > 100
    assert result["served"] == {}


@pytest.mark.parametrize(("name", "dtype"), SERVED)
def test_prefixes_longer_than_a_block_are_hit(engine, name, dtype):
    first, others, again = engine(name, dtype, plugin=True)["prefixes"]
    assert [one["cached"] for one in first] == [0]
    assert all(one["cached"] >= 1024 for one in others)
    assert all(one["cached"] >= 1024 for one in again)
    for one, other in zip(first + others, again, strict=True):
        compare(other, one, dtype)
    if (name, dtype) in BOTH:
        theirs = engine(name, dtype, plugin=False)["prefixes"][1]
        assert [one["cached"] for one in others] == [one["cached"] for one in theirs]


@pytest.mark.parametrize(("name", "dtype"), SERVED)
def test_a_crowd_is_served_and_those_who_leave_are_let_go(engine, name, dtype):
    result = engine(name, dtype, plugin=True)["crowd"]
    ended, given_up = result["ended"], result["given_up"]
    assert given_up
    assert len(ended) + len(given_up) == 64
    assert all(one["reason"] == "length" for one in ended.values())


def test_drafts_change_no_token(engine):
    drafted = engine(HYBRID, "float32", plugin=True, jobs=("few",), **DRAFTS)
    plain = engine(HYBRID, "float32", plugin=True)
    for one, other in zip(drafted["few"], plain["prompts"][:16], strict=True):
        compare(one, other, "float32")
    turns = {name: count for _, name, _, count in drafted["calls"]}["recurrent_gated_delta_rule"]
    assert turns > 2 * 6 * drafted["forwards"]  # up to four turns a layer where there are drafts


def test_compiled_models_are_served(engine):
    compiled = engine(HYBRID, "float32", plugin=True, jobs=("few",), enforce_eager=False)
    plain = engine(HYBRID, "float32", plugin=True)
    for one, other in zip(compiled["few"], plain["prompts"][:16], strict=True):
        compare(one, other, "float32")
    served = compiled["served"]
    assert served["linear_attention"] == 3 * served["full_attention"] > 0
