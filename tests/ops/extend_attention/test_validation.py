"""A caller's mistake is one ValueError that names the argument; nothing is written before it."""

import inspect

import pytest
import torch
from tests.ops.extend_attention.oracle import draw
from torch._subclasses.fake_tensor import FakeTensorMode

import headstart
from headstart import ExtendPlan, KVCache, Workspace, extend_attention, write_kv
from headstart.ops.extend_attention import spec

FP8 = torch.float8_e4m3fn


def call(**changes):
    """A valid call with some arguments changed."""
    batch = draw([3, 2], [4, 1], 4, 2, 8)
    arguments = {**batch.arguments(), **changes}
    return extend_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def rows(*shape, **options):
    return torch.zeros(*shape, **options)


NEW_IN_CACHE = ExtendPlan.from_lengths([3, 2], [4, 1], device="cpu")
NEW_IN_CACHE.new_in_cache = True
ALL_NEW = ExtendPlan.from_lengths([3, 2], device="cpu")
PADDED = ExtendPlan.from_padded([3, 2], [7, 3], 8, new_in_cache=False)
PAGED = ExtendPlan.from_pages([3, 2], [7, 3], [[0], [1]], 16, new_in_cache=False)

WRONG = [
    ({"q": [1]}, "q: expected a tensor, got list"),
    ({"q": rows(5, 8)}, r"q: expected \[T, HQ, D\]"),
    ({"q": rows(5, 4, 8, dtype=torch.int32)}, "q: expected dtype float32"),
    ({"q": rows(5, 8, 4).transpose(1, 2)}, "q: expected a contiguous last dimension"),
    ({"k": rows(5, 2, 7)}, r"k: expected \[T, HK, D\] = \[5, any, 8\], got \[5, 2, 7\]"),
    ({"k": rows(4, 2, 8)}, r"k: expected \[T, HK, D\]"),
    ({"k": rows(5, 2, 8, dtype=torch.bfloat16)}, "k: expected dtype float32, got bfloat16"),
    ({"v": rows(5, 1, 8)}, r"v: expected \[T, HK, DV\] = \[5, 2, any\], got \[5, 1, 8\]"),
    ({"v": rows(5, 2, 8, device="meta")}, "v: expected device cpu"),
    ({"k": None}, "k, v: expected tensors"),
    ({"v": None}, "k, v: expected tensors"),
    ({"k": None, "part": "prefix"}, "k, v: expected both or neither"),
    ({"k": rows(5, 0, 8), "v": rows(5, 0, 8)}, r"k: expected HK, DV >= 1, got \[5, 0, 8\]"),
    ({"v": rows(5, 2, 0)}, r"v: expected HK, DV >= 1, got \[5, 2, 0\]"),
    (
        {"plan": ALL_NEW, "k": None, "v": None, "cache": None, "part": "prefix"},
        "cache: expected a KVCache, since without k and v it says HK, DV, got None",
    ),
    ({"q": rows(5, 3, 8)}, "q: expected HQ a multiple of HK = 2, got HQ = 3"),
    ({"plan": [3, 2]}, "plan: expected an ExtendPlan, got list"),
    ({"q": rows(4, 4, 8)}, "plan: expected at most T = 4 new tokens, got 5"),
    ({"plan": NEW_IN_CACHE}, "k, v: expected None, since the plan says"),
    ({"cache": None}, "cache: expected a KVCache, since the plan reads keys from it"),
    ({"cache": (1, 2)}, "cache: expected a KVCache, got tuple"),
    ({"cache": KVCache(rows(9, 1, 8), rows(9, 1, 8))}, r"cache.k: expected \[..., HK, D\]"),
    ({"cache": KVCache(rows(9, 2, 8), rows(9, 2, 9))}, r"cache.v: expected \[..., HK, DV\]"),
    ({"cache": KVCache(rows(4, 2, 8), rows(4, 2, 8))}, r"plan: expected slots in \[0, 4\), got 4"),
    (
        {"plan": PADDED, "cache": KVCache(rows(2, 9, 2, 8), rows(2, 9, 2, 8))},
        r"cache: expected \[B, max_length, HK, D\] with max_length = 8, got 9",
    ),
    (
        {"plan": PAGED, "cache": KVCache(rows(2, 8, 2, 8), rows(2, 8, 2, 8))},
        "cache: expected pages of 16 rows, as the plan says, got 8",
    ),
    ({"window": 0}, r"window: expected None or a count of keys .* >= 1"),
    ({"window": -1}, r"window: expected None or a count of keys .* >= 1"),
    (
        {"window": 2**70},
        r"window: expected None or a count of keys .* in \[1, 9223372036854775807\]",
    ),
    ({"window": 2.0}, r"window: expected None or a count of keys .* >= 1"),
    ({"window": True}, r"window: expected None or a count of keys .* >= 1"),
    ({"scale": float("nan")}, "scale: expected None or a finite number"),
    ({"scale": "1"}, "scale: expected None or a finite number"),
    ({"softcap": 0.0}, "softcap: expected None or a finite number > 0"),
    ({"softcap": -2.0}, "softcap: expected None or a finite number > 0"),
    ({"softcap": float("inf")}, "softcap: expected None or a finite number > 0"),
    ({"softcap": 1e-300}, "softcap: expected None or a finite number > 0 of float32, got 1e-300"),
    ({"softcap": 1e39}, "softcap: expected None or a finite number > 0 of float32, got 1e"),
    ({"scale": -1e39}, "scale: expected None or a finite number of float32, got -1e"),
    ({"scale": 1e-300}, "scale: expected None or a finite number of float32, got 1e-300"),
    ({"sinks": rows(2)}, r"sinks: expected \[HQ\] = \[4\], got \[2\]"),
    ({"sinks": rows(4, dtype=torch.int64)}, "sinks: expected dtype"),
    ({"sinks": rows(4), "part": "prefix"}, 'sinks: expected None with part="prefix"'),
    ({"sinks": rows(4), "part": "extend"}, 'sinks: expected None with part="extend"'),
    ({"part": "new"}, r"part: expected one of \['all', 'prefix', 'extend'\], got 'new'"),
    ({"custom_mask": rows(27)}, "custom_mask: expected dtype bool or uint8"),
    (
        {"custom_mask": rows(26, dtype=torch.bool)},
        r"custom_mask: expected \[entries of all sequences\] = \[27\], got \[26\]",
    ),
    ({"out": rows(5, 4, 9)}, r"out: expected \[T, HQ, DV\] = \[5, 4, 8\]"),
    ({"out": rows(5, 4, 8).bfloat16()}, "out: expected dtype float32"),
    ({"out": rows(1, 4, 8).expand(5, -1, -1)}, "out: expected memory of its own"),
    ({"out": (rows(5, 4, 8), rows(5, 2))}, r"out\[1\]: expected \[T, HQ\] = \[5, 4\]"),
    ({"out": (rows(5, 4, 8),)}, r"out: expected a tensor or a pair \(o, lse\)"),
    ({"workspace": 7}, "workspace: expected a Workspace, got int"),
    ({"implementation": "fastest"}, "implementation: expected one of"),
    ({"scale": True}, "scale: expected None or a finite number of float32, got True"),
    (
        {"scale": torch.ones(())},
        r"scale: expected None or a finite number .*, got a float32 tensor",
    ),
    ({"softcap": torch.ones(3)}, r"softcap: .* > 0 .*, got a float32 tensor \[3\]"),
    ({"causal": None}, "causal: expected True or False, got None"),
    ({"causal": 1}, "causal: expected True or False, got 1"),
    ({"return_lse": "yes"}, "return_lse: expected True or False, got 'yes'"),
    ({"reproducible": None}, "reproducible: expected True or False, got None"),
    ({"out": rows(2, 2)[0]}, r"out: expected \[T, HQ, DV\]"),
    ({"out": [rows(5, 4, 8)] * 9}, r"got \[(a float32 tensor \[5, 4, 8\], ){4}\.\.\.\] of 9 entr"),
    ({"part": ["all"]}, r"part: .*, got \['all'\]"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said[:50] for _, said in WRONG])
