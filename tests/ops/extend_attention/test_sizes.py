"""Head counts, head sizes, dtypes and strides."""

import pytest
import torch
from tests.ops.extend_attention.oracle import ROUNDING, draw, expect_close, expected

from headstart import ExtendPlan
from headstart.evidence.verify.tolerances import WIDE


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(("HQ", "HK"), [(1, 1), (5, 1), (12, 2), (24, 1), (6, 3), (16, 16)])
@pytest.mark.parametrize("window", [None, 25])
def test_any_ratio_of_heads(attend, HQ, HK, window, reproducible):
    batch = draw([45, 3], [20, 9], HQ, HK, D=8, seed=HQ)
    sinks = torch.linspace(-2, 2, HQ)
    found = attend(
        **batch.arguments(),
        window=window,
        sinks=sinks,
        reproducible=reproducible,
        return_lse=True,
    )
    expect_close(found, expected(batch, window=window, sinks=sinks))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(
    ("D", "DV"), [(13, 13), (80, 80), (96, 96), (192, 128), (512, 512), (8, 40), (1, 1), (256, 1)]
)
@pytest.mark.parametrize("window", [None, 33])
def test_any_head_size(attend, D, DV, window, reproducible):
    batch = draw([70], [30], 2, 1, D, DV, seed=D)
    found = attend(**batch.arguments(), window=window, reproducible=reproducible, return_lse=True)
    expect_close(found, expected(batch, window=window), rounding=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 5.0}, {"reproducible": True}])
def test_half_precision_is_rounded_once_at_the_end(attend, implementation, dtype, options):
    """Kernels also round the operands of their products: the weights that multiply values."""
    batch = draw([90, 2], [50, 11], 4, 2, 32, dtype=dtype)
    found = attend(**batch.arguments(), **options, return_lse=True)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    rules = {name: value for name, value in options.items() if name != "reproducible"}
    want = expected(batch, **rules)
    expect_close(found, want, None if implementation in WIDE else 2 * ROUNDING[dtype])
    if implementation in WIDE:
        rounded = want[0].to(dtype)
        assert float((found[0] != rounded).float().mean()) < 0.01


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"reproducible": True}])
def test_a_looser_matmul_precision_of_the_process_changes_nothing(attend, options):
    batch = draw([90], [50], 4, 2, 64)
    arguments = {**batch.arguments(), **options, "return_lse": True}
    exact = attend(**arguments)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = attend(**arguments)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found[0], exact[0])
    assert torch.equal(found[1], exact[1])


def test_the_reference_keeps_float64_and_torch_leaves_it_to_it():
    import headstart

    batch = draw([20], [7], dtype=torch.float64)
    arguments = batch.arguments()
    o, lse = headstart.extend_attention(**arguments, return_lse=True, implementation="reference")
    assert o.dtype == lse.dtype == torch.float64
    expect_close((o, lse), expected(batch), rounding=1e-14)
    with pytest.raises(headstart.Declined, match="float64 is for the reference"):
        headstart.extend_attention(**arguments)


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 5.0}, {"reproducible": True}])
@pytest.mark.parametrize("DV", [16, 24])
def test_views_of_packed_projections_and_strided_outputs(attend, options, DV):
    """q, k and v are slices of one projection, o of a larger tensor; nothing else is written."""
    HQ, HK, D, T = 4, 2, 16, 75
    packed = torch.randn(T, HQ * D + HK * D + HK * DV)
    q, k, v = packed.split([HQ * D, HK * D, HK * DV], dim=1)
    q, k, v = q.unflatten(1, (HQ, D)), k.unflatten(1, (HK, D)), v.unflatten(1, (HK, DV))
    plan = ExtendPlan.from_lengths([70, 5], device="cpu")
    want = attend(q.clone(), k.clone(), v.clone(), plan=plan, return_lse=True, **options)
    room, room_lse = torch.full((T, 9, DV + 3), 7.0), torch.full((HQ, T, 2), 7.0)
    out = room[:, 1 : 2 * HQ + 1 : 2, :DV], room_lse[..., 1].t()
    found = attend(q, k, v, plan=plan, return_lse=True, out=out, **options)
    torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], want[1], rtol=1e-5, atol=1e-6)
    out[0].fill_(7.0)
    out[1].fill_(7.0)
    assert bool((room == 7).all())
    assert bool((room_lse == 7).all())


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"reproducible": True}], ids=str)
def test_rows_past_two_to_the_31_elements(attend, options, tmp_path):
    """Row numbers times strides exceed 32 bits, in a sparse file of 5.4 GB."""
    T, step = 6, 2**29
    assert (T - 1) * step > 2**31
    batch = draw([2, 4], None, 2, 1, 16, dtype=torch.float16, seed=8)
    sparse = tmp_path / "rows"
    with open(sparse, "wb") as file:
        file.truncate(2 * T * step)
    flat = torch.from_file(str(sparse), shared=True, size=T * step, dtype=torch.float16)
    q, k, v, out = (
        flat.as_strided((T, heads, 16), (step, 16, 1), 64 * i)
        for i, heads in enumerate((2, 1, 1, 2))
    )
    for view, rows in ((q, batch.q), (k, batch.k), (v, batch.v)):
        view.copy_(rows)
    plan = ExtendPlan.from_lengths(batch.lengths, device="cpu")
    found = attend(q, k, v, plan=plan, out=out, return_lse=True, **options)
    assert found[0] is out
    rules = {name: value for name, value in options.items() if name != "reproducible"}
    expect_close(found, expected(batch, **rules), 2 * ROUNDING[torch.float16])


def test_head_major_inputs(attend):
    batch = draw([40], [0], 4, 2)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (batch.q, batch.k, batch.v))
    plan = ExtendPlan.from_lengths([40], device="cpu")
    for window in (None, 9):
        found = attend(q, k, v, plan=plan, window=window, return_lse=True)
        expect_close(found, expected(batch, window=window))


@pytest.mark.parametrize("window", [None, 128])
def test_float32_error_of_the_last_half_is_below_two_millionths(attend, window):
    batch = draw([160], [900], 2, 1, 64, seed=1)
    sinks = torch.randn(2)
    want, _ = expected(batch, window=window, sinks=sinks)
    for reproducible in (False, True):
        o = attend(**batch.arguments(), window=window, sinks=sinks, reproducible=reproducible)
        half = slice(80, None)
        error = (o[half].double() - want[half]).norm() / want[half].norm()
        assert float(error) < 2e-6


def test_large_scores_do_not_overflow(attend):
    batch = draw([60], [60])
    for options in ({}, {"window": 30}, {"softcap": 300.0}, {"reproducible": True}):
        found = attend(**batch.arguments(), scale=200.0, return_lse=True, **options)
        assert bool(found[0].isfinite().all())
        assert bool(found[1].isfinite().all())
