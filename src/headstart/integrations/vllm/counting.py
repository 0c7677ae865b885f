"""What headstart has served in this process: calls and host seconds, as the layers make them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import headstart
from headstart.runtime import dispatch


@dataclass
class Statistics:
    """What the engine's layers have asked of headstart in this process.

    served: layer kind -> layers times steps.
    calls: (layer kind, operation, implementation) -> calls.
    seconds: the same -> host seconds.
    """

    served: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))

    def reset(self) -> None:
        """Start counting again."""
        self.served.clear()
        self.calls.clear()
        self.seconds.clear()


STATISTICS = Statistics()


def call(kind: str, operation: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run `headstart.<operation>` for a layer of this kind, counted and timed."""
    began = time.perf_counter()
    with dispatch.watching() as ran:
        result = getattr(headstart, operation)(*args, **kwargs)
    key = (kind, operation, ran[-1][1])
    STATISTICS.calls[key] += 1
    STATISTICS.seconds[key] += time.perf_counter() - began
    return result
