"""The gated norm as what a bundle holds: one launch of one small kernel."""

import torch

import headstart
from headstart.runtime.bundle_programs import programs_of
from headstart.runtime.rehearsal import rehearsing
from headstart.runtime.static import TARGETS


def norm(device, channels=64, rows=48):
    x = torch.zeros(rows, channels, dtype=torch.bfloat16, device=device)
    weight = torch.ones(channels, dtype=torch.bfloat16, device=device)
    with torch.inference_mode():
        return headstart.rms_norm_gated(x, weight, x, implementation="triton")


def rehearsed(target="cuda:90", **sizes):
    """The programs of such a call on a target, by key."""
    with rehearsing(TARGETS[target], 132) as rehearsal:
        norm("meta", **sizes)
    return programs_of(rehearsal)
