"""Host facts of one forward of a decoder, shared by its layers: rows, positions, plans."""

from __future__ import annotations

from typing import Any

import torch

from headstart import ExtendPlan, Schedule


class Forward:
    """Which rows of a padded batch [B, L] are tokens, and where each sequence stands.

    The position of a token is its index among the tokens of its sequence: padding does not count,
    so the chunk grid is the sequence's own.

    Parameters
    ----------
    batch, length: B and L.
    past: tokens (padding included) that the cache has seen of each row.
    mask: [B, past + L] or longer, 1 for tokens and 0 for padding at one or both ends; None: no
        padding.
    packed: lengths of the sequences packed into the rows (no cache then); None: one a row.
    cache: the cache that was passed to the model, or None.
    device: device of the tensors.

    Attributes
    ----------
    lengths, starts: new tokens of each sequence and the position of the first.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        past: int,
        mask: torch.Tensor | None,
        packed: list[int] | None,
        cache: Any,
        device: torch.device,
    ) -> None:
        self.batch, self.length, self.past = batch, length, past
        self.packed, self.cache, self.device = packed, cache, device
        self._pads = [0] * batch
        self._skips = [0] * batch
        self.lengths, self.starts = [length] * batch, [past] * batch
        self._index: torch.Tensor | None = None
        self._plans: dict[Any, ExtendPlan] = {}
        self._schedules: dict[Any, Schedule] = {}
        if mask is not None:
            self._read_mask(mask)

    def _read_mask(self, mask: torch.Tensor) -> None:
        total = self.past + self.length
        if mask.shape[0] != self.batch or mask.shape[1] < total:
            raise ValueError(
                f"attention_mask: expected [B, past + new] = [{self.batch}, {total}], "
                f"got {list(mask.shape)}"
            )
        seen = mask[:, :total].bool()
        counts = seen.sum(1)
        first = seen.int().argmax(1)
        last = total - seen.flip(1).int().argmax(1)
        facts = torch.stack([counts, first, last]).tolist()  # read back once
        for n, (count, begin, end) in enumerate(zip(*facts, strict=True)):
            if count == 0:
                begin = end = total
            if end - begin != count:
                raise ValueError(
                    f"attention_mask: padding between the tokens of sequence {n} is not served; "
                    "it may stand before or after them"
                )
            self._pads[n] = begin
            self._skips[n] = min(max(begin - self.past, 0), self.length)
            self.starts[n] = max(self.past - begin, 0)
            self.lengths[n] = max(end - max(begin, self.past), 0)
        if any(length != self.length for length in self.lengths):
            new = seen[:, self.past :].flatten()
            self._index = new.nonzero().flatten()

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tokens [T, ...] of a padded tensor [B, L, ...]."""
        flat = tensor.flatten(0, 1)
        return flat if self._index is None else flat[self._index]

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The padded tensor [B, L, ...] of tokens [T, ...]; padding is zero."""
        if self._index is not None:
            flat = rows.new_zeros(self.batch * self.length, *rows.shape[1:])
            flat[self._index] = rows
            rows = flat
        return rows.unflatten(0, (self.batch, self.length))

    def schedule(self, snapshots: tuple[tuple[int, ...], ...] | None, cached: bool) -> Schedule:
        """Steps of the linear layers; the snapshots are positions of each sequence."""
        key = (snapshots, cached)
        if key not in self._schedules:
            packed = self.packed if not cached else None
            self._schedules[key] = Schedule(
                self.lengths if packed is None else packed,
                start_positions=self.starts if packed is None else 0,
                snapshot_positions=None if snapshots is None else [list(s) for s in snapshots],
                device=self.device,
            )
        return self._schedules[key]

    def packed_plan(self) -> ExtendPlan:
        """Plan of packed sequences without a cache."""
        if "packed" not in self._plans:
            self._plans["packed"] = ExtendPlan.from_lengths(self.packed or [], device=self.device)
        return self._plans["packed"]

    def padded_plan(self, first: int, rows: int) -> ExtendPlan:
        """Plan over padded keys [B, rows, ...] whose row 0 is the `first`-th the cache has seen."""
        key = (first, rows)
        if key not in self._plans:
            offsets, kv_lengths, key_start = [], [], []
            for pad, skip, length in zip(self._pads, self._skips, self.lengths, strict=True):
                offset = max(pad - first, 0)
                end = self.past + skip + length - first  # after the last token of the sequence
                offsets.append(offset if length else 0)
                kv_lengths.append(end - offset if length else 0)
                key_start.append(max(first - pad, 0))
            self._plans[key] = ExtendPlan.from_padded(
                self.lengths,
                kv_lengths,
                rows,
                new_in_cache=True,
                offsets=offsets,
                key_start=key_start,
                device=self.device,
            )
        return self._plans[key]


def packed_lengths(position_ids: torch.Tensor | None, batch: int) -> list[int] | None:
    """Lengths of sequences packed end to end, where positions restart at 0; else None.

    >>> packed_lengths(torch.tensor([[0, 1, 2, 0, 1]]), 1)
    [3, 2]
    >>> packed_lengths(torch.tensor([[0, 1, 2]]), 1) is None
    True
    """
    if position_ids is None or position_ids.shape[-1] < 2:
        return None
    # Multimodal models pass one row of positions for each axis, the text's first.
    rows = position_ids[0] if position_ids.dim() == 3 else position_ids
    rows = rows.expand(batch, -1)
    if not bool((rows[:, 1:] - rows[:, :-1] != 1).any()):
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
