"""All mutants, by operation and implementation."""

from __future__ import annotations

from headstart.evidence.mutants import attention, convolution, delta, kernels, references
from headstart.evidence.mutants.record import Mutant

OPERATIONS = ("gated_delta_rule", "extend_attention", "convolution")


def named() -> tuple[Mutant, ...]:
    """The faults that somebody thought of."""
    return (
        *delta.MUTANTS,
        *attention.MUTANTS,
        *convolution.MUTANTS,
        *kernels.MUTANTS,
        *references.MUTANTS,
    )


def chosen(
    op: str | None = None,
    implementation: str = "all",
    *,
    device: str = "cpu",
    names: tuple[str, ...] = (),
) -> tuple[Mutant, ...]:
    """The mutants that a command line asks for; those that need a device only where there is one.

    names: only these.
    Raises ValueError for an unknown name, and where nothing is left.

    >>> [mutant.name for mutant in chosen(names=("delta-carry-scaled",))]
    ['delta-carry-scaled']
    """
    found = [mutant for mutant in named() if not names or mutant.name in names]
    known = {mutant.name for mutant in found}
    for name in names:
        if name not in known:
            raise ValueError(f"mutant: no mutant is called {name!r}; --list shows them")
    found = [
        mutant
        for mutant in found
        if op in (None, mutant.op)
        and implementation in ("all", mutant.implementation)
        and (device == "cpu" or mutant.implementation in ("triton", "hopper"))
        and not (device == "cpu" and mutant.device_only)
    ]
    if not found:
        raise ValueError(f"mutant: none for op {op}, implementation {implementation} on {device}")
    return tuple(found)
