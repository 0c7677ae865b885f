"""Whether an implementation is right: every output of a case against float64 at full length."""

from headstart.evidence.verify.figures import Measured
from headstart.evidence.verify.tolerances import COSINE_GATE, Tolerance
from headstart.evidence.verify.verification import Verification, verify_case, verify_many

__all__ = ["COSINE_GATE", "Measured", "Tolerance", "Verification", "verify_case", "verify_many"]