def test_a_wrong_argument_is_named(changes, said):
    call()
    with pytest.raises(ValueError, match=said):
        call(**changes)


def test_nothing_is_written_before_a_mistake_is_found():
    out = torch.full((5, 4, 8), 7.0)
    with pytest.raises(ValueError, match="softcap"):
        call(out=out, softcap=-1.0)
    assert bool((out == 7).all())


def test_an_input_that_requires_grad_is_an_error_only_in_grad_mode():
    for name, shape in (("q", (5, 4, 8)), ("k", (5, 2, 8)), ("v", (5, 2, 8)), ("sinks", (4,))):
        tensor = torch.randn(shape, requires_grad=True)
        with pytest.raises(ValueError, match=rf"{name}: requires grad, .*torch.inference_mode"):
            call(**{name: tensor})
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                call(**{name: tensor})


def test_an_unknown_implementation_declines():
    with pytest.raises(headstart.Declined, match="no implementation called hopper"):
        call(implementation="hopper")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KVCache(rows(3, 8), rows(3, 8)), r"cache.k: expected \[S, HK, D\] or"),
        (lambda: KVCache(rows(3, 0, 8), rows(3, 0, 8)), "cache.k: expected at least one head"),
        (lambda: KVCache(rows(3, 1, 8), rows(4, 1, 8)), r"cache.v: expected \[S, HK, DV\]"),
        (
            lambda: KVCache(rows(3, 4, 1, 8), rows(3, 2, 1, 8)),
            r"cache.v: expected \[pages, page_size, HK, DV\] = \[3, 4, 1, any\]",
        ),
        (
            lambda: KVCache(rows(3, 1, 8), rows(3, 1, 8).bfloat16()),
            "cache.v: expected dtype float32, got bfloat16",
        ),
        (
            lambda: KVCache(rows(3, 1, 8).to(FP8), rows(3, 1, 8).to(FP8)),
            r"k_scale: expected a float, \[1\] or \[HK\] for a float8 cache, got None",
        ),
        (
            lambda: KVCache(rows(3, 1, 8).to(FP8), rows(3, 1, 8).to(FP8), 1.0),
            "v_scale: expected a float",
        ),
        (
            lambda: KVCache(rows(3, 2, 8).to(FP8), rows(3, 2, 8).to(FP8), 1.0, torch.ones(3)),
            r"v_scale: expected \[1\] or \[2\], got \[3\]",
        ),
        (
            lambda: KVCache(rows(3, 2, 8).to(FP8), rows(3, 2, 8).to(FP8), 0.0, 1.0),
            "k_scale: expected a finite scale > 0 of float32, got 0.0",
        ),
        *(
            (
                lambda scale=scale: KVCache(rows(3, 2, 8).to(FP8), rows(3, 2, 8).to(FP8), 1, scale),
                "v_scale: expected a finite scale > 0 of float32, got ",
            )
            for scale in (float("nan"), float("inf"), -1.0, 1e-60, 1e60, True, "1", [1.0, 1.0])
        ),
        (lambda: KVCache(rows(3, 1, 8), rows(3, 1, 8), 1.0), "k_scale: expected None for a cache"),
    ],
)
def test_a_wrong_cache_is_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": rows(2, 2, 8)}, r"k: expected \[T, HK, D\] = \[2, 1, 8\], got \[2, 2, 8\]"),
        ({"v": rows(3, 1, 4)}, r"v: expected \[T, HK, DV\] = \[2, 1, 4\]"),
        ({"k": rows(2, 1, 8, dtype=torch.int32)}, "k: expected dtype"),
        ({"cache": 3}, "cache: expected a KVCache, got int"),
        ({"slots": [0]}, "slots: expected one for each of 2 tokens, got 1"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, r"slots: expected \[T\] = \[2\]"),
        ({"slots": torch.zeros(2)}, "slots: expected dtype int32 or int64"),
        ({"slots": [0, 9]}, "slots: expected slots below 9, got 9"),
        ({"slots": torch.tensor([0, 9])}, "slots: expected slots below 9, got 9"),
        ({"slots": [3, 3]}, "slots: expected every slot to be written once"),
    ],
)
def test_a_wrong_write_is_named(changes, said):
    cache = KVCache(rows(9, 1, 8), rows(9, 1, 4))
    arguments = {"k": rows(2, 1, 8), "v": rows(2, 1, 4), "cache": cache, "slots": [3, 4]}
    write_kv(**arguments)
    with pytest.raises(ValueError, match=said):
        write_kv(**{**arguments, **changes})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_checks_find_values_that_are_not_finite(monkeypatch, name, value):
    batch = draw([3, 2], [4, 1], 4, 2, 8)
    getattr(batch, name)[4, 0, 3] = value
    call(**{name: getattr(batch, name)})
    monkeypatch.setattr("headstart.runtime.checks.asked", True)
    call()
    with pytest.raises(ValueError, match=f"{name}: expected finite values"):
        call(**{name: getattr(batch, name)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_checks_find_sinks_that_are_no_logits(monkeypatch, value):
    sinks = torch.tensor([0.0, value, -1.0, -torch.inf])
    call(sinks=sinks)
    monkeypatch.setattr("headstart.runtime.checks.asked", True)
    call(sinks=sinks.nan_to_num(0, 0))
    with pytest.raises(ValueError, match="sinks: expected finite logits or -inf"):
        call(sinks=sinks)


@pytest.mark.parametrize("make", [list, torch.tensor])
def test_no_slot_is_written_twice_where_the_host_can_know(make):
    cache = KVCache(rows(9, 1, 8), rows(9, 1, 8))
    new = torch.ones(4, 1, 8)
    with pytest.raises(ValueError, match="slots: expected every slot to be written once, got slot"):
        write_kv(new, new, cache, make([3, -1, 5, 3]))
    assert not cache.k.any()
    write_kv(new, new, cache, make([3, -1, 5, -1]))
    assert cache.k[:, 0, 0].nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_write_needs_slots_with_memory_of_their_own(name):
    """Rows would land on top of each other, or on the keys that are still to be read."""
    new = torch.ones(2, 1, 8)
    wide = {"k": rows(9, 1, 8), "v": rows(9, 1, 8)}
    for shared in (rows(1, 1, 8).expand(9, 1, 8), rows(16).as_strided((9, 1, 8), (1, 1, 1))):
        with pytest.raises(
            ValueError, match=rf"cache.{name}: expected memory of its own for every"
        ):
            write_kv(new, new, KVCache(**wide | {name: shared}), [3, 4])
        assert not shared.any()
    cache = KVCache(**wide)
    with pytest.raises(ValueError, match=rf"cache.{name}: expected memory of its own, got that of"):
        write_kv(**{"k": new, "v": new, name: wide[name][2:4]}, cache=cache, slots=[3, 4])
    memory = rows(9, 1, 8)
    with pytest.raises(ValueError, match=r"cache.k: expected memory .*, got that of cache.v"):
        write_kv(new, new, KVCache(memory, memory), [3, 4])


@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_and_values_may_lie_between_each_other(heads_first):
    """Pages that hold both, and heads outside of tokens: strides are the caller's matter."""
    memory = rows(5, 2, 3, 4, 8)  # [pages, k and v, HK, page_size, D]
    if heads_first:
        memory = rows(3, 5, 4, 2, 8).permute(1, 3, 0, 2, 4)
    k, v = memory[:, 0].transpose(1, 2), memory[:, 1].transpose(1, 2)
    new = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    write_kv(*new, KVCache(k, v), [6, 19])
    assert torch.equal(k.flatten(0, 1)[[6, 19]], new[0])
    assert torch.equal(v.flatten(0, 1)[[6, 19]], new[1])
    assert int(memory.count_nonzero()) == 2 * 2 * 3 * 8


def test_a_plan_and_scratch_of_another_gpu_are_errors():
    """Fake tensors: no machine here has a GPU, let alone two."""
    with FakeTensorMode():
        arguments = {name: rows(2, 1, 8, device="cuda:1") for name in "qkv"}
        plans = {name: ExtendPlan.from_lengths([2], device=name) for name in ("cuda:0", "cuda:1")}
        rest = dict.fromkeys(inspect.signature(spec.bind).parameters) | {
            "causal": True, "part": "all", "return_lse": False, "reproducible": False,
        }  # fmt: skip
        given = rest | arguments | {"plan": plans["cuda:1"], "workspace": Workspace("cuda")}
        with pytest.raises(ValueError, match="q: expected a tensor with memory, got a FakeTensor"):
            spec.bind(**given)  # what is wrong with all others
        with pytest.raises(ValueError, match=r"plan: expected device cuda:1 .*, got cuda:0"):
            spec.bind(**given | {"plan": plans["cuda:0"]})
        with pytest.raises(ValueError, match="workspace: expected device cuda:1, got cuda:0"):
            spec.bind(**given | {"workspace": Workspace("cuda:0")})


def test_a_workspace_of_another_device_is_an_error():
    with pytest.raises(ValueError, match="workspace: expected device cpu, got meta"):
        call(workspace=Workspace("meta"))
