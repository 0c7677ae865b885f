"""The checks that judge builds, by name: values against float64, neighbours, bits, transcripts."""

from __future__ import annotations

from headstart.evidence.mutants import attention_checks, rule_checks
from headstart.evidence.mutants.attention_checks import ATTENTION_CHECKS
from headstart.evidence.mutants.convolution_checks import CONVOLUTION_CHECKS
from headstart.evidence.mutants.rule_checks import (
    DEVICE_CHECKS,
    KERNEL_CHECKS,
    RULE_CHECKS,
    TOKEN_CHECKS,
)
from headstart.evidence.mutants.verdicts import Check

CHECKS: dict[str, Check] = {
    **RULE_CHECKS,
    **TOKEN_CHECKS,
    **KERNEL_CHECKS,
    **DEVICE_CHECKS,
    **ATTENTION_CHECKS,
    **CONVOLUTION_CHECKS,
    **rule_checks.NEIGHBOUR_CHECKS,
    **attention_checks.NEIGHBOUR_CHECKS,
}
"""Name -> check."""

_HISTORIES = ("layer", "transcripts")
_FEWER = ("bits of", "transcripts", "attention long", "tile bounds")
"""How checks begin that kernels are not asked as a rule: minutes in the interpreter."""
_KERNEL_BITS = ("bits of splits", "bits of drafts", "bits of plain normalised")


def _kernels(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if not name.startswith(_FEWER))


GENERAL: dict[tuple[str, str], tuple[str, ...]] = {
    ("gated_delta_rule", "torch"): (*RULE_CHECKS, *TOKEN_CHECKS),
    ("extend_attention", "torch"): tuple(ATTENTION_CHECKS),
    ("convolution", "torch"): (*CONVOLUTION_CHECKS, *_HISTORIES),
    ("gated_delta_rule", "triton"): (*_kernels(*RULE_CHECKS, *KERNEL_CHECKS), *_KERNEL_BITS),
    ("extend_attention", "triton"): _kernels(*ATTENTION_CHECKS),
    ("convolution", "triton"): (*_kernels(*CONVOLUTION_CHECKS), "layer"),
}
"""(operation, implementation) -> the checks of a build of which nobody said what is wrong."""
