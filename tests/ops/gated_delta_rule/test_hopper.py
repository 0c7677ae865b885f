"""What a call launches on Hopper compiles, with the types and divisors that the launch would see.

The kernel runs on a GPU alone; this is what a machine without one can tell.
"""

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from headstart import DeltaCache, Gate, Pool, Schedule  # noqa: E402
from headstart.ops.gated_delta_rule import spec  # noqa: E402
from headstart.ops.gated_delta_rule.hopper import call as hopper  # noqa: E402
from headstart.ops.gated_delta_rule.passes import launch, scratch  # noqa: E402

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
         torch.int32: "i32", torch.bool: "i1", torch.uint8: "u8"}  # fmt: skip


def compiled(kernel, arguments, **options):
    """The kernel for these arguments, specialised as a launch does it."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        divisible = True
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[name], constants[name], divisible = "constexpr", value, False
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
            divisible = value.data_ptr() % 16 == 0
        elif isinstance(value, hopper.TensorDescriptor):
            kind = f"{NAMES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}"
            signature[name], divisible = f"tensordesc<{kind}>", False
        elif isinstance(value, float):
            signature[name], divisible = "fp32", False
        else:
            signature[name] = "i32"
            divisible = value % 16 == 0
        if divisible and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def inputs(T, H, HV, dtype=torch.bfloat16):
    q, k = torch.zeros(2, T, H, 128, dtype=dtype)
    return q, k, torch.zeros(T, HV, 128, dtype=dtype), torch.zeros(T, HV), torch.zeros(T, HV)


def channels(T, H, HV, dtype=torch.bfloat16):
    q, k, v, _, beta = inputs(T, H, HV, dtype)
    return q, k, v, torch.zeros(T, HV, 128), beta


def cached(*lengths, drafts=0, per_channel=False, **schedule):
    schedule["drafts"] = drafts > 0
    cache = DeltaCache(4, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16, device="cpu",
                       draft_tokens=drafts, per_channel=per_channel)  # fmt: skip
    return {"schedule": Schedule(lengths, device="cpu", **schedule),
            "state": cache.at(list(range(len(lengths))))}  # fmt: skip


CALLS = {
    "plain": lambda: (inputs(100, 1, 2), {"return_state": True}),
    "long": lambda: (inputs(5120, 16, 32), {}),
    "few heads": lambda: (inputs(8192, 2, 8), {}),
    "many short": lambda: (inputs(1280, 16, 32), {"schedule": [64] * 20}),
    "many": lambda: (inputs(20 * 320, 8, 16), {"schedule": [320] * 20}),
    "one head, a state": lambda: (
        inputs(64, 1, 1, torch.float16),
        {"state": torch.zeros(1, 1, 128, 128), "return_state": True},
    ),
    "a pool": lambda: (
        inputs(90, 2, 6),
        {
            "schedule": [60, 30],
            "qk_l2norm": True,
            "state": Pool(
                torch.zeros(5, 6, 128, 128),
                [1, 2],
                [3, -1],
                torch.tensor([True, False]),
                layout="vk",
            ),
        },
    ),
    "odd strides": lambda: (
        inputs(70, 1, 2),
        {"out": torch.zeros(70, 2, 131, dtype=torch.bfloat16)[..., 3:]},
    ),
    "drafts": lambda: (
        inputs(9, 2, 4),
        {
            **cached(4, 5, drafts=16, start_positions=[100, 0]),
            "gate": Gate.raw(torch.zeros(4), torch.zeros(4), beta="logit"),
        },
    ),
    "snapshots": lambda: (
        inputs(140, 2, 4),
        {**cached(140, snapshot_every=64), "snapshots": torch.float32},
    ),
    "snapshots of a turned pool": lambda: (
        inputs(140, 2, 4),
        {
            "schedule": Schedule([140], snapshot_every=64, device="cpu"),
            "snapshots": Pool(
                torch.zeros(3, 4, 128, 128, dtype=torch.bfloat16),
                write_slots=[0, 2],
                layout="vk",
            ),
        },
    ),
    "snapshots of slots that no bulk copy reaches": lambda: (
        inputs(140, 2, 4),
        {
            "schedule": Schedule([140], snapshot_every=64, device="cpu"),
            "snapshots": Pool(
                torch.zeros(3, 4 * 128 * 128 + 1)[:, 1:].view(3, 4, 128, 128), write_slots=[0, 2]
            ),
        },
    ),
}


CHANNELS = {
    "plain": lambda: (channels(100, 2, 4), {"return_state": True}),
    "float16": lambda: (channels(64, 2, 2, torch.float16), {}),
    "raw gates on a cache": lambda: (
        channels(140, 2, 4),
        {
            **cached(140, snapshot_every=64, per_channel=True),
            "snapshots": torch.float32,
            "gate": Gate.raw(torch.zeros(4), torch.zeros(4, 128), -5.0, beta="logit"),
            "qk_l2norm": True,
        },
    ),
    "few heads": lambda: (channels(8192, 2, 2), {}),
}
"""Calls with a decay per channel."""

FORMS = {
    "long": [(3, 1, 68, False)],
    "few heads": [(3, 2, 0, True), (3, 1, 0, False)],
    "many short": [(3, 2, 0, False)],
    "many": [(3, 2, 0, False)],
}
"""Stages, groups and preparers of scans, and whether they find maps; for all other calls one of
3, 1, 0, which does not."""


@pytest.fixture
def run(monkeypatch):
    """Run a call as a Hopper GPU would, compiling what it launches: (kernels, what was given)."""
    found = []

    def compile(kernel, grid, given, **options):
        program = compiled(kernel, given, **options)
        # Who may start before the launch before has ended waits for that.
        early, waits = options.get("launch_pdl", False), "griddepcontrol.wait" in program.asm["ptx"]
        assert early == waits, kernel.__name__
        found.append((kernel, program, given))

    # Short sequences have a kernel of their own: see test_short.
    monkeypatch.setattr(hopper.short_call, "takes", lambda call: False)
    monkeypatch.setattr(launch, "start", lambda *a, **k: None)
    monkeypatch.setattr(hopper, "start", compile)
    for module in (hopper, scratch):
        monkeypatch.setattr(module, "processors", lambda device: 132)

    def run(tensors, options):
        arguments = dict.fromkeys(("schedule", "state", "snapshots", "scale", "reproducible"))
        arguments |= {"gate": Gate.log(), "return_state": False, "qk_l2norm": False}
        arguments |= {"workspace": None, "out": None} | options
        hopper.run(spec.bind(*tensors, **arguments))
        return found

    return run


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_launches_compiles(run, name):
    found = run(*CALLS[name]())
    names = "STAGES", "GROUPS", "PREPARERS", "MAPS"
    scans = [given for kernel, _, given in found if kernel.__name__ == "scan_kernel"]
    forms = [tuple(given[name] for name in names) for given in scans]
    # A long sequence is prepared beside its scan, by processors that the scan leaves free; then
    # no program of the scan starts before it is its turn.
    assert forms == FORMS.get(name, [(3, 1, 0, False)])
    before = [] if forms[0][2] else ["prepare_kernel"]
    launched = [kernel.__name__ for kernel, _, _ in found]
    # Keys of a tail are written once no program of the scan reads the old ones.
    after = ["keep_keys_kernel"] if scans[0]["CACHED"] else []
    assert launched == before + ["scan_kernel"] * len(forms) + after
    products = found[: len(found) - len(after)]
    assert all("wgmma" in kernel.asm["ptx"] for _, kernel, _ in products)


@pytest.mark.parametrize(
    ("start", "drafts", "chunks"), [(0, 0, 80), (100, 0, 81), (100, 1, 82), (100, 16, 82)]
)
def test_a_long_prompt_on_a_cache_is_prepared_beside_its_scan(monkeypatch, start, drafts, chunks):
    launched = []
    monkeypatch.setattr(hopper, "start", lambda kernel, grid, given, **_: launched.append(given))
    monkeypatch.setattr(launch, "start", lambda *a, **k: None)
    for module in (hopper, scratch):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    cache = DeltaCache(1, H=16, HV=32, K=128, V=128, dtype=torch.bfloat16, device="cpu",
                       draft_tokens=drafts)  # fmt: skip
    schedule = Schedule([5120], start_positions=[start], device="cpu")
    arguments = dict.fromkeys(("snapshots", "scale", "reproducible", "workspace", "out"))
    arguments |= {"gate": Gate.log(), "return_state": False, "qk_l2norm": False}
    tensors = inputs(5120, 16, 32)
    hopper.run(spec.bind(*tensors, schedule=schedule, state=cache.at([0]), **arguments))
    scan, _keys = launched
    # Of a cache that takes drafts the chunk before the first is listed, and passed over.
    assert (scan["items_there"], scan["PREPARERS"]) == (chunks, 132 - 64)


@pytest.mark.parametrize("name", CHANNELS)
def test_what_a_call_with_a_decay_per_channel_launches_compiles(run, name):
    found = run(*CHANNELS[name]())
    maps = [True, False] if name == "few heads" else [False]
    launched = [(kernel.__name__, given.get("MAPS", False)) for kernel, _, given in found]
    assert launched == [
        ("prepare_channels_kernel", False),
        *(("scan_channels_kernel", which) for which in maps),
    ]
    (_, prepared, _), *scans = found
    assert "mma.sync" in prepared.asm["ptx"]
    assert all("wgmma" in kernel.asm["ptx"] for _, kernel, _ in scans)
