"""Traces: reading, the rule that makes up text, bookkeeping, workloads, and a replay on a model."""

import json
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.evidence.traffic.bookkeeping import (
    MODELS,
    Blocks,
    Sizes,
    ceiling,
    hit_shares,
    of_ids,
    of_text,
    replay,
)
from headstart.evidence.traffic.hits import compare_hits
from headstart.evidence.traffic.layers import LinearLayer, SoftmaxLayer
from headstart.evidence.traffic.records import ALL_LAYERS
from headstart.evidence.traffic.shapes import SHAPES
from headstart.evidence.traffic.trace import Request, Trace, made, read, texts
from headstart.evidence.traffic.workloads import schedule, time_workloads
from headstart.integrations.snapshot_policy import SnapshotPolicy

LINE = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_reading(tmp_path):
    file = write(tmp_path / "trace.jsonl", LINE, LINE | {"timestamp": 9, "chat_id": 1})
    assert read(file).requests == (Request(5, 600, 7, (3, 4)), Request(9, 600, 7, (3, 4)))
    assert read("seed:7") == made(7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestamp": -1}, r"jsonl:2: timestamp: expected an integer of at least 0, got -1"),
        ({"input_length": 0}, r"jsonl:2: input_length: expected an integer of at least 1, got 0"),
        ({"input_length": True}, r"jsonl:2: input_length: expected"),
        ({"output_length": "7"}, r"jsonl:2: output_length: expected .* got '7'"),
        ({"output_length": None}, r"jsonl:2: output_length: expected"),
        ({"hash_ids": [1]}, r"jsonl:2: hash_ids: expected 2 integers, one for each 512 tokens"),
        ({"hash_ids": [1, "2"]}, r"jsonl:2: hash_ids: expected 2 integers"),
        ({"hash_ids": 5}, r"jsonl:2: hash_ids: expected 2 integers"),
    ],
)
def test_a_wrong_line_is_named(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        read(write(tmp_path / "t.jsonl", LINE, LINE | change))


def test_what_is_no_trace(tmp_path):
    for text, words in (("", "has no requests"), ("{", "t:1: is no JSON"), ("[1]", "an object")):
        (tmp_path / "t").write_text(text)
        with pytest.raises(ValueError, match=words):
            read(tmp_path / "t")
    with pytest.raises(ValueError, match="cannot read"):
        read(tmp_path / "none")
    with pytest.raises(ValueError, match="expected a file or seed:N, got 'seed:x'"):
        read("seed:x")


def test_a_made_trace_is_a_trace(tmp_path):
    lines = [
        {"timestamp": one.arrival, "input_length": one.prompt, "output_length": one.output,
         "hash_ids": list(one.ids)}
        for one in made(3).requests
    ]  # fmt: skip
    assert read(write(tmp_path / "t", *lines)) == made(3)


@pytest.mark.parametrize("by", [1, 2, 4, 8])
def test_shortened(by):
    trace = made(1).shortened(by)
    assert trace.id_tokens == 512 // by
    for one, whole in zip(trace.requests, made(1).requests, strict=True):
        assert one.ids == whole.ids
        assert len(one.ids) == -(-one.prompt // trace.id_tokens)
        assert 0 <= one.prompt * by - whole.prompt < by
    with pytest.raises(ValueError, match="shorten: expected 1, 2, 4 or 8, got 3"):
        made(1).shortened(3)


def test_a_sample_holds_whole_conversations():
    trace = made(2, 200)
    sample = trace.sample(50, seed=4)
    assert 50 <= len(sample.requests) < 80
    assert sample == trace.sample(50, seed=4) != trace.sample(50, seed=5)
    arrivals = [one.arrival for one in sample.requests]
    assert arrivals == sorted(arrivals)
    talks = {one.ids[:2] for one in sample.requests}
    assert set(sample.requests) == {one for one in trace.requests if one.ids[:2] in talks}
    assert trace.sample(999) == trace
    with pytest.raises(ValueError, match="requests: expected"):
        trace.sample(0)


def keys_of(*requests, strict=False):
    return texts(Trace(requests), strict=strict)


def test_an_id_is_a_fixed_text():
    one, two = keys_of(Request(0, 1000, 0, (1, 2)), Request(1, 700, 0, (1, 2)))
    assert two.keys == one.keys[:11]
    assert len(one.keys) == 16
    assert len(set(one.keys)) == 16


def test_a_longer_prompt_continues_prompt_and_output():
    first = Request(0, 600, 210, (1, 2))  # 12 whole blocks of 64, and 42 tokens
    one, two, three = keys_of(first, Request(1, 900, 5, (1, 3)), Request(2, 800, 5, (1, 4)))
    assert (one.continues, two.continues, three.continues) == (None, 0, None)
    assert two.keys[:12] == one.keys[:12]
    assert not set(two.keys[12:]) & set(one.keys)
    # 800 is not longer than 600 + 210: no more than the common id is shared.
    assert three.keys[:8] == one.keys[:8]
    assert not set(three.keys[8:]) & {*one.keys, *two.keys}


def test_of_several_the_longest_is_continued_and_of_equal_ones_the_latest():
    found = keys_of(
        Request(0, 520, 10, (1, 2)),
        Request(1, 530, 10, (1, 3)),
        Request(2, 1100, 10, (1, 4, 5)),
        Request(3, 2000, 10, (1, 4, 6, 7)),
        Request(4, 2000, 10, (1, 9, 10, 11)),
    )
    assert [text.continues for text in found] == [None, None, 1, 2, 1]


def test_strict_text_wants_more_than_what_all_share():
    requests = [Request(0, 600, 10, (1, 2)), Request(1, 900, 0, (1, 3)), Request(2, 950, 0, (1, 4))]
    assert [text.continues for text in keys_of(*requests)] == [None, 0, 1]
    assert [text.continues for text in keys_of(*requests, strict=True)] == [None] * 3


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(1, 63)), min_size=1, max_size=12
)


