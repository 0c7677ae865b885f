"""Plain states in the caller's pool, read and written in place by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headstart.runtime.checks import expect_choice
from headstart.runtime.launcher import frozen_ints

LAYOUTS = ("kv", "vk")


@dataclass(frozen=True, eq=False)
class Pool:
    """A pool of plain states (or of convolution histories) addressed by slot.

    Parameters
    ----------
    tensor: [S, HV, K, V] with layout "kv", [S, HV, V, K] with "vk"; [S, width - 1, channels] for
        `causal_conv1d`. float32, bfloat16 or float16; the slot stride is free.
    read_slots: slot of each sequence's old state, a list or an int tensor [N]; slot -1 reads
        zeros; None: all zeros.
    write_slots: slot of each new state; -1 writes nothing; None: the read slots.
    present: bools, a list or a tensor [N]; present[n] False reads zeros (a slot that holds another
        sequence's state).
    layout: "kv" or "vk".

    Lists are copied here, and to the device once: one Pool may serve many steps.
    Two sequences must not write one slot, nor one sequence a slot that another one reads.

    >>> import torch
    >>> Pool(torch.zeros(8, 2, 16, 32), [3, 5]).layout
    'kv'
    """

    tensor: torch.Tensor
    read_slots: Sequence[int] | torch.Tensor | None = None
    write_slots: Sequence[int] | torch.Tensor | None = None
    present: Sequence[bool] | torch.Tensor | None = None
    layout: str = "kv"

    def __post_init__(self) -> None:
        expect_choice("layout", self.layout, LAYOUTS)
        for name in ("read_slots", "write_slots", "present"):
            object.__setattr__(self, name, frozen_ints(getattr(self, name)))
