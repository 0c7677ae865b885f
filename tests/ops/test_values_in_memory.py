"""Tensors whose values are not what lies at their address, in every argument of every operation.

Kernels read by address. A view that PyTorch negates when it is read and zeros that it never wrote
are ordinary values, so they are computed with; what has no memory is refused by name, and so is
whatever kernels would have to write where a value is not kept.
"""

import pytest
import torch
from tests.implementations import DEVICE, by_name, here
from torch._subclasses.fake_tensor import FakeTensorMode

import headstart
from headstart import DeltaCache, ExtendPlan, Gate, KVCache, Pool, Schedule

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="copies of such tensors are ordinary ones")

IMPLEMENTATIONS = here("reference", "torch", "triton")
T, H, HV, K, V = 3, 1, 2, 16, 16


class Wrapped(torch.Tensor):
    """A tensor around another, without a storage, as those of torch.distributed are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("it is refused before anything is computed with it")


def zeros(x):
    return torch._efficientzerotensor(*x.shape, dtype=x.dtype)


def negated(x):
    return torch._neg_view(-x)


def repeated(x):
    return x[:1].expand(x.shape)


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def halved(x):
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
    return x


LAZY = negated, zeros
"""Tensors whose values are found nowhere in memory."""
WITHOUT = freed, halved, Wrapped
"""Tensors without memory, or without all of it."""


def cache():
    sizes = {"H": H, "HV": HV, "K": K, "V": V, "conv_channels": 6}
    return DeltaCache(4, **sizes, dtype=torch.float32, device="cpu")


def on(lengths=(T,), **how):
    return Schedule(lengths, device="cpu", **how)


def rows():
    return {
        "q": torch.randn(T, H, K),
        "k": torch.nn.functional.normalize(torch.randn(T, H, K), dim=-1),
        "v": torch.randn(T, HV, V),
        "g": -torch.rand(T, HV),
        "beta": torch.rand(T, HV),
    }


def rule(run, state, a_log, dt_bias, **given):
    return run("gated_delta_rule", **given, state=state, gate=Gate.raw(a_log, dt_bias),
               return_state=True)  # fmt: skip


def rule_in_pool(run, state, read_slots, write_slots, present, snapshots, kept, out):
    step = on(start_positions=64, snapshot_positions=[[64]])
    torch.manual_seed(1)
    result = run(
        "gated_delta_rule", **rows(), schedule=step, out=out,
        state=Pool(state, read_slots, write_slots, present), snapshots=Pool(snapshots, None, kept),
    )  # fmt: skip
    return *result, state, snapshots


def token_by_token(run, **given):
    return run("recurrent_gated_delta_rule", **given, return_state=True)


def in_cache(run, **tensors):
    held = cache()
    held.tensors.update(tensors)
    torch.manual_seed(1)
    return run("gated_delta_rule", **rows(), schedule=on(), state=held.at([1]))


def convolved(run, **given):
    return run("causal_conv1d", **given, return_state=True)


def convolved_in_cache(run, **tensors):
    held = cache()
    held.tensors.update(tensors)
    x, weight = torch.ones(T, 6), torch.ones(6, 4)
    return run("causal_conv1d", x, weight, schedule=on(), state=held.at([1]))


def convolved_in_pool(run, x, weight, state, slots, out):
    return run("causal_conv1d", x, weight, state=Pool(state, slots), out=out)


def normed(run, **given):
    return run("rms_norm_gated", **given)


def attended(run, indices, out, lse, k_cache, v_cache, **given):
    plan = ExtendPlan.from_slots([T], [0, 2], indices, new_in_cache=False)
    return run("extend_attention", **given, plan=plan, cache=KVCache(k_cache, v_cache),
               out=(out, lse))  # fmt: skip


def attended_float8(run, k_cache, v_cache, **scales):
    plan = ExtendPlan.from_lengths([T], [2], device="cpu")
    eight = [x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache)]
    return run("extend_attention", **heads(), plan=plan, cache=KVCache(*eight, **scales))


def merged(run, o, lse, sinks):
    return run("merge_attention", [(o, lse), (torch.ones(T, 2, 16), torch.ones(T, 2))], sinks)


def merged_out(run, o, lse):
    return run("merge_attention", [(torch.ones(T, 2, 16), torch.ones(T, 2))], out=(o, lse))


def written(run, k, v, k_cache, v_cache, slots):
    run("write_kv", k, v, KVCache(k_cache, v_cache), slots)
    return k_cache, v_cache


def heads():
    torch.manual_seed(2)
    shapes = {"q": (T, 2, 16), "k": (T, 1, 16), "v": (T, 1, 16)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def keys():
    return {"k_cache": torch.randn(4, 1, 16), "v_cache": torch.randn(4, 1, 16)}


INPUTS = {
    rule: lambda: rows() | {
        "state": torch.randn(1, HV, K, V), "a_log": torch.randn(HV), "dt_bias": torch.randn(HV)
    },
    rule_in_pool: lambda: {"read_slots": ints(1), "write_slots": ints(2), "kept": ints(3)},
    token_by_token: rows,
    convolved: lambda: {
        "x": torch.randn(T, 6), "weight": torch.randn(6, 4), "bias": torch.randn(6),
        "state": torch.randn(1, 3, 6),
    },
    convolved_in_pool: lambda: {"slots": ints(2)},
    normed: lambda: {
        "x": torch.randn(T, 6), "weight": torch.randn(6), "gate": torch.randn(T, 6)
    },
    attended: lambda: heads() | {"sinks": torch.randn(2), "indices": ints(3, 1)},
    merged: lambda: {
        "o": torch.randn(T, 2, 16), "lse": torch.randn(T, 2), "sinks": torch.randn(2)
    },
    written: lambda: {"k": torch.randn(1, 1, 16), "v": torch.randn(1, 1, 16), "slots": ints(3)},
}  # fmt: skip
PLACES = {
    rule_in_pool: lambda: {
        "state": torch.randn(4, HV, K, V), "snapshots": torch.randn(4, HV, K, V),
        "out": torch.randn(T, HV, V), "present": torch.tensor([True]),
    },
    in_cache: lambda: cache().tensors,
    convolved_in_pool: lambda: {
        "x": torch.ones(T, 6), "weight": torch.ones(6, 4), "state": torch.randn(4, 3, 6),
        "out": torch.randn(T, 6),
    },
    convolved_in_cache: lambda: cache().tensors,
    attended: lambda: keys() | {"out": torch.randn(T, 2, 16), "lse": torch.randn(T, 2)},
    attended_float8: lambda: keys() | {"k_scale": torch.rand(1), "v_scale": torch.rand(1)},
    merged_out: lambda: {"o": torch.randn(T, 2, 16), "lse": torch.randn(T, 2)},
    written: keys,
}  # fmt: skip
"""What calls write, or keep for later ones."""
NOT_PLACES = {"present", "x", "weight"}
CALLED = {
    "kept": "snapshots", "slots": "(read_)?slots", "indices": "kv_indices", "lse": r"(lse|.*\[1\])",
    "o": r".*\[0\]", "k_cache": "cache.k", "v_cache": "cache.v",
}  # fmt: skip
"""What an error calls arguments of other names here."""


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture
def run(implementation):
    """An operation of this name, computed by one implementation."""

    def run(name, *args, **given):
        return by_name(getattr(headstart, name), implementation)(*args, **given)

    return run


def arguments(call):
    torch.manual_seed(0)
    nothing = dict
    return INPUTS.get(call, nothing)() | PLACES.get(call, nothing)()


def tensors_of(result):
    found = (result,) if isinstance(result, torch.Tensor) else result
    return [x for x in found if x is not None]


def words(name):
    return rf"^(the cache's )?{CALLED.get(name, name)}: expected "


@pytest.mark.parametrize("call", INPUTS, ids=lambda call: call.__name__)
def test_lazy_and_repeated_inputs_are_computed_with(run, call):
    for name in INPUTS[call]():
        for odd_one in (*LAZY, repeated):
            odd, plain = arguments(call), arguments(call)
            odd[name] = odd_one(odd[name])
            plain[name] = odd[name].clone(memory_format=torch.contiguous_format)
            found, wanted = (tensors_of(call(run, **given)) for given in (odd, plain))
            torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("call", PLACES, ids=lambda call: call.__name__)
def test_places_must_hold_their_values(run, call):
    for name in PLACES[call]().keys() - NOT_PLACES:
        if call is in_cache and name.startswith("history"):
            continue
        for lazy in LAZY:
            odd = arguments(call)
            odd[name] = zeros(odd[name]) if odd[name].dtype == torch.bool else lazy(odd[name])
            if call is attended_float8 and name.endswith("cache"):
                continue
            with pytest.raises(ValueError, match=words(name) + "values in memory, got"):
                call(run, **odd)


@pytest.mark.parametrize("call", INPUTS | PLACES, ids=lambda call: call.__name__)
def test_what_has_no_memory_is_refused(run, call):
    for name in arguments(call):
        if call is attended_float8 and name.endswith("cache"):
            continue
        for without in WITHOUT:
            odd = arguments(call)
            if without is halved and odd[name].untyped_storage().nbytes() < 2:
                continue
            odd[name] = without(odd[name])
            with pytest.raises(ValueError, match=words(name)):
                call(run, **odd)


@pytest.mark.parametrize(
    ("call", "name"), [(rule, "v"), (rule, "a_log"), (convolved, "weight"), (attended, "v")]
)
def test_a_fake_tensor_beside_real_ones_is_refused(run, call, name):
    odd = arguments(call)
    odd[name] = FakeTensorMode().from_tensor(odd[name])
    with pytest.raises(ValueError, match=words(name) + "a tensor with memory, got a FakeTensor"):
        call(run, **odd)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
@pytest.mark.parametrize("call", [rule, convolved, normed, attended, merged, written])
def test_what_torch_func_wraps_is_refused(run, call, transform):
    """Also where no gradient is asked for."""
    given = arguments(call)
    name = next(iter(given))

    def wrapping(x):
        with torch.no_grad():
            call(run, **given | {name: x})

    with pytest.raises(ValueError, match=words(name) + "a tensor with memory, got one that torch"):
        transform(wrapping)(given[name])


@pytest.mark.parametrize("call", [rule_in_pool, convolved_in_pool])
def test_lists_on_no_device_are_refused(run, call):
    """Nobody could look at them."""
    for name in {"read_slots", "write_slots", "kept", "present", "slots"} & arguments(call).keys():
        odd = arguments(call)
        odd[name] = odd[name].to("meta")
        with pytest.raises(ValueError, match=words(name) + "a list .*, got one on meta"):
            call(run, **odd)
