"""The workloads as data: every test, benchmark and report names one of these ids.

Each case knows its sizes, the reason it exists, the bytes and operations no implementation can
avoid, and how to draw its inputs from a seed. Every case of an operation has a `-small` sibling
(an eighth of the heads, lengths to 1,199, ratios kept), every case with sinks a `-nosink` one.

>>> case = get("gdn-next-8k")
>>> case.H, case.HV, case.lengths, case.why
(16, 32, (8192,), 'Qwen3-Next-80B-A3B and Qwen3.5-35B on one GPU')
>>> get("gdn-next-8k-small").lengths
(1199,)
>>> get("gdn-nxt-8k")
Traceback (most recent call last):
    ...
ValueError: case: no case is called 'gdn-nxt-8k'; near: gdn-next-8k, ...
"""

from __future__ import annotations

import difflib
from functools import cache

from headstart.evidence.cases.record import SMALL, Case, Floor

__all__ = ["OPERATIONS", "SMALL", "Case", "Floor", "catalogue", "get"]

OPERATIONS = ("gated_delta_rule", "extend_attention", "causal_conv1d", "model")


@cache
def _by_id() -> dict[str, Case]:
    from headstart.evidence.cases import attention_list, convolution, delta_list, models

    found: dict[str, Case] = {}
    for case in (*delta_list.CASES, *attention_list.CASES, *convolution.CASES):
        found[case.id] = case
        small = case.small()
        found[small.id] = small
    found.update({case.id: case for case in models.MODELS})
    return found


def catalogue(op: str | None = None, *, small: bool = True) -> tuple[Case, ...]:
    """All cases (of one operation), each followed by its small sibling unless `small` is False.

    Raises ValueError for an operation that no case has.
    """
    if op is not None and op not in OPERATIONS:
        raise ValueError(f"op: expected one of {list(OPERATIONS)}, got {op!r}")
    return tuple(
        case
        for case in _by_id().values()
        if op in (None, case.op) and (small or not case.id.endswith(SMALL))
    )


def get(id: str) -> Case:
    """The case called `id`, or the one that flashinfer-bench calls so.

    Raises ValueError with the nearest ids for one that does not exist.
    """
    cases = _by_id()
    if id in cases:
        return cases[id]
    for case in cases.values():
        if id and getattr(case, "definition", "") == id:
            return case
    near = difflib.get_close_matches(id, cases, n=4, cutoff=0.5)
    hint = f"near: {', '.join(near)}" if near else "`headstart cases list` shows them"
    raise ValueError(f"case: no case is called {id!r}; {hint}")
