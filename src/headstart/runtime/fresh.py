"""Memory for results, in the fewest steps: without a parser of arguments, without a dispatcher.

Each function takes a shape, strides and a dtype, and has the name of the type of device that the
tensor lies on, the current one. They are looked up where they are called: what stands in for them,
as the poison of tests does, is found. Graphs that PyTorch compiles make theirs so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

try:
    from torch._C._dynamo.guards import _empty_strided_cpu as cpu  # type: ignore[attr-defined]
    from torch._C._dynamo.guards import _empty_strided_cuda as cuda  # type: ignore[attr-defined]
except ImportError:
    # They are not public, nor in the stubs of PyTorch. Without them a call takes a little longer.

    def _empty(device: str, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    cpu, cuda = partial(_empty, "cpu"), partial(_empty, "cuda")
