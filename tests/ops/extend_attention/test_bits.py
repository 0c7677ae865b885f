"""reproducible=True: a row's bits are its own sequence's and position's affair."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.extend_attention.oracle import draw

import headstart
from headstart import Declined, ExtendPlan, KVCache, write_kv

FP8 = torch.float8_e4m3fn
CASES = [
    {},
    {"window": 100},
    {"window": 128, "sinks": True},
    {"sinks": True, "softcap": 5.0},
]


def options_of(case, HQ):
    options = {**case, "reproducible": True, "return_lse": True}
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-3, 3, HQ)
    return options


def equal(found, want):
    return torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])


def whole(attend, batch, options):
    plan = ExtendPlan.from_lengths(batch.lengths, device="cpu")
    return attend(batch.q, batch.k, batch.v, plan=plan, **options)


class Steps:
    """One sequence of a batch, brought in steps onto a shuffled paged cache full of NaN."""

    def __init__(self, batch, page_size, new_in_cache, seed=0, dtype=None, **scales):
        self.batch, self.page_size, self.new_in_cache = batch, page_size, new_in_cache
        T = batch.lengths[0]
        pages = -(-T // page_size)
        at = torch.Generator().manual_seed(seed)
        self.table = torch.randperm(pages + 4, generator=at)[:pages]
        dtype = batch.k.dtype if dtype is None else dtype
        self.cache = KVCache(
            torch.full((pages + 4, page_size, *batch.k.shape[1:]), torch.nan).to(dtype),
            torch.full((pages + 4, page_size, *batch.v.shape[1:]), torch.nan).to(dtype),
            **scales,
        )

    def write(self, begin, end):
        position = torch.arange(begin, end)
        slots = self.table[position // self.page_size] * self.page_size
        slots = slots + position % self.page_size
        write_kv(self.batch.k[begin:end], self.batch.v[begin:end], self.cache, slots)

    def step(self, attend, begin, end, options):
        """Rows [begin, end) on a prefix of `begin` keys; their keys are written too."""
        rows = slice(begin, end)
        plan = ExtendPlan.from_pages(
            [end - begin], [end], self.table[None], self.page_size, new_in_cache=self.new_in_cache
        )
        k, v = self.batch.k[rows], self.batch.v[rows]
        if self.new_in_cache:
            self.write(begin, end)
            k = v = None
        found = attend(self.batch.q[rows], k, v, plan=plan, cache=self.cache, **options)
        if not self.new_in_cache:
            self.write(begin, end)
        return found


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("new_in_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_split_into_steps_on_any_pages(attend, case, page_size, new_in_cache, dtype):
    batch = draw([200], HQ=2, HK=1, D=16, DV=24, dtype=dtype, seed=1)
    options = options_of(case, 2)
    want = whole(attend, batch, options)
    for cuts in ([0, 1, 64, 65, 192, 199, 200], [0, 127, 128, 200]):
        steps = Steps(batch, page_size, new_in_cache)
        for begin, end in pairwise(cuts):
            found = steps.step(attend, begin, end, options)
            assert equal(found, (want[0][begin:end], want[1][begin:end]))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(2, 1500),
    cuts=st.lists(st.integers(1, 1499), max_size=5),
    window=st.sampled_from([None, 1, 63, 128, 500]),
    heads=st.sampled_from([(1, 1), (5, 1), (8, 1), (16, 2), (6, 3)]),
    sizes=st.sampled_from([(64, 64), (13, 13), (16, 80)]),
    threads=st.sampled_from([1, 2, 3]),
)
def test_drawn_splits_decodes_and_threads(seed, length, cuts, window, heads, sizes, threads):
    """Only torch: the reference is covered above, and slow here."""
    before = torch.get_num_threads()
    batch = draw([length], None, *heads, *sizes, seed=seed)
    options = {"window": window, "reproducible": True, "return_lse": True}
    try:
        torch.set_num_threads(1)
        want = whole(headstart.extend_attention, batch, options)
        torch.set_num_threads(threads)
        borders = sorted({0, length, length - 1, *(c for c in cuts if c < length)})
        steps = Steps(batch, 16, seed % 2 == 0, seed)
        for begin, end in pairwise(borders):
            found = steps.step(headstart.extend_attention, begin, end, options)
            assert equal(found, (want[0][begin:end], want[1][begin:end]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_batch(attend, case):
    first, second = draw([70], seed=2), draw([130], seed=3)
    options = options_of(case, 2)
    alone = [whole(attend, batch, options) for batch in (first, second)]
    q, k, v = (
        torch.cat([getattr(second, x), getattr(first, x), getattr(second, x)[:50]]) for x in "qkv"
    )
    plan = ExtendPlan.from_lengths([130, 0, 70, 50], device="cpu")
    o, lse = attend(q, k, v, plan=plan, **options)
    assert equal((o[:130], lse[:130]), alone[1])
    assert equal((o[130:200], lse[130:200]), alone[0])
    assert equal((o[200:], lse[200:]), (alone[1][0][:50], alone[1][1][:50]))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("D", [16, 64, 13])
def test_any_number_of_heads_held(attend, case, D):
    """Ranks with 8 over 1, 4 over 1 (shared key heads) or one head of 16 over 2."""
    batch = draw([50], None, 16, 2, D, seed=4)
    options = options_of(case, 16)
    o, lse = whole(attend, batch, options)
    plan = ExtendPlan.from_lengths([50], device="cpu")
    for heads in (slice(8, 16), slice(4, 8), slice(11, 12), slice(0, 3)):
        key_head = heads.start // 8
        mine = {**options}
        if "sinks" in mine:
            mine["sinks"] = mine["sinks"][heads]
        rows = slice(key_head, key_head + 1)
        found = attend(batch.q[:, heads], batch.k[:, rows], batch.v[:, rows], plan=plan, **mine)
        assert equal(found, (o[:, heads], lse[:, heads]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_trimmed_prefix_without_the_keys_out_of_the_window(attend, case):
    if "window" not in case:
        case = {**case, "window": 60}
    batch = draw([300], seed=5)
    options = options_of(case, 2)
    o, lse = whole(attend, batch, options)
    kept = slice(250 - case["window"] - 3, 250)
    plan = ExtendPlan.from_lengths(
        [50], [kept.stop - kept.start], device="cpu", key_start=kept.start
    )
    cache = KVCache(batch.k[kept], batch.v[kept])
    found = attend(batch.q[250:], batch.k[250:], batch.v[250:], plan=plan, cache=cache, **options)
    assert equal(found, (o[250:], lse[250:]))


def test_any_layout_of_the_inputs(attend):
    batch = draw([150], None, 4, 2, 16, seed=6)
    plan = ExtendPlan.from_lengths([150], device="cpu")
    for window in (None, 40):
        options = {"window": window, "reproducible": True, "return_lse": True}
        want = whole(attend, batch, options)
        q, k, v = (
            x.transpose(0, 1).contiguous().transpose(0, 1) for x in (batch.q, batch.k, batch.v)
        )
        out = torch.empty(150, 4, 17)[..., :16], torch.empty(4, 150).t()
        assert equal(attend(q, k, v, plan=plan, out=out, **options), want)


def test_masked_keys_leave_a_row_its_bits(attend):
    """A row of a custom mask that equals the causal rule, whatever the other rows see."""
    batch = draw([90], [70], seed=7)
    options = {"reproducible": True, "return_lse": True}
    want = attend(**batch.arguments(), **options)
    causal = torch.arange(160)[None] <= torch.arange(70, 160)[:, None]
    mask = torch.where(torch.arange(90)[:, None] % 3 == 0, causal, torch.rand(90, 160) < 0.3)
    found = attend(**batch.arguments(), **options, custom_mask=mask.flatten())
    assert equal((found[0][::3], found[1][::3]), (want[0][::3], want[1][::3]))


def test_a_quantised_cache_that_holds_the_new_keys_too(attend):
    batch = draw([200], HQ=2, HK=1, D=16, seed=8)
    options = {"reproducible": True, "return_lse": True}
    scales = {"k_scale": 0.02, "v_scale": torch.tensor([0.03])}
    want = Steps(batch, 16, True, 0, FP8, **scales).step(attend, 0, 200, options)
    steps = Steps(batch, 16, True, 1, FP8, **scales)
    for begin, end in ((0, 70), (70, 71), (71, 200)):
        found = steps.step(attend, begin, end, options)
        assert equal(found, (want[0][begin:end], want[1][begin:end]))


def test_a_cache_of_other_values_than_the_new_keys_is_declined():
    batch = draw([5], [9], dtype=torch.float32)
    plan = ExtendPlan.from_lengths([5], [9], device="cpu")
    for cache in (
        KVCache(batch.prefix_k.to(FP8), batch.prefix_v.to(FP8), 1.0, 1.0),
        KVCache(batch.prefix_k.bfloat16(), batch.prefix_v.bfloat16()),
    ):
        arguments = {"plan": plan, "cache": cache, "reproducible": True}
        with pytest.raises(Declined, match="new keys in the cache too"):
            headstart.extend_attention(batch.q, batch.k, batch.v, **arguments)
        rows = headstart.explain("extend_attention", batch.q, batch.k, batch.v, **arguments)
        assert {row[0]: row[1] for row in rows} == {
            "torch": False,
            "triton": False,
            "reference": True,
        }


def test_positions_that_are_not_runs_are_declined():
    batch = draw([2], [3])
    for options in (
        {"key_positions": [0, 2, 4], "query_start": 5},
        {"query_start": 1},
    ):
        with pytest.raises(Declined, match="reproducible"):
            headstart.extend_attention(**batch.arguments(**options), reproducible=True)


PROCESS = """
import hashlib, torch
torch.set_num_threads({threads})
from headstart import ExtendPlan, extend_attention
at = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(200, h, 64, generator=at) for h in (5, 1, 1))
digest = hashlib.sha256()
for window in (None, 128):
    o, lse = extend_attention(
        q, k, v, plan=ExtendPlan.from_lengths([200], device="cpu"), window=window,
        sinks=torch.linspace(-2, 2, 5), reproducible=True, return_lse=True,
    )
    digest.update(o.numpy().tobytes() + lse.numpy().tobytes())
print(digest.hexdigest())
"""


def test_one_and_two_threads_in_processes_of_their_own():
    digests = [
        subprocess.run(
            [sys.executable, "-c", PROCESS.format(threads=threads)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for threads in (1, 2)
    ]
    assert digests[0] == digests[1]
    assert len(digests[0].strip()) == 64
