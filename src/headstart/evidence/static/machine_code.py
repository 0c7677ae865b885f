"""What stands in machine code: registers, spills, matrix instructions, load widths, a fingerprint.

NVIDIA: the resource usage and SASS that `cuobjdump` prints. AMD: the assembly with its metadata.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class MachineCode:
    """What was read from one compiled kernel.

    registers: vector registers a thread holds (with accumulation registers on AMD).
    vector_spills: 32-bit words a thread spills; on NVIDIA words of stores to local memory.
    scalar_spills: scalar registers spilled; None where there are none to spill.
    threads: threads of a block.
    opcodes: opcode -> how often it stands in the code.
    loads: kind and width in bits -> count, "LDGSTS.128" or "global_load.64" for example.
    matrix: matrix opcode -> count.
    fingerprint: of the instructions and operands without addresses; equal means the same code.
    """

    registers: int
    vector_spills: int
    scalar_spills: int | None
    threads: int
    opcodes: dict[str, int]
    loads: dict[str, int]
    matrix: dict[str, int]
    fingerprint: str

    @property
    def instructions(self) -> int:
        """Instructions in the code, padding left out."""
        return sum(self.opcodes.values())


CUDA_MATRIX = re.compile(r"(?:UTC\w*MMA|[A-Z]GMMA|[A-Z]MMA)\b")
HIP_MATRIX = re.compile(r"v_(?:s?mfmac?|swmmac|wmma)_")
SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.M)
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
HIP_INSTRUCTION = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch|tensor|image)_\w+.*)$")
HIP_LOAD = re.compile(r"(global|buffer|flat)_load_(lds_)?(\w+)")
HIP_WIDTHS = {
    "dwordx4": 128,
    "b128": 128,
    "dwordx3": 96,
    "b96": 96,
    "dwordx2": 64,
    "b64": 64,
    "dword": 32,
    "b32": 32,
}


def sass(resources: str, listing: str, ptx: str) -> MachineCode:
    """From `cuobjdump -res-usage`, `cuobjdump -sass` and the PTX of a cubin with one kernel."""
    lines = [PREDICATE.sub("", line) for line in SASS.findall(listing)]
    raw = SASS.findall(listing)
    while lines and lines[-1] == "NOP":
        lines.pop()
        raw.pop()
    opcodes = Counter(line.split(maxsplit=1)[0] for line in lines)
    loads: Counter[str] = Counter()
    spilled = 0
    for opcode, count in opcodes.items():
        kind, *modifiers = opcode.split(".")
        if kind in ("LDG", "LDGSTS"):
            loads[f"{kind}.{_sass_width(modifiers)}"] += count
        elif kind in ("UTMALDG", "UBLKCP"):
            loads["TMA"] += count
        elif kind == "STL":
            spilled += count * max(_sass_width(modifiers) // 32, 1)
    return MachineCode(
        registers=int(_only(r"\bREG:(\d+)", resources, "registers")),
        vector_spills=spilled,
        scalar_spills=None,
        threads=int(_only(r"\.reqntid (\d+)", ptx, "threads of a block")),
        opcodes=dict(opcodes),
        loads=dict(loads),
        matrix={op: count for op, count in opcodes.items() if CUDA_MATRIX.match(op)},
        fingerprint=_fingerprint(raw),
    )


def amdgcn(text: str) -> MachineCode:
    """From AMD assembly with the metadata of one kernel."""
    lines = []
    for line in text.splitlines():
        if found := HIP_INSTRUCTION.match(line.split(";", 1)[0].split("//", 1)[0].rstrip()):
            lines.append(" ".join(found[1].split()))
    while lines and lines[-1] in ("s_code_end", "s_nop 0"):
        lines.pop()
    opcodes = Counter(line.split(maxsplit=1)[0] for line in lines)
    loads: Counter[str] = Counter()
    for line in lines:
        if found := HIP_LOAD.match(line):
            kind = found[1] + "_load" + (".lds" if found[2] or line.endswith(" lds") else "")
            loads[f"{kind}.{_hip_width(found[3])}"] += 1

    def metadata(field: str) -> int:
        return int(_only(rf"^\s*(?:- )?\.{field}:\s+(\d+)", text, field))

    return MachineCode(
        registers=metadata("vgpr_count"),
        vector_spills=metadata("vgpr_spill_count"),
        scalar_spills=metadata("sgpr_spill_count"),
        threads=metadata("max_flat_workgroup_size"),
        opcodes=dict(opcodes),
        loads=dict(loads),
        matrix={op: count for op, count in opcodes.items() if HIP_MATRIX.match(op)},
        fingerprint=_fingerprint(lines),
    )


def _sass_width(modifiers: list[str]) -> int:
    """Bits that one thread moves.

    >>> _sass_width(["E", "BYPASS", "128"]), _sass_width(["E", "U16"]), _sass_width(["E"])
    (128, 16, 32)
    """
    for modifier in modifiers:
        if modifier in ("64", "128", "256"):
            return int(modifier)
        if modifier in ("U8", "S8", "U16", "S16"):
            return int(modifier[1:])
    return 32


def _hip_width(suffix: str) -> int:
    """Bits that one lane moves.

    >>> _hip_width("dwordx4"), _hip_width("d16_b16"), _hip_width("ubyte")
    (128, 16, 8)
    """
    if suffix in HIP_WIDTHS:
        return HIP_WIDTHS[suffix]
    return 8 if re.search(r"byte|[ui]8", suffix) else 16


def _fingerprint(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _only(pattern: str, text: str, what: str) -> str:
    found = re.search(pattern, text, re.M)
    if found is None:
        raise ValueError(f"machine code: {what} not found")
    return found[1]
