"""On a GPU (HEADSTART_TEST_DEVICE=cuda): compiled calls, graphs, processes, memory that ends."""

import hashlib
import multiprocessing
import random
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.implementations import DEVICE
from tests.runtime.traced_calls import FORMS, World, ops_of, outcome, same_bits

import headstart
from headstart import DeltaCache, ExtendPlan, Gate, KVCache, Schedule, Workspace

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")]

DTYPE = torch.bfloat16
H, HV, K, V, CHANNELS, HQ, HK, D = 1, 2, 64, 64, 256, 4, 2, 64
PAGE, ROOM = 16, 256
STEPS = ((130, 70), (64, 1), (1, 1), (100, 128), (1, 64), (63, 7))
"""New tokens of two sequences, step by step."""
NAMES = ("rule_cache", "rule_pool", "recurrent", "convolution_cache", "norm", "attention",
         "attention_out", "attention_parts", "write")  # fmt: skip


@pytest.fixture(autouse=True)
def compiled_anew():
    yield
    torch._dynamo.reset()


class Layer:
    """What a forward calls: convolution, rule on a cache, norm, write_kv, attention over pages."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(5)

        def some(*shape):
            return (torch.randn(shape, generator=source) / 4).to(DEVICE, DTYPE)

        self.weight, self.norm, self.sinks = some(CHANNELS, 4), some(V) + 1, some(HQ)
        sizes = {"H": H, "HV": HV, "K": K, "V": V, "conv_channels": CHANNELS}
        self.cache = DeltaCache(5, **sizes, dtype=DTYPE, device=DEVICE)
        self.slots = self.cache.at(torch.tensor([3, 1], device=DEVICE))
        self.kv = KVCache(*(torch.zeros(64, PAGE, HK, D, dtype=DTYPE, device=DEVICE) for _ in "kv"))
        self.pages = torch.stack([torch.arange(32).flip(0), torch.arange(32, 64)])
        self.table, self.scratch = self.pages.to(DEVICE), Workspace(DEVICE)

    def __call__(self, x, q, g, beta, where, schedule, plan):
        y = headstart.causal_conv1d(x, self.weight, schedule=schedule, state=self.slots).y
        query, key, value = y.split([H * K, H * K, HV * V], -1)
        value = value.unflatten(-1, (HV, V))
        o = headstart.gated_delta_rule(
            query.unflatten(-1, (H, K)), key.unflatten(-1, (H, K)), value, g, beta,
            schedule=schedule, state=self.slots, gate=Gate.log(beta="logit"), qk_l2norm=True,
            workspace=self.scratch,
        ).o  # fmt: skip
        o = headstart.rms_norm_gated(o, self.norm, value)
        headstart.write_kv(o, value, self.kv, where)
        return o, headstart.extend_attention(
            q, None, None, plan=plan, cache=self.kv, sinks=self.sinks, reproducible=True
        )

    def plan(self, lengths, starts, **capacity) -> ExtendPlan:
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        return ExtendPlan.from_pages(lengths, ends, self.table, PAGE, new_in_cache=True, **capacity)

    def where(self, lengths, starts, rows) -> torch.Tensor:
        """Slots of the new keys; -1 past them."""
        slots = [
            int(self.pages[n, p // PAGE]) * PAGE + p % PAGE
            for n, (length, start) in enumerate(zip(lengths, starts, strict=True))
            for p in range(start, start + length)
        ]
        return torch.tensor(slots + [-1] * (rows - len(slots)), device=DEVICE)

    def clear(self) -> None:
        for tensor in (*self.cache.tensors.values(), self.kv.k, self.kv.v):
            tensor.zero_()


def drawn(rows: int, seed: int) -> list[torch.Tensor]:
    """x, q, log decay and strength."""
    source = torch.Generator().manual_seed(seed)
    x, q = (torch.randn(rows, *shape, generator=source) for shape in ((CHANNELS,), (HQ, D)))
    decay, strength = (torch.randn(rows, HV, generator=source) for _ in range(2))
    return [x.to(DEVICE, DTYPE), q.to(DEVICE, DTYPE), -decay.abs().to(DEVICE), strength.to(DEVICE)]


def stepped() -> tuple[Layer, list[list[torch.Tensor]]]:
    """A layer after all steps, called eagerly with schedules and plans of their own; results."""
    layer, starts, results = Layer(), [0, 0], []
    for i, lengths in enumerate(STEPS):
        T = sum(lengths)
        schedule = Schedule(list(lengths), start_positions=starts, device=DEVICE)
        where, plan = layer.where(lengths, starts, T), layer.plan(list(lengths), starts)
        found = layer(*(x[:T] for x in drawn(ROOM, i)), where, schedule, plan)
        results.append([x.clone() for x in found])
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return layer, results


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch.inference_mode()
def test_a_captured_graph_goes_on_with_what_update_wrote(compiled):
    twin, wanted = stepped()
    layer = Layer()
    call = torch.compile(layer.__call__, fullgraph=True, backend="aot_eager") if compiled else layer
    schedule = Schedule([1, 1], device=DEVICE, capacity=(2, ROOM, 0))
    plan = layer.plan([1, 1], [0, 0], capacity=(2, ROOM, 1024))
    held, where = drawn(ROOM, 99), layer.where([1, 1], [0, 0], ROOM)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call(*held, where, schedule, plan)
    torch.cuda.synchronize()
    before = headstart.programs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(*held, where, schedule, plan)
    layer.clear()
    starts = [0, 0]
    for i, lengths in enumerate(STEPS):
        for tensor, new in zip(held, drawn(ROOM, i), strict=True):
            tensor.copy_(new)
        where.copy_(layer.where(lengths, starts, ROOM))
        schedule.update_(list(lengths), start_positions=starts)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        plan.update_(list(lengths), ends, layer.table, PAGE, new_in_cache=True)
        graph.replay()
        T = sum(lengths)
        assert same_bits([x[:T] for x in results], wanted[i]), i
        assert not any(bool(x[T:].any()) for x in results), i
        starts = ends
    assert same_bits(list(layer.cache.tensors.values()), list(twin.cache.tensors.values()))
    assert headstart.programs().since(before).compiled == 0


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_compiled_call_is_the_eager_one_and_its_op_what_it_says(name):
    eager, other = World(DEVICE, DTYPE), World(DEVICE, DTYPE)
    wanted, call = outcome(eager, FORMS[name](eager)()), FORMS[name](other)
    before = {word: x.clone() for word, x in other.changed.items()}
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same_bits(outcome(other, compiled()), wanted)
    for op, arguments in ops_of(call):
        for word, x in before.items():
            other.changed[word].copy_(x)
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.slow
@torch.inference_mode()
def test_fifty_lengths_take_one_graph_and_no_other_program():
    layer, twin, starts = Layer(), Layer(), [0, 0]
    call = torch.compile(layer.__call__, fullgraph=True, dynamic=True, backend="inductor")
    draw, graphs, programs = random.Random(1), set(), set()
    for i in range(50):
        lengths = [draw.randint(2, 40) for _ in range(2)]
        if max(starts) + 40 > 32 * PAGE:
            starts = [0, 0]
        T = sum(lengths)
        schedule = Schedule(lengths, start_positions=starts, device=DEVICE)
        where, plan = layer.where(lengths, starts, T), layer.plan(lengths, starts)
        given = [x[:T] for x in drawn(ROOM, i)]
        wanted = twin(*given, where, schedule, plan)
        assert same_bits(list(call(*given, where, schedule, plan)), list(wanted)), i
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        programs.add(headstart.programs().compiled)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert len(graphs) == 1
    assert len(programs) == 1


def digest() -> str:
    """Of what calls of every operation give, and what they change."""
    found = hashlib.sha256()
    with torch.inference_mode():
        for name in NAMES:
            world = World(DEVICE, DTYPE)
            for x in outcome(world, FORMS[name](world)()):
                found.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def answer(sink: Any) -> None:
    sink.put(digest())


@pytest.mark.slow
def test_a_process_begun_anew_computes_the_same_bits():
    context = multiprocessing.get_context("spawn")
    sink = context.Queue()
    child = context.Process(target=answer, args=(sink,), daemon=True)
    child.start()
    theirs = sink.get(timeout=120)
    child.join(60)
    assert child.exitcode == 0
    assert theirs == digest()


@contextmanager
def no_memory_left():
    """The process may take no more of the device, and what it has taken holds no gap."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(room)
    held, size = [], 2**30
    while size >= 512:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@torch.inference_mode()
