"""The Triton extend attention on a GPU: checked first, then timed in several configurations.

    python benchmarks/extend_attention_device.py [--only PATTERN] [--json FILE]

Every configuration of a case is held against float64 on a few rows of its last sequence before it
is timed. Times are medians of CUDA events over replays of captured graphs, configurations in
rotated order. Kernels are compiled beforehand by processes of their own, several at once.
"""

import argparse
import fnmatch
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import asdict, replace

import torch

from headstart.evidence import cases
from headstart.evidence.oracles.attention import attend
from headstart.ops.extend_attention import spec
from headstart.ops.extend_attention.triton import call as call_module
from headstart.ops.extend_attention.triton.call import (
    configured,
    declines,
    launch_arguments,
    run,
)
from headstart.ops.extend_attention.triton.config import Config

DEVICE = torch.device("cuda")
ROWS = 24
"""Rows of the last sequence that are checked."""
PROCESSES = 12
MOST = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Error of a row against its own largest value."""

WINDOWS = (
    Config(64, 32, 2, 4), Config(64, 32, 3, 4), Config(64, 32, 4, 4), Config(64, 64, 2, 4),
    Config(64, 16, 4, 4), Config(128, 32, 3, 4), Config(128, 32, 3, 8),
    Config(64, 32, 3, 4, registers=80),
)  # fmt: skip
NARROW = (
    Config(64, 128, 2, 4), Config(64, 128, 2, 4, registers=168), Config(64, 64, 3, 4),
    Config(64, 64, 3, 4, registers=128), Config(128, 128, 2, 8), Config(128, 64, 3, 8),
)  # fmt: skip
MIDDLE = (
    Config(64, 64, 3, 4), Config(64, 64, 2, 4), Config(64, 128, 2, 4), Config(128, 64, 3, 8),
    Config(128, 64, 2, 8), Config(128, 128, 2, 8),
)  # fmt: skip
WIDE = (
    Config(64, 64, 2, 8), Config(64, 32, 2, 4), Config(64, 64, 2, 4), Config(128, 64, 2, 8),
    Config(128, 32, 3, 8), Config(64, 32, 3, 4),
)  # fmt: skip
PAGED = (
    Config(64, 64, 3, 4), Config(64, 64, 3, 4, registers=168), Config(64, 64, 4, 4),
    Config(64, 64, 2, 4), Config(64, 128, 2, 4), Config(64, 32, 4, 4), Config(128, 64, 3, 8),
)  # fmt: skip
SWEEPS = {
    "oss-16k-win": WINDOWS,
    "oss-chunk-win": WINDOWS[:2],
    "oss-512-on-8k-win": WINDOWS[:2],
    "oss-512-on-512-win": WINDOWS[:2],
    "oss-16k-full": NARROW,
    "oss-chunk-full": NARROW[:3],
    "llama-16k": MIDDLE,
    "next-16k": WIDE,
    "gemma-win-16k": (Config(64, 32, 2, 8), Config(64, 32, 2, 4), Config(64, 64, 2, 8)),
    "mixed": MIDDLE[:1],
    "d512-win": (Config(64, 32, 2, 8), Config(64, 16, 2, 8)),
    "mla-expanded": (Config(64, 64, 2, 8), Config(64, 64, 2, 4), Config(128, 64, 2, 8)),
    "paged-1": PAGED,
    "paged-16": PAGED,
    "paged-64": PAGED,
    "paged-1-win": WINDOWS[:3],
    "paged-16-win": WINDOWS[:3],
    "oss-fp8-page16": WINDOWS[:4],
    "oss-fp8-page16-full": PAGED,
    "fp8-cache": PAGED,
}
"""Case -> configurations beside the rule's; every other case of the list runs the rule's alone."""
REPRODUCIBLE = {
    "oss-16k-win": (Config(64, 32, 3, 4), Config(64, 32, 3, 4, registers=96)),
    "oss-16k-full": (
        Config(64, 64, 3, 4, 2048, 168, 3), Config(64, 64, 3, 4, 8192, 168, 3),
        Config(64, 64, 2, 4, 4096, 168, 3), Config(64, 128, 2, 4, 4096, 168, 3),
    ),
    "llama-16k": (Config(64, 64, 2, 4, 4096, 0, 2), Config(64, 64, 3, 4, 1024, 0, 2)),
    "next-16k": (Config(64, 32, 2, 4, 4096, 0, 2), Config(64, 64, 2, 4, 4096)),
}  # fmt: skip
"""The same for the reproducible kernel, beside the rule's."""
OTHERS = (
    "oss-tp4-8k-on-8k", "ragged-short", "ragged-short-full", "oss-residual-mix",
    "oss-residual-mix-full", "paged-64 dense", "paged-64-win", "paged-64-win dense",
    "oss-fp8-page16 bf16", "oss-fp8-page16-full bf16",
)  # fmt: skip
"""Cases that the rule runs; "dense" and "bf16" name siblings with that kind of cache."""


