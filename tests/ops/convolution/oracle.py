"""The convolution in float64 over a whole sequence, and inputs to compute it from."""

import torch

from headstart import DeltaCache


def replay(inputs, weight, bias=None, activation="silu"):
    """Outputs [L, channels] of one sequence from its start, float64; inputs [L, channels]."""
    inputs, weight = inputs.double(), weight.double()
    padded = torch.cat([inputs.new_zeros(weight.shape[1] - 1, inputs.shape[1]), inputs])
    taps = [weight[:, w] * padded[w : w + len(inputs)] for w in range(weight.shape[1])]
    outputs = torch.stack(taps).sum(0)
    if bias is not None:
        outputs = outputs + bias.double()
    return outputs / (1 + (-outputs).exp()) if activation == "silu" else outputs


def history(inputs, position, width):
    """The inputs [width - 1, channels] before `position`, zeros before the start."""
    padded = torch.cat([inputs.new_zeros(width - 1, inputs.shape[1]), inputs])
    return padded[position : position + width - 1]


def draw(tokens, channels=5, width=4, dtype=torch.float32, seed=0):
    """x [tokens, channels], weight [channels, width], bias [channels]."""
    at = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, generator=at)
    weight = torch.randn(channels, width, generator=at)
    return x.to(dtype), weight.to(dtype), torch.randn(channels, generator=at).to(dtype)


def cache_of(channels=5, width=4, slots=4, drafts=6, dtype=torch.float32):
    """A cache whose memory holds NaN wherever nothing was written."""
    cache = DeltaCache(
        slots, H=1, HV=1, K=2, V=2, conv_channels=channels, conv_width=width, dtype=dtype,
        draft_tokens=drafts, device="cpu",
    )  # fmt: skip
    cache.tensors["history"].fill_(torch.nan)
    return cache


# Rounding of one value in the output's dtype, and of the sum in float32.
CLOSE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5},
    torch.float16: {"rtol": 2**-11, "atol": 1e-5},
}


def assert_close(found, wanted):
    """`found` is `wanted` (float64) but for rounding to the dtype of `found`."""
    torch.testing.assert_close(found.double(), wanted.double(), **CLOSE[found.dtype])
