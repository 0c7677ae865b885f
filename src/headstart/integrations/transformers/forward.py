"""Host facts of one forward of a decoder, shared by its layers: rows, positions, plans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from headstart import ExtendPlan, Schedule
from headstart.runtime.checks import shown


class Forward:
    """Which rows of a padded batch [B, L] are tokens, and where each sequence stands.

    The position of a token is its index among the tokens of its sequence: padding does not count,
    so the chunk grid is the sequence's own.

    Parameters
    ----------
    batch, length: B and L.
    past: rows (padding included) that the cache has seen of each sequence.
    mask: [B, past + L] or longer, nonzero for tokens and 0 for padding; None: no padding. It is
        read back once, here.
    packed: lengths of the sequences packed end to end into the rows (no cache then); None: one
        sequence a row.
    known: tokens that the cache holds of each sequence, or None where it does not count them.
    cache: the cache of the forward, or None.
    device: device of the tensors.

    Attributes
    ----------
    lengths, starts: new tokens of each sequence and the position of the first.

    >>> mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    >>> forward = Forward(2, 4, mask=mask)
    >>> forward.lengths, forward.starts
    ([4, 2], [0, 0])
    >>> forward.rows(torch.arange(8).view(2, 4, 1)).flatten().tolist()
    [0, 1, 2, 3, 6, 7]
    """

    def __init__(
        self,
        batch: int,
        length: int,
        *,
        past: int = 0,
        mask: torch.Tensor | None = None,
        packed: list[int] | None = None,
        known: list[int] | None = None,
        cache: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch, self.length, self.past = batch, length, past
        self.packed, self.cache, self.device = packed is not None, cache, torch.device(device)
        self._seen: torch.Tensor | None = None
        self._index: torch.Tensor | None = None
        self._memo: dict[Any, Any] = {}
        if packed is not None:
            self.lengths, self.starts = packed, [0] * len(packed)
        elif mask is None:
            self.lengths = [length] * batch
            self.starts = [past] * batch if known is None else known
        else:
            self._read_mask(mask)
            if known is not None and known != self.starts:
                raise ValueError(
                    "attention_mask: expected as many tokens before the new ones as the cache "
                    f"holds, {shown(known)}, got {shown(self.starts)}"
                )
        if len(self.starts) != len(self.lengths):
            raise ValueError(
                f"past_key_values: expected a batch of {len(self.starts)}, as before, got {batch}"
            )

    def _read_mask(self, mask: torch.Tensor) -> None:
        total = self.past + self.length
        if mask.dim() != 2 or mask.shape[0] != self.batch or mask.shape[1] < total:
            raise ValueError(
                f"attention_mask: expected [B, past + new] = [{self.batch}, {total}], "
                f"got {list(mask.shape)}"
            )
        seen = mask[:, :total].bool().cpu()
        self.starts = seen[:, : self.past].sum(1).tolist()
        self.lengths = seen[:, self.past :].sum(1).tolist()
        if not seen.all():
            self._seen = seen
        if sum(self.lengths) < self.batch * self.length:
            self._index = seen[:, self.past :].flatten().nonzero().flatten().to(self.device)

    @property
    def ends(self) -> list[int]:
        """Tokens of each sequence after the forward."""
        return [start + new for start, new in zip(self.starts, self.lengths, strict=True)]

    @property
    def padded_before(self) -> bool:
        """Whether a sequence has seen fewer tokens than rows."""
        return any(start != self.past for start in self.starts)

    def position_ids(self) -> torch.Tensor | None:
        """Positions [B, L] of the tokens, where rows say others: 0 or the last one at padding.

        >>> Forward(2, 4, mask=torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])).position_ids().tolist()
        [[0, 1, 2, 2], [0, 0, 0, 1]]
        """
        if self.packed or (self._seen is None and not self.padded_before):
            return None
        tokens = torch.ones(self.batch, self.length, dtype=torch.int64, device="cpu")
        if self._seen is not None:
            tokens = self._seen[:, self.past :].long()
        positions = torch.tensor(self.starts, device="cpu")[:, None] + tokens.cumsum(1) - 1
        return positions.clamp(min=0).to(self.device)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tokens [T, ...] of a padded tensor [B, L, ...]."""
        flat = tensor.flatten(0, 1)
        return flat if self._index is None else flat.index_select(0, self._index)

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The padded tensor [B, L, ...] of tokens [T, ...]; padding is zero."""
        if self._index is not None:
            flat = rows.new_zeros(self.batch * self.length, *rows.shape[1:])
            rows = flat.index_copy_(0, self._index, rows)
        return rows.unflatten(0, (self.batch, self.length))

    def schedule(
        self, snapshots: tuple[tuple[int, ...], ...] | None = None, drafts: bool = False
    ) -> Schedule:
        """The step of the linear layers, with snapshots at these positions of each sequence."""
        key = ("schedule", snapshots, drafts)
        if key not in self._memo:
            self._memo[key] = Schedule(
                self.lengths,
                start_positions=self.starts,
                drafts=drafts,
                snapshot_positions=None if snapshots is None else [list(p) for p in snapshots],
                device=self.device,
            )
        return self._memo[key]

    def plan(self) -> ExtendPlan:
        """Plan of a forward without a cache: every sequence from position 0."""
        if "plan" not in self._memo:
            self._memo["plan"] = ExtendPlan.from_lengths(self.lengths, device=self.device)
        return self._memo["plan"]

    def padded_plan(self, rows: int) -> ExtendPlan:
        """Plan over the keys [B, rows, ...] that a layer of transformers' caches returns.

        They are the last `rows` that the layer has seen, or (static caches) all, followed by rows
        that nobody wrote.
        """
        if ("plan", rows) not in self._memo:
            self._memo["plan", rows] = self._padded_plan(rows)
        return self._memo["plan", rows]

    def _padded_plan(self, rows: int) -> ExtendPlan:
        total = self.past + self.length
        first = max(total - rows, 0)
        if self._seen is None:
            ends, starts, offsets = [total] * self.batch, [first] * self.batch, [0] * self.batch
        else:
            kept = [row.nonzero().flatten().tolist() for row in self._seen[:, first:]]
            starts = self._seen[:, :first].sum(1).tolist()
            ends = [start + len(at) for start, at in zip(starts, kept, strict=True)]
            if any(at and at[-1] - at[0] + 1 != len(at) for at in kept):
                return self._listed_plan(kept, first, rows)
            offsets = [at[0] if at else 0 for at in kept]
        return ExtendPlan.from_padded(
            self.lengths,
            [end - start for start, end in zip(starts, ends, strict=True)],
            rows,
            new_in_cache=True,
            offsets=offsets,
            key_start=starts,
            device=self.device,
        )

    def _listed_plan(self, kept: list[list[int]], first: int, rows: int) -> ExtendPlan:
        """Padding between the tokens of a sequence: every key by its row."""
        if first:
            raise ValueError(
                "attention_mask: padding between tokens needs a cache that keeps all keys, "
                "as HybridCache does; a sliding layer of this one has dropped some"
            )
        indptr = [0]
        for at in kept:
            indptr.append(indptr[-1] + len(at))
        indices = [n * rows + row for n, at in enumerate(kept) for row in at]
        return ExtendPlan.from_slots(
            self.lengths,
            indptr,
            torch.tensor(indices, dtype=torch.int64, device=self.device),
            new_in_cache=True,
        )


def packed_lengths(position_ids: torch.Tensor | None, batch: int) -> list[int] | None:
    """Lengths of sequences packed end to end, where positions restart at 0; else None.

    position_ids: [B or 1, L], or [4, B, L] with the text's positions first (Qwen3.5); [3, B, L]
    holds places in images, which say nothing.

    >>> packed_lengths(torch.tensor([[0, 1, 2, 0, 1]]), 1)
    [3, 2]
    >>> packed_lengths(torch.tensor([[0, 1, 2]]), 1) is None
    True
    """
    if position_ids is None or position_ids.shape[-1] < 2:
        return None
    if position_ids.dim() == 3:
        if position_ids.shape[0] != 4:
            return None
        position_ids = position_ids[0]
    rows = position_ids.expand(batch, -1)
    if not bool((rows.diff(dim=-1) != 1).any()):
        return None
    lengths: list[int] = []
    for row in rows.tolist():
        begins = [i for i, p in enumerate(row) if i == 0 or p != row[i - 1] + 1]
        if any(row[i] != 0 for i in begins):
            raise ValueError(
                "position_ids: expected positions that rise by one and restart at 0 "
                "where a packed sequence begins"
            )
        lengths += [end - begin for begin, end in zip(begins, [*begins[1:], len(row)], strict=True)]
    return lengths


def lengths_of(cu_seqlens: torch.Tensor, batch: int, length: int) -> list[int]:
    """Lengths of packed sequences from their running sum, which covers the rows of the batch.

    >>> lengths_of(torch.tensor([0, 3, 5]), 1, 5)
    [3, 2]
    """
    offsets = cu_seqlens.tolist()
    if not offsets or offsets[0] != 0 or offsets[-1] != batch * length:
        raise ValueError(
            f"cu_seq_lens_q: expected a running sum from 0 to B L = {batch * length}, "
            f"got {offsets[:4]}"
        )
    return [end - begin for begin, end in pairwise(offsets)]