def test_where_memory_ends_nothing_has_changed_and_the_call_is_made_again():
    T, HV, H = 16_384, 32, 16
    source = torch.Generator(DEVICE).manual_seed(0)

    def some(*shape, dtype=DTYPE):
        return torch.randn(shape, generator=source, device=DEVICE).to(dtype)

    rows = (some(T, H, K), some(T, H, K), some(T, HV, V),
            -some(T, HV, dtype=torch.float32).abs(), some(T, HV, dtype=torch.float32))  # fmt: skip
    sizes = {"H": H, "HV": HV, "K": K, "V": V}
    cache, twin = (DeltaCache(2, **sizes, dtype=DTYPE, device=DEVICE) for _ in range(2))
    how: dict[str, Any] = {"schedule": Schedule([T], device=DEVICE), "qk_l2norm": True}
    how |= {"gate": Gate.log(beta="logit"), "out": some(T, HV, V)}
    wanted = headstart.gated_delta_rule(*rows, state=twin.at([1]), **how).o.clone()
    slots = cache.at(torch.tensor([1], device=DEVICE))
    for turn in ("the long way", "a steady call"):
        how["workspace"] = Workspace(DEVICE)
        with no_memory_left(), pytest.raises(torch.OutOfMemoryError, match="workspace: "):
            headstart.gated_delta_rule(*rows, state=slots, **how)
        if turn == "the long way":
            assert not any(bool(x.any()) for x in cache.tensors.values())
        found = headstart.gated_delta_rule(*rows, state=slots, **how).o
        assert torch.equal(found, wanted), turn
        assert same_bits(list(cache.tensors.values()), list(twin.tensors.values())), turn
