"""After a steady call: tensors whose values are not what lies at their address.

They may be laid out like those of the call that was recorded, which kernels would then read.
"""

import pytest
import torch

pytest.importorskip("triton")

from tests.implementations import KERNELS
from tests.runtime.fake_driver import Map
from tests.runtime.steady_calls import is_steady, launched

import headstart
from headstart import DeltaCache, ExtendPlan, KVCache, Pool, Schedule
from headstart.runtime import layouts

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")

T = 64
STEP = Schedule([T], device="cpu")
PLAN = ExtendPlan.from_lengths([T], [30], device="cpu")


def heads(H, D=128):
    return torch.zeros(T, H, D, dtype=torch.bfloat16)


def pool():
    return torch.zeros(5, 4, 128, 128)


def rule(q, k, v, g, state):
    return (q, k, v, g, None), {"schedule": STEP, "state": state, "return_state": True}


def rule_in_pool(state, slots):
    rows = heads(2), heads(2), heads(4), None, None
    return rows, {"schedule": STEP, "state": Pool(state, slots)}


def convolved(x, weight):
    return (x, weight), {"schedule": STEP}


def normed(x, weight, gate):
    return (x, weight, gate), {}


def attended(q, k, v, sinks, k_cache, v_cache):
    return (q, k, v), {"plan": PLAN, "cache": KVCache(k_cache, v_cache), "sinks": sinks}


def written(k, v, slots, k_cache, v_cache):
    return (k, v, KVCache(k_cache, v_cache), slots), {}


def write(*arguments, **options):
    headstart.write_kv(*arguments, **options)
    return ()


FUNCTIONS = {
    convolved: headstart.causal_conv1d,
    normed: headstart.rms_norm_gated,
    attended: headstart.extend_attention,
    written: write,
}
INPUTS = {
    rule: lambda: {"q": heads(2), "k": heads(2), "v": heads(4), "g": torch.zeros(T, 4),
                   "state": torch.zeros(1, 4, 128, 128)},
    rule_in_pool: lambda: {"slots": torch.tensor([1])},
    convolved: lambda: {"x": torch.zeros(T, 24), "weight": torch.zeros(24, 4)},
    normed: lambda: {"x": heads(4), "weight": torch.zeros(128), "gate": heads(4)},
    attended: lambda: {"q": heads(4), "k": heads(1), "v": heads(1), "sinks": torch.zeros(4)},
    written: lambda: {"k": heads(1), "v": heads(1), "slots": torch.arange(T)},
}  # fmt: skip
PLACES = {
    rule_in_pool: lambda: {"state": pool()},
    attended: lambda: {"k_cache": heads(1), "v_cache": heads(1)},
    written: lambda: {"k_cache": heads(1), "v_cache": heads(1)},
}


def steady(driver, call):
    """Arguments of a call that is steady by now, and what makes it."""
    PLAN.prepared.clear()  # for the driver of another test
    given = INPUTS[call]() | PLACES.get(call, dict)()

    def go(**changed):
        function = FUNCTIONS.get(call, headstart.gated_delta_rule)
        return launched(driver, call(**given | changed), "triton", function=function)

    for _ in range(2):
        go()
    assert is_steady(driver)
    return given, go


def addresses(driver):
    """Of all memory that kernels were told of."""
    return {
        value.data_ptr() if isinstance(value, torch.Tensor) else getattr(value, "address", value)
        for args in driver.launched
        for value in args
        if isinstance(value, (torch.Tensor, Map, int))
    }


@pytest.fixture(params=["guards", "one by one"], autouse=True)
def guards(request, monkeypatch):
    """Also with a PyTorch that has no guards."""
    if request.param != "guards":
        monkeypatch.setattr(layouts, "TensorGuards", None)


