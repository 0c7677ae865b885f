"""The pieces of the main job: fixed tiles, comparisons, recorded rows, tokens of any bytes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headstart import checkpoints
from headstart.evidence.prefill import compare, loading
from headstart.evidence.prefill.replay import Recorder
from headstart.evidence.prefill.runs import Run
from headstart.evidence.prefill.tiles import FixedTiles
from headstart.evidence.prefill.timing import LayerTimes, peak_memory


class TopRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        logits = x @ self.weight.t()
        values, chosen = logits.topk(2, dim=-1)
        return logits, values.softmax(-1), chosen


class SomeExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, rows, (x[rows] @ self.weight[expert]) * weights[rows, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.router, self.experts = TopRouter(), SomeExperts()

    def forward(self, x):
        rows = self.first(x)[0]
        _, weights, chosen = self.router(rows)
        return self.experts(rows, chosen, weights)[None]


@pytest.fixture
def mixture():
    torch.manual_seed(0)
    return Mixture().requires_grad_(False)


@pytest.mark.parametrize("cuts", [[64], [100], [1, 2, 63, 65, 190], [192]])
def test_tiles_make_rows_independent_of_steps(mixture, cuts):
    x = torch.randn(1, 200, 16)
    with FixedTiles(mixture) as tiles:
        whole = mixture(x)
        pieces = []
        for begin, end in zip([0, *cuts], [*cuts, 200], strict=True):
            tiles.start = begin
            pieces.append(mixture(x[:, begin:end]))
    assert torch.equal(torch.cat(pieces, dim=1), whole)
    torch.testing.assert_close(whole, mixture(x), rtol=1e-5, atol=1e-5)


def test_tiles_do_not_look_at_other_rows(mixture):
    x = torch.randn(1, 130, 16)
    spoilt = x.clone()
    spoilt[:, 100:] = torch.nan
    with FixedTiles(mixture.first):
        assert torch.equal(mixture.first(spoilt)[:, :100], mixture.first(x)[:, :100])


def test_tiles_leave_no_trace(mixture):
    before = [dict(vars(module)) for module in mixture.modules()]
    with pytest.raises(RuntimeError), FixedTiles(mixture):
        mixture(torch.randn(1, 3, 17))
    assert [list(vars(module)) for module in mixture.modules()] == [list(b) for b in before]


def test_differing_bits():
    x = torch.randn(5, 7)
    assert compare.differing_bits(x, x.clone()) == 0
    assert compare.differing_bits(x, -x) == 35
    assert compare.differing_bits(x.bfloat16(), -x.bfloat16()) == 35
    y = x.clone().view(torch.int32)
    y[2, 3] ^= 0b1011
    assert compare.differing_bits(x, y.view(torch.float32)) == 3
    nan = torch.full((2,), torch.nan)
    assert compare.differing_bits(nan, nan.clone()) == 0
    with pytest.raises(ValueError, match="right: expected"):
        compare.differing_bits(x, x[:4])


def run_of(logits, start=0):
    """A run whose head hands its hidden states through."""
    model = SimpleNamespace(get_output_embeddings=nn.Identity)
    return Run(SimpleNamespace(model=model), start, logits, 1.0, 0)


def test_compare_counts_by_hand():
    own = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.99995], [0.0, 0.0, 3.0], [5.0, 0.0, 0.0]])
    mine = own.clone()
    mine[1] = torch.tensor([0.0, 0.99995, 1.0])  # a near-tie that flips
    mine[2] = torch.tensor([0.0, 3.5, 3.0])  # a real disagreement
    found = compare.compare(run_of(mine), run_of(own), [0, 1, 2, 0])
    assert (found.rows, found.agreeing, found.excluded, found.disagreeing) == (4, 2, 1, 1)
    assert found.difference == 3.5
    wanted = torch.tensor([1, 2, 0])
    loss = -own[:3].double().log_softmax(-1)[torch.arange(3), wanted].mean()
    assert found.other_perplexity == pytest.approx(loss.exp().item())
    sentences = found.breaches()
    assert [sentence.split()[0] for sentence in sentences] == ["top-1", "near-ties", "perplexity"]
    assert "1 of 4 rows" in sentences[0]


def test_16_bits_have_a_tolerance_of_their_own():
    own = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.75], [0.0, 0.0, 3.0], [5.0, 0.0, 0.0]])
    mine = own.clone()
    mine[1] = torch.tensor([0.0, 0.75, 1.0])
    mine[2, 2] = 2.98
    found = compare.compare(run_of(mine.bfloat16()), run_of(own.bfloat16()), [0, 1, 2, 1])
    assert (found.agreeing, found.excluded, found.disagreeing) == (3, 1, 0)
    assert [sentence.split()[0] for sentence in found.breaches()] == ["perplexity"]
    assert "not less than 0.002" in found.breaches()[0]


def test_compare_takes_the_rows_that_both_have():
    own = torch.randn(1100, 8)
    found = compare.compare(
        run_of(own[1024:], start=1024), run_of(own), list(range(8)) * 137 + [1] * 4
    )
    assert (found.rows, found.agreeing, found.differing_bits) == (76, 76, 0)
    assert found.breaches() == []


def test_nan_is_a_breach():
    own = torch.randn(9, 8)
    mine = own.clone()
    mine[3] = torch.nan
    assert any(
        "nan" in line for line in compare.compare(run_of(mine), run_of(own), [0] * 9).breaches()
    )


def test_the_recorder_keeps_the_rows_from_the_hit_on():
    recorder = Recorder(hit=128)
    x = torch.arange(150.0)[:, None]
    for begin, end in ((0, 100), (100, 140), (140, 150)):
        recorder.step(begin)
        piece = x[begin:end]
        result = SimpleNamespace(y=piece + 1)
        arguments = {"x": piece, "weight": "w", "schedule": "s", "state": "c"}
        recorder(3, "causal_conv1d", arguments, result)
    (record,) = recorder.records.values()
    assert torch.equal(torch.cat(record.rows["x"]), x[128:])
    assert torch.equal(torch.cat(record.results), x[128:] + 1)
    assert record.fixed == {"weight": "w"}


@pytest.mark.parametrize("name", checkpoints.names())
def test_shipped_models_read_bytes(name):
    loaded = loading.load(name)
    data = bytes(range(256))
    assert loaded.encode(data) == list(data)
    assert loaded.decode([*data, 256]) == data
    assert loaded.model.dtype == torch.float32
    assert loading.load(str(checkpoints.path(name))).kinds == loaded.kinds


def test_other_tokenizers_get_text():
    class Words:
        def __len__(self):
            return 50_000

        def __call__(self, text):
            return {"input_ids": [ord(c) for c in text]}

        def decode(self, ids):
            return "".join(map(chr, ids))

    encode, decode = loading.text_directions(Words())
    assert encode(b"a\xff") == [97, 0xFFFD]
    assert decode([97, 98]) == b"ab"


def test_layer_times_cover_attention_and_mlp():
    layer = nn.Module()
    layer.self_attn, layer.mlp = nn.Linear(4, 4), nn.Linear(4, 4)
    layer.forward = lambda x: layer.mlp(layer.self_attn(x))
    times, done = LayerTimes(torch.device("cpu")), []
    with times.watching([layer], ["full_attention"], lambda: done.append(1)):
        layer(torch.ones(4))
    layer(torch.ones(4))
    assert sorted(times.seconds) == ["full_attention", "mlp"]
    assert all(seconds > 0 for seconds in times.seconds.values())
    assert done == [1]


def test_projections_are_told_apart():
    layer = nn.Module()
    layer.self_attn = nn.Sequential(nn.Linear(2000, 2000), nn.Identity())
    layer.forward = lambda x: layer.self_attn(x)
    times = LayerTimes(torch.device("cpu"), apart=True)
    with times.watching([layer], ["full_attention"]):
        layer(torch.ones(100, 2000))
    spent = times.seconds
    assert sorted(spent) == ["full_attention", "projections"]
    assert 0 < spent["full_attention"] < spent["projections"]


def test_peak_memory_sees_what_was_held():
    before = peak_memory(torch.device("cpu"))
    torch.ones(before // 4 + 25_000_000)  # more than all that was ever held at once
    assert peak_memory(torch.device("cpu")) - before > 50_000_000
