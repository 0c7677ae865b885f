"""Inputs of the convolution, and how near its outputs must be to the float64 oracle."""

import torch

from headstart import DeltaCache
from headstart.evidence.oracles.convolution import convolve as replay
from headstart.evidence.oracles.convolution import history

__all__ = ["history", "replay"]


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
