"""PyTorch's FlexAttention, compiled on a GPU, with its block mask made beforehand."""

from __future__ import annotations

import warnings

import torch

from headstart.evidence.arms import Arm, Unfit
from headstart.evidence.arms.attention import dense_attention
from headstart.evidence.cases import Case


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """One call over the packed batch; sequence and position of every row lie in tensors."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs = dense_attention(case, device, seed)
    inputs.refuse(sinks=True, mask=True)
    if not inputs.case.tokens:
        raise Unfit("takes no empty batch")
    owner, place = _rows(inputs.case.lengths, inputs.case.cached, device)
    key_owner, key_place = _rows(inputs.key_lengths, [0] * len(inputs.key_lengths), device)
    window = inputs.case.window

    def sees(batch: object, head: object, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = (owner[i] == key_owner[j]) & (key_place[j] <= place[i])
        return seen if window is None else seen & (key_place[j] > place[i] - window)

    mask = create_block_mask(sees, None, None, len(owner), len(key_owner), device=str(device))
    compiled, attend = device.type == "cuda", flex_attention
    if compiled:
        # Each case compiles anew; past a limit of compiled forms PyTorch would run uncompiled.
        torch.compiler.reset()
        attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    # The note says it.
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    q, k, v = (rows.transpose(0, 1)[None] for rows in (inputs.q, inputs.k, inputs.v))
    return Arm(
        "flex",
        lambda: attend(q, k, v, block_mask=mask, enable_gqa=inputs.case.HQ != inputs.case.HK),
        lambda o: {"o": o[0].transpose(0, 1)},
        note="; ".join(filter(None, (inputs.note, "" if compiled else "not compiled on a CPU"))),
    )


def _rows(
    lengths: object, starts: object, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and absolute position of every packed row."""
    owners, places = [], []
    for n, (length, start) in enumerate(zip(lengths, starts, strict=True)):  # type: ignore[call-overload]
        owners.append(torch.full((length,), n))
        places.append(torch.arange(start, start + length))
    return torch.cat(owners).to(device), torch.cat(places).to(device)
