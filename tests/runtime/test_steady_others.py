"""Steady calls of what stands beside the gated delta rule: convolution, gated norm, attention."""

import pytest
import torch

pytest.importorskip("triton")

from tests.implementations import KERNELS
from tests.runtime.steady_calls import alike, is_steady, launched, the_long_way

import headstart
from headstart import DeltaCache, ExtendPlan, KVCache, Pool, Schedule

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")


def on(lengths, **how):
    return Schedule(lengths, device="cpu", **how)


def cache(channels):
    sizes = {"H": 2, "HV": 4, "K": 16, "V": 16, "conv_channels": channels}
    return DeltaCache(6, **sizes, dtype=torch.bfloat16, device="cpu", draft_tokens=0)


def inputs(T, channels=24, dtype=torch.bfloat16):
    weight = torch.nn.Parameter(torch.zeros(channels, 4), requires_grad=False)
    return torch.zeros(T, channels, dtype=dtype), weight, torch.zeros(channels)


def histories(*slots, **how):
    return Pool(torch.zeros(7, 3, 24, dtype=torch.bfloat16), *slots, **how)


OTHERS = {
    "convolution": lambda: (inputs(90), {"schedule": on([60, 20])}),
    "convolution without bias": lambda: (
        inputs(90)[:2],
        {"schedule": on([90]), "activation": None, "return_state": True},
    ),
    "convolution with histories": lambda: (
        inputs(90),
        {"schedule": on([60, 30], snapshot_every=64, start_positions=10),
         "state": torch.zeros(2, 3, 24, dtype=torch.bfloat16), "snapshots": torch.bfloat16,
         "out": torch.zeros(90, 24, dtype=torch.bfloat16)},
    ),
    "convolution in a pool": lambda: (
        inputs(90),
        {"schedule": on([60, 30]), "state": histories([1, 2], [3, -1], [True, False])},
    ),
    "convolution in a cache": lambda: (
        inputs(90),
        {"schedule": on([60, 30]), "state": cache(24).at([3, 0])},
    ),
    "norm": lambda: (
        (torch.zeros(9, 4, 128, dtype=torch.bfloat16), torch.zeros(128),
         torch.zeros(9, 4, 128, dtype=torch.bfloat16)),
        {},
    ),
    "norm of slices": lambda: (
        (torch.zeros(9, 4, 256)[..., :128], torch.zeros(128), torch.zeros(9, 4, 128)),
        {"activation": "sigmoid", "eps": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_stands_beside_the_rule_too(driver, monkeypatch, name):
    first, call = OTHERS[name](), OTHERS[name]()
    conv = name.startswith("convolution")
    function = {"function": headstart.causal_conv1d if conv else headstart.rms_norm_gated}
    launched(driver, first, "triton", **function)
    assert not is_steady(driver)
    result, found = launched(driver, call, "triton", **function)
    assert is_steady(driver)
    expected, wanted = the_long_way(monkeypatch, driver, call, "triton", **function)
    assert found == wanted
    alike(result if conv else (result,), expected if conv else (expected,))


def heads(T, HQ=8, HK=2, D=64, dtype=torch.bfloat16):
    q = torch.zeros(T, HQ, D, dtype=dtype)
    return q, torch.zeros(T, HK, D, dtype=dtype), torch.zeros(T, HK, D, dtype=dtype)


def kv(slots, HK=2, D=64, dtype=torch.bfloat16, page=None, **scales):
    shape = (slots, HK, D) if page is None else (slots, page, HK, D)
    return KVCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), **scales)


def plain():
    return ExtendPlan.from_lengths([70, 9], device="cpu")


def consecutive(**how):
    return ExtendPlan.from_lengths([5, 1], [300, 900], device="cpu", **how)


def listed():
    indices = torch.arange(400, dtype=torch.int32)
    return ExtendPlan.from_slots([3, 2], [0, 300, 400], indices, new_in_cache=False, device="cpu")


def pages():
    table = torch.arange(32).view(2, 16)
    return ExtendPlan.from_pages([1, 1], [900, 1000], table, 64, new_in_cache=True, device="cpu")


FP8 = torch.float8_e4m3fn
ATTENTION = {
    "no prefix": (plain, lambda: (heads(79), {})),
    "sinks and a window": (
        plain,
        lambda: (heads(79), {"sinks": torch.zeros(8), "window": 33, "softcap": 20}),
    ),
    "rows of nobody": (plain, lambda: (heads(90), {"return_lse": True, "scale": 0.5})),
    "a prefix": (consecutive, lambda: (heads(6), {"cache": kv(1200)})),
    "a prefix, reproducible": (
        consecutive,
        lambda: (heads(6), {"cache": kv(1200), "reproducible": True}),
    ),
    "a part": (consecutive, lambda: (heads(6), {"cache": kv(1200), "part": "prefix"})),
    "slots": (listed, lambda: (heads(5), {"cache": kv(400)})),
    "float8 with scales": (
        listed,
        lambda: (
            heads(5),
            {"cache": kv(400, dtype=FP8, k_scale=torch.ones(1), v_scale=0.5)},
        ),
    ),
    "pages": (
        pages,
        lambda: ((heads(2)[0], None, None), {"cache": kv(32, page=64), "window": 100}),
    ),
    "decoding on pages": (
        pages,
        lambda: ((heads(2)[0], None, None), {"cache": kv(32, page=64)}),
    ),
    "a mask and results of the caller": (
        plain,
        lambda: (
            heads(79),
            {"custom_mask": torch.ones(70 * 70 + 81, dtype=torch.bool), "return_lse": True,
             "out": (torch.zeros(79, 8, 64, dtype=torch.bfloat16), torch.zeros(79, 8))},
        ),
    ),
}  # fmt: skip
EXTEND = {"function": headstart.extend_attention}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_launches_what_the_long_way_launches(driver, monkeypatch, name):
    plan, make = ATTENTION[name]
    plan = plan()
    first, call = make(), make()
    launched(driver, first, "triton", plan=plan, **EXTEND)
    assert not is_steady(driver)
    for again in (call, first):
        result, found = launched(driver, again, "triton", plan=plan, **EXTEND)
        assert is_steady(driver)
        expected, wanted = the_long_way(monkeypatch, driver, again, "triton", plan=plan, **EXTEND)
        assert found == wanted
        pairs = [(x,) if isinstance(x, torch.Tensor) else x for x in (result, expected)]
        alike(*pairs)


WRITES = {
    "rows": lambda: (*heads(5)[1:], kv(40), torch.tensor([3, 9, -1, 4, 8])),
    "pages": lambda: (*heads(2)[1:], kv(4, page=16), torch.tensor([3, 63], dtype=torch.int32)),
    "float8": lambda: (
        *heads(2)[1:], kv(40, dtype=FP8, k_scale=torch.ones(2), v_scale=2.0), torch.tensor([1, 0]),
    ),
}  # fmt: skip


def write(*arguments, **options):
    """`write_kv`, with the cache as a result that stays where it is."""
    headstart.write_kv(*arguments, **options)
    return ()


@pytest.mark.parametrize("name", WRITES)
def test_writing_launches_what_the_long_way_launches(driver, monkeypatch, name):
    function = {"function": write}
    first, call = (WRITES[name](), {}), (WRITES[name](), {})
    launched(driver, first, "triton", **function)
    assert not is_steady(driver)
    _, found = launched(driver, call, "triton", **function)
    assert is_steady(driver)
    assert found == the_long_way(monkeypatch, driver, call, "triton", **function)[1]


def test_writing_into_the_rows_that_are_read_is_told(driver):
    k, v, cache, slots = WRITES["rows"]()
    for _ in range(2):
        launched(driver, ((k, v, cache, slots), {}), "triton", function=write)
    assert is_steady(driver)
    with pytest.raises(ValueError, match=r"cache.k: expected memory of its own, got that of k"):
        headstart.write_kv(cache.k[1:6], v, cache, slots, implementation="triton")


@pytest.mark.parametrize("capacity", [None, (3, 16, 2000)])
def test_another_forward_of_a_plan_is_prepared_anew(driver, monkeypatch, capacity):
    plan = consecutive(capacity=capacity)
    call = heads(6), {"cache": kv(1200)}
    for lengths in ([300, 900], [500, 2], [500, 3]):
        plan.update_([5, 1], lengths)
        launched(driver, call, "triton", plan=plan, **EXTEND)
        assert not is_steady(driver)
        _, found = launched(driver, call, "triton", plan=plan, **EXTEND)
        assert is_steady(driver)
        assert found == the_long_way(monkeypatch, driver, call, "triton", plan=plan, **EXTEND)[1]


def test_mistakes_of_attention_are_told_after_a_call_that_was_right(driver):
    plan, right = consecutive(), {"cache": kv(1200)}
    for _ in range(2):
        launched(driver, (heads(6), right), "triton", plan=plan, **EXTEND)
    for wrong in (
        {"cache": kv(1000)}, {"cache": None}, {"window": 0}, {"window": True}, {"part": "none"},
        {"scale": float("inf")}, {"softcap": -1.0}, {"sinks": torch.zeros(7)}, {"causal": 1},
        {"return_lse": None}, {"out": torch.zeros(6, 8, 64)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^[a-z_]+: "):
            launched(driver, (heads(6), right | wrong), "triton", plan=plan, **EXTEND)
