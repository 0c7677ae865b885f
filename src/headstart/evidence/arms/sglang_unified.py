"""SGLang's one-stage Triton kernel, which keeps a row's bits whatever the batch: keys by slot."""

from __future__ import annotations

from itertools import accumulate

import torch

from headstart.evidence.arms import Arm, Unfit, peer
from headstart.evidence.arms.attention import dense_attention
from headstart.evidence.cases import Case


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """`extend_attention_fwd_unified`, without the slots before the window, as SGLang calls it."""
    inputs = dense_attention(case, device, seed)
    inputs.refuse(mask=True)
    case = inputs.case
    if case.window == 1:
        raise Unfit("takes a window of one key for no window")
    (attend,) = peer(
        "sglang.kernels.ops.attention.extend_attention", "extend_attention_fwd_unified"
    )
    # Its window counts the keys before the query's own.
    before = -1 if case.window is None else case.window - 1
    kept = [old if before < 0 else min(old, before) for old in case.cached]
    left = [old - seen for old, seen in zip(case.cached, kept, strict=True)]
    ends = list(accumulate(inputs.key_lengths))
    rows = [
        torch.arange(end - count + gone, end)
        for end, count, gone in zip(ends, inputs.key_lengths, left, strict=True)
    ]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots = torch.cat([*rows, torch.zeros(0, dtype=torch.int64)]).to(device)
    borders = ints([0, *accumulate(map(len, rows))])
    o = torch.empty(case.tokens, case.HQ, case.value_size, dtype=inputs.q.dtype, device=device)
    arguments = (
        inputs.q, o, inputs.k, inputs.v, 1.0, 1.0, inputs.query_borders, borders, slots,
        ints(kept), max(case.lengths, default=0),
    )  # fmt: skip
    options = {
        "sliding_window_size": before,
        "sinks": inputs.sinks,
        "window_start_pos": ints(left) if before > 0 else None,
    }

    def run() -> torch.Tensor:
        attend(*arguments, **options)
        return o

    return Arm("sglang-unified", run, lambda found: {"o": found}, note=inputs.note)
