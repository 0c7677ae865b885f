"""The smallest cases that reveal a fault: sizes all different, borders on both sides of a chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.gated_delta_rule import DeltaCase

SIZES = {"H": 2, "HV": 4, "K": 32, "V": 16, "dtype": "float32"}
WHY = "reveals mutants"


def _rule(id: str, **options: object) -> DeltaCase:
    return DeltaCase(**{"id": f"mutant-{id}", "why": WHY, **SIZES, **options})  # type: ignore[arg-type]


RULES = {
    "rule": _rule("rule", lengths=(1, 63, 0, 150, 66)),
    "rule spans": _rule("rule-spans", lengths=(700,), values="flat"),
    "rule pool": _rule("rule-pool", lengths=(70, 5), state="pool"),
    "rule snapshots": _rule(
        "rule-snapshots", lengths=(200, 130), snapshot_every=64, snapshot_dtype="float32"
    ),
    "rule cache": _rule(
        "rule-cache", lengths=(70, 1, 40, 3), starts=(64, 70, 130, 0), state="cache"
    ),
    "rule drafts": _rule(
        "rule-drafts", lengths=(4, 16), starts=(127, 70), state="cache", drafts=True
    ),
    "rule hard decays": _rule("rule-hard", lengths=(140,), values="decay-hard"),
    "rule late forgetting": _rule("rule-late", lengths=(140,), values="late-forget"),
    "rule chunk ends": _rule("rule-ends", lengths=(200,), values="chunk-ends"),
    "rule equal keys": _rule("rule-repeat", lengths=(140,), values="repeat"),
    "rule raw keys": _rule("rule-raw", lengths=(140,), values="raw-keys"),
    "rule bfloat16": _rule("rule-bfloat16", lengths=(3, 70), dtype="bfloat16"),
    "rule float16 snapshots": _rule(
        "rule-float16", lengths=(130,), snapshot_every=64, snapshot_dtype="float16", dtype="float16"
    ),
    "channels": _rule("channels", lengths=(130, 20), per_channel=True),
    "channels cache": _rule(
        "channels-cache", lengths=(40, 3), starts=(100, 64), state="cache", per_channel=True
    ),
    "channels hard decays": _rule(
        "channels-hard", lengths=(140,), values="decay-hard", per_channel=True
    ),
    "layer": DeltaBlockCase(
        id="mutant-layer",
        why=WHY,
        **SIZES,
        lengths=(70, 2, 100),
        starts=(64, 0, 128),  # type: ignore[arg-type]
    ),
}
"""Name of a check -> its case of the gated delta rule."""


@dataclass(frozen=True, kw_only=True)
class NoDrafts(DeltaCase):
    """A case whose cache takes no drafts: its tail holds one chunk."""

    def _cache_sizes(self) -> dict[str, Any]:
        return super()._cache_sizes() | {"draft_tokens": 0}


_OF_128: dict[str, Any] = {"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": "bfloat16"}
OF_128 = {
    **{
        f"{name} of 128": replace(RULES[name], id=f"{RULES[name].id}-128", **_OF_128)
        for name in ("rule", "rule pool", "rule snapshots", "rule cache", "rule drafts",
                     "rule hard decays", "rule late forgetting", "rule chunk ends",
                     "rule equal keys", "channels", "channels cache", "channels hard decays")
    },
    # Sequences of one chunk each, and steps that end with their chunk: one goes on from a tail
    # alone, in a slot whose state is stale.
    "rule short of 128": _rule("rule-short-128", lengths=(1, 40, 0, 64, 13), **_OF_128),
    "rule short cache of 128": NoDrafts(
        id="mutant-rule-short-cache-128",
        why=WHY,
        lengths=(44, 1, 40, 3, 20),
        starts=(84, 70, 130, 0, 30),
        state="cache",
        **_OF_128,
    ),
    # Steps that a cache with drafts takes, one beyond its chunk; tails are filled by longer ones.
    "rule short drafts of 128": _rule(
        "rule-short-drafts-128",
        lengths=(16, 1, 14, 3),
        starts=(112, 70, 122, 0),
        state="cache",
        **_OF_128,
    ),
    "rule short chunk ends of 128": _rule(
        "rule-short-ends-128", lengths=(64, 64), values="chunk-ends", **_OF_128
    ),
    # Long, and with heads enough for chunks to be prepared beside the scan.
    "rule beside of 128": _rule(
        "rule-beside-128", lengths=(3400,), H=16, HV=32, K=128, V=128, dtype="bfloat16"
    ),
}  # fmt: skip
"""The same for kernels that are written for one head size and 16-bit inputs."""

SEGMENTED = _rule("rule-segments", lengths=(390,), values="chunk-ends", V=32)
SEGMENTED_128 = replace(SEGMENTED, id="mutant-rule-segments-128", **_OF_128)
"""One sequence of seven chunks, for what is cut into segments; the state stays felt throughout."""


def _attention(id: str, **options: object) -> AttentionCase:
    sizes = {"HQ": 6, "HK": 2, "D": 32, "dtype": "float32"}
    return AttentionCase(**{"id": f"mutant-{id}", "why": WHY, **sizes, **options})  # type: ignore[arg-type]


ATTENTIONS = {
    "attention": _attention(
        "attention", lengths=(70, 0, 1, 130), prefixes=(0, 5, 40, 90), sinks=True
    ),
    "attention no sinks": _attention("plain", lengths=(1, 100), prefixes=(0, 30)),
    "attention window": _attention(
        "window", lengths=(300, 1, 90), prefixes=(0, 200, 100), window=50, sinks=True
    ),
    "attention without tokens": _attention("no-tokens", lengths=(0, 0), prefixes=(0, 30)),
    "attention wide window": _attention("wide-window", lengths=(100, 70), window=100),
    "attention window of 1": _attention("window-1", lengths=(70,), prefixes=(10,), window=1),
    "attention pages": _attention(
        "pages", lengths=(70, 5), prefixes=(90, 33), layout="pages", page_size=16
    ),
    "attention pages hold all": _attention(
        "pages-all",
        lengths=(70, 5),
        prefixes=(90, 33),
        layout="pages",
        page_size=16,
        new_in_cache=True,
        window=40,
        sinks=True,
    ),
    "attention slots": _attention("slots", lengths=(20, 5), prefixes=(90, 33), layout="slots"),
    "attention fp8": _attention(
        "fp8",
        lengths=(20, 5),
        prefixes=(90, 33),
        layout="pages",
        page_size=16,
        cache_dtype="float8_e4m3fn",
        scale_per_head=True,
    ),
    "attention tree": _attention("tree", lengths=(40,), prefixes=(300,), mask="tree"),
    "attention tree window": _attention(
        "tree-window", lengths=(40,), prefixes=(300,), mask="tree", window=100
    ),
    "attention value size": _attention("value-size", DV=16, lengths=(70,), prefixes=(20,)),
    "attention bfloat16": _attention(
        "bfloat16", lengths=(70, 1), prefixes=(0, 40), sinks=True, dtype="bfloat16"
    ),
    "attention float16 window": _attention(
        "float16-window", lengths=(90, 5), prefixes=(30, 0), window=20, dtype="float16"
    ),
    "attention bfloat16 pages": _attention(
        "bfloat16-pages",
        lengths=(20,),
        prefixes=(90,),
        layout="pages",
        page_size=16,
        dtype="bfloat16",
    ),
    "attention float16 slots window": _attention(
        "float16-slots", lengths=(20,), prefixes=(90,), layout="slots", window=30, dtype="float16"
    ),
    "attention slots of whole tiles": _attention(
        "slots-64", D=64, lengths=(20, 5), prefixes=(90, 33), layout="slots"
    ),
    "attention deep prefix": _attention("deep", lengths=(66,), prefixes=(4200,), HQ=1, HK=1, D=16),
    "attention long": _attention("long", lengths=(4200,), HQ=1, HK=1, D=16),
    "attention long narrow window": _attention(
        "long-narrow", lengths=(4200,), HQ=1, HK=1, D=16, window=50
    ),
    "attention long window": _attention("long-window", lengths=(1300,), HQ=1, HK=1, window=700),
}
"""Name of a check -> its case of softmax extend attention."""

NEIGHBOURLY = {
    "rule beside onnxruntime": ("onnxruntime", _rule("rule-onnx", lengths=(1, 63, 0, 100))),
    "rule beside transformers": ("transformers", _rule("rule-equal", lengths=(70, 70))),
    "attention beside onnxruntime": (
        "onnxruntime",
        _attention("onnx", lengths=(40, 1), prefixes=(0, 33), sinks=True),
    ),
    "attention window beside onnxruntime": (
        "onnxruntime",
        _attention("onnx-window", lengths=(40, 1), prefixes=(0, 33), window=9, sinks=True),
    ),
    "attention beside sdpa": ("sdpa", _attention("sdpa", lengths=(40, 40))),
}
"""Name of a check -> (neighbour that judges, case)."""