@pytest.mark.parametrize("call", INPUTS, ids=lambda call: call.__name__)
def test_lazy_values_are_copied_for_kernels(driver, call):
    given, go = steady(driver, call)
    for name in INPUTS[call]():
        x = given[name]
        go()
        assert is_steady(driver)
        assert x.data_ptr() in addresses(driver)
        for lazy in (torch._neg_view(x), torch._efficientzerotensor(*x.shape, dtype=x.dtype)):
            if name == "slots" and call is written and lazy._is_zerotensor():
                continue  # one slot written by all
            for _ in range(2):
                go(**{name: lazy})
                assert not is_steady(driver)
                assert x.data_ptr() not in addresses(driver)
        go()
        assert is_steady(driver)


@pytest.mark.parametrize("call", PLACES, ids=lambda call: call.__name__)
def test_lazy_places_are_told(driver, call):
    given, go = steady(driver, call)
    for name in PLACES[call]():
        for _ in range(2):
            with pytest.raises(ValueError, match="expected values in memory, got ones that PyTor"):
                go(**{name: torch._neg_view(given[name])})


@pytest.mark.parametrize("call", INPUTS, ids=lambda call: call.__name__)
def test_freed_memory_is_told(driver, call):
    """As of parameters that are sharded between calls, and of caches that are put to sleep."""
    given, go = steady(driver, call)
    for x in given.values():
        size = x.untyped_storage().nbytes()
        x.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(ValueError, match=r": expected memory for its \d+ bytes, got 0"):
                go()
        x.untyped_storage().resize_(size)
        x.zero_() if x.dtype != torch.int64 else x.copy_(torch.arange(len(x)))
        go()


def test_freed_and_lazy_tensors_of_a_cache_are_told(driver):
    held = DeltaCache(3, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16, device="cpu")
    call = (heads(2), heads(2), heads(4), None, None), {"schedule": STEP, "state": held.at([1])}
    for _ in range(2):
        launched(driver, call, "triton")
    assert is_steady(driver)
    for name, x in held.tensors.items():
        held.tensors[name] = torch._neg_view(x)
        with pytest.raises(ValueError, match=f"the cache's {name}: expected values in memory"):
            launched(driver, call, "triton")
        held.tensors[name] = x
        x.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"the cache's {name}: expected memory for its"):
            launched(driver, call, "triton")
        with pytest.raises(ValueError, match=f"the cache's {name}: expected memory for its"):
            held.reset([0])
        held.tensors[name] = torch.zeros_like(x, memory_format=torch.contiguous_format)
    launched(driver, call, "triton")


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize, torch.vmap])
def test_what_torch_func_wraps_is_told(driver, transform):
    given, go = steady(driver, normed)

    def wrapping(x):
        with torch.no_grad(), pytest.raises(ValueError, match=r"x: expected a .*, got one that"):
            go(x=x)
        return x.sum()

    x = given["x"]
    transform(wrapping)(x[None] if transform is torch.vmap else x)


@pytest.mark.parametrize("plain", [True, False], ids=["a tensor", "a pool"])
@pytest.mark.parametrize("convolution", [False, True], ids=["rule", "convolution"])
def test_snapshots_over_states_are_told(driver, plain, convolution):
    """Wherever the first of them begins."""
    shape, dtype = ((3, 24), torch.bfloat16) if convolution else ((4, 128, 128), torch.float32)
    memory = torch.zeros(9, *shape, dtype=dtype)
    step = Schedule([T], snapshot_every=64, device="cpu")
    rows = (heads(1, 24)[:, 0], torch.zeros(24, 4)) if convolution else (
        heads(2), heads(2), heads(4), None, None
    )  # fmt: skip
    function = headstart.causal_conv1d if convolution else headstart.gated_delta_rule

    def go(begin):
        state = memory[4:5] if plain else Pool(memory[4:6], [0])
        kept = Pool(memory[begin : begin + 3], None, [1])
        call = rows, {"schedule": step, "state": state, "snapshots": kept}
        launched(driver, call, "triton", function=function)

    go(0)
    go(1)
    assert is_steady(driver)
    for begin in (2, 3, 4 if plain else 5):
        with pytest.raises(ValueError, match="snapshots: expected memory of its own, got that of"):
            go(begin)
    go(6)
    assert is_steady(driver)
