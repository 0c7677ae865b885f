"""What a call on Hopper leaves in scratch between its passes, as a machine without one can tell."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headstart import DeltaCache, Gate, Schedule
from headstart.ops.gated_delta_rule import spec
from headstart.ops.gated_delta_rule.passes import scratch

H, HV, T = 2, 4, 4000


def plan(**options):
    """The plan of a call whose scan reads rows of the call and of a tail itself."""
    q, k = torch.zeros(2, T, H, 128, dtype=torch.bfloat16)
    v = torch.zeros(T, HV, 128, dtype=torch.bfloat16)
    arguments: dict[str, Any] = dict.fromkeys(
        ("schedule", "state", "snapshots", "scale", "reproducible")
    )
    arguments |= {"gate": Gate.log(), "return_state": False, "qk_l2norm": False}
    arguments |= {"workspace": None, "out": None} | options
    call = spec.bind(q, k, v, torch.zeros(T, HV), torch.zeros(T, HV), **arguments)
    return scratch.Plan.of(call, gathers=True)


def on_a_cache():
    cache = DeltaCache(
        1, H=H, HV=HV, K=128, V=128, dtype=torch.bfloat16, draft_tokens=0, device="cpu"
    )
    return {"state": cache.at([0]), "schedule": Schedule([T], device="cpu")}


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_q_k_and_v_are_in_no_scratch(cached, normalised):
    plain = plan()
    found = plan(**(on_a_cache() if cached else {}), qk_l2norm=normalised)
    assert not {"q_tiles", "k_tiles", "v_tiles"} & set(found.shapes)
    # What rows are multiplied by, log decays and positions are a few words a row.
    assert found.bytes <= 1.06 * plain.bytes
