"""Operations as ops of PyTorch: compiled, exported and fake calls are the eager ones."""

from __future__ import annotations

import copy
import io
import os
import random
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.runtime.traced_calls import (
    FLOAT8,
    FORMS,
    HV,
    H,
    K,
    Seen,
    T,
    V,
    World,
    ops_of,
    outcome,
    same_bits,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import headstart
from headstart import DeltaCache, ExtendPlan, Gate, KVCache, Schedule, Workspace
from headstart.runtime.handles import found
from headstart.runtime.torch_ops import traced

FORM = pytest.mark.parametrize("name", FORMS)


@pytest.fixture(autouse=True)
def _no_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@FORM
def test_an_op_is_what_its_schema_says(name):
    """Aliases and changes, fakes, and what happens under functionalization."""
    world = World()
    call = FORMS[name](world)  # what handles stand for lives as long as this
    before = {word: x.clone() for word, x in world.changed.items()}
    for op, arguments in ops_of(call):
        for word, x in before.items():  # so that another call changes something
            world.changed[word].copy_(x)
        tests: tuple[str, ...] = ("test_schema", "test_autograd_registration", "test_faketensor")
        if any(x.dtype == FLOAT8 for x in world.changed.values()):
            tests = tests[1:]  # PyTorch's own check has no float8 product to compare with
        torch.library.opcheck(op, arguments, test_utils=(*tests, "test_aot_dispatch_dynamic"))


@FORM
def test_what_an_op_says_it_changes_it_changes(name):
    call = FORMS[name](World())
    for op, arguments in ops_of(call):
        for argument, given in zip(op._schema.arguments, arguments, strict=True):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            held = [given] if isinstance(given, torch.Tensor) else given or []
            for x in held:
                x.view(torch.uint8).fill_(0)
            op(*arguments)
            assert not held or any(bool(x.view(torch.uint8).any()) for x in held), argument.name


@FORM
def test_a_compiled_call_is_the_eager_one(name):
    eager, compiled = World(), World()
    call = torch.compile(FORMS[name](compiled), fullgraph=True, backend="aot_eager")
    want = outcome(eager, FORMS[name](eager)())
    assert same_bits(outcome(compiled, call()), want)


@FORM
def test_an_eager_call_never_meets_the_op(name):
    world = World()
    with Seen() as mode:
        FORMS[name](world)()
    assert mode.ops == []


class Layer(torch.nn.Module):
    """A small linear-attention layer, and an attention layer over its outcome."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        widths = 2 * H * K + HV * V
        self.kernel = torch.nn.Parameter(torch.randn(widths, 4, generator=source))
        self.norm = torch.nn.Parameter(torch.ones(V))
        self.a_log = torch.nn.Parameter(torch.zeros(HV))

    def forward(self, x, g, beta, schedule=None, state=None, plan=None, kv=None):
        mixed = headstart.causal_conv1d(x, self.kernel, schedule=schedule, state=state).y
        q, k, v = mixed.split([H * K, H * K, HV * V], -1)
        v = v.unflatten(-1, (HV, V))
        o = headstart.gated_delta_rule(
            q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v, g, beta, schedule=schedule,
            state=state, gate=Gate.raw(self.a_log, beta="logit"), qk_l2norm=True,
        ).o  # fmt: skip
        o = headstart.rms_norm_gated(o, self.norm, v)
        if plan is not None:
            o = o + headstart.extend_attention(o, o, o, plan=plan, cache=kv)
        return o + 1.0


def _inputs(tokens: int, source: torch.Generator) -> tuple[torch.Tensor, ...]:
    shapes = (tokens, 2 * H * K + HV * V), (tokens, HV), (tokens, HV)
    return tuple(torch.randn(shape, generator=source) for shape in shapes)


def _layer_cache() -> DeltaCache:
    sizes = {"H": H, "HV": HV, "K": K, "V": V, "conv_channels": 2 * H * K + HV * V}
    return DeltaCache(4, **sizes, dtype=torch.float32, device="cpu")


COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None
INDUCTOR = (pytest.mark.slow, pytest.mark.skipif(not COMPILER, reason="no C++ compiler"))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_other_lengths_take_no_other_graph(backend):
    """Steps of two sequences: new schedules and plans, and updated ones."""
    layer, cached, compiled_cache = Layer(), _layer_cache(), _layer_cache()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    kv = KVCache(torch.randn(4096, HV, V), torch.randn(4096, HV, V))
    draw, source = random.Random(3), torch.Generator().manual_seed(2)
    starts, graphs = [0, 0], None
    schedule = Schedule([1, 1], device="cpu", capacity=(2, 512, 0))
    for step in range(12):
        lengths = [draw.randint(1, 130), draw.randint(1, 130)]
        how: dict[str, Any] = {"start_positions": starts}
        if step % 3 == 2:
            schedule = Schedule(lengths, device="cpu", capacity=(2, 512, 0), **how)
        else:
            schedule.update_(lengths, **how)
        plan = ExtendPlan.from_lengths(lengths, starts, device="cpu")
        x = _inputs(sum(lengths), source)
        want = layer(*x, schedule, cached.at([0, 2]), plan, kv)
        got = compiled(*x, schedule, compiled_cache.at([0, 2]), plan, kv)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert same_bits(list(compiled_cache.tensors.values()), list(cached.tensors.values()))
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        found_now = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs in (None, found_now)
        graphs = found_now


def test_other_slots_in_a_tensor_take_no_other_graph():
    layer, cache = Layer(), _layer_cache()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, schedule = _inputs(9, torch.Generator().manual_seed(2)), Schedule([9], device="cpu")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for slot in range(3):
            compiled(*x, schedule, cache.at(torch.tensor([slot])))
    states = cache.tensors["end"][:, 0]
    assert states.tolist() == [9, 9, 9, 0]


def test_a_plan_is_found_again_after_its_update():
    world, other = World(), World()
    q, k, v = world.some(8, 4, 64), world.some(8, 2, 64), world.some(8, 2, 64)
    cache, plan = world.kv_cache(), world.plan()

    def call():
        return headstart.extend_attention(q, k, v, plan=plan, cache=cache)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), call())
    before = compiled()
    plan.update_([4, 4], [30, 12], [[1, 3], [0, 2]], 16, new_in_cache=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(), call())
    assert not torch.equal(compiled(), before)
    del other


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_graphs_and_modes_mix(mode):
    layer, source = Layer(), torch.Generator().manual_seed(2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        schedule, cache = Schedule([70], device="cpu"), _layer_cache()
        x = _inputs(70, source)
        want = layer(*x, schedule, cache.at([1]))
    with mode():
        assert torch.equal(compiled(*x, schedule, cache.at([0])), want)


@pytest.mark.parametrize("strict", [False, True])
def test_a_small_module_is_exported_for_any_length(strict):
    layer, source = Layer(), torch.Generator().manual_seed(2)
    tokens = torch.export.Dim("T", min=2, max=4096)
    shapes = {"x": {0: tokens}, "g": {0: tokens}, "beta": {0: tokens}}
    program = torch.export.export(layer, _inputs(70, source), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for length in (2, 131):
        x = _inputs(length, source)
        assert torch.equal(loaded(*x), layer(*x))


LOADING = """
import sys, torch
from headstart import Schedule
program = torch.export.load(sys.argv[1]).module()
with torch.no_grad():
    torch.save(program(*torch.load(sys.argv[2])), sys.argv[3])
"""


def test_an_exported_program_runs_in_another_process(tmp_path):
    layer, source = Layer(), torch.Generator().manual_seed(2)
    files = [str(tmp_path / name) for name in ("program.pt2", "inputs.pt", "result.pt")]
    x = _inputs(70, source)
    torch.export.save(torch.export.export(layer, x, strict=False), files[0])
    torch.save(x, files[1])
    subprocess.run([sys.executable, "-c", LOADING, *files], check=True, timeout=300)
    assert torch.equal(torch.load(files[2]), layer(*x))


def test_a_tensor_that_a_module_holds_is_exported_too():
    class Held(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = torch.randn(8, 16)  # neither a parameter nor a buffer

        def forward(self, weight):
            return headstart.rms_norm_gated(self.rows, weight, self.rows)

    graph = torch.export.export(Held(), (torch.randn(16),), strict=False).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called == ["headstart.rms_norm_gated.default"]


@pytest.mark.parametrize("strict", [False, True])
def test_what_lives_in_a_process_is_not_exported(strict):
    class Held(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x, g, beta):
            return self.layer(x, g, beta, schedule)

    schedule = Schedule([70], device="cpu")
    with pytest.raises(Exception, match="schedule: expected none in an exported program"):
        torch.export.export(Held(), _inputs(70, torch.Generator()), strict=strict)


def test_fake_tensors_give_shapes():
    world = World()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v, g, beta = (mode.from_tensor(x) for x in world.rows())
        schedule, cache = [70, 5], None
        got = headstart.gated_delta_rule(
            q, k, v, g, beta, schedule=schedule, state=cache, return_state=True
        )
        weight = mode.from_tensor(world.some(V))
        normed = headstart.rms_norm_gated(v, weight, v)
    assert traced(got.o)
    assert got.o.shape == (T, HV, V)
    assert got.state is not None
    assert got.state.shape == (2, HV, K, V)
    assert normed.shape == v.shape


def _compiled(call):
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def test_wrong_arguments_are_told():
    q, k, v, g, beta = World().rows()
    rule = headstart.gated_delta_rule
    with pytest.raises(ValueError, match=r"k: expected \[T, H, K\]"):
        _compiled(lambda: rule(q, k[:, :, :9], v, g, beta))()
    with pytest.raises(headstart.Declined, match="hopper: "):
        _compiled(lambda: rule(q, k, v, g, beta, implementation="hopper"))()
    for message, arguments in (
        ("state: expected None, a tensor, a Pool", {"state": 3}),
        ("snapshots: expected None, a dtype, a Pool", {"snapshots": 3}),
        ("schedule: expected None, a Schedule or a list", {"schedule": 3}),
        ("gate: expected a Gate", {"gate": "log"}),
    ):
        with pytest.raises(Exception, match=message):
            _compiled(lambda given=arguments: rule(q, k, v, g, beta, **given))()
    conv = headstart.causal_conv1d
    with pytest.raises(Exception, match=r"weight: expected .channels, width."):
        _compiled(lambda: conv(v[:, 0], v[0, 0]))()
    plan = ExtendPlan.from_lengths([T], device="cpu")
    with pytest.raises(Exception, match="k, v: expected tensors, or a cache"):
        _compiled(lambda: headstart.extend_attention(q, None, None, plan=plan))()
    with pytest.raises(Exception, match="Schedule: expected to be made before the compiled"):
        _compiled(lambda: rule(q, k, v, g, beta, schedule=Schedule([T], device="cpu")))()
    with pytest.raises(Exception, match="q: requires grad"), torch.enable_grad():
        _compiled(lambda x: rule(x, k, v, g, beta))(q.clone().requires_grad_())


def test_a_handle_is_of_one_living_object():
    schedule, workspace = Schedule([3], device="cpu"), Workspace("cpu")
    plan = ExtendPlan.from_lengths([3], device="cpu")
    twin = copy.copy(schedule)
    assert found(Schedule, schedule.handle) is schedule
    assert found(Schedule, twin.handle) is twin
    assert found(Workspace, workspace.handle) is workspace
    kept = plan.handle
    plan.update_([4])
    assert plan.handle is kept
    assert found(ExtendPlan, kept) is plan
    with pytest.raises(ValueError, match="expected that of a Schedule"):
        found(Schedule, plan.handle)
    gone = twin.handle
    del twin
    with pytest.raises(ValueError, match="expected that of a Schedule that lives"):
        found(Schedule, gone)
