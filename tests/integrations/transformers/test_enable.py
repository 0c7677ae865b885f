"""What enabling changes, and what it leaves alone; observers, statistics, and what is refused."""

import copy
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from tests.integrations.transformers.models import (
    CACHE,
    FAMILIES,
    difference,
    left_padding,
    make,
    pair,
    tokens,
)

from headstart.integrations.transformers import (
    HybridCache,
    disable,
    enable,
    observe,
    statistics,
)

NEAR = 2e-5


def _attributes(model):
    """Everything of the instances in a model that enabling might change."""
    seen = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                seen[name, key] = (id(value), copy.copy(value) if "hooks" in key else None)
    return seen


def test_disabling_gives_everything_back(family):
    model = make(family)
    ids = tokens(2, 90)
    before, logits = _attributes(model), model(ids).logits
    text = vars(model.config).copy()
    for _ in range(2):
        enable(model)
        assert not torch.equal(model(ids).logits, logits)  # it was headstart that ran
        assert disable(model) is model
        assert _attributes(model) == before
        assert torch.equal(model(ids).logits, logits)
    assert vars(model.config) == text


def test_other_instances_with_the_same_configuration_are_untouched(family):
    model = make(family)
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    ids = tokens(1, 90)
    logits = other(ids).logits
    asked = model.config._attn_implementation
    enable(model)
    assert other.config._attn_implementation == asked
    assert torch.equal(other(ids).logits, logits)
    assert type(model)(other.config).config._attn_implementation == asked
    assert difference(model(ids).logits, logits) < NEAR


def test_a_copy_of_an_enabled_model_is_a_model_of_its_own(family):
    own, _ = pair(family)
    model = enable(make(family))
    ids = tokens(1, 90)
    wanted = own(ids).logits
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.mul_(0)
    assert difference(model(ids).logits, wanted) < NEAR
    assert twin(ids).logits.abs().max() == 0
    twin.load_state_dict(own.state_dict())
    assert difference(twin(ids).logits, wanted) < NEAR
    assert sum(statistics(twin).calls.values()) == 2 * sum(statistics(model).calls.values())
    disable(twin)
    assert torch.equal(twin(ids).logits, wanted)
    assert not torch.equal(model(ids).logits, wanted)


def test_saving_an_enabled_model_saves_the_model(family, tmp_path):
    own, served = pair(family)
    served.save_pretrained(tmp_path)
    assert "headstart" not in (tmp_path / "config.json").read_text()
    with torch.inference_mode(False):
        loaded = type(own).from_pretrained(tmp_path).eval()
    ids = tokens(1, 40)
    assert torch.equal(loaded(ids).logits, own(ids).logits)


