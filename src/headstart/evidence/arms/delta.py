"""Plain inputs of a gated delta rule case, as peers without a cache take them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

import headstart
from headstart.evidence.arms import Outputs, Unfit
from headstart.evidence.cases import Case
from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.cases.gated_delta_rule import DeltaCase

NO_CACHE = "plain states in and out instead of a cache"


@dataclass
class PlainDelta:
    """One call on plain tensors: q, k, v, log decay g and beta packed, states [N, HV, K, V].

    initial: float32, or None for zeros. Where a case starts in the middle of a chunk, it is the
        state after the cached tail.
    final: whether the state after the last token is wanted.
    """

    case: DeltaCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial: torch.Tensor | None
    final: bool
    note: str

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Borders of the sequences, int64."""
        borders = [0, *accumulate(self.case.lengths)]
        return torch.tensor(borders, device=self.q.device)

    @property
    def dense(self) -> tuple[int, int] | None:
        """(B, L) where all sequences have the same length, else None."""
        lengths = set(self.case.lengths)
        return (len(self.case.lengths), lengths.pop()) if len(lengths) == 1 else None

    @property
    def decoding(self) -> bool:
        """Whether the case is a decode or a verify: a few tokens of every sequence."""
        return self.dense is not None and self.dense[1] <= 8 and self.initial is not None

    def outputs(self, o: torch.Tensor, state: torch.Tensor | None) -> Outputs:
        """Outputs that can be checked; state [N, HV, K, V]. A cache's state stands elsewhere."""
        found = {"o": o.reshape(self.v.shape)}
        if state is not None and self.case.state in ("plain", "pool"):
            found["state"] = state.flatten(2)
        return found


def plain(case: Case, device: torch.device, seed: int) -> PlainDelta:
    """The inputs of a case; `Unfit` where it is no gated delta rule or needs more than states."""
    if not isinstance(case, DeltaCase):
        raise Unfit(f"computes the gated delta rule, not {case.op}")
    if isinstance(case, DeltaBlockCase):
        raise Unfit("computes the rule alone, not the layer around it")
    *tails, last = case.steps(seed, device)
    initial = case.initial_states(seed)
    # The reference runs on the CPU alone.
    for step in tails:
        lengths = [start % 64 for start in case.positions]
        initial = headstart.gated_delta_rule(
            *(step[name].float().cpu() for name in ("q", "k", "v", "g", "beta")),
            schedule=headstart.Schedule(lengths, device="cpu"),
            state=initial,
            return_state=True,
            implementation="reference",
        ).state
    return PlainDelta(
        case,
        *(last[name].contiguous() for name in ("q", "k", "v", "g", "beta")),
        initial=None if initial is None else initial.to(device),
        final=case.state != "none",
        note={"cache": NO_CACHE, "pool": "gathered states instead of a pool"}.get(case.state, ""),
    )


def refuse_snapshots(case: DeltaCase, note: str) -> str:
    """The note of a peer that keeps no snapshots."""
    if case.snapshot_dtype is None:
        return note
    return "; ".join(filter(None, (note, "keeps no snapshots")))
