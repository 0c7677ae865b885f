"""The float64 truth about a case, a group of heads at a time, kept on disk.

A group is one key head with the value (or query) heads that read it; on a GPU, where a walk over
tokens costs as much for many heads, several of the gated delta rule's are one group. Truths are
kept under the user's cache directory by case, seed and a digest of the inputs and of the oracles'
source, so that neither a redrawn case nor a corrected oracle meets an old truth.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from headstart.evidence import oracles
from headstart.evidence.cases import Case
from headstart.evidence.cases.convolution import BLOCK, ConvolutionCase
from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.gated_delta_rule import CHUNK, DeltaCase
from headstart.evidence.oracles import attention, convolution, delta

Truths = dict[str, torch.Tensor]
"""Output -> [rows, heads of the group, vector] in float64 (a history in its own dtype)."""


@dataclass(frozen=True)
class Group:
    """A part of the truth: which heads of which outputs, and how to compute it."""

    name: str
    heads: slice
    compute: Callable[[], Truths]


def cache_folder() -> Path:
    """Where truths are kept: headstart/truths under $XDG_CACHE_HOME, or under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headstart" / "truths"


def truths(
    case: Case,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kept: bool = True,
    progress: Callable[[float], None] = lambda share: None,
) -> Iterator[tuple[slice, Truths]]:
    """The truth about a case, group by group: (heads, output -> values).

    device: where to compute; a truth from a GPU differs by float64 rounding alone.
    kept: read and write the disk cache.
    progress: told the share of groups that are done.
    """
    groups, inputs = _groups(case, seed, dtype or case.torch_dtype, torch.device(device))
    folder = None
    if kept:
        words = f"{seed}-{str(dtype or case.torch_dtype).removeprefix('torch.')}"
        folder = cache_folder() / case.id / f"{words}-{_digest(case, inputs)}"
    for n, group in enumerate(groups):
        yield group.heads, _computed_or_kept(group, folder)
        progress((n + 1) / len(groups))


def _computed_or_kept(group: Group, folder: Path | None) -> Truths:
    if folder is None:
        return group.compute()
    file = folder / f"{group.name}.pt"
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError):
        file.unlink(missing_ok=True)  # cut short by a full disk or an older torch: computed again
    found = group.compute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{group.name}.{os.getpid()}"
        torch.save({name: values.cpu() for name, values in found.items()}, unfinished)
        unfinished.replace(file)
    except OSError as error:
        raise ValueError(
            f"cache: cannot write {folder}: {error.strerror} (--no-cache does without)"
        ) from error
    return found


@cache
def _oracle_source() -> bytes:
    modules = (oracles, attention, convolution, delta)
    source = "".join(inspect.getsource(module) for module in modules)
    return (source + Path(__file__).read_text()).encode()


def _digest(case: Case, inputs: list[Any]) -> str:
    """Of the case's record, its inputs and the code that makes the truth."""
    digest = hashlib.blake2b(_oracle_source(), digest_size=8)
    digest.update(repr(case.record()).encode())
    for value in inputs:
        if isinstance(value, torch.Tensor):
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _groups(
    case: Case, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Group], list[Any]]:
    if isinstance(case, DeltaBlockCase):
        return _block_groups(case, seed, dtype, device)
    if isinstance(case, DeltaCase):
        return _delta_groups(case, seed, dtype, device)
    if isinstance(case, AttentionCase):
        return _attention_groups(case, seed, dtype, device)
    if isinstance(case, ConvolutionCase):
        return _convolution_groups(case, seed, dtype)
    raise ValueError(f"case: {case.id} is a whole model; `headstart prefill --compare` verifies it")


# The gated delta rule

TOGETHER = 8
"""Key heads that a GPU walks at once."""


def _key_heads(H: int, device: torch.device) -> list[slice]:
    """The key heads of each group."""
    step = 1 if device.type == "cpu" else TOGETHER
    return [slice(first, min(first + step, H)) for first in range(0, H, step)]


def _value_heads(keys: slice, ratio: int) -> slice:
    return slice(keys.start * ratio, keys.stop * ratio)


def _group_name(keys: slice) -> str:
    last = keys.stop - 1
    return f"head-{keys.start}" if last == keys.start else f"heads-{keys.start}-{last}"


