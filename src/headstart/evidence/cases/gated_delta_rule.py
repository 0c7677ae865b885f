"""Cases of the gated delta rule: their record, and inputs as real models produce them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import normalize, softplus

from headstart.evidence.cases.record import SMALL, Case, Draws, Floor, small_heads, small_lengths

if TYPE_CHECKING:
    from headstart import DeltaCache

CHUNK = 64
STATES = ("plain", "none", "pool", "cache")
VALUES = ("typical", "decay-hard", "late-forget", "chunk-ends", "repeat", "raw-keys", "flat")
POOL_SLOTS = 64
SMALL_START = 1152
"""Most cached tokens in a small sibling, a multiple of 64."""


@dataclass(frozen=True, kw_only=True)
class DeltaCase(Case):
    """A step of the gated delta rule over a packed batch.

    H, HV, K, V: heads and head sizes.
    lengths: new tokens of each sequence.
    starts: position of each sequence's first new token; () means 0 for all. Rows between the last
        multiple of 64 and a start lie in the cache's tail.
    state: "plain" (an initial state in, the final one out), "none", "pool" (in place, scattered
        slots of 64) or "cache" (a `DeltaCache` restored at each start).
    per_channel: log decay per channel (KDA).
    drafts: the step brings drafts that may be rolled back.
    snapshot_every, snapshot_positions, snapshot_dtype: states kept on the way.
    values: what is drawn. "typical": q, k normalised, beta in (0, 1), g = -softplus(x) A with A in
        [0, 16] per head and 0 for a quarter of the heads, v unit normal with outliers to 25. The
        others change decay, beta or keys as their case's reason says.
    definition: the name flashinfer-bench has for the same shapes.
    """

    op: ClassVar[str] = "gated_delta_rule"

    H: int = 16
    HV: int = 32
    K: int = 128
    V: int = 128
    lengths: tuple[int, ...]
    starts: tuple[int, ...] = ()
    state: str = "plain"
    per_channel: bool = False
    drafts: bool = False
    snapshot_every: int = 0
    snapshot_positions: tuple[tuple[int, ...], ...] = ()
    snapshot_dtype: str | None = None
    values: str = "typical"
    definition: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state: expected one of {list(STATES)}, got {self.state!r}")
        if self.values not in VALUES:
            raise ValueError(f"values: expected one of {list(VALUES)}, got {self.values!r}")
        if self.starts and (self.state != "cache" or len(self.starts) != len(self.lengths)):
            raise ValueError(f"starts: expected one a sequence and a cache, got {self.starts}")

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.lengths)

    @property
    def positions(self) -> tuple[int, ...]:
        """`starts`, zeros filled in."""
        return self.starts or (0,) * len(self.lengths)

    def small(self) -> DeltaCase:
        """H / 8 at the same ratio, lengths to 1,199, cached states to position 1,152."""
        H, HV = small_heads(self.H, self.HV)
        lengths = small_lengths(self.lengths)
        return replace(
            self,
            id=self.id + SMALL,
            H=H,
            HV=HV,
            lengths=lengths,
            starts=tuple(min(s - s % CHUNK, SMALL_START) + s % CHUNK for s in self.starts),
            snapshot_positions=tuple(
                tuple(max(p * short // length // CHUNK, 1) * CHUNK for p in positions)
                for positions, short, length in zip(
                    self.snapshot_positions, lengths, self.lengths, strict=False
                )
            ),
        )

    def floor(self) -> Floor:
        """q, k, v, g, beta, states and o once; 6 K V operations a token and value head.

        The operations are those of the recurrence: k S, the rank-one update and q S.
        """
        T, N, size = self.tokens, len(self.lengths), self.torch_dtype.itemsize
        decay = self.K if self.per_channel else 1
        rows = T * (2 * self.H * self.K + 2 * self.HV * self.V) * size
        gates = T * self.HV * (decay + 1) * 4
        states = self.HV * self.K * self.V * 4
        moved = {"none": 0, "cache": N + self._folds()}.get(self.state, 2 * N) * states
        kept = 0
        if self.snapshot_dtype:
            item = getattr(torch, self.snapshot_dtype).itemsize
            kept = self._snapshots() * self.HV * self.K * self.V * item
        tails = sum(start % CHUNK for start in self.positions)
        tail_bytes = tails * (
            (self.H * self.K + self.HV * self.V) * size + self.HV * (decay + 1) * 4
        )
        return Floor(rows + gates + moved + kept + tail_bytes, 6 * T * self.HV * self.K * self.V)

    def _folds(self) -> int:
        """Sequences whose canonical state changes in this step."""
        if self.drafts:
            return 0
        steps = zip(self.positions, self.lengths, strict=True)
        return sum((start + step) // CHUNK > start // CHUNK for start, step in steps)

    def _snapshots(self) -> int:
        if self.snapshot_every:
            return sum(length // self.snapshot_every for length in self.lengths)
        return sum(map(len, self.snapshot_positions))

    def inputs(
        self, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of `headstart.gated_delta_rule`; a cache comes with its tails filled.

        >>> from headstart.evidence import cases
        >>> inputs = cases.get("gdn-ragged-7seq-small").inputs(seed=1)
        >>> list(inputs["q"].shape), list(inputs["v"].shape), list(inputs["state"].shape)
        ([1442, 2, 128], [1442, 4, 128], [7, 4, 128, 128])
        """
        import headstart

        *earlier, last = self.steps(seed, device, dtype)
        for step in earlier:
            headstart.gated_delta_rule(**step)
        return last

    def blank(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Arguments of the same shapes with undefined values, for `explain` and the like."""
        return self._steps(Draws(0, device, blank=True), self.torch_dtype)[-1]

    def steps(
        self, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> list[dict[str, Any]]:
        """The calls that lead up to the case and the case itself, sharing one cache.

        There is more than one only where tails must be filled first: whoever replays a case
        against another implementation replays all of them, in order.
        """
        return self._steps(Draws(seed, device), dtype or self.torch_dtype)

    def _steps(self, draws: Draws, dtype: torch.dtype) -> list[dict[str, Any]]:
        import headstart

        snapshots = getattr(torch, self.snapshot_dtype) if self.snapshot_dtype else None
        schedule = headstart.Schedule(
            list(self.lengths),
            start_positions=list(self.positions),
            drafts=self.drafts,
            snapshot_every=self.snapshot_every,
            snapshot_positions=self.snapshot_positions or None,
            device=draws.device,
        )
        call = {**self._rows(draws, "", self.tokens, dtype), "schedule": schedule}
        if snapshots is not None:
            call["snapshots"] = snapshots
        if self.state == "plain":
            call |= {"state": draws.place(self._drawn_states(draws)), "return_state": True}
        elif self.state == "pool":
            pool = draws.place(self._drawn_states(draws))
            call["state"] = headstart.Pool(pool, self._pool_slots(draws))
        elif self.state == "cache":
            return self._cached_steps(draws, dtype, call)
        return [call]

    def _cached_steps(
        self, draws: Draws, dtype: torch.dtype, call: dict[str, Any]
    ) -> list[dict[str, Any]]:
        import headstart

        count = len(self.lengths)
        cache = headstart.DeltaCache(
            2 * count, **self._cache_sizes(), dtype=dtype, device=draws.device
        )
        slots = draws.permutation("slots", 2 * count)[:count].tolist()
        call["state"] = cache.at(slots)
        if draws.blank:
            return [call]
        self._restore(draws, cache, slots)
        tails = [start % CHUNK for start in self.positions]
        if not any(tails):
            return [call]
        begin = [start - tail for start, tail in zip(self.positions, tails, strict=True)]
        schedule = headstart.Schedule(tails, start_positions=begin, device=draws.device)
        rows = self._rows(draws, "tail ", sum(tails), dtype)
        return [{**rows, "schedule": schedule, "state": cache.at(slots)}, call]

    def initial_states(self, seed: int = 0) -> torch.Tensor | None:
        """States [N, HV, K, V] float32 before the first of `steps`; None: zeros."""
        draws = Draws(seed, "cpu")
        if self.state == "none":
            return None
        states = self._drawn_states(draws)
        return states[self._pool_slots(draws)] if self.state == "pool" else states

    def _drawn_states(self, draws: Draws) -> torch.Tensor:
        count = POOL_SLOTS if self.state == "pool" else len(self.lengths)
        return draws.normal("state", count, self.HV, self.K, self.V) / 4

    def _pool_slots(self, draws: Draws) -> list[int]:
        return draws.permutation("slots", POOL_SLOTS)[: len(self.lengths)].tolist()

    def _cache_sizes(self) -> dict[str, Any]:
        sizes = {"H": self.H, "HV": self.HV, "K": self.K, "V": self.V}
        return {**sizes, "per_channel": self.per_channel}

    def _restore(self, draws: Draws, cache: DeltaCache, slots: list[int]) -> None:
        begin = [start - start % CHUNK for start in self.positions]
        cache.load(slots, begin, draws.place(self._drawn_states(draws)))

    def _rows(self, draws: Draws, part: str, T: int, dtype: torch.dtype) -> dict[str, Any]:
        """q, k, v, g and beta of T packed tokens."""
        q = normalize(draws.normal(part + "q", T, self.H, self.K), dim=-1)
        k = normalize(draws.normal(part + "k", T, self.H, self.K), dim=-1)
        v = drawn_values(draws, part, T, self.HV, self.V)
        beta = torch.sigmoid(1.5 * draws.normal(part + "beta", T, self.HV))
        g = self._decay(draws, part, T)
        if self.values == "repeat":
            k = normalize(draws.normal("key", 1, self.H, self.K), dim=-1).expand(T, -1, -1)
        if self.values in ("repeat", "flat"):
            beta = draws.filled(1.0, T, self.HV)
        if self.values == "raw-keys":
            k, beta = 10 * k, 0.001 + 0.014 * draws.uniform(part + "beta", T, self.HV)
        rows = {"q": draws.place(q, dtype), "k": draws.place(k, dtype), "v": draws.place(v, dtype)}
        return {**rows, "g": draws.place(g), "beta": draws.place(beta)}

    def _decay(self, draws: Draws, part: str, T: int) -> torch.Tensor:
        shape = (T, self.HV, self.K) if self.per_channel else (T, self.HV)
        if self.values in ("flat", "repeat"):
            return draws.filled(0.0, *shape)
        if self.values == "chunk-ends":
            # What a chunk leaves of a state is what its last row says.
            g = draws.filled(0.0, *shape)
            g[CHUNK - 1 :: CHUNK] = -1.0
            return g
        if self.values == "raw-keys":
            return draws.filled(-30.0, *shape)
        if self.values == "decay-hard":
            g = -0.05 * draws.uniform(part + "g", *shape)
            g[7::8] = -316.0
            g[draws.permutation(part + "forget", T)[:4]] = -torch.inf
            return g
        rate = drawn_rates(draws, self.HV).view(-1, *([1] * self.per_channel))
        g = -softplus(drawn_steps(draws, part, *shape)) * rate
        if self.values == "late-forget":
            for chunk in range(0, T, CHUNK):
                late = chunk + 32 + int(draws.permutation(f"{part}late {chunk}", 32)[0])
                if late < T:
                    g[late] = -torch.inf if chunk // CHUNK % 2 else -316.0
        return g


def drawn_rates(draws: Draws, HV: int) -> torch.Tensor:
    """A of the log decay -softplus(x) A: in [0, 16) per head, 0 for every fourth head."""
    rates = 16 * draws.uniform("rate", HV)
    rates[3::4] = 0.0
    return rates


def drawn_steps(draws: Draws, part: str, *shape: int) -> torch.Tensor:
    """x of the log decay: softplus(x) is 0.02 in the middle, from 0.0003 to 0.7, as trained."""
    return 2 * draws.normal(part + "g", *shape) - 4


def drawn_values(draws: Draws, part: str, *shape: int) -> torch.Tensor:
    """Unit normal, one in a thousand an outlier of up to 25."""
    outliers = 50 * draws.uniform(part + "outliers", *shape) - 25
    chosen = draws.uniform(part + "chosen", *shape) < 0.001
    return torch.where(chosen, outliers, draws.normal(part + "v", *shape))