def test_importing_changes_nothing():
    """In a fresh process, since this one has enabled models already."""
    script = """
import sys
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

def facts():
    found = {}
    for module in (modeling_gpt_oss, modeling_qwen3_5, modeling_qwen3_next,
                   transformers.cache_utils, transformers.masking_utils):
        for name, value in vars(module).items():
            found[module.__name__, name] = id(value)
            if isinstance(value, type):
                found.update({(name, key): id(v) for key, v in vars(value).items()
                              if key != "__abstractmethods__"})
    found["attention"] = sorted(AttentionInterface().keys())
    found["masks"] = sorted(AttentionMaskInterface().keys())
    return found

import headstart
assert "headstart.integrations" not in sys.modules
before = facts()
import headstart.integrations.transformers
after = facts()
changed = [key for key in before if before[key] != after.get(key)]
assert not changed and len(after) == len(before), changed
assert "headstart" not in after["attention"]
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr


def test_observers_are_told_every_operation(family):
    _, served = pair(family)
    linear = ["causal_conv1d", "gated_delta_rule", "rms_norm_gated"]
    wanted = [
        (layer, operation)
        for layer, kind in enumerate(served.config.layer_types)
        for operation in (linear if kind == "linear_attention" else ["extend_attention"])
    ]
    told = []

    def observer(layer, operation, arguments, result):
        told.append((layer, operation))
        rows = arguments["q" if "q" in arguments else "x"]
        assert rows.shape[0] == 70
        assert result is not None

    with observe(served, observer):
        served(tokens(1, 70))
        assert told == wanted
    served(tokens(1, 70))
    assert told == wanted  # no longer told

    with pytest.raises(RuntimeError, match="heard enough"), observe(served, _fail):
        served(tokens(1, 70))
    served(tokens(1, 70))


def _fail(*_):
    raise RuntimeError("heard enough")


def test_statistics_can_be_reset(family):
    _, served = pair(family)
    counted = statistics(served)
    counted.reset()
    assert not counted.calls
    assert not counted.seconds
    served(tokens(1, 20))
    assert sum(counted.calls.values()) > 0


@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_a_named_implementation_is_the_one_that_runs(family, implementation):
    own, _ = pair(family)
    model = enable(make(family), implementation=implementation)
    ids = tokens(1, 70)
    cache = HybridCache(model)
    found = [model(ids).logits, model(ids, **{CACHE: cache}).logits]
    for logits in found:
        assert difference(logits, own(ids).logits) < NEAR
    assert {key[2] for key in statistics(model).calls if key[1] != "write_kv"} == {implementation}


def test_an_unknown_implementation_is_named(family):
    model = make(family)
    with pytest.raises(ValueError, match="nonesuch"):
        enable(model, implementation="nonesuch")(tokens(1, 5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"implementation": 3}, "implementation: expected one of"),
        ({"implementation": ["torch"]}, "implementation: expected one of"),
        ({"reproducible": "yes"}, "reproducible: expected True or False, got 'yes'"),
        ({"reproducible": None}, "reproducible: expected True or False, got None"),
    ],
)
def test_an_odd_way_of_enabling_changes_nothing(family, arguments, message):
    model = pair(family)[0]
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match=f"^{message}"):
        enable(model, **arguments)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_reproducible_softmax_layers_without_a_hybrid_cache():
    """The bits of a row depend on its own sequence: the batch beside it changes none."""
    asked = []
    for reproducible in (False, True):
        model = enable(make("gpt-oss"), reproducible=reproducible)

        def observer(layer, operation, arguments, result):
            asked.append(arguments["reproducible"])

        with observe(model, observer):
            model(tokens(1, 70))
            model(tokens(1, 70), **{CACHE: HybridCache(model)})
    assert asked == [False] * 2 + [True] * 2 + [True] * 4


def test_threads_have_forwards_of_their_own(family):
    own, served = pair(family)
    prompts = [tokens(1, 40 + 10 * n, seed=n) for n in range(4)]
    found, errors = {}, []
    counted = statistics(served)
    counted.reset()
    served(prompts[0])
    per_forward = counted.calls.copy()
    counted.reset()

    def work(n):
        try:
            with torch.inference_mode():
                for _ in range(3):
                    found[n] = served(prompts[n]).logits
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for n, prompt in enumerate(prompts):
        assert difference(found[n], own(prompt).logits) < NEAR
    assert counted.calls == {key: 12 * n for key, n in per_forward.items()}


@pytest.mark.parametrize("failing", ["causal_conv1d", "gated_delta_rule", "rms_norm_gated"])
def test_a_failed_forward_leaves_nothing_behind(family, failing):
    """The next forward works, and a cache that was left half written is refused."""
    own, _ = pair(family)
    model = enable(make(family))
    ids = tokens(1, 100)
    cache = HybridCache(model, snapshot_every=64)
    model(ids[:, :70], **{CACHE: cache})
    if family == "gpt-oss":
        failing = "extend_attention"

    def fail(layer, operation, *_):
        if operation == failing:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), observe(model, fail):
        model(ids[:, 70:], **{CACHE: cache})
    with pytest.raises(ValueError, match="outside its decoder's forward"):
        _run_a_layer(model)
    wanted = own(ids).logits
    assert difference(model(ids).logits, wanted) < NEAR
    with pytest.raises(ValueError, match="past_key_values: "):
        model(ids[:, 70:], **{CACHE: cache})
    # what had been kept before is whole
    hit = cache.restored(64)
    assert difference(model(ids[:, 64:], **{CACHE: hit}).logits, wanted[:, 64:]) < NEAR
    cache.reset()
    assert difference(model(ids, **{CACHE: cache}).logits, wanted) < NEAR


def _run_a_layer(model, length=30):
    """One layer by itself, on hidden states as wide as a forward that ran before."""
    hidden = torch.randn(1, length, model.config.hidden_size)
    layer = model.model.layers[0]
    positions = torch.arange(length)[None]
    if "qwen3_5" in model.config.model_type:  # in time, height and width
        positions = positions.expand(3, 1, -1)
    angles = model.model.rotary_emb(hidden, positions)
    layer(hidden, position_embeddings=angles)


def test_a_layer_outside_its_decoder_is_refused(family):
    model = enable(make(family))
    with pytest.raises(ValueError, match="outside its decoder's forward"):
        _run_a_layer(model)
    model(tokens(1, 30))
    with pytest.raises(ValueError, match="outside its decoder's forward"):
        _run_a_layer(model)  # as long as the forward before, which is over


def test_enabling_twice_is_refused(family):
    model = enable(make(family))
    for again in (model, model.model):
        with pytest.raises(ValueError, match="already enabled"):
            enable(again)
    disable(model)
    for function in (disable, statistics):
        with pytest.raises(ValueError, match="not enabled"):
            function(model)
    enable(model.model)  # a decoder alone
    with pytest.raises(ValueError, match="already enabled"):
        enable(model)
    disable(model.model)
    enable(model)


def test_a_decoder_alone(family):
    own, _ = pair(family)
    decoder = enable(make(family).model)
    ids = tokens(2, 90)
    found, wanted = (m(ids).last_hidden_state for m in (decoder, own.model))
    assert difference(found, wanted) < NEAR


def test_models_without_served_layers_are_refused():
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=9,
    )
    for model in (transformers.LlamaModel(config), torch.nn.Linear(2, 2), "gpt-oss"):
        with pytest.raises(ValueError, match=r"model: expected Qwen3-Next, Qwen3\.5 or gpt-oss"):
            enable(model)


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_configurations_that_are_not_served_are_named_before_anything_changes(family):
    config = copy.deepcopy(pair(family)[0].config)
    config.hidden_act = "gelu"
    model = type(pair(family)[0])(config)
    before = _attributes(model)
    with pytest.raises(ValueError, match=r"'silu'.*'gelu'"):
        enable(model)
    assert _attributes(model) == before


def test_masks_that_are_not_padding_are_named(family):
    _, served = pair(family)
    ids = tokens(2, 20)
    full = torch.ones(2, 1, 20, 20).tril().bool()
    for mask in (full, {"full_attention": full, "sliding_attention": full}, torch.ones(2, 20, 20)):
        with pytest.raises(ValueError, match=r"attention_mask: expected \[B, "):
            served(ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[B, .*got \[2, 19\]"):
        served(ids, attention_mask=torch.ones(2, 19))


def test_gradients_are_named(family):
    _, served = pair(family)
    with torch.inference_mode(False):
        ids = tokens(1, 20).clone()
        with torch.enable_grad(), pytest.raises(ValueError, match=r"torch\.inference_mode"):
            served(ids)
        with torch.no_grad():
            served(ids)


def test_dropout_is_named():
    model = make("gpt-oss")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    enable(model).train()
    with pytest.raises(ValueError, match=r"dropout: expected 0, got 0\.5"):
        model(tokens(1, 20))


def test_packed_batches_are_named_where_they_cannot_be():
    _, served = pair("qwen3.5")
    ids = tokens(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with pytest.raises(ValueError, match="past_key_values: expected None with a packed batch"):
        served(ids, position_ids=positions, **{CACHE: HybridCache(served)})
    with pytest.raises(ValueError, match="position_ids: expected positions that rise by one"):
        served(ids, position_ids=positions + 3, use_cache=False)
    for borders in ([0, 8, 19], [1, 20], []):
        with pytest.raises(ValueError, match="cu_seq_lens_q: expected a running sum"):
            served(ids, cu_seq_lens_q=torch.tensor(borders), use_cache=False)


def test_no_cache_made_for_another_model_is_taken():
    _, served = pair("qwen3.5")
    for cache in (
        transformers.DynamicCache(),
        transformers.DynamicCache(config=pair("gpt-oss")[0].config),
    ):
        with pytest.raises(ValueError, match="past_key_values: expected a"):
            served(tokens(1, 20), **{CACHE: cache})
    with pytest.raises(ValueError, match="past_key_values: expected a Cache, got list"):
        served(tokens(1, 20), **{CACHE: []})


def test_a_multimodal_model_s_text():
    """The decoder of a model that also reads images; its vision layers are left to it."""
    text = pair("qwen3.5")[0].config.to_dict()
    config = transformers.Qwen3_5Config(
        text_config=text,
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
    )
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    asked = model.model.visual.config._attn_implementation
    ids, mask = tokens(2, 90), left_padding(90, 0, 20)
    wanted = model(ids, attention_mask=mask).logits
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    enable(model)
    assert model.model.visual.config._attn_implementation == asked
    found = model(ids, attention_mask=mask).logits
    assert difference(found * mask[..., None], wanted * mask[..., None]) < NEAR
    again = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(again, generated)
    assert statistics(model).calls["linear_attention", "gated_delta_rule", "torch"] > 0
    assert model.config.get_text_config() is model.model.language_model.config


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-next"])
def test_continuous_batching_is_refused_and_harms_nothing(family):
    """transformers takes its own attention alone there, and no model with linear layers."""
    model = enable(make(family))
    ids = tokens(1, 20)
    wanted = model(ids).logits
    if not hasattr(model, "generate_batch"):
        pytest.skip("this version has none")
    with pytest.raises(ValueError, match="headstart is not supported for continuous batching"):
        model.generate_batch([ids[0].tolist()], max_new_tokens=2)
    assert torch.equal(model(ids).logits, wanted)


DOCUMENT = Path(__file__).parents[3] / "docs/transformers.md"


def test_the_documents_example_runs(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    with torch.inference_mode(False), torch.no_grad():
        exec(compile(block, str(DOCUMENT), "exec"), {})
    assert re.search(r"^48 calls of gated_delta_rule in linear_attention layers by \w+$",
                     capsys.readouterr().out, re.M)  # fmt: skip


def test_every_family_is_tested():
    from headstart.integrations.transformers import adapters

    served = {type(m).__name__ for family in FAMILIES for m in pair(family)[0].modules()}
    for names in (adapters.LINEAR, adapters.SOFTMAX, adapters.DECODERS):
        assert set(names) <= served
