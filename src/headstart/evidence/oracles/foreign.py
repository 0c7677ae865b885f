"""A neighbour's outputs for a case: ONNX Runtime's operators, or a peer's arm of the benchmarks."""

from __future__ import annotations

from dataclasses import replace

import torch

from headstart.evidence.cases import Case
from headstart.evidence.oracles import onnx
from headstart.runtime.checks import dtype_name
from headstart.runtime.dispatch import Declined

PEERS = ("transformers", "fla", "flashinfer", "sdpa")
NEIGHBOURS = ("onnxruntime", *PEERS)


def outputs(
    against: str, case: Case, seed: int, device: torch.device, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Outputs by name, [rows, heads, vector], as far as the neighbour gives them.

    Raises ValueError for an unknown neighbour, `Declined` where it is missing or cannot compute the
    case.

    >>> from headstart.evidence import cases
    >>> sorted(outputs("onnxruntime", cases.get("gdn-1x1-small"), 0, torch.device("cpu"), None))
    ['o', 'state']
    """
    if against == "onnxruntime":
        return onnx.outputs(case, seed, dtype or case.torch_dtype)
    if against not in PEERS:
        raise ValueError(f"against: expected one of {list(NEIGHBOURS)}, got {against!r}")
    from headstart.evidence import arms

    if dtype is not None:
        case = replace(case, dtype=dtype_name(dtype))
    try:
        arm = arms.build(against, case, device, seed)
        found = arm.outputs(arm.call())
    except (arms.MissingPeer, arms.Unfit) as reason:
        raise Declined(f"{against}: {reason}") from reason
    return {name: values.flatten(2) for name, values in found.items()}