@settings(deadline=None)
@given(PROMPTS)
def test_the_ceiling_is_the_longest_common_prefix(prompts):
    requests = [Blocks(64 * len(keys) + tail, tuple(keys)) for keys, tail in prompts]
    found = ceiling(requests, 64)
    for index, request in enumerate(requests):
        shared = 0
        for earlier in requests[:index]:
            pairs = zip(request.keys, earlier.keys, strict=False)
            run = [a == b for a, b in pairs]
            shared = max(shared, [*run, False].index(False))
        assert found[index] == 64 * shared
    # A tree without a bound, with a state at every block, finds just that.
    assert replay(requests, 64, policy="all", sizes=Sizes(1, 1), budget=None)[0] == found


def test_the_last_token_is_never_hit():
    whole = Blocks(128, ("a", "b"))
    assert ceiling([whole, whole], 64) == [0, 64]
    assert replay([whole, whole], 64, policy="ends", sizes=Sizes(1, 1), budget=None)[0] == [0, 64]


def test_blocks_of_text_and_of_ids():
    trace = Trace((Request(0, 1600, 500, (1, 2, 3, 4)),))
    text = texts(trace)
    assert [len(of_text(text, grain)[0].keys) for grain in (64, 512, 1024)] == [32, 4, 2]
    assert of_ids(trace, 512)[0].keys == ((1,), (2,), (3,))
    assert of_ids(trace, 1024)[0].keys == ((1, 2),)


def test_hit_shares():
    trace = made(0)
    sizes = MODELS["qwen3-next-80b"]
    assert (sizes.page, sizes.state) == (1_572_864, 77_266_944)
    budget = 4 << 30
    found = hit_shares(
        trace, texts(trace), policies=["ends", "geometric", "all"], budgets=[budget, None]
    )
    assert len(found) == 5 * 3 * 2
    for one in found:
        assert 0 <= one.hit_tokens <= one.ceiling_tokens <= one.tokens == trace.tokens
        assert sum(one.hits) == one.hit_tokens
        assert len(one.hits) == one.requests == 60
        assert one.budget is None or one.kept_bytes <= one.budget
        assert bool(one.evicted) <= (one.budget is not None)
    share = {(one.text, one.grain, one.policy, one.budget): one for one in found}
    assert share["synthetic", 64, "all", None].of_ceiling == 1
    assert share["ids", 512, "all", None].of_ceiling == 1
    assert share["synthetic", 64, "geometric", None].of_ceiling > 0.95
    assert share["synthetic", 64, "all", budget].share < share["synthetic", 64, "ends", None].share
    for policy in ("ends", "geometric", "all"):
        shares = [share["synthetic", grain, policy, None].share for grain in (64, 512, 1024)]
        assert shares == sorted(shares, reverse=True)


