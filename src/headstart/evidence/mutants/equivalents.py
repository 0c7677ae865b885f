"""Generated mutants that no check can kill, and why: the reason is what makes them no fault."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
"""Name of a generated mutant -> why its build gives the same results."""