def case_of(name):
    name, _, sibling = name.partition(" ")
    case = cases.get(name)
    if sibling == "dense":
        return replace(case, layout="rows", new_in_cache=False)
    return replace(case, cache_dtype=None) if sibling == "bf16" else case


def bound(case, inputs):
    given = {
        "cache": None, "scale": None, "window": None, "sinks": None, "softcap": None,
        "custom_mask": None, "causal": True, "part": "all", "return_lse": False,
        "reproducible": False, "workspace": None, "out": None,
    } | inputs  # fmt: skip
    given["out"] = torch.full(
        (case.tokens, case.HQ, case.value_size), torch.nan, dtype=given["q"].dtype, device=DEVICE
    )
    return spec.bind(**given)


def keys_of(case, call):
    """Keys and values [J, HK, .] of the last sequence as float64."""
    n = len(case.lengths) - 1
    first, cached = sum(case.lengths[:n]), case.cached[n]
    pieces = []
    for name in ("k", "v"):
        fresh = getattr(call, name)
        fresh = None if fresh is None else fresh[first:].double()
        if cached or fresh is None:
            store = getattr(call.cache, name)
            rows = case.cache_rows(0)[n].to(DEVICE)
            flat = store.reshape(-1, *store.shape[-2:])
            if flat.dtype == torch.float8_e4m3fn:
                old = flat.view(torch.uint8)[rows].view(flat.dtype).double()
                old = old * getattr(call.cache, f"{name}_scale").view(-1, 1)
            else:
                old = flat[rows].double()
            fresh = old if fresh is None else torch.cat([old, fresh])
        pieces.append(fresh)
    return first, cached, *pieces


