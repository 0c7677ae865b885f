"""Where cached keys lie: slots, pages, padded rows, strides, float8; and storing them."""

from dataclasses import replace

import pytest
import torch
from tests.ops.extend_attention.oracle import ROUNDING, Batch, draw, expect_close, expected

import headstart
from headstart import ExtendPlan, KVCache, write_kv
from headstart.evidence.verify.tolerances import WIDE

FP8 = torch.float8_e4m3fn
LAYOUTS = ["slots", "pages of 1", "pages of 16", "pages of 64", "flat pages", "padded", "left"]


def stored(batch: Batch, layout: str, new_in_cache: bool, dtype=None, options=None, **scales):
    """Arguments with the keys in a cache of this layout; what nobody owns is NaN.

    options: more of the plan's.
    """
    at = torch.Generator().manual_seed(1)
    new, prefix = batch.lengths, batch.prefix
    held = [p + (n if new_in_cache else 0) for n, p in zip(new, prefix, strict=True)]
    total = [p + n for n, p in zip(new, prefix, strict=True)]
    HK, D, DV = batch.k.shape[1], batch.k.shape[2], batch.v.shape[2]
    dtype = batch.k.dtype if dtype is None else dtype
    options = {"new_in_cache": new_in_cache} | (options or {})
    if layout == "slots":
        slots = torch.randperm(sum(held) + 9, generator=at)[: sum(held)]
        shape = (sum(held) + 9,)
        indptr = [3, *(3 + sum(held[: n + 1]) for n in range(len(held)))]
        indices = torch.cat([torch.tensor([-5, -5, -5]), slots]).to(torch.int32)
        plan = ExtendPlan.from_slots(new, indptr, indices, **options)
        slots = slots.split(held)
    elif "pages" in layout:
        size = 16 if layout == "flat pages" else int(layout.removeprefix("pages of "))
        pages = [-(-count // size) for count in held]
        order = torch.randperm(sum(pages) + 3, generator=at)
        table = torch.full((len(new), max(pages, default=0) + 2), -7, dtype=torch.int32)
        for n, mine in enumerate(order[: sum(pages)].split(pages)):
            table[n, : len(mine)] = mine
        plan = ExtendPlan.from_pages(new, torch.tensor(total), table, size, **options)
        shape = (len(order), size)
        slots = [
            table[n].long()[torch.arange(count) // size] * size + torch.arange(count) % size
            for n, count in enumerate(held)
        ]
        if layout == "flat pages":
            shape = (len(order) * size,)
    else:
        length = max(held, default=0) + 5
        first = [length - count for count in held] if layout == "left" else [0] * len(new)
        plan = ExtendPlan.from_padded(
            new, total, length, offsets=first if layout == "left" else None, **options
        )
        shape = (len(new), length)
        slots = [n * length + first[n] + torch.arange(held[n]) for n in range(len(new))]
    cache = KVCache(
        torch.full((*shape, HK, D), torch.nan).to(dtype),
        torch.full((*shape, HK, DV), torch.nan).to(dtype),
        **scales,
    )
    rows = torch.tensor([0, *new]).cumsum(0).tolist()
    cached = torch.tensor([0, *prefix]).cumsum(0).tolist()
    for n, mine in enumerate(slots):
        old, fresh = slice(cached[n], cached[n + 1]), slice(rows[n], rows[n + 1])
        k, v = batch.prefix_k[old], batch.prefix_v[old]
        if new_in_cache:
            k, v = torch.cat([k, batch.k[fresh]]), torch.cat([v, batch.v[fresh]])
        write_kv(k, v, cache, mine)
    k, v = (None, None) if new_in_cache else (batch.k, batch.v)
    return {"q": batch.q, "k": k, "v": v, "plan": plan, "cache": cache}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("new_in_cache", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"window": 50}, {"softcap": 4.0}, {"reproducible": True}], ids=str
)
@pytest.mark.parametrize("sizes", [(16, 24), (64, 64)], ids=["padded tiles", "whole tiles"])
def test_every_layout_gives_the_keys_in_order_and_nothing_else(
    attend, layout, new_in_cache, options, sizes
):
    """Kernels may copy whole tiles of 64 channels in bulk, and read all others key by key."""
    batch = draw([80, 0, 1, 33], [100, 7, 65, 0], 4, 2, *sizes, seed=2)
    rules = {name: value for name, value in options.items() if name != "reproducible"}
    arguments = stored(batch, layout, new_in_cache)
    found = attend(**arguments, **options, return_lse=True)
    expect_close(found, expected(batch, **rules))


@pytest.mark.parametrize("new_in_cache", [False, True])
@pytest.mark.parametrize("part", ["prefix", "extend"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_partials_of_every_layout(attend, part, new_in_cache, reproducible):
    """With new keys enough for whole tiles."""
    batch = draw([150, 5], [40, 0], seed=3)
    for layout in LAYOUTS:
        arguments = stored(batch, layout, new_in_cache)
        found = attend(**arguments, part=part, reproducible=reproducible)
        expect_close(found, expected(batch, part=part))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("covers", ["all", "new"])
def test_a_custom_mask_over_new_keys_in_the_cache(attend, covers, window, reproducible):
    batch = draw([150, 40], [50, 70], seed=9)
    at = torch.Generator().manual_seed(9)
    columns = [n + (p if covers == "all" else 0) for n, p in ((150, 50), (40, 70))]
    masks = [torch.rand(n, c, generator=at) < 0.5 for n, c in zip((150, 40), columns, strict=True)]
    call = {
        "custom_mask": torch.cat([mask.flatten() for mask in masks]),
        "window": window,
        "reproducible": reproducible,
        "return_lse": True,
    }
    options = {"mask_covers": covers}
    want = expected(batch, masks=masks, covers=covers, window=window)
    found = [
        attend(**stored(batch, "pages of 16", new_in_cache, options=options), **call)
        for new_in_cache in (True, False)
    ]
    for each in found:
        expect_close(each, want)
    if reproducible:
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("gap", [1, 64])
def test_new_keys_in_the_cache_behind_a_gap(attend, gap, window, reproducible):
    """A prefix whose end was trimmed: its keys and the new ones are two runs of positions."""
    batch = draw([150], [64], seed=10, query_start=[71 + gap], positions=[torch.arange(7, 71)])
    options = {"key_start": 7, "query_start": 71 + gap}
    for layout in ("slots", "pages of 16", "padded"):
        arguments = stored(batch, layout, True, options=options)
        found = attend(**arguments, window=window, reproducible=reproducible, return_lse=True)
        expect_close(found, expected(batch, window=window))


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_cache_wider_than_the_queries_keeps_its_digits(attend, reproducible):
    """Stored values are the only rounding: queries of float16 multiply float32 keys."""
    batch = draw([40], [60], seed=11)
    q = batch.q.half()
    arguments = stored(replace(batch, q=q.float()), "slots", True) | {"q": q}
    o, lse = attend(**arguments, reproducible=reproducible, return_lse=True)
    want = expected(replace(batch, q=q.float()))
    expect_close((o, lse), want, 2 * ROUNDING[torch.float16])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float8_caches_with_scales(attend, layout, per_head):
    """Against the oracle on the values that the cache holds."""
    batch = draw([20, 3], [70, 30], 4, 2, 16, 24, seed=4)
    k_scale = torch.tensor([0.02, 0.5]) if per_head else torch.tensor([0.03])
    v_scale = torch.tensor([0.5, 0.01]) if per_head else 0.04

    def round_trip(x, scale):
        scale = scale.view(-1, 1) if isinstance(scale, torch.Tensor) else scale
        return (x / scale).clamp(-448, 448).to(FP8).float() * scale

    held = Batch(
        batch.lengths,
        batch.prefix,
        batch.q,
        batch.k,
        batch.v,
        round_trip(batch.prefix_k, k_scale),
        round_trip(batch.prefix_v, v_scale),
        batch.query_start,
        batch.positions,
    )
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for window in (None, 40):
        found = attend(
            **stored(batch, layout, False, FP8, **scales), window=window, return_lse=True
        )
        expect_close(found, expected(held, window=window))
    all_cached = Batch(
        held.lengths,
        held.prefix,
        held.q,
        round_trip(batch.k, k_scale),
        round_trip(batch.v, v_scale),
        *(held.prefix_k, held.prefix_v, held.query_start, held.positions),
    )
    arguments = stored(batch, layout, True, FP8, **scales)
    for reproducible in (False, True):
        found = attend(**arguments, reproducible=reproducible, return_lse=True)
        expect_close(found, expected(all_cached))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("power", [-100, -10, 0, 10, 100])
def test_queries_of_any_size_beside_a_float8_cache(attend, implementation, dtype, power):
    """Kernels may multiply in float16, which holds neither 2**100 nor 2**-100."""
    if dtype == torch.float16 and abs(power) > 10:
        power //= 10
    batch = draw([20, 3], [70, 30], 4, 2, 64, dtype=dtype, seed=9)
    keys = [getattr(batch, name) for name in ("k", "v", "prefix_k", "prefix_v")]
    keys = [(4 * x.float()).to(FP8).to(dtype) for x in keys]
    batch = Batch(batch.lengths, batch.prefix, batch.q * 2.0**power, *keys, [70, 30], [
        torch.arange(70), torch.arange(30)
    ])  # fmt: skip
    scale = 64**-0.5 / 4 * 2.0**-power
    arguments = stored(batch, "pages of 16", True, FP8, k_scale=1.0, v_scale=1.0)
    for options in ({}, {"reproducible": True}, {"window": 40}):
        found = attend(**arguments, scale=scale, return_lse=True, **options)
        rules = {name: value for name, value in options.items() if name != "reproducible"}
        rounding = None if implementation in WIDE else 2 * ROUNDING[dtype]
        expect_close(found, expected(batch, scale=scale, **rules), rounding)


def test_a_half_precision_cache_beside_float32_queries(attend):
    batch = draw([20], [30], seed=5)
    held = batch.prefix_k.bfloat16(), batch.prefix_v.bfloat16()
    batch.prefix_k.copy_(held[0])
    batch.prefix_v.copy_(held[1])
    plan = ExtendPlan.from_lengths([20], [30], device="cpu")
    found = attend(batch.q, batch.k, batch.v, plan=plan, cache=KVCache(*held), return_lse=True)
    expect_close(found, expected(batch))


@pytest.mark.parametrize("options", [{}, {"window": 30}, {"reproducible": True}], ids=str)
def test_caches_of_any_strides(attend, options):
    """Heads first, one tensor for keys and values, a last dimension that is not contiguous."""
    batch = draw([20], [50], 4, 2, seed=6)
    rules = {name: value for name, value in options.items() if name != "reproducible"}
    want = expected(batch, **rules)
    head_first = batch.prefix_k.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.stack([batch.prefix_k, batch.prefix_v], dim=-1)
    plan = ExtendPlan.from_lengths([20], [50], device="cpu")
    for k, v in ((head_first, batch.prefix_v), (both[..., 0], both[..., 1])):
        found = attend(
            batch.q, batch.k, batch.v, plan=plan, cache=KVCache(k, v), return_lse=True, **options
        )
        expect_close(found, want)


@pytest.mark.parametrize("layout", ["slots", "pages"])
@pytest.mark.parametrize("options", [{}, {"window": 8}, {"reproducible": True}], ids=str)
def test_caches_past_two_to_the_31_elements(attend, layout, options, tmp_path):
    """Slot numbers times strides exceed 32 bits, in a sparse file of 8.8 GB."""
    batch = draw([3], [6], 2, 1, 8, seed=7)
    pages, size = 2100, 4
    step = 2**20
    sparse = tmp_path / "cache"
    with open(sparse, "wb") as file:
        file.truncate(4 * pages * step)
    flat = torch.from_file(str(sparse), shared=True, size=pages * step, dtype=torch.float32)
    assert (pages - 1) * step > 2**31
    cache = KVCache(
        flat.as_strided((pages, size, 1, 8), (step, 8, 8, 1)),
        flat.as_strided((pages, size, 1, 8), (step, 8, 8, 1), step // 2),
    )
    table = [2099, 7, 2098]
    slots = torch.tensor([table[j // size] * size + j % size for j in range(9)], dtype=torch.int32)
    k, v = torch.cat([batch.prefix_k, batch.k]), torch.cat([batch.prefix_v, batch.v])
    write_kv(k, v, cache, slots)
    assert torch.equal(flat[2099 * step : 2099 * step + 8], batch.prefix_k[0, 0])
    if layout == "pages":
        table = torch.tensor([table], dtype=torch.int32)
        plan = ExtendPlan.from_pages([3], [9], table, size, new_in_cache=True)
    else:
        plan = ExtendPlan.from_slots([3], [0, 9], slots, new_in_cache=True)
    rules = {name: value for name, value in options.items() if name != "reproducible"}
    found = attend(batch.q, None, None, plan=plan, cache=cache, return_lse=True, **options)
    expect_close(found, expected(batch, **rules))


def test_a_nan_in_one_sequence_leaves_all_others_their_bits(attend):
    batch = draw([20, 30, 10], [70, 40, 5], seed=8)
    for options in ({}, {"window": 16}, {"softcap": 4.0}, {"reproducible": True}):
        clean = attend(**batch.arguments(), return_lse=True, **options)
        spoilt = {name: getattr(batch, name).clone() for name in ("q", "k", "v")}
        for rows in spoilt.values():
            rows[20:50] = torch.nan
        prefix_k, prefix_v = batch.prefix_k.clone(), batch.prefix_v.clone()
        prefix_k[70:110] = prefix_v[70:110] = torch.nan
        plan = ExtendPlan.from_lengths(batch.lengths, batch.prefix, device="cpu")
        found = attend(
            **spoilt, plan=plan, cache=KVCache(prefix_k, prefix_v), return_lse=True, **options
        )
        for mine, before in zip(found, clean, strict=True):
            assert torch.equal(mine[:20], before[:20])
            assert torch.equal(mine[50:], before[50:])


@pytest.mark.parametrize("who", ["reference", "torch"])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("new_in_cache", [False, True])
@pytest.mark.parametrize(("new", "prefix", "window"), [(1, 130, 5), (40, 100, 20), (3, 700, 128)])
def test_slots_that_every_window_has_left_may_be_of_others(
    who, reproducible, new_in_cache, new, prefix, window
):
    """Engines give such pages to other sequences, and one of those may hold a NaN."""
    keys, values, q = (torch.randn(prefix + new, n, 16) for n in (1, 1, 2))
    rows = {"q": q[prefix:], "k": keys[prefix:].clone(), "v": values[prefix:].clone()}
    if new_in_cache:
        rows |= {"k": None, "v": None}
    held = prefix + new * new_in_cache
    plan = ExtendPlan.from_slots([new], [0, held], list(range(held)), new_in_cache=new_in_cache)
    how = {"window": window, "reproducible": reproducible, "implementation": who}

    def attended():
        cache = KVCache(keys, values)
        return headstart.extend_attention(**rows, plan=plan, cache=cache, **how)

    wanted = attended()
    for x in (keys, values):
        x[: prefix - window + 1] = torch.nan
        assert torch.equal(attended(), wanted)


@pytest.mark.parametrize("shape", [(24,), (6, 4)], ids=["rows", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_writing_rounds_to_nearest_even_and_skips_negative_slots(write, shape, dtype):
    cache = KVCache(torch.zeros(*shape, 2, 4, dtype=dtype), torch.zeros(*shape, 2, 6, dtype=dtype))
    k, v = torch.randn(5, 2, 4), torch.randn(5, 2, 6)
    k[0, 0, 0] = 1 + 2**-8  # a tie in bfloat16: to even, down
    v[0, 0, 0] = 1 + 3 * 2**-8  # a tie in bfloat16: to even, up
    slots = [3, -1, 23, 0, -100]
    for given in (slots, torch.tensor(slots), torch.tensor(slots, dtype=torch.int32)):
        cache.k.zero_()
        cache.v.zero_()
        write(k, v, cache, given)
        for rows, store in ((k, cache.k), (v, cache.v)):
            flat = store.reshape(24, *rows.shape[1:])
            want = torch.zeros_like(flat)
            want[[3, 23, 0]] = rows[[0, 2, 3]].to(dtype)
            assert torch.equal(flat, want)
    if dtype == torch.bfloat16:
        assert float(cache.k.reshape(24, 2, 4)[3, 0, 0]) == 1.0
        assert float(cache.v.reshape(24, 2, 6)[3, 0, 0]) == 1 + 2**-6


def test_writing_float8_divides_by_the_scale_and_saturates(write):
    k = torch.tensor([[[1.0, -3.0], [1000.0, -1e9]]])
    cache = KVCache(
        torch.zeros(4, 2, 2).to(FP8),
        torch.zeros(4, 2, 2).to(FP8),
        k_scale=torch.tensor([0.5, 2.0]),
        v_scale=4.0,
    )
    write(k, k, cache, [2])
    assert cache.k[2].float().tolist() == [[2.0, -6.0], [448.0, -448.0]]
    assert cache.v[2].float().tolist() == [[0.25, -0.75], [256.0, -448.0]]
    # 17 and 19 lie between 16, 18 and 20: ties go to the even mantissa.
    ties = torch.tensor([[[17.0, 19.0], [-17.0, -19.0]]])
    one = KVCache(cache.k, cache.v, 1.0, 1.0)
    write(ties, ties, one, [0])
    assert cache.k[0].float().tolist() == [[16.0, 20.0], [-16.0, -20.0]]


def test_writing_nothing(write):
    cache = KVCache(torch.zeros(4, 1, 2), torch.zeros(4, 1, 2))
    write(torch.ones(0, 1, 2), torch.ones(0, 1, 2), cache, [])
    write(torch.ones(2, 1, 2), torch.ones(2, 1, 2), cache, [-1, -1])
    assert not cache.k.any()


def test_served_calls_are_counted():
    from headstart.runtime.dispatch import served

    batch = draw([3])
    before = served["extend_attention", "torch"]
    headstart.extend_attention(**batch.arguments())
    assert served["extend_attention", "torch"] == before + 1
