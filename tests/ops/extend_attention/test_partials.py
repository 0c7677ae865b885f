"""Partials over the prefix and the new keys, and their merge."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.ops.extend_attention.oracle import INF, ROUNDING, draw, expect_close, expected

import headstart
from headstart.evidence.verify.tolerances import WIDE

SINKS = torch.tensor([1.5, -200.0])
RULES = [
    {},
    {"window": 1},
    {"window": 25},
    {"window": 64},
    {"causal": False},
    {"causal": False, "window": 25},
    {"softcap": 3.0},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("part", ["prefix", "extend"])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_partial_is_float32_with_its_lse(
    attend, implementation, rules, part, reproducible, dtype
):
    """Kernels round the weights that multiply 16-bit values, if not the result."""
    batch = draw([50, 1, 9, 0], [40, 70, 0, 3], dtype=dtype, seed=1)
    found = attend(**batch.arguments(), **rules, part=part, reproducible=reproducible)
    assert found[0].dtype == found[1].dtype == torch.float32
    rounding = None if implementation in WIDE else 2 * ROUNDING[dtype]
    expect_close(found, expected(batch, **rules, part=part), rounding)


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_merged_partials_are_the_whole(attend, merge, rules, sinks):
    batch = draw([50, 1, 9], [40, 70, 0], seed=2)
    parts = [attend(**batch.arguments(), **rules, part=part) for part in ("prefix", "extend")]
    expect_close(merge(parts, sinks), expected(batch, **rules, sinks=sinks))


def test_the_prefix_part_needs_no_new_keys_and_the_extend_part_no_cache(attend):
    batch = draw([5], [40], seed=3)
    arguments = batch.arguments()
    want = expected(batch, part="prefix")
    expect_close(attend(**{**arguments, "k": None, "v": None}, part="prefix"), want)
    want = expected(batch, part="extend")
    expect_close(attend(**{**arguments, "cache": None}, part="extend"), want)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_a_partial_of_a_plan_without_a_prefix_sees_nothing(attend, window, reproducible):
    batch = draw([3, 2])
    plan = headstart.ExtendPlan.from_lengths([3, 2], device="cpu")
    options = {"plan": plan, "part": "prefix", "window": window, "reproducible": reproducible}
    o, lse = attend(batch.q, batch.k, batch.v, **options)
    assert not o.any()
    assert bool((lse == -torch.inf).all())


def parts_of(count, seed=0, T=7, HQ=2, DV=5, dtype=torch.float32):
    at = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(count):
        lse = 30 * torch.randn(T, HQ, generator=at)
        lse[torch.rand(T, HQ, generator=at) < 0.3] = -INF
        o = torch.randn(T, HQ, DV, generator=at).masked_fill((lse == -INF)[..., None], 0.0)
        parts.append((o.to(dtype), lse))
    return parts


def merged(parts, sinks=None):
    logits = torch.stack([lse.double() for _, lse in parts])
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().expand_as(logits[:1])])
    lse = torch.logsumexp(logits, 0)
    shares = torch.exp(logits - lse.masked_fill(lse == -INF, 0.0))
    o = sum(shares[i][..., None] * o.double() for i, (o, _) in enumerate(parts))
    return o, lse


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 5), seed=st.integers(0, 10_000), sink=st.booleans())
@example(count=3, seed=1012, sink=False)  # an LSE of 73, whose rounding shares must not inherit
def test_any_number_of_parts_in_any_order(merge, count, seed, sink):
    parts = parts_of(count, seed)
    sinks = torch.tensor([-3.0, 40.0]) if sink else None
    expect_close(merge(parts, sinks), merged(parts, sinks))
    expect_close(merge(parts[::-1], sinks), merged(parts, sinks))


def test_nothing_seen_is_the_identity_bit_for_bit(merge):
    (part,) = parts_of(1, seed=4)
    nothing = torch.zeros_like(part[0]), torch.full_like(part[1], -INF)
    for parts in ([part, nothing], [nothing, part], [nothing, part, nothing, nothing]):
        found = merge(parts)
        assert torch.equal(found[0], part[0])
        assert torch.equal(found[1], part[1])
    found = merge([nothing, nothing])
    assert torch.equal(found[0], nothing[0])
    assert torch.equal(found[1], nothing[1])
    found = merge([nothing], SINKS)
    assert torch.equal(found[0], nothing[0])
    assert torch.equal(found[1], SINKS.expand_as(found[1]))


@pytest.mark.parametrize("into", [0, 1, 2])
def test_a_merge_into_one_of_its_parts(merge, into):
    parts = parts_of(3, seed=5)
    want = merge([(o.clone(), lse.clone()) for o, lse in parts], SINKS)
    found = merge(parts, SINKS, out=parts[into])
    assert found[0] is parts[into][0]
    assert found[1] is parts[into][1]
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])


def test_the_same_part_twice(merge):
    (part,) = parts_of(1, seed=6)
    expect_close(merge([part, part]), merged([part, part]))


def test_inputs_are_left_alone(merge):
    parts = parts_of(3, seed=7)
    before = [(o.clone(), lse.clone()) for o, lse in parts]
    merge(parts, SINKS)
    for part, kept in zip(parts, before, strict=True):
        assert torch.equal(part[0], kept[0])
        assert torch.equal(part[1], kept[1])


def test_merged_dtypes(merge):
    parts = parts_of(2, dtype=torch.bfloat16)
    o, lse = merge(parts)
    assert o.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    expect_close((o, lse), merged(parts))
    out = torch.empty(7, 2, 5, dtype=torch.bfloat16), torch.empty(7, 2)
    wide = parts_of(2)
    expect_close(merge(wide, out=out), merged(wide))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "parts: expected at least one pair"),
        ([torch.zeros(3)], r"parts\[0\]: expected a pair"),
        ([(torch.zeros(1, 1), torch.zeros(1, 1))], r"parts\[0\]\[0\]: expected \[T, HQ, DV\]"),
        ([(torch.zeros(1, 1, 0), torch.zeros(1, 1))], r"with HQ, DV >= 1, got \[1, 1, 0\]"),
        ([(torch.zeros(1, 0, 2), torch.zeros(1, 0))], r"with HQ, DV >= 1, got \[1, 0, 2\]"),
        ([(torch.zeros(1, 1, 2), torch.zeros(1, 2))], r"parts\[0\]\[1\]: expected \[T, HQ\]"),
        (
            [(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.float64))],
            r"parts\[0\]\[1\]: expected dtype float32",
        ),
        (
            [
                (torch.zeros(1, 1, 2), torch.zeros(1, 1)),
                (torch.zeros(1, 1, 3), torch.zeros(1, 1)),
            ],
            r"parts\[1\]\[0\]: expected \[T, HQ, DV\] = \[1, 1, 2\], got \[1, 1, 3\]",
        ),
    ],
)
def test_wrong_parts_are_named(parts, said):
    with pytest.raises(ValueError, match=said):
        headstart.merge_attention(parts)


def test_wrong_merge_arguments_are_named():
    (part,) = parts_of(1)
    with pytest.raises(ValueError, match=r"sinks: expected \[HQ\] = \[2\], got \[3\]"):
        headstart.merge_attention([part], torch.zeros(3))
    with pytest.raises(ValueError, match="out: expected a pair"):
        headstart.merge_attention([part], out=torch.zeros(7, 2, 5))
    with pytest.raises(ValueError, match=r"out\[1\]: expected dtype float32"):
        headstart.merge_attention([part], out=(part[0], part[1].double()))
    memory = torch.zeros(70)
    with pytest.raises(ValueError, match=r"out\[0\]: expected memory .* that of out\[1\]"):
        headstart.merge_attention([part], out=(memory.view(7, 2, 5), memory[:14].view(7, 2)))
    with pytest.raises(ValueError, match="requires grad"):
        headstart.merge_attention([(part[0].requires_grad_(), part[1])])
