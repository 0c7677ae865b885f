"""Known-bad builds: a gate counts once it has failed on them."""

from headstart.evidence.mutants.catalogue import chosen, drawn, named, waiting
from headstart.evidence.mutants.record import Found, Mutant
from headstart.evidence.mutants.runner import run_mutant, run_mutants

__all__ = ["Found", "Mutant", "chosen", "drawn", "named", "run_mutant", "run_mutants", "waiting"]
