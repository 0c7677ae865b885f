"""Which calls go to the kernel of short sequences, and that what they launch compiles.

The kernel runs on a GPU alone; this is what a machine without one can tell.
"""

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from headstart import DeltaCache, Gate, Pool, Schedule  # noqa: E402
from headstart.ops.gated_delta_rule import spec  # noqa: E402
from headstart.ops.gated_delta_rule.hopper import short_call  # noqa: E402
from headstart.ops.gated_delta_rule.signature import signature  # noqa: E402
from headstart.ops.gated_delta_rule.stores import Stores  # noqa: E402
from headstart.runtime import launcher  # noqa: E402

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
         torch.int32: "i32", torch.bool: "i1", torch.uint8: "u8"}  # fmt: skip


def bound(lengths, H=2, HV=4, dtype=torch.bfloat16, drafts=None, columns=128, **options):
    """A call with a cache where `drafts` is given, the draft tokens that it takes."""
    T = sum(lengths)
    q, k, v = (torch.zeros(T, heads, columns, dtype=dtype)[..., :128] for heads in (H, H, HV))
    how = {"start_positions": options.pop("starts", 0), "drafts": options.pop("flags", False)}
    schedule = Schedule(lengths, device="cpu", capacity=options.pop("capacity", None), **how)
    names = "snapshots", "state", "scale", "reproducible", "workspace", "out"
    given: dict[str, Any] = dict.fromkeys(names)
    given |= {"gate": Gate.log(), "return_state": drafts is None, "qk_l2norm": False}
    if drafts is not None:
        cache = DeltaCache(len(lengths), H=H, HV=HV, K=128, V=128, dtype=dtype, device="cpu",
                           draft_tokens=drafts)  # fmt: skip
        given["state"] = cache.at(list(range(len(lengths))))
    given |= options
    g, beta = torch.zeros(T, HV), torch.zeros(T, HV)
    return spec.bind(q, k, v, g, beta, schedule=schedule, **given)


@pytest.mark.parametrize(
    ("expected", "lengths", "options"),
    [
        (True, [64, 1, 0, 30], {}),
        (False, [64, 65], {}),
        (False, [2], {"starts": 63}),
        (False, [0, 0], {}),
        (False, [5], {"capacity": (2, 64, 0)}),
        (False, [5], {"columns": 136}),
        (True, [1, 64], {"drafts": 0, "starts": [200, 64]}),
        (False, [1, 2], {"drafts": 0, "starts": [200, 63]}),
        (True, [4, 4], {"drafts": 4, "starts": [200, 63], "flags": True}),
        (True, [4, 4], {"drafts": 4, "starts": [200, 63]}),
        (False, [5, 4], {"drafts": 4, "starts": [200, 63]}),
    ],
)
def test_calls_are_taken_by_host_facts(expected, lengths, options):
    assert short_call.takes(bound(lengths, **options)) is expected


@pytest.mark.parametrize(
    ("expected", "lengths", "options"),
    [
        (True, [128], {}),
        (True, [64, 65, 0], {}),
        (True, [30, 2], {"starts": [80, 63]}),
        (False, [129], {}),
        (False, [66], {"starts": 63}),
        (True, [65] * 16, {}),
        (False, [65] * 17, {}),
        (False, [65], {"capacity": (2, 128, 0)}),
        (False, [65], {"drafts": 0}),
    ],
)
def test_two_chunks_are_taken_where_programs_are_few(monkeypatch, expected, lengths, options):
    """Two programs a value head, of which there are four, on 132 processors."""
    monkeypatch.setattr(short_call, "processors", lambda device: 132)
    assert short_call.takes(bound(lengths, **options)) is expected


CALLS = {
    "plain": lambda: bound([64, 20]),
    "two chunks": lambda: bound([128]),
    "two chunks from a state": lambda: bound(
        [128, 3, 0], state=torch.zeros(3, 4, 128, 128), snapshots=torch.float32
    ),
    "two chunks in a pool": lambda: bound(
        [100],
        qk_l2norm=True,
        return_state=False,
        gate=Gate.raw(torch.zeros(4), torch.zeros(4), beta="logit"),
        state=Pool(torch.zeros(5, 4, 128, 128), [1], [3], torch.tensor([True]), layout="vk"),
    ),
    "float16": lambda: bound([64], H=1, HV=1, dtype=torch.float16),
    "a state": lambda: bound([30, 20], state=torch.zeros(2, 4, 128, 128), snapshots=torch.float32),
    "a pool": lambda: bound(
        [60, 30],
        qk_l2norm=True,
        return_state=False,
        state=Pool(
            torch.zeros(5, 4, 128, 128, dtype=torch.bfloat16),
            [1, 2],
            [3, -1],
            torch.tensor([True, False]),
            layout="vk",
        ),
    ),
    "the rest of a chunk": lambda: bound([30, 9], drafts=0, starts=[70, 100]),
    "decode": lambda: bound([1, 1], drafts=0, starts=[200, 64], qk_l2norm=True),
    "drafts": lambda: bound(
        [4, 4],
        drafts=16,
        starts=[100, 126],
        flags=True,
        gate=Gate.raw(torch.zeros(4), torch.zeros(4), beta="logit"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_short_call_launches_compiles(monkeypatch, name):
    found = []

    def compile(kernel: Any, grid: Any, given: dict[str, Any], **options: Any) -> None:
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value, divisible = given[parameter.name], True
            if parameter.is_constexpr or (type(value) is int and value == 1):
                signature[parameter.name], divisible = "constexpr", False
                constants[parameter.name] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{NAMES[value.dtype]}"
                divisible = value.data_ptr() % 16 == 0
            elif isinstance(value, TensorDescriptor):
                kind = f"{NAMES[value.base.dtype]}{list(value.block_shape)}"
                signature[parameter.name] = f"tensordesc<{kind},{value.layout!r}>"
                divisible = False
            elif isinstance(value, float):
                signature[parameter.name], divisible = "fp32", False
            else:
                signature[parameter.name], divisible = "i32", value % 16 == 0
            if divisible:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = GluonASTSource(kernel, signature, constants, attributes)
        found.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))

    monkeypatch.setattr(short_call, "start", compile)
    monkeypatch.setattr(short_call, "processors", lambda device: 132)
    call = CALLS[name]()
    assert short_call.takes(call)
    short_call.launch(call, Stores.allocate(call, torch.float32))
    (kernel,) = found
    assert "wgmma" in kernel.asm["ptx"]
    # Two programs share a multiprocessor, each with 1 KiB of the driver's; one, with a wide window.
    assert kernel.metadata.shared <= (227 if name == "the rest of a chunk" else 113) * 1024


def test_a_step_of_another_window_has_another_signature(monkeypatch):
    monkeypatch.setattr(launcher, "prepares", lambda x: True)
    found = []
    for lengths in ([9, 9], [8, 10], [10, 8]):
        call = bound(lengths, drafts=17, starts=[200, 70])
        given = (call.q, call.k, call.v, call.g, call.beta, call.schedule, call.state, call.gate)
        seen = signature(*given, None, False, None, False, None, None, None)
        assert seen is not None
        found.append(seen[0])
    assert found[0] != found[1] == found[2]
