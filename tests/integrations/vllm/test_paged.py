"""vLLM's pages against attention over the keys themselves."""

import pytest
import torch

from headstart import ExtendPlan, extend_attention
from headstart.integrations.vllm import paged, statistics

HQ, HK, D, PAGE = 8, 2, 64, 24  # a page that is no power of two, as hybrid models have


def poisoned(*shape):
    return torch.full(shape, torch.nan)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("strided", [False, True])
def test_steps_through_pages_are_attention_over_all_keys(window, strided):
    generator = torch.Generator().manual_seed(5)
    lengths = [70, 31, 1]
    q, k, v = (
        [torch.randn(n, heads, D, generator=generator) for n in lengths] for heads in (HQ, HK, HK)
    )
    sinks = torch.randn(HQ, generator=generator)
    table = torch.tensor([[5, 1, 3], [2, 6, 0], [7, 0, 0]], dtype=torch.int32)
    cache = poisoned(8, HK, PAGE, 2 * D)
    if strided:  # the same logical tensor in another physical order
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    seen = [0, 0, 0]
    # A chunk, a chunk beside a decode, then all that is left; padding ends each step.
    for new in ([40, 0, 0], [29, 30, 0], [1, 1, 1]):
        rows = [slice(s, s + n) for s, n in zip(seen, new, strict=True)]
        seen = [s + n for s, n in zip(seen, new, strict=True)]
        slots = [
            int(table[r, p // PAGE]) * PAGE + p % PAGE
            for r, own in enumerate(rows)
            for p in range(own.start, own.stop)
        ]
        pad = 3
        packed = [torch.cat([x[r][own] for r, own in enumerate(rows)]) for x in (q, k, v)]
        query, key, value = (torch.cat([x, x.new_zeros(pad, *x.shape[1:])]) for x in packed)
        paged.write("kind", key, value, cache, torch.tensor(slots + [-1] * pad))
        start = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        step = paged.PagedStep.of(start, torch.tensor(seen, dtype=torch.int32), table, PAGE)
        out = poisoned(*query.shape)
        step.attend(
            "kind", query, cache, out, scale=0.2, window=window, sinks=sinks, softcap=None,
            reproducible=False,
        )  # fmt: skip
        begin = 0
        for r, own in enumerate(rows):
            if not new[r]:
                continue
            want = extend_attention(
                q[r][: own.stop], k[r][: own.stop], v[r][: own.stop],
                plan=ExtendPlan.from_lengths([own.stop], device="cpu"), scale=0.2, window=window,
                sinks=sinks, implementation="reference",
            )[own]  # fmt: skip
            torch.testing.assert_close(out[begin : begin + new[r]], want, atol=2e-6, rtol=2e-6)
            begin += new[r]
        assert not out[begin:].any()


def test_pages_before_a_window_may_be_anything():
    generator = torch.Generator().manual_seed(6)
    k, v, q = (torch.randn(3 * PAGE, h, D, generator=generator) for h in (HK, HK, HQ))
    cache = poisoned(4, HK, PAGE, 2 * D)
    table = torch.tensor([[0, 2, 1]], dtype=torch.int32)  # page 0 is nobody's
    slots = torch.arange(3 * PAGE)
    slots[:PAGE] = -1
    slots[PAGE:] = table[0, slots[PAGE:] // PAGE] * PAGE + slots[PAGE:] % PAGE
    paged.write("kind", k, v, cache, slots)
    step = paged.PagedStep.of([0, 2], [3 * PAGE], table, PAGE)
    out, how = poisoned(2, HQ, D), {"scale": 0.1, "window": PAGE, "sinks": None, "softcap": None}
    step.attend("kind", q[-2:], cache, out, reproducible=False, **how)
    want = extend_attention(
        q, k, v, plan=ExtendPlan.from_lengths([3 * PAGE], device="cpu"), scale=0.1, window=PAGE,
        implementation="reference",
    )  # fmt: skip
    torch.testing.assert_close(out, want[-2:], atol=2e-6, rtol=2e-6)


def test_calls_are_counted_by_layer_kind():
    statistics().reset()
    cache, table = torch.zeros(2, HK, PAGE, 2 * D), torch.ones(1, 1, dtype=torch.int32)
    q, k = torch.randn(1, HQ, D), torch.randn(1, HK, D)
    for _ in range(2):
        paged.write("some_attention", k, k, cache, torch.tensor([PAGE]))
        paged.PagedStep.of([0, 1], [1], table, PAGE).attend(
            "some_attention", q, cache, torch.empty_like(q), scale=1.0, window=None, sinks=None,
            softcap=None, reproducible=True,
        )  # fmt: skip
    assert statistics().served == {"some_attention": 2}
    assert statistics().calls == {
        ("some_attention", "write_kv", "torch"): 2,
        ("some_attention", "extend_attention", "torch"): 2,
    }


def test_a_default_device_of_the_process_changes_no_step():
    table = torch.tensor([[5, 1], [2, 6]], dtype=torch.int32)
    start, seen = torch.tensor([0, 3, 4]), torch.tensor([3, 17])
    with torch.device("meta"):
        steps = (
            paged.PagedStep.of(start, seen, table, PAGE),
            paged.PagedStep.of([0, 3, 4], [3, 17], table, PAGE),
        )
    for step in steps:
        assert (step.plan.lengths, step.plan.prefix) == ([3, 1], [0, 16])
