"""CPU figures of the gated delta rule: time and memory against transformers, cache against none.

    python benchmarks/gated_delta_rule.py [--rounds 7] [--threads 2] [--json FILE]

T 4096, H 16, HV 32, K = V = 128, float32. Arms run interleaved in one process with their order
rotated; only ratios of medians count. Memory is the growth of the peak resident set over the
inputs, each arm in a fresh process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

import headstart

T, H, HV, K, V = 4096, 16, 32, 128, 128


def inputs():
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(T, H, K), dim=-1) for _ in range(2))
    v = torch.randn(T, HV, V)
    g = -torch.nn.functional.softplus(torch.randn(T, HV))
    return q, k, v, g, torch.rand(T, HV)


def arms(q, k, v, g, beta):
    """Name -> a call that computes outputs and final states."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    theirs = modeling_qwen3_next.torch_chunk_gated_delta_rule
    ratio = HV // H
    wide = [x.repeat_interleave(ratio, 1)[None] for x in (q, k)]
    schedule = headstart.Schedule([T], device="cpu")
    cache = headstart.DeltaCache(1, H=H, HV=HV, K=K, V=V, dtype=q.dtype, device="cpu")
    return {
        "plain": lambda: headstart.gated_delta_rule(q, k, v, g, beta, return_state=True).o,
        "cache": lambda: (
            headstart.gated_delta_rule(q, k, v, g, beta, schedule=schedule, state=cache.at([0])).o
        ),
        "transformers": lambda: theirs(
            *wide, v[None], g[None], beta[None], output_final_state=True
        )[0][0],
    }


def times(rounds):
    """Median seconds of each arm, and the largest relative L2 distance between their outputs."""
    calls = arms(*inputs())
    outputs = {name: call() for name, call in calls.items()}
    base = outputs["transformers"]
    distance = max(float((o - base).norm() / base.norm()) for o in outputs.values())
    names, seconds = list(calls), {name: [] for name in calls}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}, distance


def peak():
    """Peak resident set of this process in MiB (getrusage would inherit the parent's)."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def peak_growth(name):
    """MiB by which the peak resident set grows in one call of an arm (this process)."""
    calls = arms(*inputs())
    before = peak()
    calls[name]()
    return peak() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak_growth(options.peak))
        return
    seconds, distance = times(options.rounds)
    growth = {
        name: float(
            subprocess.run(
                [sys.executable, __file__, "--threads", str(options.threads), "--peak", name],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for name in ("plain", "cache", "transformers")
    }
    report = {
        "sizes": {"T": T, "H": H, "HV": HV, "K": K, "V": V, "threads": options.threads},
        "seconds": seconds,
        "peak_growth_mib": growth,
        "speedup_over_transformers": seconds["transformers"] / seconds["plain"],
        "memory_over_transformers": growth["plain"] / growth["transformers"],
        "cache_over_plain": seconds["cache"] / seconds["plain"],
        "largest_relative_l2": distance,
    }
    print(json.dumps(report, indent=2))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
