"""float32 products in float32, whatever a process allows.

`torch.set_float32_matmul_precision("medium")` lets float32 products be computed in bfloat16 on
processors that multiply it, and in TF32 on GPUs; under `torch.autocast` they are computed in 16
bits. What headstart promises does not depend on such a switch of the process or the thread, so its
products are computed with the switch off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_inside = 0
_found: list[Any] = []


@contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 tensors keep 24 bits inside; the first to enter notes the switches and
    the last to leave puts them back.

    >>> torch.set_float32_matmul_precision("medium")
    >>> with full_float32():
    ...     torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision
    ('medium', 'ieee')
    >>> torch.backends.mkldnn.matmul.fp32_precision
    'bf16'
    >>> torch.set_float32_matmul_precision("highest")
    """
    global _inside
    backends: Any = torch.backends  # the checker does not know all of their switches
    switches = (backends.mkldnn.matmul, backends.cuda.matmul)
    with _lock:
        if _inside == 0:
            _found[:] = [switch.fp32_precision for switch in switches]
            for switch, found in zip(switches, _found, strict=True):
                if found != "ieee":
                    switch.fp32_precision = "ieee"
        _inside += 1
    try:
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for switch, found in zip(switches, _found, strict=True):
                    if found != "ieee":
                        switch.fp32_precision = found
