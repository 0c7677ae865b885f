"""Host facts of one forward: which rows are new, where their prefixes lie, at what positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from typing import Any

import torch

from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.locate import Consecutive, Listed, Paged, Slots
from headstart.runtime.checks import (
    INT32_MAX,
    INTEGERS,
    expect_choice,
    expect_dtype,
    expect_flag,
    expect_int,
    expect_one_each,
    expect_place,
    expect_tensor,
    host_ints,
    host_rows,
    in_memory,
    positions_of_each,
    shown,
)
from headstart.runtime.handles import Handled
from headstart.runtime.steady import Group

Ints = Sequence[int] | torch.Tensor
LAST = 2**31 - 2**16
"""Where the last token of a sequence ends at most: kernels round positions up to whole tiles and
blocks in 32 bits."""


@dataclass(frozen=True)
class _Options:
    """What every constructor takes besides the lengths and the place of the cached keys."""

    query_start: int | Ints | None
    key_start: int | Ints
    key_positions: Ints | None
    mask_covers: str
    capacity: Sequence[int] | None


class ExtendPlan(Handled):
    """New tokens of a packed batch on their cached prefixes; shared by all layers of a forward.

    Sequence n brings the packed rows offsets[n] to offsets[n + 1]. Its keys are prefix[n] cached
    ones, then its new ones. Build a plan with `from_lengths`, `from_slots`, `from_pages` or
    `from_padded`; lengths and pointers are lists or int32 / int64 tensors, and whatever lies on a
    device is read once, there. Nothing is kept by reference.

    Options of every constructor
    ----------------------------
    device: device of the tensors of the calls; None: that of the indices (from_lengths needs it).
    query_start: absolute position of each sequence's first new token, one int for all or [N];
        None: key_start + prefix length.
    key_start: absolute position of each sequence's first cached key, one int for all or [N]:
        above 0 where the head of the prefix was trimmed, or for a contiguous shard of it.
    key_positions: absolute position of each prefix key, sequence after sequence, in place of
        key_start + j (interleaved shards); new keys sit where their queries do. Then query_start
        must be given where the prefix is not empty.
    mask_covers: whether a custom mask covers "all" keys (rows of prefix + new entries) or the
        "new" ones only (the prefix is then seen by the usual rule).
    capacity: (sequences, tokens, keys): the most that later `update_`s may bring, keys being
        cached keys; index memory then stays where it is (captured graphs).

    Attributes
    ----------
    lengths, prefix, offsets, query_start, key_start: host lists over the sequences.
    N, T: number of sequences and of packed new tokens.
    tables, prepared: what implementations made of the plan, and how its calls are computed, kept
        for the next one.

    >>> plan = ExtendPlan.from_lengths([3, 1], [5, 0], device="cpu")
    >>> plan.N, plan.T, plan.query_start
    (2, 4, [5, 0])
    """

    lengths: list[int]
    prefix: list[int]
    offsets: list[int]
    query_start: list[int]
    key_start: list[int]
    prefix_offsets: list[int]
    key_positions: list[int] | None
    position_tensor: torch.Tensor | None
    mask_covers: str
    new_in_cache: bool
    slots: Slots | None
    capacity: tuple[int, int, int] | None
    device: torch.device
    _constructor: str
    tables: dict[Any, Any]
    prepared: dict[Hashable, Group]
    _on_device: dict[Callable[[ExtendPlan], torch.Tensor], torch.Tensor]
    derived = ("tables", "prepared", "_on_device")

    def __init__(self) -> None:
        raise TypeError(
            "ExtendPlan: build one with from_lengths, from_slots, from_pages or from_padded"
        )

    @classmethod
    def from_lengths(
        cls,
        new: Ints,
        prefix: Ints | None = None,
        *,
        device: torch.device | str,
        query_start: int | Ints | None = None,
        key_start: int | Ints = 0,
        key_positions: Ints | None = None,
        mask_covers: str = "all",
        capacity: Sequence[int] | None = None,
    ) -> ExtendPlan:
        """Prefixes in consecutive slots, sequence after sequence; prefix None: no cache."""
        lengths = _lengths("new", new)
        options = _Options(query_start, key_start, key_positions, mask_covers, capacity)
        if prefix is None:
            cached, slots = [0] * len(lengths), None
        else:
            cached = _lengths("prefix", prefix, len(lengths))
            slots = Consecutive(_running_sum(cached)[:-1])
        return cls._make("from_lengths", lengths, cached, slots, False, device, options)

    @classmethod
    def from_slots(
        cls,
        lengths: Ints,
        kv_indptr: Ints,
        kv_indices: Ints,
        *,
        new_in_cache: bool,
        device: torch.device | str | None = None,
        query_start: int | Ints | None = None,
        key_start: int | Ints = 0,
        key_positions: Ints | None = None,
        mask_covers: str = "all",
        capacity: Sequence[int] | None = None,
    ) -> ExtendPlan:
        """One slot per key: key j of sequence n lies in slot kv_indices[kv_indptr[n] + j].

        new_in_cache=True: the indices cover prefix and new keys, and k, v of the call are None;
        False: they cover the prefix only.
        """
        expect_flag("new_in_cache", new_in_cache)
        new = _lengths("lengths", lengths)
        indptr = host_ints("kv_indptr", kv_indptr, "entries", 0)
        if len(indptr) != len(new) + 1:
            raise ValueError(
                f"kv_indptr: expected [N + 1] = [{len(new) + 1}] entries, got {len(indptr)}"
            )
        listed = [end - begin for begin, end in pairwise(indptr)]
        if min(listed, default=0) < 0:
            n = listed.index(min(listed))
            raise ValueError(
                "kv_indptr: expected a running sum, "
                f"got {indptr[n + 1]} after {indptr[n]} at {n + 1}"
            )
        indices = _index_tensor("kv_indices", kv_indices, 1, device)
        if indices.numel() < indptr[-1]:
            raise ValueError(
                f"kv_indices: expected kv_indptr[-1] = {indptr[-1]} entries, got {indices.numel()}"
            )
        prefix = _prefix("kv_indptr", listed, new) if new_in_cache else listed
        options = _Options(query_start, key_start, key_positions, mask_covers, capacity)
        slots = Listed(indptr, indices)
        return cls._make("from_slots", new, prefix, slots, new_in_cache, indices.device, options)

    @classmethod
    def from_pages(
        cls,
        lengths: Ints,
        kv_lengths: Ints,
        page_table: torch.Tensor | Sequence[Sequence[int]],
        page_size: int,
        *,
        new_in_cache: bool,
        device: torch.device | str | None = None,
        query_start: int | Ints | None = None,
        key_start: int | Ints = 0,
        key_positions: Ints | None = None,
        mask_covers: str = "all",
        capacity: Sequence[int] | None = None,
    ) -> ExtendPlan:
        """Pages: key j of sequence n is row j % page_size of page page_table[n, j // page_size].

        kv_lengths is prefix + new for each sequence, always; the table covers the new keys too
        only if new_in_cache.
        """
        expect_flag("new_in_cache", new_in_cache)
        new = _lengths("lengths", lengths)
        prefix = _prefix("kv_lengths", _lengths("kv_lengths", kv_lengths, len(new)), new)
        page_size = expect_int("page_size", page_size, 1, INT32_MAX)
        table = _index_tensor("page_table", page_table, 2, device)
        cached = [p + t for p, t in zip(prefix, new, strict=True)] if new_in_cache else prefix
        columns = -(-max(cached, default=0) // page_size)
        if table.shape[0] < len(new) or table.shape[1] < columns:
            raise ValueError(
                f"page_table: expected at least [N, pages] = [{len(new)}, {columns}], "
                f"got {list(table.shape)}"
            )
        options = _Options(query_start, key_start, key_positions, mask_covers, capacity)
        slots = Paged(table, page_size)
        return cls._make("from_pages", new, prefix, slots, new_in_cache, table.device, options)

    @classmethod
    def from_padded(
        cls,
        lengths: Ints,
        kv_lengths: Ints,
        max_length: int,
        *,
        new_in_cache: bool,
        offsets: Ints | None = None,
        device: torch.device | str | None = None,
        query_start: int | Ints | None = None,
        key_start: int | Ints = 0,
        key_positions: Ints | None = None,
        mask_covers: str = "all",
        capacity: Sequence[int] | None = None,
    ) -> ExtendPlan:
        """A padded cache [B, max_length, HK, D]: key j of sequence n is row offsets[n] + j of n.

        kv_lengths is prefix + new for each sequence, always. offsets: first used row of each
        sequence (left padding), which holds its key_start-th position; None: 0. device None: that
        of `lengths` or `kv_lengths` if they are tensors, else the CPU.
        """
        expect_flag("new_in_cache", new_in_cache)
        new = _lengths("lengths", lengths)
        prefix = _prefix("kv_lengths", _lengths("kv_lengths", kv_lengths, len(new)), new)
        first = [0] * len(new) if offsets is None else _lengths("offsets", offsets, len(new))
        max_length = expect_int("max_length", max_length, 1, INT32_MAX)
        for n, (begin, old, length) in enumerate(zip(first, prefix, new, strict=True)):
            used = begin + old + (length if new_in_cache else 0)
            if used > max_length:
                raise ValueError(
                    f"kv_lengths: expected at most max_length = {max_length} rows, "
                    f"got {used} for sequence {n}"
                )
        if device is None:
            tensors = [t for t in (lengths, kv_lengths) if isinstance(t, torch.Tensor)]
            device = tensors[0].device if tensors else "cpu"
        options = _Options(query_start, key_start, key_positions, mask_covers, capacity)
        slots = Consecutive([n * max_length + begin for n, begin in enumerate(first)], max_length)
        return cls._make("from_padded", new, prefix, slots, new_in_cache, device, options)

    @classmethod
    def _make(
        cls,
        constructor: str,
        lengths: list[int],
        prefix: list[int],
        slots: Slots | None,
        new_in_cache: bool,
        device: torch.device | str,
        options: _Options,
    ) -> ExtendPlan:
        plan = cls.__new__(cls)
        plan._constructor = constructor
        plan.tables, plan.prepared, plan._on_device = {}, {}, {}
        plan.device = expect_place("device", device)
        plan.lengths, plan.prefix, plan.slots = lengths, prefix, slots
        plan.new_in_cache = new_in_cache
        plan.offsets, plan.prefix_offsets = _running_sum(lengths), _running_sum(prefix)
        count = len(lengths)
        plan.key_start = positions_of_each("key_start", options.key_start, count)
        plan.key_positions = plan.position_tensor = None
        if options.key_positions is not None:
            found = host_ints("key_positions", options.key_positions, "positions", 0, INT32_MAX)
            if len(found) != plan.prefix_offsets[-1]:
                raise ValueError(
                    f"key_positions: expected one for each of {plan.prefix_offsets[-1]} prefix "
                    f"keys, got {len(found)}"
                )
            if options.query_start is None and found:
                raise ValueError("query_start: expected positions beside key_positions, got None")
            plan.key_positions = found
            plan.position_tensor = torch.tensor(found, dtype=torch.int64, device=plan.device)
        if options.query_start is None:
            plan.query_start = [s + p for s, p in zip(plan.key_start, prefix, strict=True)]
        else:
            plan.query_start = positions_of_each("query_start", options.query_start, count)
        ends = {
            "new" if constructor == "from_lengths" else "lengths": plan.offsets[-1],
            "key_start": max(map(add, plan.key_start, prefix), default=0),
            "query_start": max(map(add, plan.query_start, lengths), default=0),
        }
        for name, last in ends.items():
            if last > LAST:
                raise ValueError(f"{name}: expected tokens to end at most at {LAST}, got {last}")
        expect_choice("mask_covers", options.mask_covers, ("all", "new"))
        plan.mask_covers = options.mask_covers
        plan.capacity = None
        if options.capacity is not None:
            room = host_ints("capacity", options.capacity, "counts", 0)
            if len(room) != 3:
                raise ValueError(
                    f"capacity: expected (sequences, tokens, keys), got {shown(options.capacity)}"
                )
            plan.capacity = (room[0], room[1], room[2])
            found = (count, plan.T, sum(plan.cached(n) for n in range(count)))
            for name, have, most in zip(("sequences", "tokens", "keys"), found, room, strict=True):
                if have > most:
                    raise ValueError(f"capacity: expected at most {most} {name}, got {have}")
            if slots is not None:
                plan.slots = slots.with_room(plan.capacity)
        plan.take_handle()
        return plan

    def update_(self, *args: Any, **kwargs: Any) -> ExtendPlan:
        """Describe another forward in place; arguments as for the constructor of this plan.

        device and capacity stay as they are. Everything is copied before this returns; on an error
        the plan stays as it was. Returns itself.
        """
        for name in ("device", "capacity"):
            if name in kwargs:
                raise ValueError(
                    f"{name}: expected at construction only, got {shown(kwargs[name])}"
                )
        build = getattr(type(self), self._constructor)
        fresh: ExtendPlan = build(*args, device=self.device, capacity=self.capacity, **kwargs)
        kept = self.slots
        if kept is not None and fresh.slots is not None and self.capacity is not None:
            fresh.slots = fresh.slots.stored_in(kept)
        if self.capacity is not None:
            fresh.tables, fresh._on_device = self.tables, self._on_device
        fresh.handle = self.handle
        self.__dict__.update(fresh.__dict__)
        for build, tensor in self._on_device.items():
            # Pageable memory: staged before the call returns, so the source may go.
            tensor.copy_(build(self), non_blocking=True)
        return self

    def on_device(self, build: Callable[[ExtendPlan], torch.Tensor]) -> torch.Tensor:
        """The table that `build` makes of this plan on the CPU, on the plan's device, kept.

        Built at first use; `update_` writes it again where it lies, so `build` must return one
        shape for every forward that a plan with a capacity may hold.

        >>> plan = ExtendPlan.from_lengths([2], device="cpu", capacity=(1, 8, 0))
        >>> kept = plan.on_device(lambda plan: torch.tensor(plan.lengths))
        >>> _ = plan.update_([4])
        >>> kept.tolist()
        [4]
        """
        if build not in self._on_device:
            # A plain tensor even when made under inference mode: the plan outlives it.
            with torch.inference_mode(False):
                table = build(self)
                self._on_device[build] = table.to(self.device, non_blocking=True)
        return self._on_device[build]

    @property
    def held(self) -> list[torch.Tensor]:
        """What lies on the device: tables, and slots or pages."""
        held = list(self._on_device.values())
        if isinstance(self.slots, Listed):
            held.append(self.slots.indices)
        elif isinstance(self.slots, Paged):
            held.append(self.slots.table)
        return held

    def validate(self, cache: KVCache | None = None) -> None:
        """Read the indices back and raise ValueError if a slot lies outside the cache.

        Without a cache only negative slots are found. Calls do this themselves where it costs no
        synchronisation (on the CPU), and on devices under HEADSTART_CHECK=1.
        """
        if cache is not None and not isinstance(cache, KVCache):
            raise ValueError(f"cache: expected a KVCache, got {type(cache).__name__}")
        if self.slots is None:
            return
        limit = None if cache is None else cache.slots
        for n in range(self.N):
            lowest, highest = self.slots.bounds(n, self.cached(n))
            if lowest < 0 or (limit is not None and highest >= limit):
                wanted = "slots >= 0" if limit is None else f"slots in [0, {limit})"
                found = lowest if lowest < 0 else highest
                raise ValueError(f"plan: expected {wanted}, got {found} in sequence {n}")

    @property
    def N(self) -> int:  # noqa: N802
        """Sequences."""
        return len(self.lengths)

    @property
    def T(self) -> int:  # noqa: N802
        """Packed new tokens."""
        return self.offsets[-1]

    @property
    def needs_cache(self) -> bool:
        """Whether any key of this forward lies in the cache."""
        return any(self.cached(n) for n in range(self.N))

    def cached(self, n: int) -> int:
        """How many keys of sequence n lie in the cache."""
        return self.prefix[n] + (self.lengths[n] if self.new_in_cache else 0)

    def mask_columns(self, n: int) -> int:
        """Entries of a row of sequence n in a custom mask."""
        return self.lengths[n] + (self.prefix[n] if self.mask_covers == "all" else 0)

    def __repr__(self) -> str:
        return f"ExtendPlan(lengths={self.lengths}, prefix={self.prefix})"


def _lengths(name: str, values: Ints, count: int | None = None) -> list[int]:
    found = host_ints(name, values, "values", 0)
    if count is not None:
        expect_one_each(name, found, count)
    return found


def _prefix(name: str, total: list[int], new: list[int]) -> list[int]:
    """Prefix lengths from prefix + new, which the caller says the list covers."""
    for n, (whole, length) in enumerate(zip(total, new, strict=True)):
        if whole < length:
            raise ValueError(
                f"{name}: expected prefix + new >= {length} keys for sequence {n}, got {whole}"
            )
    return [whole - length for whole, length in zip(total, new, strict=True)]


def _running_sum(values: list[int]) -> list[int]:
    total = [0]
    for value in values:
        total.append(total[-1] + value)
    return total


def _index_tensor(
    name: str, values: Any, dims: int, device: torch.device | str | None
) -> torch.Tensor:
    """A private integer tensor: the caller may overwrite its own as soon as this returns."""
    place = None if device is None else expect_place("device", device)
    if isinstance(values, torch.Tensor):
        expect_tensor(name, values)
        if values.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions, got shape {list(values.shape)}")
        expect_dtype(name, values, INTEGERS)
        values = in_memory(name, values)
        return values.to(device=place or values.device, copy=True)
    if dims == 1:
        listed: Any = host_ints(name, values)
        shape = (len(listed),)
    else:
        listed = host_rows(name, values)
        shape = (len(listed), len(listed[0]) if listed else 0)
    return torch.tensor(listed, dtype=torch.int64, device=place or "cpu").reshape(shape)