def test_a_model_without_states_is_hit_at_every_block():
    trace = made(0)
    (found, *_) = hit_shares(trace, texts(trace), model="gpt-oss-20b", policies=["ends"])
    assert found.of_ceiling == 1


@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9).map(lambda n: 64 * n)), max_size=9),
    st.integers(64, 400),
)
def test_steps_of_a_scheduler(pairs, budget):
    steps = schedule(pairs, budget)
    assert all(0 < sum(piece.new for piece in step) <= budget for step in steps)
    assert all(piece.prefix % 64 == 0 for step in steps for piece in step)
    brought = [
        (piece.request, position)
        for step in steps
        for piece in step
        for position in range(piece.prefix, piece.prefix + piece.new)
    ]
    assert brought == [
        (request, position)
        for request, (new, prefix) in enumerate(pairs)
        for position in range(prefix, prefix + new)
    ]
    # A step is left with room only where the next row of 64 would not fit.
    for step, following in pairwise(steps):
        assert budget - sum(piece.new for piece in step) < min(following[0].new, 64)


def test_too_small_a_step():
    with pytest.raises(ValueError, match="step-tokens: expected"):
        schedule([(1, 0)], 63)


CPU = torch.device("cpu")


def test_workloads_are_timed_side_by_side():
    found = time_workloads(
        [200, 150], {0: [0, 0], 64: [64, 128]}, model="tiny-qwen3-next", device=CPU,
        step_tokens=128, rounds=3,
    )  # fmt: skip
    figures = [
        (one.kind, one.layers, one.grain, one.steps, one.new_tokens, one.prefix_tokens)
        for one in found
    ]
    assert figures == [
        (*layer, *grain)
        for layer in (("linear_attention", 1), ("full_attention", 1), (ALL_LAYERS, 8))
        for grain in ((0, 4, 350, 0), (64, 2, 158, 192))
    ]
    for one in found:
        assert len(one.ms) == 3
        assert min(one.ms) > 0
        assert one.served == "torch"
        assert (one.ratio if one.grain else one.of_cold).ratio == 1
    linear, full, every = [one.ms for one in found if one.grain]
    wanted = [6 * one + 2 * other for one, other in zip(linear, full, strict=True)]
    assert every == pytest.approx(wanted)


@pytest.mark.parametrize("model", ["tiny-qwen3-next", "tiny-gpt-oss"])
def test_rows_past_hits_are_those_of_a_cold_prefill(model):
    found = compare_hits(
        [200, 150, 90, 300], [64, 128, 0, 192], model=model, device=CPU, step_tokens=128
    )
    assert [one.kind for one in found] == list(SHAPES[model].layers)
    for one in found:
        assert (one.requests, one.hit_tokens, one.rows) == (4, 384, 136 + 22 + 90 + 108)
        assert one.differing == 0


def test_a_state_or_a_page_that_is_off_shows(monkeypatch):
    forget = SoftmaxLayer.forget
    monkeypatch.setattr(SoftmaxLayer, "forget", lambda self, p, at: forget(self, p, at - 64))

    def drift(self, place, prefix):
        self.cache.tensors["state"].mul_(1.001)

    monkeypatch.setattr(LinearLayer, "forget", drift)
    for model in ("tiny-qwen3-next", "tiny-gpt-oss"):
        for one in compare_hits([200], [128], model=model, device=CPU, step_tokens=128):
            assert one.differing > one.rows // 2, one.kind


