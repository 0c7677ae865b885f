"""The Triton convolution and gated norm on a GPU: checked first, then timed beside a copy.

    python benchmarks/convolution_device.py [--quick]

Times are medians of CUDA events over replays of captured graphs, arms in rotated order. Inputs
rotate through buffers that no cache holds. The ceiling is torch's copy of as many bytes, in the
same run. Writes convolution_device.json to $OUT (default: out).
"""

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import sys
from pathlib import Path

import torch

import headstart
from headstart import DeltaCache, Pool, Schedule
from headstart.ops.convolution import spec
from headstart.ops.convolution.triton.convolve import Config, convolve, convolve_kernel
from headstart.ops.convolution.triton.norm import Config as NormConfig
from headstart.ops.convolution.triton.norm import norm

DEVICE, WIDTH = "cuda", 4
causal_conv1d = functools.partial(headstart.causal_conv1d, implementation="triton")
rms_norm_gated = functools.partial(headstart.rms_norm_gated, implementation="triton")
# A rounding in the dtype, and the sum and the exponential in float32.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
failures = []


def expect(what, found):
    if not found:
        failures.append(what)
        print("FAILED", what)


def close(what, found, wanted, dtype):
    found, wanted = found.double().cpu(), wanted.double()
    within = (found - wanted).abs() <= ROUNDING[dtype] * wanted.abs() + 1e-5
    expect(f"{what}: off by {(found - wanted).abs().max():.3g}", bool(within.all()))


