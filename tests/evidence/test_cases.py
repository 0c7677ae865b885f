"""The catalogue: every workload has its id, its rule-made siblings and reproducible inputs."""

from pathlib import Path

import pytest
import torch

import headstart
from headstart.evidence import cases
from headstart.evidence.cases import delta_block, trace
from headstart.evidence.cases.record import Draws, drawn_lengths, small_lengths

# The ids as the workload document writes them, groups spelt out.
IDS = {
    "gated_delta_rule": """
gdn-next-8k gdn-next-2048 gdn-next-18778 gdn-next-18778-1x2 gdn-next-32k gdn-next-64k
gdn-397b-tp8-8k gdn-397b-tp8-16k gdn-397b-tp8-32k gdn-397b-tp8-64k gdn-qk8-v16-8k gdn-qk4-v8-8k
gdn-35b-tp2-2500 gdn-397b-4x8k gdn-27b-8k gdn-varlen-4x8k gdn-varlen-8x1k gdn-varlen-33seq
gdn-varlen-7seq gdn-varlen-4seq gdn-residual-512 gdn-residual-2k gdn-residual-mix gdn-ragged-7seq
gdn-256x64 gdn-1x128 gdn-1x1 gdn-mixed gdn-pool gdn-snap-2 gdn-snap-2-bf16 gdn-snap-64
gdn-snap-64-bf16 gdn-decode-64 gdn-verify-64x4 kda-8k kda-residual-512 block-next-8k
block-residual-512 gdn-fp16-next gdn-dk64-dv64 gdn-dk96-dv128 gdn-dk256 gdn-decay-hard
gdn-late-forget gdn-repeat gdn-raw-keys gdn-1m gdn-flat
""",
    "extend_attention": """
oss-16k-full oss-16k-win oss-chunk-full oss-chunk-win oss-512-on-8k-win oss-512-on-512-win
oss-tp4-8k-on-8k oss-tp4-8k-on-8k-full llama-16k next-16k gemma-win-16k ragged-short
ragged-short-full mixed ratio-odd ratio-odd-win ratio-odd-12x2 ratio-odd-12x2-win ratio-odd-24x1
ratio-odd-24x1-win paged-none paged-none-win paged-1 paged-1-win paged-16 paged-16-win paged-64
paged-64-win fp8-cache oss-fp8-page16 oss-fp8-page16-full oss-bf16-page16 oss-bf16-page16-full
d512-win mla-expanded oss-residual-mix oss-residual-mix-full
tree-verify tree-verify-win
edge-1 edge-2 edge-3 edge-4 edge-5 edge-6 edge-7 edge-8 edge-9 edge-10 edge-11 edge-12 edge-13
edge-14 edge-15 edge-16 edge-17 edge-18 edge-19 edge-20 edge-21 edge-22 edge-23 edge-24
""",
    "causal_conv1d": "conv-next-18778",
    "model": "gpt-oss-20b qwen3-next-80b qwen3.5-9b-like tiny-qwen3-next tiny-gpt-oss",
}

OPERATIONS = [case for case in cases.catalogue() if case.op != "model"]
SMALL = [case for case in OPERATIONS if case.id.endswith(cases.SMALL)]


def identity(case):
    return case.id


