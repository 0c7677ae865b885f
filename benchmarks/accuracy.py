"""float32 against float64 on the CPU: relative L2 of the last half, per case and output.

    python benchmarks/accuracy.py [CASE ...] [--bound 2e-6] [--json FILE]

Every case's inputs are drawn in float32, computed by the `torch` implementation, and compared with
the reference in float64 from the same values. Exits with 1 where a figure exceeds the bound or an
output is not finite.
"""

import argparse
import json
import sys

import torch

import headstart
from headstart.evidence import cases

CASES = (
    "gdn-flat-small",
    "gdn-decay-hard-small",
    "gdn-late-forget-small",
    "gdn-repeat-small",
    "gdn-raw-keys-small",
    "gdn-next-8k-small",
    "kda-8k-small",
    "oss-16k-full-small",
    "oss-16k-win-small",
    "oss-chunk-full-small",
    "oss-chunk-win-small",
    "llama-16k-small",
    "next-16k-small",
    "gemma-win-16k-small",
)


def wide(value, dtype):
    """Float tensors of the arguments in another dtype."""
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return value.to(dtype)
    if isinstance(value, headstart.Gate) and value.a_log is not None:
        return headstart.Gate.raw(
            value.a_log.to(dtype),
            None if value.dt_bias is None else value.dt_bias.to(dtype),
            value.lower_bound,
            beta=value.beta,
        )
    return value


def outputs(operation, arguments, dtype, implementation):
    arguments = {name: wide(value, dtype) for name, value in arguments.items()}
    if (cache := arguments.get("cache")) is not None:
        arguments["cache"] = headstart.KVCache(wide(cache.k, dtype), wide(cache.v, dtype))
    if operation == "extend_attention":
        o, lse = headstart.extend_attention(
            **arguments, return_lse=True, implementation=implementation
        )
        return {"o": o, "lse": lse[..., None]}
    result = headstart.gated_delta_rule(**arguments, implementation=implementation)
    return {"o": result.o, "state": result.state}


def last_half(output, found, want):
    """Relative L2: of the last half of the tokens, or of a whole state."""
    rows = slice(None) if output == "state" else slice(found.shape[0] // 2, None)
    found, want = found[rows].double(), want[rows]
    seen = want.isfinite()
    return float((found - want)[seen].norm() / want[seen].norm())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--bound", type=float, default=2e-6)
    parser.add_argument("--json")
    options = parser.parse_args()
    figures, broken = {}, []
    for name in options.cases:
        case = cases.get(name)
        arguments = {key: wide(value, torch.float32) for key, value in case.inputs(seed=0).items()}
        found = outputs(case.op, arguments, torch.float32, "torch")
        want = outputs(case.op, arguments, torch.float64, "reference")
        for output, tensor in found.items():
            if tensor is None:
                continue
            figure = last_half(output, tensor, want[output])
            figures[f"{name} {output}"] = figure
            spoiled = bool(tensor.isnan().any())
            if spoiled or not figure < options.bound:
                broken.append(f"{name} {output}")
            print(f"{name:28} {output:6} {figure:.2e}{'  NaN' if spoiled else ''}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"bound": options.bound, "relative_l2": figures}, file, indent=2)
    if broken:
        sys.exit(f"not under {options.bound}: {', '.join(broken)}")


if __name__ == "__main__":
    main()