def reference(case, call):
    """Some rows of the last sequence, and their outputs in float64."""
    first, cached, k, v = keys_of(case, call)
    length, group = case.lengths[-1], case.HQ // case.HK
    at = torch.Generator().manual_seed(0)
    rows = torch.randint(length, (ROWS,), generator=at)
    rows[:3] = torch.tensor([0, length - 1, length // 2])
    rows = rows.to(DEVICE)
    found = []
    for h in range(case.HK):
        heads = slice(h * group, (h + 1) * group)
        found.append(attend(
            call.q[first + rows][:, heads], k[:, h], v[:, h], positions=cached + rows,
            window=case.window, sinks=None if call.sinks is None else call.sinks[heads],
        )[0])  # fmt: skip
    return first + rows, torch.cat(found, dim=1)


def error(call, rows, wanted):
    """The worst row's error against its own largest value; NaN and infinities count as such."""
    if not bool(call.out.isfinite().all()):
        return float("inf")
    off = (call.out[rows].double() - wanted).abs().amax(-1)
    return float((off / wanted.abs().amax(-1).clamp_min(0.1)).max())


def arms_of(name):
    """(label, configuration or None for the rule's, reproducible) of a case."""
    arms = [("rule", None, False), ("reproducible", None, True)]
    arms += [(label(config), config, False) for config in SWEEPS.get(name, ())]
    arms += [("R " + label(config), config, True) for config in REPRODUCIBLE.get(name, ())]
    return arms


def label(config):
    found = f"{config.BM}x{config.BN} s{config.stages} w{config.warps}"
    found += f" b{config.piece}" if config.piece != Config.piece else ""
    return found + (f" r{config.registers}" if config.registers else "")


def compile_only(kernel, grid, given, config):
    named, options = launch_arguments(kernel, given, config)
    kernel.warmup(grid=grid, **named, **options)


def prime(jobs):
    """Compile what these (case, arm) need, into Triton's cache on disk; nothing is launched."""
    torch.set_grad_enabled(False)
    call_module.start = compile_only
    for name, (label, config, reproducible) in jobs:
        try:
            case = case_of(name)
            call = replace(bound(case, case.blank(DEVICE)), reproducible=reproducible)
            if not declines(call):
                run(call, config)
        except Exception as failure:  # reported where it is timed
            print(f"{name} {label}: {type(failure).__name__}: {failure}", file=sys.stderr)


def timed(calls, rounds=9):
    """Median milliseconds of every (call, configuration)."""
    graphs = []
    for call, config in calls:
        began = time.perf_counter()
        run(call, config)
        torch.cuda.synchronize()
        once = time.perf_counter() - began
        repeats = max(1, min(20, int(3e-3 / once)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                run(call, config)
        graphs.append((graph, repeats))
    times = [[] for _ in calls]
    for r in range(rounds + 1):
        for i in range(len(calls)):
            at = (i + r) % len(calls)
            graph, repeats = graphs[at]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if r:
                times[at].append(begin.elapsed_time(end) / repeats)
    return [statistics.median(found) for found in times]


def measure(name):
    """One line of the table for each arm of a case."""
    case = case_of(name)
    drawn = bound(case, case.inputs(0, DEVICE))
    rows, wanted = reference(case, drawn)
    lines, calls = [], []
    for label, config, reproducible in arms_of(name):
        call = replace(drawn, reproducible=reproducible)
        if declines(call):
            continue
        line = {"case": name, "arm": label, "reproducible": reproducible}
        line["config"] = asdict(config or configured(call))
        try:
            call.out.fill_(torch.nan)
            run(call, config)
            line["error"] = error(call, rows, wanted)
            first = call.out.clone()
            run(call, config)
            line["same again"] = torch.equal(first, call.out)
            if line["error"] < MOST[call.q.dtype]:
                calls.append((line, call, config))
        except Exception as failure:
            line["failure"] = f"{type(failure).__name__}: {str(failure)[:120]}"
        lines.append(line)
    floor = case.floor()
    times = timed([(call, config) for _, call, config in calls])
    for (line, _, _), found in zip(calls, times, strict=True):
        line["ms"] = found
        line["TFLOP/s"] = floor.operations / found / 1e9
        line["TB/s"] = floor.bytes / found / 1e9
    return lines


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", default="*", help="cases whose name fits this pattern")
    arguments.add_argument("--json", help="write every figure there")
    chosen = arguments.parse_args()
    torch.set_grad_enabled(False)
    names = [name for name in (*SWEEPS, *OTHERS) if fnmatch.fnmatch(name, chosen.only)]
    began = time.perf_counter()
    jobs = [(name, arm) for name in names for arm in arms_of(name)]
    context = multiprocessing.get_context("spawn")
    shares = [jobs[i::PROCESSES] for i in range(PROCESSES)]
    workers = [context.Process(target=prime, args=(share,)) for share in shares if share]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"compiled in {time.perf_counter() - began:.0f} s")
    lines = []
    for name in names:
        try:
            found = measure(name)
        except Exception as failure:  # the other cases are worth their time
            found = [{"case": name, "arm": "-", "failure": f"{type(failure).__name__}: {failure}"}]
        for line in found:
            print(described(line), flush=True)
        lines += found
        if chosen.json:
            record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            with open(chosen.json, "w") as sink:
                json.dump(record | {"lines": lines}, sink, indent=1)
        torch.cuda.empty_cache()
    wrong = [line for line in lines if not good(line)]
    print(torch.cuda.get_device_name(), f"{time.perf_counter() - began:.0f} s, {len(wrong)} wrong")
    for name in names:
        print(best(name, [line for line in lines if line["case"] == name and good(line)]))
    sys.exit(bool(wrong))


def good(line):
    return "ms" in line and line["same again"]


def described(line):
    numbers = ""
    if "ms" in line:
        numbers = f"{line['ms']:8.4f} ms {line['TFLOP/s']:6.0f} TFLOP/s {line['TB/s']:6.2f} TB/s"
    rest = line.get("failure", f"error {line.get('error', float('nan')):.1e}")
    wrong = "" if good(line) else "  WRONG"
    return f"{line['case']:24} {line['arm']:22} {numbers:44} {rest[:160]}{wrong}"


def best(name, lines):
    """The rule's time beside the best configuration's, of both kernels."""
    found = []
    for reproducible in (False, True):
        mine = [line for line in lines if line["reproducible"] == reproducible]
        if mine:
            least = min(mine, key=lambda line: line["ms"])
            found.append(f"{mine[0]['ms']:8.4f} (best {least['ms']:8.4f} {least['arm']})")
    return f"{name:24} {'   '.join(found)}"


if __name__ == "__main__":
    main()
