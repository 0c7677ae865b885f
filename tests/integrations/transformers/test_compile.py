"""Compiled models: the same logits, and no length is compiled for again."""

import pytest
import torch
from tests.implementations import DEVICE
from tests.integrations.transformers.models import (
    difference,
    left_padding,
    make,
    served_calls,
    stepped,
    steps_of,
    tokens,
)

from headstart.integrations.transformers import HybridCache, enable, statistics

pytestmark = pytest.mark.kernels

NEAR = 2e-5


@pytest.mark.parametrize("family", ["qwen3-next", "gpt-oss"])
def test_compiled_models(family):
    own, served = make(family), enable(make(family))
    torch.compiler.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(served, backend="eager" if DEVICE == "cpu" else "inductor")
    ids = tokens(2, 200)
    counts = []
    for length in (200, 150, 70, 133):
        statistics(served).reset()
        found = compiled(ids[:, :length]).logits
        assert difference(found, own(ids[:, :length]).logits) < NEAR
        assert {kind for kind, _ in served_calls(served)} == set(served.config.layer_types)
        counts.append(graphs["unique_graphs"])
    assert counts[1] == counts[2] == counts[3]  # for one length, and then for all
    found = stepped(compiled, ids, steps_of(200, [64]), HybridCache(served))
    assert difference(found, own(ids).logits) < NEAR
    mask = left_padding(200, 0, 71)
    found = compiled(ids, attention_mask=mask).logits
    assert difference(found[0], own(ids[:1]).logits[0]) < NEAR
    assert difference(found[1, 71:], own(ids[1:, 71:]).logits[0]) < NEAR