def tensors(arguments):
    """Every tensor of a call, those inside pools, caches and states included."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, headstart.Pool):
            found[name] = value.tensor
        elif hasattr(value, "k_scale"):
            found |= {f"{name}.{part}": getattr(value, part) for part in ("k", "v")}
        elif hasattr(value, "cache"):
            found |= {f"{name}.{part}": t for part, t in value.cache.tensors.items()}
    return found


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("op", cases.OPERATIONS)
def test_every_workload_is_there(op):
    named = {case.id for case in cases.catalogue(op, small=False)}
    assert {id for id in named if not id.endswith("-nosink")} == set(IDS[op].split())


def test_ids_are_unique_and_say_why():
    everything = cases.catalogue()
    assert len({case.id for case in everything}) == len(everything)
    assert all(len(case.why) > 10 for case in everything)


def test_flashinfer_bench_names_are_accepted():
    assert cases.get("gdn_prefill_qk8_v16_d128_k_last").id == "gdn-qk8-v16-8k"
    assert cases.get("gdn_prefill_qk4_v8_d128_k_last").id == "gdn-qk4-v8-8k"


def test_unknown_ids_and_operations_are_told():
    with pytest.raises(ValueError, match=r"^case: no case is called 'gdn-nex-8k'; near: gdn-next"):
        cases.get("gdn-nex-8k")
    with pytest.raises(ValueError, match="headstart cases list"):
        cases.get("!!!")
    with pytest.raises(ValueError, match=r"^op: expected one of .*, got 'softmax'"):
        cases.catalogue("softmax")


@pytest.mark.parametrize("case", OPERATIONS, ids=identity)
def test_siblings(case):
    if case.id.endswith(cases.SMALL):
        return
    small = cases.get(case.id + cases.SMALL)
    assert small == case.small()
    if case.op == "gated_delta_rule":
        assert (small.K, small.V) == (case.K, case.V)
        assert max(1, case.H // 8) == small.H
        assert small.HV * case.H == case.HV * small.H
        assert [s % 64 for s in small.starts] == [s % 64 for s in case.starts]
        before, after = case.lengths, small.lengths
    elif case.op == "causal_conv1d":
        assert (small.channels * 8, small.width) == (case.channels, case.width)
        before, after = case.lengths, small.lengths
    else:
        assert (small.D, small.DV, small.window) == (case.D, case.DV, case.window)
        assert max(1, case.HK // 8) == small.HK
        assert small.HQ * case.HK == case.HQ * small.HK
        before, after = case.lengths + case.prefixes, small.lengths + small.prefixes
        if case.sinks:
            twin = cases.get(case.id + "-nosink")
            assert not twin.sinks
            assert twin.lengths == case.lengths
    assert len(before) == len(after)
    for long, short in zip(before, after, strict=True):
        if long <= 192:
            assert short == long
        else:
            assert 193 <= short <= 1200
            assert short % 2 == 1


def test_small_lengths_keep_what_is_ragged():
    assert small_lengths([32768, 16384, 100, 0]) == (1199, 599, 100, 0)
    assert small_lengths([]) == ()


@pytest.mark.parametrize("case", OPERATIONS, ids=identity)
def test_floors_count_something(case):
    floor = case.floor()
    assert (floor.bytes > 0) == (case.tokens > 0)
    assert (floor.operations > 0) == (case.tokens > 0)


def test_floors_by_hand():
    floor = cases.get("gdn-1x1").floor()
    rows = (2 * 16 * 128 + 2 * 32 * 128) * 2 + 32 * 2 * 4
    assert floor == (rows + 2 * 32 * 128 * 128 * 4, 6 * 32 * 128 * 128)
    floor = cases.get("oss-chunk-win").floor()
    assert floor.operations == 4 * 64 * 64 * 2048 * 128
    assert floor.bytes == 2 * (2048 * 64 * 128 + (2048 + 127) * 8 * 128)


@pytest.mark.parametrize("window", [1, 3, 4, 7, 8, 9, 50, None])
@pytest.mark.parametrize(("new", "cached"), [(0, 5), (1, 0), (5, 0), (4, 4), (6, 20)])
def test_pairs_against_the_literal_mask(new, cached, window):
    case = cases.get("edge-1")
    case = type(case)(
        id="x", why="", HQ=1, HK=1, D=1, lengths=(new,), prefixes=(cached,), window=window
    )
    own = torch.arange(cached, cached + new)[:, None]
    key = torch.arange(cached + new)
    seen = (key <= own) & (key > own - (window or 10**6))
    assert case.pairs() == int(seen.sum())


@pytest.mark.parametrize("case", SMALL, ids=identity)
def test_inputs_bind_and_reproduce(case):
    if case.tokens > 6000:
        pytest.skip("its siblings say the same")
    first, again, other = (tensors(case.inputs(seed=seed)) for seed in (3, 3, 4))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(bits(tensor), bits(again[name])), name
    if case.tokens:
        name = next(name for name in ("q", "mixed", "x") if name in first)
        assert not torch.equal(bits(first[name]), bits(other[name]))


@pytest.mark.parametrize("case", OPERATIONS, ids=identity)
def test_blank_arguments_are_accepted(case):
    if case.tokens > 20_000:
        pytest.skip("takes too much memory")
    rows = headstart.explain(case.op, **case.blank())
    assert {row[0]: row[1] for row in rows}["torch"], rows


def test_blank_arguments_have_the_shapes_of_inputs():
    for id in ("gdn-decode-64-small", "oss-residual-mix-small", "kda-8k-small", "gdn-pool-small"):
        case = cases.get(id)
        drawn, blank = tensors(case.inputs()), tensors(case.blank())
        assert {n: (t.shape, t.dtype) for n, t in drawn.items()} == {
            n: (t.shape, t.dtype) for n, t in blank.items()
        }


@pytest.mark.parametrize("id", ["gdn-residual-512-small", "gdn-pool-small", "paged-16-small"])
def test_draws_made_once_are_the_same_draws(id, monkeypatch):
    case, drawn, randn = cases.get(id), [], torch.randn

    def counting(shape, generator):
        drawn.append(shape)
        return randn(shape, generator=generator)

    def tensors():
        call = {**case.inputs(seed=1, dtype=torch.float32)}
        state = call.pop("state", None)
        memory = getattr(state, "tensor", None)
        if state is not None and memory is None:
            memory = state.cache.tensors["state"]
        kept = call.get("cache")
        found = [one for one in (memory, kept and kept.k, *call.values()) if one is not None]
        return [one for one in found if isinstance(one, torch.Tensor)]

    monkeypatch.setattr(torch, "randn", counting)
    plain = tensors()
    times = len(drawn)
    drawn.clear()
    with Draws.once():
        first = tensors()
        assert len(drawn) <= times
        drawn.clear()
        for tensor in first:  # a call may write to what it was given
            tensor.fill_(7)
        again = tensors()
        assert drawn == []
    assert all(
        torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(plain, again, strict=True)
    )
    assert len(plain) >= 3
    tensors()
    assert len(drawn) == times


def test_typical_inputs_are_what_models_produce():
    inputs = cases.get("gdn-next-2048").inputs(dtype=torch.float32)
    for name in ("q", "k"):
        norms = inputs[name].norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms))
    assert 0 < inputs["beta"].min() <= inputs["beta"].max() < 1
    g = inputs["g"]
    assert g.max() <= 0
    still = (g == 0).all(dim=0)
    assert still.sum() == 32 // 4
    assert g.isfinite().all()
    assert 15 < inputs["v"].abs().max() <= 25
    assert abs(inputs["v"].std() - 1) < 0.2


def test_special_values():
    def drawn(id):
        return cases.get(id).inputs(dtype=torch.float32)

    g = drawn("gdn-decay-hard-small")["g"]
    forgets = (g == -torch.inf).all(dim=1)
    assert forgets.sum() == 4
    assert (g[7::8] <= -316).all()
    mild = ~forgets
    mild[7::8] = False
    assert (g[mild] >= -0.05).all()

    g = drawn("gdn-late-forget-small")["g"]
    hard = (g <= -316).all(dim=1).nonzero().flatten().tolist()
    assert [row // 64 for row in hard] == list(range(len(hard)))
    assert len(hard) >= 1199 // 64
    assert all(row % 64 >= 32 for row in hard)
    assert (g == -torch.inf).any()
    assert (g == -316).any()

    repeat = drawn("gdn-repeat-small")
    assert torch.equal(repeat["k"], repeat["k"][:1].expand_as(repeat["k"]))
    assert (repeat["beta"] == 1).all()
    assert (repeat["g"] == 0).all()

    raw = drawn("gdn-raw-keys-small")
    torch.testing.assert_close(raw["k"].square().sum(-1), torch.full(raw["k"].shape[:2], 100.0))
    assert (raw["g"] == -30).all()
    assert raw["beta"].max() * 100 < 2

    flat = drawn("gdn-flat-small")
    assert (flat["g"] == 0).all()
    assert (flat["beta"] == 1).all()

    assert list(drawn("kda-8k-small")["g"].shape) == [1199, 4, 128]


def test_caches_stand_where_the_case_says():
    case = cases.get("gdn-decode-64-small")
    slots = case.inputs()["state"]
    cache = slots.cache
    ends = cache.tensors["end"][torch.tensor(slots.slots), 0].tolist()
    positions = cache.tensors["position"][torch.tensor(slots.slots), 0].tolist()
    assert ends == list(case.starts) == [1152 + tail for tail in range(64)]
    assert positions == [1152] * 64


def test_sinks_are_all_that_tells_a_nosink_sibling_apart():
    with_sinks = tensors(cases.get("paged-16-small").inputs())
    without = tensors(cases.get("paged-16-nosink-small").inputs())
    assert with_sinks.keys() - without.keys() == {"sinks"}
    assert all(torch.equal(bits(without[name]), bits(with_sinks[name])) for name in without)


def test_spare_cache_slots_hold_nan():
    for id in ("oss-chunk-win-small", "paged-1-small", "paged-16-small", "oss-fp8-page16-small"):
        cache = cases.get(id).inputs()["cache"]
        spoilt = cache.k.float().isnan().flatten(1).any(dim=1)
        assert 7 <= spoilt.sum() < len(spoilt)


def test_tree_masks_hold_prefix_self_and_ancestors():
    case = cases.get("tree-verify-small")
    mask = case.inputs()["custom_mask"].view(64, -1)
    new = mask[:, -64:]
    assert mask[:, :-64].all()
    assert new.diagonal().all()
    assert not new.triu(1).any()
    assert new.sum() < 64 * 65 // 2
    for token in range(64):
        for ancestor in new[token].nonzero().flatten().tolist():
            assert (new[token] | ~new[ancestor]).all()


def test_the_trace_draw_is_what_it_says():
    assert len(trace.RESIDUAL_MIX) == 24
    assert all(prefix % 64 == 0 and prefix > 512 and new > 0 for new, prefix in trace.RESIDUAL_MIX)
    assert cases.get("gdn-residual-mix").starts == cases.get("oss-residual-mix").prefixes


def test_drawn_lengths_are_stable():
    assert drawn_lengths(1, 4, 1, 128) == cases.get("ragged-short").lengths[:4]
    assert sum(cases.get("gdn-varlen-33seq").lengths) == 32768


def test_blocks_run():
    case = cases.get("block-residual-512-small")
    out = delta_block.run(case.inputs())
    assert list(out.shape) == [511, 4, 128]
    assert out.isfinite().all()
    reference = delta_block.run(case.inputs(dtype=torch.float32), implementation="reference")
    error = (out.float() - reference).norm() / reference.norm()
    assert error < 0.02


def test_records_are_plain_data():
    import json

    for case in cases.catalogue():
        assert json.loads(json.dumps(case.record()))["id"] == case.id


def test_the_catalogue_needs_no_extra():
    folder = Path(cases.__file__).parent
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert "pydantic" not in text
        assert "numpy" not in text
