"""A hit is a cold prefill, bit for bit: every operation on restored states, histories and pages.

Products of the model's own Linear layers change bits with their row count, so the operations are
replayed with the inputs of one cold prefill.
"""

import random

import pytest
import torch
from tests.integrations.transformers.models import CACHE, make, steps_of, tokens

import headstart
from headstart.integrations.transformers import HybridCache, enable, observe

pytestmark = pytest.mark.kernels

T = 203
ROWS = {
    "causal_conv1d": ("x",),
    "gated_delta_rule": ("q", "k", "v", "g", "beta"),
    "extend_attention": ("q",),
}
FIXED = {
    "causal_conv1d": ("weight", "bias", "activation"),
    "gated_delta_rule": ("gate", "qk_l2norm"),
    "extend_attention": ("scale", "window", "sinks", "softcap", "reproducible"),
}
KEPT = (64, 128, 192)


def _rows(operation, result):
    return getattr(
        result, {"causal_conv1d": "y", "gated_delta_rule": "o"}.get(operation, ""), result
    )


class Cold:
    """A cold prefill of one sequence, whole, with everything that its operations were given."""

    def __init__(self, model, ids):
        self.calls = []
        self.cache = HybridCache(model, snapshot_every=64)
        with observe(model, self._keep):
            model(ids, **{CACHE: self.cache})

    def _keep(self, layer, operation, arguments, result):
        if operation in ROWS:
            rows = {name: arguments[name].clone() for name in ROWS[operation]}
            fixed = {name: arguments[name] for name in FIXED[operation] if name in arguments}
            self.calls.append((layer, operation, rows, fixed, _rows(operation, result).clone()))

    def differing(self, cache, start, sizes):
        """Values that differ when `cache`, which stands at `start`, gets the rows after it."""
        count = 0
        for layer, operation, rows, fixed, wanted in self.calls:
            if operation == "extend_attention":
                self._write_keys(layer, cache, start)
            found = []
            for begin, end in steps_of(len(wanted) - start, sizes):
                begin, end = begin + start, end + start
                step = {name: tensor[begin:end] for name, tensor in rows.items()}
                if operation == "extend_attention":
                    step |= {"k": None, "v": None}
                place = cache.arguments(layer, begin, end - begin)[operation]
                result = getattr(headstart, operation)(**step, **fixed, **place)
                found.append(_rows(operation, result))
            found = torch.cat(found)
            count += (found != wanted[start:]).sum().item() + found.isnan().sum().item()
        return count

    def _write_keys(self, layer, cache, start):
        source = self.cache.arguments(layer, start, T - start)["write_kv"]
        memory, slots = source["cache"], source["slots"]
        k, v = (x.flatten(0, 1)[slots].clone() for x in (memory.k, memory.v))
        headstart.write_kv(k, v, **cache.arguments(layer, start, T - start)["write_kv"])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(family, request):
    return enable(make(family, request.param))


def test_replayed_from_the_start(model):
    """In one step and in others, on a cache that stands at 0."""
    cold = Cold(model, tokens(1, T))
    drawn = random.Random(0)
    for sizes in ([T], [64], [drawn.randint(1, 80) for _ in range(20)]):
        assert cold.differing(cold.cache.restored(0), 0, sizes) == 0


@pytest.mark.parametrize("position", KEPT)
def test_replayed_from_every_hit(model, position):
    cold = Cold(model, tokens(1, T))
    drawn = random.Random(position)
    for sizes in ([T], [1, 2, 60], [drawn.randint(1, 80) for _ in range(20)]):
        assert cold.differing(cold.cache.restored(position), position, sizes) == 0


def test_the_replay_sees_a_wrong_state(model):
    """The count is no constant: from the wrong place, or with one key changed, bits differ."""
    cold = Cold(model, tokens(1, T))
    other = Cold(model, tokens(1, T, seed=1))
    assert cold.differing(other.cache.restored(64), 64, [T]) > 0


def test_a_cold_prefill_in_steps_keeps_the_same_states():
    """Rows of one sequence, in whatever steps the cold prefill itself ran: equal bits for hits.

    The convolution's input comes from a product whose bits change with its rows, so one layer is
    compared on recorded inputs: a hit of a stepped prefill must replay that prefill's rows.
    """
    model = enable(make("qwen3.5"))
    ids = tokens(1, T)
    cache = HybridCache(model, snapshot_every=64)
    calls = {}

    def keep(layer, operation, arguments, result):
        if operation in ("causal_conv1d", "gated_delta_rule"):
            rows = {name: arguments[name].clone() for name in ROWS[operation]}
            fixed = {name: arguments[name] for name in FIXED[operation] if name in arguments}
            entry = calls.setdefault((layer, operation), (fixed, []))
            entry[1].append((rows, _rows(operation, result).clone()))

    with observe(model, keep):
        for start, end in steps_of(T, [37, 50, 1, 64]):
            model(ids[:, start:end], **{CACHE: cache})
    for position in KEPT:
        restored = cache.restored(position)
        for (layer, operation), (fixed, steps) in calls.items():
            rows = {
                name: torch.cat([step[0][name] for step in steps])[position:]
                for name in ROWS[operation]
            }
            wanted = torch.cat([step[1] for step in steps])[position:]
            place = restored.arguments(layer, position, T - position)[operation]
            result = getattr(headstart, operation)(**rows, **fixed, **place)
            assert torch.equal(_rows(operation, result), wanted)


def test_the_batch_changes_no_bit():
    """A sequence of a padded batch replays on a cache of its own."""
    model = enable(make("qwen3-next"))
    ids = tokens(3, T)
    mask = torch.ones_like(ids)
    mask[1, :75] = 0
    calls = []

    def keep(layer, operation, arguments, result):
        if operation in ("causal_conv1d", "gated_delta_rule"):
            rows = {name: arguments[name][T : 2 * T - 75].clone() for name in ROWS[operation]}
            fixed = {name: arguments[name] for name in FIXED[operation] if name in arguments}
            wanted = _rows(operation, result)[T : 2 * T - 75].clone()
            calls.append((layer, operation, rows, fixed, wanted))

    cache = HybridCache(model, snapshot_every=64)
    with observe(model, keep):
        model(ids, attention_mask=mask, **{CACHE: cache})
    restored = cache.restored(64, row=1)
    assert len(calls) == 2
    for layer, operation, rows, fixed, wanted in calls:
        rows = {name: tensor[64:] for name, tensor in rows.items()}
        place = restored.arguments(layer, 64, len(wanted) - 64)[operation]
        result = getattr(headstart, operation)(**rows, **fixed, **place)
        assert torch.equal(_rows(operation, result), wanted[64:])
