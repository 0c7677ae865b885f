"""One share of many, chosen by what each thing is called: of programs, or of tests."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The index-th of `count` parts, counted from 1; together they hold everything once.

    What a part holds follows from each thing's own names: others may come and go beside it.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, words: str) -> Part:
        """From "I/N"; ValueError where it is no part.

        >>> Part.parse("3/16")
        Part(index=3, count=16)
        """
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", words)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"part: expected I/N with 1 <= I <= N, got {words!r}")
        return cls(int(found[1]), int(found[2]))

    def holds(self, *names: str) -> bool:
        """Whether this is the part of what goes by these names.

        >>> scan = ("gated_delta_rule", "scan-K128-V128-bf16", "cuda:90")
        >>> [index for index in (1, 2, 3) if Part(index, 3).holds(*scan)]
        [2]
        """
        digest = hashlib.sha256("\0".join(names).encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
