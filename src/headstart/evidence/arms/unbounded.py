"""Attention's kernels without their bounds: every tile of keys is visited, and masked where needed.

What bounds save is what this build takes longer. Its bits are the same.
"""

from __future__ import annotations

import torch

from headstart.evidence.arms import Arm, Unfit, ours
from headstart.evidence.cases import Case
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.tile_bounds import saving
from headstart.ops.extend_attention.spec import ExtendCall
from headstart.runtime import dispatch

NAME = "unbounded"
KINDS = ("triton", "reproducible")
"""Arms of this package that have such a build; the first where nothing is said."""

EDITS = {
    "extend": (
        ("tl.maximum(lower // BN, limits[0])", "limits[0]"),
        ("tl.minimum((upper + BN - 1) // BN,", "tl.minimum(tl.cdiv(count, BN),"),
        # Tiles that no row sees are read too: what stands for their keys must be one of the run.
        (
            "    end = tl.where(lower < upper, end, begin)\n",
            "    lower = tl.minimum(lower, tl.maximum(count - 1, 0))\n",
        ),
    ),
    "unified": (
        (
            "    return (old_run, new_run), lower, tl.where(old_seen | new_seen, upper, lower)",
            """    upper = tl.maximum(old_run[0] + old_run[1], new_run[0] + new_run[1])
    lower = tl.where(old_run[1] > 0, old_run[0], new_run[0])
    return (old_run, new_run), lower, upper""",
        ),
    ),
}  # fmt: skip
"""Kernel, which is a module of its own -> what takes its bounds out, each once in its source."""


def without_bounds(path: str, source: str) -> str:
    """The source of a module of the package, by its path below it, without bounds.

    >>> without_bounds("ops/extend_attention/triton/merge.py", "end = count")
    'end = count'
    """
    for name, edits in EDITS.items():
        if path == f"ops/extend_attention/triton/{name}.py":
            for old, new in edits:
                if source.count(old) != 1:
                    raise ValueError(f"unbounded: expected {old!r} once in {path}")
                source = source.replace(old, new)
    return source


def build(package: str, kind: str, case: Case, device: torch.device, seed: int) -> Arm:
    """An arm of such a build, loaded as `package`; its note says which share of tiles it lacks.

    Raises `Unfit` for a case that is not attention's, or where no kernels run it.
    """
    if not isinstance(case, AttentionCase):
        raise Unfit("bounds are those of attention's kernels")
    arm = ours.build(kind, case, device, seed, package=package)
    if arm.served != "triton":
        raise Unfit(f"bounds are those of kernels, and {arm.served} ran")
    saved = saving(case, tiling(case, device, reproducible=kind == "reproducible"))
    arm.note = "bounds save {:.1%} of tiles of {} x {}".format(saved.saved, *saved.tiling)
    return arm


def tiling(case: AttentionCase, device: torch.device, *, reproducible: bool) -> tuple[int, int]:
    """New tokens and keys of the tiles that a case's kernel takes."""
    from headstart.ops.extend_attention.triton.call import configured
    from headstart.ops.extend_attention.triton.config import packing

    arguments = {**case.blank(device), "reproducible": reproducible}
    _, call, _ = dispatch.bound("extend_attention", (), arguments)
    assert isinstance(call, ExtendCall)
    config = configured(call)
    return packing(call.HQ, call.HK, config.BM)[1], config.BN
