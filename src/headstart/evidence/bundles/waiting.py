"""How long a first request waits: first calls in fresh processes, from a bundle alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

import headstart
from headstart.evidence.bundles.records import FirstCall
from headstart.evidence.cases import Case, delta_block
from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.profiles import profile
from headstart.runtime.bundle_launch import BUNDLE, JIT


class Wanted(NamedTuple):
    """A case of a model's profile: the one of this id, with a window or not."""

    model: str
    id: str
    windowed: bool = False
    reproducible: bool = False


CALLS: Mapping[str, Wanted] = {
    "attention-window": Wanted("gpt-oss-20b", "short-rows", windowed=True),
    "attention-full": Wanted("gpt-oss-20b", "short-rows"),
    "attention-reproducible": Wanted("gpt-oss-20b", "short-rows", reproducible=True),
    "attention-pages": Wanted("gpt-oss-20b", "mixed-paged-64"),
    "rule": Wanted("qwen3-next-80b", "plain-short"),
    "layer": Wanted("qwen3-next-80b", "layer-short-kept"),
    "layer-decode": Wanted("qwen3-next-80b", "layer-decode"),
    "tiny-attention": Wanted("tiny-gpt-oss", "short-rows", windowed=True),
    "tiny-layer": Wanted("tiny-qwen3-next", "layer-short"),
}
"""What may be called first, by name; a layer is convolution, rule and norm."""
SECONDS = 300
"""A process that takes longer hangs."""


def case_of(name: str) -> Case:
    """The case that the call of this name is of."""
    wanted = CALLS[name]
    return next(
        case
        for case in profile(wanted.model)
        if case.id == wanted.id and bool(getattr(case, "window", None)) == wanted.windowed
    )


def prepared(name: str, device: torch.device) -> Callable[[], object]:
    """The call of this name, on inputs that are drawn."""
    case = case_of(name)
    if isinstance(case, DeltaBlockCase):
        # From position 0: what slots of a cache hold before it does not count.
        return partial(delta_block.run, replace(case, starts=()).inputs(0, device))
    arguments = case.inputs(0, device)
    if isinstance(case, AttentionCase):
        arguments |= {"reproducible": CALLS[name].reproducible}
    return partial(getattr(headstart, case.op), **arguments)


def first_call(name: str, bundle: Path, device: str) -> FirstCall:
    """The call of this name, the first of a process that may compile nothing.

    Triton's cache is empty, as on a machine that has never run it.
    """
    with tempfile.TemporaryDirectory(prefix="headstart-first-") as cache:
        environment = os.environ | {
            BUNDLE: str(bundle.absolute()), JIT: "forbid", "TRITON_CACHE_DIR": cache
        }  # fmt: skip
        run = [sys.executable, "-m", "headstart.evidence.bundles.first_call", name, device]
        try:
            ended = subprocess.run(
                run, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return FirstCall(call=name, device=device, failed=f"not back within {SECONDS} s")
    try:
        return FirstCall.model_validate_json(ended.stdout.strip().rpartition("\n")[2])
    except ValidationError:
        words = ended.stderr.strip().splitlines() or [f"ended with {ended.returncode}"]
        return FirstCall(call=name, device=device, failed=words[-1][:300])
