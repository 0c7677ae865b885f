"""All mutants, by operation and implementation."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import islice

from headstart.evidence.mutants import (
    attention,
    attention_kernels,
    convolution,
    delta,
    hopper,
    kernels,
    references,
)
from headstart.evidence.mutants.generated import generated
from headstart.evidence.mutants.record import Mutant

OPERATIONS = ("gated_delta_rule", "extend_attention", "convolution")
KERNELS = ("triton", "hopper")
"""Implementations that run on a device."""


def named() -> tuple[Mutant, ...]:
    """The faults that somebody thought of."""
    return (
        *delta.MUTANTS,
        *attention.MUTANTS,
        *convolution.MUTANTS,
        *kernels.MUTANTS,
        *hopper.MUTANTS,
        *attention_kernels.MUTANTS,
        *references.MUTANTS,
    )


def chosen(
    op: str | None = None,
    implementation: str = "all",
    *,
    device: str = "cpu",
    names: tuple[str, ...] = (),
) -> tuple[Mutant, ...]:
    """The listed mutants that a command line asks for; on a device those of kernels alone.

    names: only these.
    Raises ValueError for an unknown name, and where nothing is left.

    >>> [mutant.name for mutant in chosen(names=("delta-carry-scaled",))]
    ['delta-carry-scaled']
    """
    found = [mutant for mutant in named() if not names or mutant.name in names]
    known = {mutant.name for mutant in found}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [one.name for one in named()], n=4)
            hint = f"near: {', '.join(near)}" if near else "--list shows them"
            raise ValueError(f"mutant: no mutant is called {name!r}; {hint}")
    found = [
        mutant
        for mutant in found
        if op in (None, mutant.op)
        and implementation in ("all", mutant.implementation)
        and (device == "cpu" or mutant.implementation in KERNELS)
        and not (device == "cpu" and mutant.device_only)
    ]
    if not found:
        raise ValueError(
            f"mutant: none for op {op or 'any'}, implementation {implementation} on {device}"
        )
    return tuple(found)


def waiting(op: str | None = None, implementation: str = "all") -> tuple[Mutant, ...]:
    """The listed mutants that no run on a CPU shows."""
    return tuple(
        mutant
        for mutant in named()
        if mutant.device_only
        and op in (None, mutant.op)
        and implementation in ("all", mutant.implementation)
    )


def drawn(
    count: int,
    op: str | None = None,
    implementation: str = "all",
    *,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[tuple[Mutant, ...], Iterator[Mutant]]:
    """`count` generated mutants of one seed, and those that come after them.

    On a CPU "all" stands for what runs there as it is: kernels in the interpreter are named.
    Raises ValueError where there are no sources, or not so many edits of them.

    >>> [mutant.name for mutant in drawn(2, "convolution", "torch")[0]]
    ['generated-0', 'generated-1']
    """
    if implementation == "all":
        implementation = "torch" if device == "cpu" else "triton"
    draws = generated(op, implementation, seed=seed)
    found = tuple(islice(draws, count))
    if len(found) < count:
        raise ValueError(f"generated: expected at most {len(found)}, got {count}")
    return found, draws