def check(dtype, channels):
    """Every form of a call against the float64 reference, and the promised bits."""
    name = f"{dtype} {channels}"
    torch.manual_seed(0)
    lengths = [0, 1, 3, 700, 0, 64, 5, 1500, 2]
    total = sum(lengths)
    wide = torch.full((total + 20, channels + 24), torch.nan, dtype=dtype)
    wide[:total, 8 : 8 + channels] = torch.randn(total, channels)
    weight, bias = torch.randn(channels, WIDTH).to(dtype), torch.randn(channels).to(dtype)
    x = wide.to(DEVICE)[:, 8 : 8 + channels]
    w, b = weight.to(DEVICE), bias.to(DEVICE)
    before = torch.randn(len(lengths), WIDTH - 1, channels).to(dtype)
    schedule = Schedule(lengths, snapshot_every=64, device=DEVICE)
    out = torch.full_like(wide, 7.0).to(DEVICE)[:, 8 : 8 + channels]
    found = causal_conv1d(
        x, w, b, schedule=schedule, state=before.to(DEVICE), return_state=True, snapshots=dtype,
        out=out,
    )  # fmt: skip
    on_cpu = Schedule(lengths, snapshot_every=64, device="cpu")
    plain = wide[:total, 8 : 8 + channels]
    with torch.no_grad():
        wanted = causal_conv1d(
            plain.double(), weight.double(), bias.double(), schedule=on_cpu, state=before.double(),
            return_state=True, snapshots=torch.float64, implementation="reference",
        )  # fmt: skip
    close(f"{name} values", found.y[:total], wanted.y, dtype)
    expect(f"{name} rows of nobody are zero", not found.y[total:].any())
    expect(f"{name} states", torch.equal(found.state.cpu().double(), wanted.state))
    expect(f"{name} snapshots", torch.equal(found.snapshots.cpu().double(), wanted.snapshots))

    pool = torch.full((20, WIDTH - 1, channels), torch.nan, dtype=dtype, device=DEVICE)
    read = torch.tensor([3, 5, 7, 9, 11, 13, 15, 17, -1], device=DEVICE)
    pool[read[:-1]] = before[:-1].to(DEVICE)
    pooled = causal_conv1d(x[:total], w, b, schedule=schedule, state=Pool(pool, read)).y
    expect(f"{name} pool: y", torch.equal(pooled[:-2], found.y[: total - 2]))
    expect(f"{name} pool: states", torch.equal(pool[read[:-1]], found.state[:-1]))
    expect(f"{name} pool: others", bool(pool[[0, 1, 2, 19]].isnan().all()))

    sequence = x[:total][-1502:-2]
    whole = causal_conv1d(sequence, w, b).y
    at = random.Random(0)
    for drafts in (0, 6):
        cache = DeltaCache(
            6, H=1, HV=1, K=2, V=2, conv_channels=channels, dtype=dtype, draft_tokens=drafts,
            device=DEVICE,
        )  # fmt: skip
        cache.tensors["history"].fill_(torch.nan)
        start, same = 0, True
        while start < len(sequence):
            if drafts and start > 10 and at.random() < 0.5:
                start -= at.randint(0, 4)  # rolled back by position
            wrong = drafts and at.random() < 0.3
            step = at.choice([1, 2, 6] if wrong else [1, 2, 5, 64, 65, 300])
            step = min(step, len(sequence) - start)
            rows = sequence[start : start + step]
            if wrong:
                rows = torch.cat([rows[:1], torch.randn_like(rows[1:])])
            opening = 64 * (start // 64)
            keep = opening == start
            plan = Schedule(
                [step], start_positions=start, drafts=bool(wrong),
                snapshot_positions=[[opening]] if keep else None, device=DEVICE,
            )  # fmt: skip
            y = causal_conv1d(
                rows, w, b, schedule=plan, state=cache.at([2]),
                snapshots=cache.at([4]) if keep else None,
            ).y  # fmt: skip
            right = 1 if wrong else step
            same = same and torch.equal(y[:right], whole[start : start + right])
            if keep and start:
                hit = Schedule([right], start_positions=start, device=DEVICE)
                y = causal_conv1d(rows[:right], w, b, schedule=hit, state=cache.at([4])).y
                same = same and torch.equal(y, whole[start : start + right])
            start += right
        expect(f"{name} cache with {drafts} drafts: bits", same)
        expect(f"{name} cache: others", bool(cache.tensors["history"][[0, 1, 3, 5]].isnan().all()))

    rows, gate = torch.randn(2, 777, 6, channels // 8 or 1).to(dtype)
    scale = torch.randn(rows.shape[-1])
    for activation in ("silu", "sigmoid"):
        wanted = rms_norm_gated(
            rows.double(), scale.double(), gate.double(), activation=activation,
            implementation="reference",
        )  # fmt: skip
        there = rows.to(DEVICE), scale.to(DEVICE), gate.to(DEVICE)
        found = rms_norm_gated(*there, activation=activation)
        close(f"{name} norm {activation}", found, wanted, dtype)
        spread = torch.full((777, 9, rows.shape[-1] + 3), torch.nan, dtype=dtype, device=DEVICE)
        spread[:, 2:8, 1:-2] = there[2]
        strided = rms_norm_gated(*there[:2], spread[:, 2:8, 1:-2], activation=activation)
        expect(f"{name} norm {activation}: strides", torch.equal(strided, found))
        alone = rms_norm_gated(there[0][5, 3], there[1], there[2][5, 3], activation=activation)
        expect(f"{name} norm {activation}: a row alone", torch.equal(alone, found[5, 3]))


def check_compiles():
    """Fifty random batches compile nothing new after the first."""
    w, hashes = torch.ones(64, WIDTH, device=DEVICE), []
    at = random.Random(1)
    run = convolve_kernel.run

    def counted(*args, **kwargs):
        kernel = run(*args, **kwargs)
        hashes.append(kernel.hash)
        return kernel

    convolve_kernel.run = counted
    try:
        for _ in range(50):
            lengths = [at.randint(0, 900) for _ in range(at.randint(1, 40))]
            causal_conv1d(torch.ones(sum(lengths), 64, device=DEVICE), w, schedule=lengths)
    finally:
        del convolve_kernel.run
    expect(f"50 batches compile once, not {len(set(hashes))} times", len(set(hashes)) == 1)


def captured(run, buffers, repeats):
    """A graph of `repeats` calls of run(buffer), buffers in turn."""
    for buffer in buffers:
        run(buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _, buffer in zip(range(repeats), itertools.cycle(buffers), strict=False):
            run(buffer)
    return graph


def timed(arms, buffers, rounds, repeats):
    """Median microseconds a call of every arm."""
    graphs = {name: captured(run, buffers, repeats) for name, run in arms.items()}
    times = {name: [] for name in arms}
    names = list(arms)
    for r in range(rounds + 2):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if r >= 2:
                times[name].append(1e3 * begin.elapsed_time(end) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def call_of(x, weight, bias, out, **given):
    given = {
        "schedule": None, "state": None, "snapshots": None, "return_state": False,
        "activation": "silu",
    } | given  # fmt: skip
    return spec.bind(x, weight, bias, out=out, **given)


def bench(tokens, channels, dtype, rounds, repeats, sweep):
    """Arms of one shape: copy, the rule, other configurations, the cache with snapshots."""
    count = max(2, min(64, int(3e8 // (tokens * channels * dtype.itemsize)) + 1))
    buffers = []
    for _ in range(count):
        x = torch.randn(tokens, channels, device=DEVICE, dtype=torch.float32).to(dtype)
        buffers.append((x, torch.empty_like(x)))
    weight = torch.randn(channels, WIDTH, device=DEVICE).to(dtype)
    bias = torch.randn(channels, device=DEVICE).to(dtype)

    def arm(config=None, rows=0, **given):
        return lambda b: convolve(call_of(b[0], weight, bias, b[1], **given), config, rows)

    whole = Schedule([tokens], device=DEVICE)
    often = Schedule([tokens], snapshot_every=64, device=DEVICE)
    ragged = Schedule([tokens // 32] * 31 + [tokens - 31 * (tokens // 32)], device=DEVICE)
    cache, room = caches(channels, dtype, often.M + 40)
    slots = torch.arange(32, device=DEVICE)
    kept = torch.arange(33, 33 + often.M, device=DEVICE)
    arms = {
        "copy": lambda b: b[1].copy_(b[0]),
        "rule": arm(schedule=whole),
        "rule, no activation": arm(schedule=whole, activation=None),
        "rule, 32 sequences": arm(schedule=ragged),
        "cache": arm(schedule=whole, state=cache.at(slots[:1])),
        "cache, 32 sequences": arm(schedule=ragged, state=cache.at(slots)),
        "cache, a snapshot every 64": arm(
            schedule=often, state=cache.at(slots[:1]), snapshots=room.at(kept)
        ),
    }
    for block, unroll, warps, rows in sweep:
        config = Config(block, unroll, warps)
        arms[f"channels {block}, unroll {unroll}, warps {warps}, rows {rows}"] = arm(
            config, rows, schedule=whole
        )
    return timed(arms, buffers, rounds, repeats)


def caches(channels, dtype, slots):
    """Two caches of the convolution alone."""
    return [
        DeltaCache(
            slots, H=1, HV=1, K=1, V=1, conv_channels=channels, dtype=dtype, device=DEVICE
        )
        for _ in range(2)
    ]  # fmt: skip


def bench_decode(channels, dtype, rounds, repeats):
    """64 sequences of one token, and of four drafts, the ring's inputs or its channels in line."""
    x = torch.randn(256, channels, device=DEVICE).to(dtype)
    weight = torch.randn(channels, WIDTH, device=DEVICE).to(dtype)
    plain, other = caches(channels, dtype, 64 * 16)
    other.tensors["history"] = other.tensors["history"].transpose(1, 2).contiguous().transpose(1, 2)
    buffers = [torch.arange(64 * i, 64 * i + 64, device=DEVICE) for i in range(16)]
    one = Schedule([1] * 64, start_positions=100, device=DEVICE)
    four = Schedule([4] * 64, start_positions=100, drafts=True, device=DEVICE)
    out = torch.empty_like(x)
    arms = {"copy": lambda b: out[:64].copy_(x[:64])}
    for name, cache in (("made", plain), ("turned", other)):
        for steps, schedule in ((1, one), (4, four)):
            arms[f"64 x {steps}, ring {name}"] = lambda b, c=cache, s=schedule: convolve(
                call_of(x[: s.T], weight, None, out[: s.T], schedule=s, state=c.at(b))
            )
    return timed(arms, buffers, rounds, repeats)


def bench_norm(rows, heads, size, dtype, rounds, repeats):
    """The gated norm: x contiguous, the gate a slice of a packed projection."""
    buffers = []
    for _ in range(2):
        x, gate = torch.randn(2, rows, heads, size, device=DEVICE).to(dtype)
        packed = torch.zeros(rows, 3 * heads, size, device=DEVICE, dtype=dtype)
        packed[:, heads : 2 * heads] = gate
        buffers.append((x, packed[:, heads : 2 * heads], torch.empty_like(x)))
    weight = torch.randn(size, device=DEVICE)

    def arm(config=None):
        return lambda b: norm(spec.bind_norm(b[0], weight, b[1], 1e-6, "silu"), config)

    arms = {"two reads, one write": lambda b: torch.add(b[0], b[1], out=b[2]), "rule": arm()}
    for tile, warps in ((8, 4), (16, 4), (64, 4), (64, 8), (16, 2)):
        arms[f"rows {tile}, warps {warps}"] = arm(NormConfig(tile, warps))
    return timed(arms, buffers, rounds, repeats)


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="fewer configurations and rounds")
    chosen = arguments.parse_args()
    with torch.inference_mode():
        for dtype in ROUNDING:
            check(dtype, 256)
        check(torch.bfloat16, 1003)
        check_compiles()
        print("checks:", "passed" if not failures else f"{len(failures)} failed")
        if failures:
            sys.exit(1)
        rounds = 10 if chosen.quick else 40
        blocks = (
            (1024, 8, 4), (1024, 4, 4), (1024, 16, 4), (512, 8, 4), (512, 8, 2), (2048, 8, 8),
            (512, 16, 4), (256, 8, 1),
        )  # fmt: skip
        long = [(*block, rows) for block in blocks for rows in (32, 64, 128)]
        short = [(1024, 8, 4, 16), (1024, 8, 4, 32), (512, 8, 4, 8), (512, 8, 2, 8)]
        half = torch.bfloat16
        results = {
            "18778 x 8192": bench(18778, 8192, half, rounds, 4, long[: 4 if chosen.quick else 99]),
            "512 x 8192": bench(512, 8192, half, rounds, 20, short),
            "decode 8192": bench_decode(8192, half, rounds, 20),
            "norm 18778 x 32 x 128": bench_norm(18778, 32, 128, half, rounds, 4),
        }
    place = Path(os.environ.get("OUT", "out"))
    place.mkdir(parents=True, exist_ok=True)
    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "us": results}
    (place / "convolution_device.json").write_text(json.dumps(record, indent=1))
    print(torch.cuda.get_device_name())
    for case, times in results.items():
        ceiling = next(iter(times.values()))
        print(case)
        for name, value in times.items():
            print(f"  {name:48} {value:9.2f} us {ceiling / value:7.3f} of the copy")


if __name__ == "__main__":
    main()
