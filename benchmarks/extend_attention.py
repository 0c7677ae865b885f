"""The CPU bars of softmax extend attention: interleaved medians in one process, float32.

    python benchmarks/extend_attention.py [--threads 2] [--rounds 7] [--json FILE]

Heads are 16 over 2 of size 64. Every arm is first held against its peer or the float64 reference;
the order of the arms rotates; a ratio is the median of the ratios within a round. Exits with 1
where a bar is missed.

    window      window 128, T 8192: SDPA with the boolean mask / headstart, at least 8
    prefix      window 128: 512 new on 8192 cached / 512 new on 512 cached, at most 1.3
    causal      T 4096, sinks: headstart / contiguous SDPA without sinks, at most 1.25
    tiles       the same without sinks, reproducible / default (for information)
    decode      one new token on 8192, reproducible / default (for information)
"""

import argparse
import json
import statistics
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from headstart.ops.extend_attention.api import extend_attention
from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.plan import ExtendPlan

HQ, HK, D, WINDOW = 16, 2, 64, 128
BARS = {"window": (8.0, "at least"), "prefix": (1.3, "at most"), "causal": (1.25, "at most")}


def interleaved(arms, rounds):
    """Milliseconds of every arm and round, the order rotated between rounds."""
    names = list(arms)
    for run in arms.values():
        run()
    times = {name: [] for name in names}
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            begin = time.perf_counter()
            arms[name]()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def drawn(T):
    return torch.randn(T, HQ, D), torch.randn(T, HK, D), torch.randn(T, HK, D)


def head_major(*tensors):
    return [tensor.transpose(0, 1)[None].contiguous() for tensor in tensors]


def on_prefix(new, prefix, **options):
    q, k, v = drawn(new)
    cache = KVCache(torch.randn(prefix, HK, D), torch.randn(prefix, HK, D))
    plan = ExtendPlan.from_lengths([new], [prefix], device="cpu")
    return lambda: extend_attention(q, k, v, plan=plan, cache=cache, **options)


def alone(T, **options):
    q, k, v = drawn(T)
    plan = ExtendPlan.from_lengths([T], device="cpu")
    return q, k, v, lambda: extend_attention(q, k, v, plan=plan, **options)


def expect_close(found, want):
    error = float((found.double() - want.double()).norm() / want.double().norm())
    if not error < 2e-6:
        sys.exit(f"an arm is wrong: relative L2 {error:.1e}")


def window():
    q, k, v, ours = alone(8192, window=WINDOW)
    position = torch.arange(8192)
    mask = (position <= position[:, None]) & (position > position[:, None] - WINDOW)
    heads = head_major(q, k, v)

    def theirs():
        return sdpa(*heads, attn_mask=mask, enable_gqa=True)

    expect_close(ours(), theirs()[0].transpose(0, 1))
    return {"SDPA with a mask": theirs, "headstart, window 128, T 8192": ours}


def prefix():
    sinks = torch.randn(HQ)
    return {
        "512 new on 8192": on_prefix(512, 8192, window=WINDOW, sinks=sinks),
        "512 new on 512": on_prefix(512, 512, window=WINDOW, sinks=sinks),
    }


def causal():
    sinks = torch.randn(HQ)
    q, k, v, ours = alone(4096, sinks=sinks)
    heads = head_major(q, k, v)

    def theirs():
        return sdpa(*heads, is_causal=True, enable_gqa=True)

    plain = extend_attention(q, k, v, plan=ExtendPlan.from_lengths([4096], device="cpu"))
    expect_close(plain, theirs()[0].transpose(0, 1))
    return {"headstart, causal with sinks, T 4096": ours, "SDPA causal, no sinks": theirs}


def tiles():
    q, k, v, default = alone(4096)
    plan = ExtendPlan.from_lengths([4096], device="cpu")

    def fixed():
        return extend_attention(q, k, v, plan=plan, reproducible=True)

    expect_close(fixed(), default())
    return {"reproducible, T 4096": fixed, "default, T 4096": default}


def decode():
    return {
        "reproducible, 1 on 8192": on_prefix(1, 8192, reproducible=True),
        "default, 1 on 8192": on_prefix(1, 8192),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    report, missed = {"threads": options.threads, "rounds": options.rounds}, []
    for comparison in (window, prefix, causal, tiles, decode):
        name = comparison.__name__
        times = interleaved(comparison(), options.rounds)
        above, below = times.values()
        ratios = sorted(a / b for a, b in zip(above, below, strict=True))
        ratio = statistics.median(ratios)
        for arm, found in times.items():
            print(f"{arm:40} {statistics.median(found):9.2f} ms")
        line = f"  {name}: {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        if name in BARS:
            bar, kind = BARS[name]
            held = ratio >= bar if kind == "at least" else ratio <= bar
            line += f", bar: {kind} {bar}{'' if held else '  MISSED'}"
            missed += [] if held else [name]
        print(line)
        report[name] = {
            "ratio": ratio,
            "ratios": ratios,
            "ms": {arm: statistics.median(found) for arm, found in times.items()},
        }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)
    sys.exit(f"missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
