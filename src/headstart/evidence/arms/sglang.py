"""SGLang's Triton extend kernel (slots of page size 1, sinks, windows), convolution and layer."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from headstart.evidence.arms import Arm, MissingPeer, Unfit, layer, peer
from headstart.evidence.arms.attention import dense_attention
from headstart.evidence.cases import Case
from headstart.evidence.cases.convolution import ConvolutionCase
from headstart.evidence.cases.delta_block import DeltaBlockCase

PLACES = (
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.srt.layers.attention.triton_ops.extend_attention",
    "extend_attention",
)
"""Where versions keep the file; the last: the file alone, on the path."""
NO_SLOTS = torch.zeros(0, dtype=torch.int64)


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """`extend_attention_fwd`: new keys packed, cached ones by slot; or what `layer` builds.

    As SGLang does, it leaves out slots before the window: the kernel would visit them all.
    """
    if isinstance(case, DeltaBlockCase):
        return layer.build(case, device, seed)
    if isinstance(case, ConvolutionCase):
        return layer.build_convolution(case, device, seed)
    inputs = dense_attention(case, device, seed)
    inputs.refuse(mask=True)
    case = inputs.case
    if case.window == 1:
        raise Unfit("takes a window of one key for no window")
    attend = _attend()
    # Its window counts the keys before the query's own.
    before = -1 if case.window is None else case.window - 1
    call = case.inputs(seed, device)
    k, v, stored = call["k"], call["v"], call.get("cache")
    rows = [NO_SLOTS] * len(case.lengths) if stored is None else case.cache_rows(seed)
    if stored is None:
        k_slots = torch.empty(1, case.HK, case.D, dtype=inputs.q.dtype, device=device)
        v_slots = torch.empty(1, case.HK, case.value_size, dtype=inputs.q.dtype, device=device)
    else:
        k_slots, v_slots = (m.reshape(-1, *m.shape[-2:]) for m in (stored.k, stored.v))
    if case.new_in_cache:
        new = torch.cat([own[old:] for own, old in zip(rows, case.cached, strict=True)]).to(device)
        k, v = k_slots[new], v_slots[new]
    prefixes = [own[:old] for own, old in zip(rows, case.cached, strict=True)]
    seen = [slots if before < 0 else slots[-before:] for slots in prefixes]
    indices = torch.cat([NO_SLOTS, *seen]).to(device)
    borders = torch.tensor([0, *accumulate(map(len, seen))], dtype=torch.int32, device=device)
    o = torch.empty(case.tokens, case.HQ, case.value_size, dtype=inputs.q.dtype, device=device)
    query_borders = inputs.query_borders
    options = {"sliding_window_size": before, "sinks": inputs.sinks}

    def run() -> torch.Tensor:
        attend(
            inputs.q, k, v, o, k_slots, v_slots, query_borders, borders, indices, None, True, None,
            max(case.lengths), 1.0, 1.0, **options,
        )  # fmt: skip
        return o

    note = "new keys packed instead of in the cache" if case.new_in_cache else ""
    return Arm("sglang", run, lambda found: {"o": found}, note=note)


def _attend() -> Any:
    failures = []
    for place in PLACES:
        try:
            return peer(place, "extend_attention_fwd")[0]
        except MissingPeer as missing:
            failures.append(str(missing))
    raise MissingPeer(failures[0])
