"""What of a trace could be hit: prefixes kept under a budget and a policy, without a model.

Requests come one after the other in the order of the trace, each whole (with its output) before the
next, which is what a prefix cache can know at best.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from headstart.evidence.traffic.records import HitShare
from headstart.evidence.traffic.shapes import SHAPES
from headstart.evidence.traffic.trace import GRAIN, Text, Trace
from headstart.integrations.prefix_tree import PrefixTree
from headstart.integrations.snapshot_policy import POLICIES


@dataclass(frozen=True)
class Sizes:
    """What is kept of a model in bytes: of 64 tokens' keys and values, and of one state."""

    page: int
    state: int


MODELS = {name: Sizes(shape.page_bytes, shape.state_bytes) for name, shape in SHAPES.items()}
"""Models by name, in the dtype of their checkpoints."""


@dataclass(frozen=True)
class Blocks:
    """A request by whole blocks: their keys, those of its output included."""

    prompt: int
    keys: tuple[Hashable, ...]


def of_text(texts: Sequence[Text], grain: int) -> list[Blocks]:
    """Requests by blocks of `grain` tokens, a multiple of 64, of their synthetic text."""
    each = grain // GRAIN
    return [
        Blocks(
            text.request.prompt,
            tuple(
                text.keys[at * each : (at + 1) * each]
                for at in range((text.request.prompt + text.request.output) // grain)
            ),
        )
        for text in texts
    ]


def of_ids(trace: Trace, grain: int) -> list[Blocks]:
    """Requests by blocks of `grain` tokens, a multiple of what an id stands for."""
    each = grain // trace.id_tokens
    return [
        Blocks(
            one.prompt,
            tuple(one.ids[at * each : (at + 1) * each] for at in range(one.prompt // grain)),
        )
        for one in trace.requests
    ]


def ceiling(requests: Sequence[Blocks], grain: int) -> list[int]:
    """Tokens that each request finds if all blocks of all before it are kept, with states."""
    places: dict[tuple[int, Hashable], int] = {}  # (place of the block before, key) -> place
    found = []
    for request in requests:
        place, hit = -1, 0
        for at, key in enumerate(request.keys):
            known = (place, key) in places
            place = places.setdefault((place, key), len(places))
            if known and at == hit and (at + 1) * grain < request.prompt:
                hit = at + 1
        found.append(hit * grain)
    return found


def replay(
    requests: Sequence[Blocks], grain: int, *, policy: str, sizes: Sizes, budget: int | None
) -> tuple[list[int], PrefixTree]:
    """Tokens that each request finds, and the tree at the end."""
    places_of = POLICIES[policy if sizes.state else "all"]
    tree = PrefixTree(
        page_bytes=sizes.page * grain // GRAIN, state_bytes=sizes.state, budget=budget
    )
    found = []
    for request in requests:
        keys, again = request.keys, (request.prompt - 1) // grain
        node, shared = tree.find(keys[:again])
        tree.use(node)
        places = set(places_of.places(node.end, shared, request.prompt, grain))
        if places_of.outputs and node.end < len(keys):
            places.add(len(keys))
        tree.insert(keys, keys, dict.fromkeys(places, True))
        tree.leave(node)
        places_of.thin_out(tree, keys)
        found.append(node.end * grain)
    return found, tree


def hit_shares(
    trace: Trace,
    texts: Sequence[Text],
    *,
    model: str = "qwen3-next-80b",
    policies: Sequence[str] = ("geometric",),
    budgets: Sequence[int | None] = (None,),
    grains: Sequence[int] = (64, 512, 1024),
) -> list[HitShare]:
    """Hit shares of a trace for every grain, policy and budget; with ids alone where they reach."""
    found = []
    finest = ceiling(of_text(texts, GRAIN), GRAIN)
    finest_ids = ceiling(of_ids(trace, trace.id_tokens), trace.id_tokens)
    for grain in grains:
        kinds = [("synthetic", of_text(texts, grain), finest)]
        if grain % trace.id_tokens == 0:
            kinds.append(("ids", of_ids(trace, grain), finest_ids))
        for text, requests, most in kinds:
            for policy in policies:
                for budget in budgets:
                    hits, tree = replay(
                        requests, grain, policy=policy, sizes=MODELS[model], budget=budget
                    )
                    found.append(
                        HitShare(
                            text=text,
                            grain=grain,
                            policy=policy,
                            model=model,
                            budget=budget,
                            requests=len(requests),
                            tokens=trace.tokens,
                            hit_tokens=sum(hits),
                            ceiling_tokens=sum(most),
                            kept_bytes=tree.bytes,
                            evicted=tree.evicted,
                            hits=tuple(hits),
                        )
                    )
    return found