def _delta_groups(
    case: DeltaCase, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Group], list[Any]]:
    steps = case.steps(seed, "cpu", dtype)
    names = ("q", "k", "v", "g", "beta")
    parts = [[step[name] for name in names] for step in steps]
    tails = [start % CHUNK for start in case.positions]
    counts = [case.lengths] if len(parts) == 1 else [tails, case.lengths]
    # Rows of each sequence from its state on: its tail, then its new tokens.
    sequences = [
        [torch.cat(rows) for rows in zip(*pieces, strict=True)]
        for pieces in zip(*(_split(part, c) for part, c in zip(parts, counts, strict=True)),
                          strict=True)
    ]  # fmt: skip
    states = case.initial_states(seed)
    inputs = [*(tensor for part in parts for tensor in part), states]

    ratio = case.HV // case.H

    def group(keys: slice) -> Group:
        values = _value_heads(keys, ratio)

        def run() -> Truths:
            mine = [
                [rows[0][:, keys], rows[1][:, keys], *(x[:, values] for x in rows[2:])]
                for rows in sequences
            ]
            before = None if states is None else states[:, values]
            return _replayed(case, mine, before, device, tails)

        return Group(_group_name(keys), values, run)

    return [group(keys) for keys in _key_heads(case.H, device)], inputs


def _split(rows: list[torch.Tensor], counts: Any) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split(list(counts)) for tensor in rows), strict=True))


