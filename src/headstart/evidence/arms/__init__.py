"""Whoever computes a case: headstart's implementations, other revisions of it, and its peers.

A peer is imported when its arm is asked for, never before, and is never a dependency. An adapter
gives it the layout and the metadata that it likes best, all made before the clock starts.

>>> from headstart.evidence import cases
>>> arm = build("torch", cases.get("gdn-1x1-small"), "cpu")
>>> list(arm.outputs(arm.call())["o"].shape)
[1, 4, 128]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from headstart.evidence.cases import Case

Outputs = dict[str, torch.Tensor]


class MissingPeer(Exception):
    """A peer is not installed, or cannot run on this machine; the message says what is missing."""


class Unfit(Exception):
    """A peer cannot compute a case; the message says why."""


@dataclass
class Arm:
    """Something that computes a case, with everything it needs already in place.

    call: computes once; allocates what a caller of it would let it allocate.
    outputs: from what `call` returned to outputs by name, [rows, heads, vector]: "o" always,
        "state", "snapshots" and "norm" where the arm has them.
    restore: puts back what a call changed in place; not timed.
    served: the implementation that ran, for headstart's own arms.
    note: what differs from the case as it stands.
    case: what it computes instead of the case that it is timed on, None: that case.
    kept: objects that must outlive the arm.
    """

    name: str
    call: Callable[[], Any]
    outputs: Callable[[Any], Outputs]
    restore: Callable[[], None] = lambda: None
    served: str = ""
    note: str = ""
    case: Case | None = None
    kept: list[Any] = field(default_factory=list)


OURS = ("headstart", "hopper", "triton", "torch", "reference", "reproducible")
"""Arms of this package: what dispatch picks, an implementation by name, or what dispatch picks
where every row's bits must be reproducible."""

PEERS = {
    "fla": "headstart.evidence.arms.fla",
    "flashinfer": "headstart.evidence.arms.flashinfer",
    "flashqla": "headstart.evidence.arms.flashqla",
    "fa4": "headstart.evidence.arms.fa4",
    "sdpa": "headstart.evidence.arms.sdpa",
    "flex": "headstart.evidence.arms.flex",
    "sglang": "headstart.evidence.arms.sglang",
    "sglang-unified": "headstart.evidence.arms.sglang_unified",
    "transformers": "headstart.evidence.arms.transformers",
}
"""Arm -> module with `build(case, device, seed) -> Arm`."""

ARMS = (*OURS, *PEERS)


def build(name: str, case: Case, device: torch.device | str, seed: int = 0) -> Arm:
    """The arm called `name`, ready to run `case` on `device`.

    Raises ValueError for an unknown name, `MissingPeer`, `Unfit`, or `headstart.Declined`.
    """
    place = torch.device(device)
    if name in OURS:
        from headstart.evidence.arms.ours import build as build_ours

        return build_ours(name, case, place, seed)
    if name not in PEERS:
        raise ValueError(f"arm: expected one of {list(ARMS)} or a git revision, got {name!r}")
    return importlib.import_module(PEERS[name]).build(case, place, seed)


def named(arm: str, served: str) -> str:
    """An arm with the implementation that served it, where that has another name.

    >>> named("headstart", "hopper"), named("torch", "torch"), named("fla", "")
    ('headstart (hopper)', 'torch', 'fla')
    """
    return arm if served in ("", arm) else f"{arm} ({served})"


def peer(module: str, *names: str) -> list[Any]:
    """Attributes of a peer's module; `MissingPeer` where it cannot be imported."""
    try:
        loaded = importlib.import_module(module)
        return [getattr(loaded, name) for name in names]
    except Exception as error:  # a broken peer raises whatever it likes while it is imported
        words = (str(error).strip().splitlines() or [""])[0]
        raise MissingPeer(f"{module}: {type(error).__name__}: {words[:160]}") from error
