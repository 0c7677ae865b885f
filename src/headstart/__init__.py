"""headstart: prefill of hybrid-attention language models; a prefix-cache hit is a cold prefill.

Its names are loaded together when the first is used: the command line can say what it offers, and
be interrupted, before torch is there.
"""

# ruff: noqa: F403, F405 (a type checker reads the names)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.public import *

__all__ = [
    "ChunkMap",
    "CompileForbidden",
    "Convolution",
    "Declined",
    "DeltaCache",
    "ExtendPlan",
    "Gate",
    "GatedDelta",
    "KVCache",
    "Pool",
    "Schedule",
    "Workspace",
    "causal_conv1d",
    "chunk_map",
    "compose",
    "explain",
    "extend_attention",
    "gated_delta_rule",
    "merge_attention",
    "programs",
    "recurrent_gated_delta_rule",
    "rms_norm_gated",
    "warmup",
    "workspace_bytes",
    "write_kv",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = importlib.import_module("headstart.public")
    for each in __all__:
        globals().setdefault(each, getattr(public, each))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
