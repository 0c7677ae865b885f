"""What a process has set for its own tensors and products changes nothing here."""

import contextlib

import pytest
import torch

import headstart
from headstart import DeltaCache, ExtendPlan, Gate, KVCache, Schedule
from headstart.ops.extend_attention.tile_table import Cut, key_positions, tile_table
from headstart.runtime.launcher import device_ints

T, H, HV, K, V = 130, 1, 2, 16, 12


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "other device": lambda: torch.device("meta"),
}


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float32, device="cpu")


def rule():
    k = torch.nn.functional.normalize(rows(T, H, K), dim=-1)
    x = rows(T, H, K), k, rows(T, HV, V), rows(T, HV), rows(T, HV)
    raw = Gate.raw(rows(HV), rows(HV), beta="logit")

    def call():
        cache = DeltaCache(1, H=H, HV=HV, K=K, V=V, dtype=torch.float32, device="cpu")
        step = Schedule([T], device="cpu")
        yield headstart.gated_delta_rule(*x, gate=raw, schedule=step, state=cache.at([0])).o
        rest = Schedule([5], start_positions=[T], device="cpu")
        more = [part[:5] for part in x]
        yield headstart.gated_delta_rule(*more, gate=raw, schedule=rest, state=cache.at([0])).o
        yield headstart.gated_delta_rule(*x, gate=raw, return_state=True).state
        yield headstart.gated_delta_rule(*x[:3], None, None, implementation="reference").o
        yield headstart.gated_delta_rule(*x[:3], None, None, schedule=[T - 3, 3]).o
        yield headstart.recurrent_gated_delta_rule(*x[:3], None, None).o
        yield from headstart.chunk_map(k, x[2], None, None, schedule=[9, T - 9])

    return call


def attention():
    q, k, v = rows(T, 4, 16), rows(T, 2, 16), rows(T, 2, 16)
    cache = KVCache(rows(T, 2, 16), rows(T, 2, 16))
    mask = rows(T * T) < 0.5

    def call():
        whole = ExtendPlan.from_lengths([T], device="cpu")
        behind = ExtendPlan.from_lengths([T], [T], device="cpu")
        for reproducible in (False, True):
            for window in (None, 9):
                for softcap in (None, 2.0):
                    how = {"reproducible": reproducible, "window": window, "softcap": softcap}
                    for plan in (whole, behind):
                        yield from headstart.extend_attention(
                            q, k, v, plan=plan, cache=cache, return_lse=True, **how
                        )
            yield headstart.extend_attention(
                q, k, v, plan=whole, custom_mask=mask, reproducible=reproducible
            )
        parts = [
            headstart.extend_attention(q, k, v, plan=behind, cache=cache, part=part)
            for part in ("prefix", "extend")
        ]
        yield from headstart.merge_attention(parts, sinks=v[0, 0, :4])

    return call


def layer():
    x, weight, bias = rows(T, 6), rows(6, 4), rows(6)

    def call():
        yield headstart.causal_conv1d(x, weight, bias).y
        yield headstart.causal_conv1d(x, weight, schedule=[T - 2, 2], return_state=True).state
        yield headstart.rms_norm_gated(x, bias, x)
        yield from headstart.compose((rows(3, 3) * 0 + x[:3, :3], x[:3]), (x[3:6, :3], x[3:6]))

    return call


def tables():
    """What kernels read beside rows: made on the host, and copied."""
    k, v = rows(2, 2, 16), rows(2, 2, 16)

    def call():
        step = Schedule([T - 3, 3], device="cpu", capacity=(2, T, 0))
        yield torch.zeros_like(step.handle)
        lengths = step.on_device(lambda own: own.lengths)
        yield lengths.clone()
        step.update_([3, T - 3])
        yield lengths
        for capacity in (None, (4, 500, 400)):
            plan = ExtendPlan.from_lengths([70, 1], [0, 300], device="cpu", capacity=capacity)
            cut = Cut("all", False, tokens=64, piece=256, absolute=False)
            table = tile_table(plan, cut)
            yield from (table.sequences, table.tiles, table.joins)
            yield key_positions(plan)
        yield device_ints([3, -1], torch.device("cpu"))
        cache = KVCache(torch.zeros_like(k), torch.zeros_like(v))
        headstart.write_kv(k, v, cache, [1, -1])
        yield cache.k

    return call


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("made", [rule, attention, layer, tables])
def test_settings_of_the_process_change_no_bit(made, setting):
    call = made()
    wanted = list(call())
    with SETTINGS[setting]():
        found = list(call())
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)
