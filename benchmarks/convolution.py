"""The short convolution and the gated norm beside what transformers falls back to on a CPU.

    python benchmarks/convolution.py [--threads 2] [--rounds 7]

Prints interleaved medians in ms, T 4096, 8192 channels (32 heads of 128 for the norm), float32.
"""

import argparse
import statistics
import time

import torch
from torch.nn.functional import conv1d, silu

from headstart import DeltaCache, Schedule, causal_conv1d, rms_norm_gated


def interleaved(arms, rounds):
    """Median milliseconds of every arm, the order rotated between rounds."""
    names = list(arms)
    for run in arms.values():
        run()
    times = {name: [] for name in names}
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            begin = time.perf_counter()
            arms[name]()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=7)
    chosen = arguments.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    T, C, width = 4096, 8192, 4
    x, weight = torch.randn(T, C), torch.randn(C, width)
    taken = x.t()[None]  # [1, channels, T] as transformers passes it: a transposed projection
    packed = taken.contiguous()
    kernel = weight[:, None]

    def theirs(inputs):
        return silu(conv1d(inputs, kernel, None, padding=width - 1, groups=C)[..., :T])

    half = x.bfloat16()
    arms = {
        "convolution, headstart": lambda: causal_conv1d(x, weight),
        "convolution, F.conv1d + silu, transposed": lambda: theirs(taken),
        "convolution, F.conv1d + silu, contiguous": lambda: theirs(packed),
        "convolution, headstart, bfloat16": lambda: causal_conv1d(half, weight),
    }
    for name, value in interleaved(arms, chosen.rounds).items():
        print(f"{name:50} {value:9.1f} ms")

    rows, gate, scale = torch.randn(T, 32, 128), torch.randn(T, 40, 128)[:, :32], torch.randn(128)

    def norm():
        normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scale * normed * silu(gate)

    arms = {"norm, headstart": lambda: rms_norm_gated(rows, scale, gate), "norm, torch": norm}
    for name, value in interleaved(arms, chosen.rounds).items():
        print(f"{name:50} {value:9.1f} ms")

    token, history = torch.randn(1, C), torch.zeros(1, width - 1, C)
    cache = DeltaCache(
        1, H=1, HV=1, K=1, V=1, conv_channels=C, conv_width=width, dtype=x.dtype, device="cpu"
    )
    schedule = Schedule([1], device="cpu")
    arms = {
        "one token, state": lambda: causal_conv1d(token, weight, state=history, return_state=True),
        "one token, cache": lambda: causal_conv1d(
            token, weight, schedule=schedule, state=cache.at([0])
        ),
    }
    for name, value in interleaved(arms, 200).items():
        print(f"{name:50} {value:9.3f} ms")


if __name__ == "__main__":
    main()