def _replayed(
    case: DeltaCase,
    sequences: list[list[Any]],
    before: torch.Tensor | None,
    device: torch.device,
    tails: list[int],
    **options: Any,
) -> Truths:
    """o, states and snapshots of some heads; a sequence's rows begin at its state's position."""
    outputs, states, snapshots = [], [], []
    for n, rows in enumerate(sequences):
        start, length = case.positions[n], case.lengths[n]
        base = start - tails[n]
        end = start + length
        if case.state == "cache":
            end = (start if case.drafts else end) // CHUNK * CHUNK
        if case.snapshot_every:
            every = case.snapshot_every
            kept = list(range((start // every + 1) * every, start + length + 1, every))
        else:
            kept = list(case.snapshot_positions[n]) if case.snapshot_positions else []
        state = None
        # A state at position 0 of a cache reads as zeros.
        if before is not None and not (case.state == "cache" and base == 0):
            state = before[n].double()
        found = delta.replay(
            *rows,
            state=state,
            keep=[end - base, *(position - base for position in kept)],
            device=None if device.type == "cpu" else device,
            **options,
        )
        outputs.append(_tensor(found.o)[tails[n] :])
        states.append(_tensor(found.states[end - base]))
        snapshots += [_tensor(found.states[position - base]) for position in kept]
    truth = {"o": torch.cat(outputs)}
    if case.state != "none":
        truth["state"] = torch.stack(states).flatten(2)
    if case.snapshot_dtype:
        truth["snapshots"] = torch.stack(snapshots).flatten(2)
    return truth


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


# The whole layer


def _block_groups(
    case: DeltaBlockCase, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Group], list[Any]]:
    (block,) = case.steps(seed, "cpu", dtype)
    weights = {name: block[name] for name in ("weight", "a_log", "dt_bias", "norm")}
    histories = case.initial_histories(seed).to(dtype)
    states = case.initial_states(seed)
    mixed = list(block["mixed"].split(list(case.lengths)))
    H, K, ratio = case.H, case.K, case.HV // case.H

    @cache
    def convolved() -> list[torch.Tensor]:
        return [
            convolution.convolve(rows, weights["weight"], before=before)
            for rows, before in zip(mixed, histories, strict=True)
        ]

    def outside() -> Truths:
        kept = [
            convolution.history(rows, len(rows), case.conv_width, before)
            for rows, before in zip(mixed, histories, strict=True)
        ]
        return {
            "convolution": torch.cat(convolved()).unflatten(1, (-1, K)),
            "history": torch.stack(kept).flatten(1)[:, None].double(),
        }

    def group(keys: slice) -> Group:
        values = _value_heads(keys, ratio)

        def run() -> Truths:
            # The convolution's output is stored in the case's dtype: a rounding point.
            rows = [y.to(dtype) for y in convolved()]
            q, k, v = (
                [part.unflatten(1, (-1, size)) for part in parts]
                for size, parts in zip(
                    (K, K, case.V),
                    zip(*(y.split((H * K, H * K, case.HV * case.V), dim=1) for y in rows),
                        strict=True),
                    strict=True,
                )
            )  # fmt: skip
            g = delta.raw_decay(block["a"], weights["a_log"], weights["dt_bias"])[:, values]
            beta = delta.sigmoid(delta.wide(block["b"]))[:, values]
            borders = np.cumsum(case.lengths)[:-1]
            sequences = [
                [q[n][:, keys], k[n][:, keys], v[n][:, values], *gates]
                for n, gates in enumerate(
                    zip(np.split(g, borders), np.split(beta, borders), strict=True)
                )
            ]
            before = None if states is None else states[:, values]
            truth = _replayed(case, sequences, before, device, [0] * len(sequences), qk_l2norm=True)
            truth["norm"] = convolution.gated_norm(
                truth["o"].cpu(), weights["norm"], block["z"][:, values]
            )
            return truth

        return Group(_group_name(keys), values, run)

    groups = [Group("convolution", slice(0, None), outside)]
    groups += [group(keys) for keys in _key_heads(H, device)]
    rows = [block[name] for name in ("mixed", "z", "a", "b")]
    return groups, [*rows, *weights.values(), histories, states]


# The convolution alone

CHANNELS = 8 * BLOCK
"""Channels of a group."""


def _convolution_groups(
    case: ConvolutionCase, seed: int, dtype: torch.dtype
) -> tuple[list[Group], list[Any]]:
    call = case.inputs(seed, "cpu", dtype)
    x, weight = call["x"], call["weight"]

    def group(begin: int) -> Group:
        mine = slice(begin, begin + CHANNELS)

        def run() -> Truths:
            rows = x[:, mine].split(list(case.lengths))
            found = torch.cat([convolution.convolve(part, weight[mine]) for part in rows])
            return {"convolution": found.unflatten(1, (-1, BLOCK))}

        end = min(begin + CHANNELS, case.channels)
        return Group(f"channels-{begin}", slice(begin // BLOCK, end // BLOCK), run)

    return [group(begin) for begin in range(0, case.channels, CHANNELS)], [x, weight]


# Softmax attention


def _attention_groups(
    case: AttentionCase, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Group], list[Any]]:
    call = case.inputs(seed, "cpu", dtype)
    stored = call.get("cache")
    held = case.cache_rows(seed)
    masks = None
    if case.mask:
        sizes = [new * (new + old) for new, old in zip(case.lengths, case.cached, strict=True)]
        masks = call["custom_mask"].bool().split(sizes)
    new = [None if call[name] is None else call[name].split(list(case.lengths)) for name in "kv"]
    queries = call["q"].split(list(case.lengths))
    ratio = case.HQ // case.HK

    def keys(which: int, n: int, head: int) -> torch.Tensor:
        """Keys (0) or values (1) of one key head, prefix then new, [J, size] float64."""
        parts = []
        if stored is not None:
            memory = (stored.k, stored.v)[which]
            rows = memory.reshape(-1, *memory.shape[-2:])[:, head]
            rows = rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
            rows = rows[held[n]]
            rows = rows.view(memory.dtype) if rows.dtype == torch.uint8 else rows
            rows = rows.double()
            scale = (stored.k_scale, stored.v_scale)[which]
            if scale is not None:
                scale = torch.as_tensor(scale).double().flatten()
                rows = rows * scale[head if len(scale) > 1 else 0]
            parts.append(rows)
        part = new[which]
        if part is not None:
            parts.append(part[n][:, head].double())
        return torch.cat(parts).to(device)

    def group(head: int) -> Callable[[], Truths]:
        mine = slice(head * ratio, (head + 1) * ratio)

        def run() -> Truths:
            outputs, lses = [], []
            for n, (length, cached) in enumerate(zip(case.lengths, case.cached, strict=True)):
                mask = None if masks is None else masks[n].view(length, cached + length).to(device)
                o, lse = attention.attend(
                    queries[n][:, mine].to(device),
                    keys(0, n, head),
                    keys(1, n, head),
                    positions=torch.arange(cached, cached + length, device=device),
                    window=case.window,
                    sinks=call["sinks"][mine].to(device) if case.sinks else None,
                    mask=mask,
                )
                outputs.append(o)
                lses.append(lse)
            return {"o": torch.cat(outputs), "LSE": torch.cat(lses)[..., None]}

        return run

    groups = [
        Group(f"head-{h}", slice(h * ratio, (h + 1) * ratio), group(h)) for h in range(case.HK)
    ]
    inputs = [call["q"], call["k"], call["v"], call.get("sinks"), call.get("custom_mask"), *held]
    if stored is not None:
        inputs += [stored.k, stored.v, stored.k_scale, stored.v_scale]
    return groups, inputs