def test_shapes_are_those_of_the_published_configurations():
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    from headstart import checkpoints
    from headstart.evidence.models.building import CONFIGURATIONS

    public = json.loads(CONFIGURATIONS.read_text())
    for name, shape in SHAPES.items():
        if name in public:
            fields = dict(public[name]["configuration"])
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        else:
            config = AutoConfig.from_pretrained(checkpoints.path(name))
        kinds = {kind: config.layer_types.count(kind) for kind in config.layer_types}
        assert shape.layers == kinds
        heads = (shape.HQ, shape.HK, shape.D)
        assert heads == (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        if shape.sliding:
            assert shape.window == config.sliding_window
        if shape.linear:
            assert (shape.H, shape.HV, shape.K, shape.V, shape.conv_width) == (
                config.linear_num_key_heads, config.linear_num_value_heads,
                config.linear_key_head_dim, config.linear_value_head_dim,
                config.linear_conv_kernel_dim,
            )  # fmt: skip


# A short made trace on the shipped models.


@pytest.fixture(scope="module", params=["tiny-qwen3-next", "tiny-gpt-oss"])
def loaded(request):
    pytest.importorskip("transformers")
    from headstart.evidence.prefill.loading import load

    return load(request.param)


def few(count=6):
    return texts(made(1).sample(count, seed=1).shortened(8))


def test_no_bit_differs_and_hits_are_those_of_the_bookkeeping(loaded):
    from headstart.evidence.traffic.replay import replay_on_model

    found = replay_on_model(loaded, few(), shortened=8)
    assert found.differing == 0
    assert found.total("rows") > 0
    assert found.total("logits") == sum(s.prompt - s.hit for s in found.served if s.hit)
    sizes = MODELS["tiny-qwen3-next"] if "qwen" in loaded.name else Sizes(1, 0)
    wanted, tree = replay(of_text(few(), 64), 64, policy="geometric", sizes=sizes, budget=None)
    assert [one.hit for one in found.served] == wanted
    assert any(wanted)
    if sizes.state:
        assert found.served[-1].kept_bytes == tree.bytes
    assert 0 < found.share <= 1
    assert found.of_ceiling <= 1


def test_a_state_that_is_off_shows(loaded, monkeypatch):
    from headstart.evidence.traffic.replay import replay_on_model
    from headstart.integrations.transformers import HybridCache

    stand = HybridCache.stand

    def spoilt(self, pages, layers):
        stand(self, pages, layers)
        if pages.table:
            pages.table[0].reverse()

    monkeypatch.setattr(HybridCache, "stand", spoilt)
    found = replay_on_model(loaded, few(), shortened=8)
    assert found.total("differing") > 0
    assert found.total("differing_logits") > 0


def test_a_small_budget_evicts_and_changes_no_bit(loaded):
    from headstart.evidence.traffic.replay import replay_on_model

    found = replay_on_model(loaded, few(), shortened=8, budget=12 << 20)
    assert found.differing == 0
    assert max(one.kept_bytes for one in found.served) <= 12 << 20


def test_requests_beyond_the_models_positions(loaded):
    from headstart.evidence.traffic.replay import replay_on_model

    long = texts(Trace((Request(0, 40_000, 1, tuple(range(79))),)))
    with pytest.raises(ValueError, match=r"of at most 32768 tokens .* got one of 40001"):
        replay_on_model(loaded, long)
    with pytest.raises(ValueError, match="policy: expected"):
        replay_on_model(loaded, few(), policy="best")
    assert not hasattr(loaded.model, "headstart")


DOCUMENT = (Path(__file__).parents[2] / "docs/prefix_cache.md").read_text()


def test_the_documents_example_runs(capsys):
    pytest.importorskip("transformers")
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.M | re.S)
    with torch.inference_mode(False):
        exec(compile(block, "docs/prefix_cache.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("0 of 400 tokens were there; ")
    assert second.startswith("384 of 500 tokens were there; ")


def test_the_document_names_every_option_and_policy():
    from headstart.cli.bench_trace import trace

    known = {name for parameter in trace.params for name in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", DOCUMENT)) - {"---", "----"} <= known
    rules = {field.name for field in fields(SnapshotPolicy)}
    assert set(re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.M)) == rules
