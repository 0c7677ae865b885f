"""SGLang's Triton extend kernel: slots of page size 1, sinks, windows."""

from __future__ import annotations

from typing import Any

import torch

from headstart.evidence.arms import Arm, MissingPeer, Unfit, peer
from headstart.evidence.arms.attention import dense_attention
from headstart.evidence.cases import Case

PLACES = (
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.srt.layers.attention.triton_ops.extend_attention",
    "extend_attention",
)
"""Where versions keep the file; the last: the file alone, on the path."""


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """`extend_attention_fwd`: new keys packed, cached ones by slot."""
    inputs = dense_attention(case, device, seed)
    inputs.refuse(mask=True)
    if inputs.case.new_in_cache:
        raise Unfit("this arm takes the new keys packed, not in the cache")
    attend = _attend()
    call = inputs.case.inputs(seed, device)
    stored, case = call.get("cache"), inputs.case
    if stored is None:
        k_slots = torch.empty(1, case.HK, case.D, dtype=inputs.q.dtype, device=device)
        v_slots = torch.empty(1, case.HK, case.value_size, dtype=inputs.q.dtype, device=device)
    else:
        k_slots, v_slots = (m.reshape(-1, *m.shape[-2:]) for m in (stored.k, stored.v))
    rows = inputs.case.cache_rows(seed) if stored is not None else []
    indices = torch.cat([*rows, torch.zeros(0, dtype=torch.int64)]).to(device)
    query_borders = inputs.query_borders
    borders = inputs.key_borders - query_borders
    o = torch.empty(case.tokens, case.HQ, case.value_size, dtype=inputs.q.dtype, device=device)
    options = {
        "sliding_window_size": -1 if case.window is None else case.window - 1,
        "sinks": inputs.sinks,
    }

    def run() -> torch.Tensor:
        attend(
            inputs.q, call["k"], call["v"], o, k_slots, v_slots, query_borders,
            borders, indices, None, True, None, max(case.lengths), 1.0, 1.0, **options,
        )  # fmt: skip
        return o

    return Arm("sglang", run, lambda found: {"o": found})


def _attend() -> Any:
    failures = []
    for place in PLACES:
        try:
            return peer(place, "extend_attention_fwd")[0]
        except MissingPeer as missing:
            failures.append(str(missing))
    raise MissingPeer(failures[0])
