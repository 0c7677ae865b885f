"""Drawn batches: every implementation against the oracle, and the properties of attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.extend_attention.oracle import draw, expect_close, expected

import headstart
from headstart import ExtendPlan, KVCache

sequences = st.lists(st.tuples(st.integers(0, 150), st.integers(0, 300)), max_size=4)


@settings(max_examples=120, deadline=None)
@given(
    sequences=sequences,
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1), (3, 3)]),
    sizes=st.sampled_from([(16, 16), (13, 13), (8, 24), (24, 8)]),
    window=st.sampled_from([None, 1, 2, 17, 64, 100, 128, 400]),
    causal=st.booleans(),
    sink=st.booleans(),
    softcap=st.sampled_from([None, None, 4.0]),
    covers=st.sampled_from([None, None, "all", "new"]),
    part=st.sampled_from(["all", "all", "prefix", "extend"]),
    reproducible=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_ragged_batches(
    sequences, heads, sizes, window, causal, sink, softcap, covers, part, reproducible, seed
):
    lengths, prefix = [s[0] for s in sequences], [s[1] for s in sequences]
    batch = draw(lengths, prefix, *heads, *sizes, seed=seed)
    rules = {"window": window, "causal": causal, "softcap": softcap, "part": part}
    options = {}
    if sink and part == "all":
        rules["sinks"] = options["sinks"] = torch.linspace(-4, 4, heads[0])
    arguments = batch.arguments(mask_covers=covers or "all")
    masks = None
    if covers:
        at = torch.Generator().manual_seed(seed)
        columns = [n + (p if covers == "all" else 0) for n, p in zip(lengths, prefix, strict=True)]
        masks = [
            torch.rand(n, c, generator=at) < 0.4 for n, c in zip(lengths, columns, strict=True)
        ]
        flat = [torch.zeros(0, dtype=torch.bool), *(mask.flatten() for mask in masks)]
        options["custom_mask"] = torch.cat(flat)
    given = {name: value for name, value in rules.items() if name != "sinks"}
    found = headstart.extend_attention(
        **arguments, **given, **options, reproducible=reproducible, return_lse=True
    )
    if not sum(lengths):
        return
    if masks is not None:
        rules["covers"] = covers
    expect_close(found, expected(batch, masks=masks, **rules), rounding=6e-6)


@pytest.mark.parametrize("window", [None, 40])
def test_a_step_on_a_prefix_is_the_tail_of_the_whole(attend, window):
    batch = draw([150], seed=1)
    plan = ExtendPlan.from_lengths([150], device="cpu")
    o, lse = attend(batch.q, batch.k, batch.v, plan=plan, window=window, return_lse=True)
    plan = ExtendPlan.from_lengths([30], [120], device="cpu")
    cache = KVCache(batch.k[:120], batch.v[:120])
    rest = slice(120, None)
    found = attend(
        batch.q[rest],
        batch.k[rest],
        batch.v[rest],
        plan=plan,
        cache=cache,
        window=window,
        return_lse=True,
    )
    expect_close(found, (o[rest].double(), lse[rest].double()))


def test_permuted_heads_permute_the_output(attend):
    batch = draw([40], None, 4, 4)
    plan = ExtendPlan.from_lengths([40], device="cpu")
    order = [2, 0, 3, 1]
    for window in (None, 10):
        o = attend(batch.q, batch.k, batch.v, plan=plan, window=window)
        q, k, v = (getattr(batch, name)[:, order] for name in "qkv")
        found = attend(q, k, v, plan=plan, window=window)
        torch.testing.assert_close(found, o[:, order], rtol=0, atol=1e-6)


def test_equal_keys_average_the_values(attend):
    batch = draw([50], [30])
    k = torch.ones_like(batch.k)
    cache = KVCache(torch.ones_like(batch.prefix_k), batch.prefix_v)
    o = attend(batch.q, k, batch.v, plan=batch.arguments()["plan"], cache=cache)
    values = torch.cat([batch.prefix_v, batch.v]).double()
    mean = values.cumsum(0)[30:] / torch.arange(31, 81)[:, None, None]
    torch.testing.assert_close(o.double(), mean.expand_as(o), rtol=0, atol=2e-6)
