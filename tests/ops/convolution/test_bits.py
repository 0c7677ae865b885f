"""The bits of a row depend on its own inputs alone: torch.equal, everywhere."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.implementations import examples
from tests.ops.convolution.oracle import cache_of, draw

import headstart
from headstart import Schedule
from headstart.ops.convolution import decomposed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Whole vectors, parts of vectors, one channel, and more channels than a block.
CHANNELS = [1, 3, 8, 37, 64, 1003]


def by_token(convolve, x, weight, bias):
    """Every row computed alone, from its own inputs."""
    padded = torch.cat([x.new_zeros(3, x.shape[1]), x])
    return torch.cat(
        [
            convolve(x[t : t + 1], weight, bias, state=padded[t : t + 3][None].clone()).y
            for t in range(len(x))
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_tokens_alone(convolve, channels, dtype):
    x, weight, bias = draw(examples(45), channels, dtype=dtype)
    assert torch.equal(convolve(x, weight, bias).y, by_token(convolve, x, weight, bias))


@pytest.mark.parametrize("channels", [3, 37, 1003])
def test_blocks(channels, monkeypatch):
    """Cuts between blocks, wherever they fall, in stretches, heads and the gated norm."""
    x, weight, bias = draw(150, channels)
    lengths = [1, 60, 2, 0, 3, 4, 80]
    rows = torch.randn(7, 11, channels)
    whole = headstart.causal_conv1d(x, weight, bias, schedule=lengths).y
    normed = headstart.rms_norm_gated(rows, bias, rows + 1)
    for elements in (1, 5 * channels, 16 * channels + 1):
        monkeypatch.setattr(decomposed, "BLOCK", elements)
        assert torch.equal(headstart.causal_conv1d(x, weight, bias, schedule=lengths).y, whole)
        assert torch.equal(headstart.rms_norm_gated(rows, bias, rows + 1), normed)


@pytest.mark.parametrize("channels", [37, 1003])
def test_gaps_between_stretches(channels, monkeypatch):
    x, weight, bias = draw(150, channels)
    lengths = [1, 20, 2, 0, 3, 4, 60, 3, 3, 3, 50, 1]
    whole = headstart.causal_conv1d(x, weight, bias, schedule=lengths).y
    monkeypatch.setattr(decomposed, "GAP", 0)
    assert torch.equal(headstart.causal_conv1d(x, weight, bias, schedule=lengths).y, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads(convolve, implementation, threads_restored, dtype):
    tokens = 300 if implementation == "torch" else 40
    x, weight, bias = draw(tokens, 1003, dtype=dtype)
    torch.set_num_threads(1)
    one = convolve(x, weight, bias).y
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(convolve(x, weight, bias).y, one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (3, 5), (8, 1)])
def test_strides(convolve, before, after, dtype):
    """x as a slice of a packed projection whose other columns hold NaN; out likewise."""
    x, weight, bias = draw(70, 37, dtype=dtype)
    plain = convolve(x, weight, bias).y
    memory = torch.full((70, before + 37 + after), torch.nan, dtype=dtype)
    view, out = memory[:, before : before + 37], memory.clone()[:, before : before + 37]
    view.copy_(x)
    assert torch.equal(convolve(view, weight, bias).y, plain)
    assert torch.equal(convolve(view, weight, bias, out=out).y, plain)
    assert torch.equal(out, plain)
    turned = weight.t().contiguous().t()
    assert torch.equal(convolve(view, turned, bias).y, plain)


def test_sliced_channels_keep_their_bits(convolve):
    """A rank with a part of the channels computes what all of them would."""
    x, weight, bias = draw(50, 64)
    whole = convolve(x, weight, bias).y
    for part in (slice(0, 32), slice(5, 12), slice(63, 64)):
        assert torch.equal(convolve(x[:, part], weight[part], bias[part]).y, whole[:, part])


@settings(deadline=None, max_examples=examples(15), derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 12) | st.integers(0, 40), min_size=1, max_size=5),
    channels=st.sampled_from([1, 7, 33]),
    data=st.data(),
)
def test_batches_and_steps(convolve, lengths, channels, data):
    """A sequence alone, in any batch, in any steps, through states and through a cache."""
    x, weight, bias = draw(sum(lengths), channels, seed=len(lengths))
    batch = convolve(x, weight, bias, schedule=lengths).y.split(lengths)
    cache = cache_of(channels, slots=2)
    for row, part in zip(batch, x.split(lengths), strict=True):
        assert torch.equal(convolve(part, weight, bias).y, row)
        start, state = 0, None
        while start < len(part):
            step = data.draw(st.integers(1, len(part) - start))
            new = part[start : start + step]
            found = convolve(new, weight, bias, state=state, return_state=True)
            state = found.state
            assert torch.equal(found.y, row[start : start + step])
            schedule = Schedule([step], start_positions=start, device="cpu")
            cached = convolve(new, weight, bias, schedule=schedule, state=cache.at([1])).y
            assert torch.equal(cached, found.y)
            start += step


def test_implementations_agree_without_an_activation():
    """Both round every product and every sum once, in one order."""
    x, weight, bias = draw(50, 37)
    one, other = (
        headstart.causal_conv1d(x, weight, bias, activation=None, implementation=name).y
        for name in ("reference", "torch")
    )
    assert torch.equal(one, other)
