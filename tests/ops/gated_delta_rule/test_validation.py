"""A caller's mistake gets one error that names the argument, before anything is written."""

import pytest
import torch
from tests.ops.gated_delta_rule.inputs import draw

import headstart
from headstart import DeltaCache, Gate, Pool, Schedule, Workspace

T, H, HV, K, V = 100, 2, 4, 16, 24
SIZES = {"H": H, "HV": HV, "K": K, "V": V}


def tensors(**changes) -> dict:
    x = draw(T, H, HV, K, V, seed=1)
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta} | changes


def new_cache(slots=4, **changes) -> DeltaCache:
    return DeltaCache(slots, **SIZES | {"dtype": torch.float32, "device": "cpu"} | changes)


def pool(slots=4, **changes) -> torch.Tensor:
    return torch.zeros(slots, HV, K, V, **changes)


def scheduled(lengths=(T,), **arguments) -> Schedule:
    return Schedule(list(lengths), device="cpu", **arguments)


def refused(says: str, function=headstart.gated_delta_rule, **arguments) -> str:
    """The message of the ValueError, which begins with `says`."""
    with pytest.raises(ValueError) as error:
        function(**arguments)
    message = str(error.value)
    assert message.startswith(says), message
    return message


WRONG_TENSORS = {
    "q of two dimensions": ({"q": torch.zeros(T, K)}, "q: expected [T, H, K]"),
    "q no tensor": ({"q": [[1.0]]}, "q: expected a tensor, got list"),
    "q sparse": ({"q": torch.zeros(T, H, K).to_sparse()}, "q: expected a dense tensor, got layout"),
    "q None": ({"q": None}, "q: expected a tensor, got NoneType"),
    "q of integers": ({"q": torch.zeros(T, H, K, dtype=torch.int32)}, "q: expected dtype"),
    "k of other heads": (
        {"k": torch.zeros(T, HV, K)},
        "k: expected [T, H, K] = [100, 2, 16], got [100, 4, 16]",
    ),
    "k of other length": ({"k": torch.zeros(T - 1, H, K)}, "k: expected [T, H, K]"),
    "k of other size": ({"k": torch.zeros(T, H, K + 1)}, "k: expected [T, H, K]"),
    "k of other dtype": ({"k": torch.zeros(T, H, K).half()}, "k: expected dtype float32"),
    "k not contiguous at the end": (
        {"k": torch.zeros(T, K, H).mT},
        "k: expected a contiguous last",
    ),
    "q not contiguous at the end": (
        {"q": torch.zeros(T, K, H).mT},
        "q: expected a contiguous last",
    ),
    "v not contiguous at the end": (
        {"v": torch.zeros(T, V, HV).mT},
        "v: expected a contiguous last",
    ),
    "k dense beside packed": ({"k": torch.zeros(1, T, H, K)}, "k: expected [T, H, K]"),
    "v of two dimensions": ({"v": torch.zeros(T, V)}, "v: expected [T, HV, V]"),
    "v of other length": ({"v": torch.zeros(T + 1, HV, V)}, "v: expected [T, HV, V]"),
    "v of a number of heads that H does not divide": (
        {"v": torch.zeros(T, 3, V)},
        "v: expected HV a multiple of H = 2, got 3",
    ),
    "v of no heads": ({"v": torch.zeros(T, 0, V)}, "v: expected HV a multiple of H"),
    "v of no channels": ({"v": torch.zeros(T, HV, 0)}, ""),
    "v of other dtype": ({"v": torch.zeros(T, HV, V).bfloat16()}, "v: expected dtype float32"),
    "g of key heads": (
        {"g": torch.zeros(T, H)},
        "g: expected [T, HV] = [100, 4], got [100, 2]",
    ),
    "g of other channels": ({"g": torch.zeros(T, HV, V)}, "g: expected [T, HV, K]"),
    "g of one dimension": ({"g": torch.zeros(T)}, "g: expected"),
    "g of integers": ({"g": torch.zeros(T, HV, dtype=torch.int64)}, "g: expected a float dtype"),
    "g a number": ({"g": 0.5}, "g: expected a tensor, got float"),
    "beta of key heads": ({"beta": torch.zeros(T, H)}, "beta: expected [T, HV]"),
    "beta per channel": ({"beta": torch.zeros(T, HV, K)}, "beta: expected [T, HV]"),
    "beta of booleans": (
        {"beta": torch.zeros(T, HV, dtype=torch.bool)},
        "beta: expected a float dtype",
    ),
    "k elsewhere": ({"k": torch.zeros(T, H, K, device="meta")}, "k: expected device cpu"),
    "g elsewhere": ({"g": torch.zeros(T, HV, device="meta")}, "g: expected device cpu"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors_are_named(name):
    changes, says = WRONG_TENSORS[name]
    refused(says, **tensors(**changes))


def test_dense_inputs_are_dense_together():
    dense = {name: tensor[None] for name, tensor in tensors().items()}
    headstart.gated_delta_rule(**dense)
    refused("g: expected [B, L, HV]", **dense | {"g": dense["g"][0]})
    refused("beta: expected [B, L, HV]", **dense | {"beta": dense["beta"][0]})
    refused("v: expected [B, L, HV, V]", **dense | {"v": dense["v"][0]})
    refused("schedule: expected None", **dense, schedule=[T])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"schedule": [T + 1]}, "schedule: expected at most T = 100 tokens, got 101"),
        ({"schedule": scheduled([T, 1])}, "schedule: expected at most T = 100 tokens, got 101"),
        ({"schedule": [-1]}, "lengths: expected lengths >= 0"),
        ({"schedule": 100}, "lengths: expected"),
        ({"schedule": scheduled(drafts=True)}, "schedule: expected no drafts without a DeltaCache"),
        ({"scale": "big"}, "scale: expected None or a finite number"),
        ({"scale": float("nan")}, "scale: expected None or a finite number, got nan"),
        ({"scale": float("inf")}, "scale: expected None or a finite number, got inf"),
        ({"scale": True}, "scale: expected None or a finite number, got True"),
        ({"scale": torch.ones(7)}, "scale: expected None or a finite number, got a float32 tensor"),
        ({"scale": 10**400}, "scale: expected None or a finite number, got 1000"),
        ({"return_state": 1}, "return_state: expected True or False, got 1"),
        ({"qk_l2norm": None}, "qk_l2norm: expected True or False, got None"),
        ({"reproducible": "no"}, "reproducible: expected True or False, got 'no'"),
        ({"gate": Gate.raw(torch.zeros(HV).int())}, "a_log: expected dtype float32 or bfloat16"),
        (
            {"gate": Gate.raw(torch.zeros(HV), torch.zeros(HV).bool())},
            "dt_bias: expected dtype float32 or bfloat16",
        ),
        ({"schedule": [True]}, "lengths: expected integers, got True"),
        ({"gate": "log"}, "gate: expected a Gate"),
        ({"gate": None}, "gate: expected a Gate"),
        ({"gate": Gate.raw(torch.zeros(H))}, "a_log: expected [HV] = [4], got [2]"),
        ({"gate": Gate.raw(None)}, "a_log: expected a tensor"),
        ({"gate": Gate.raw(torch.zeros(HV, device="meta"))}, "a_log: expected device cpu"),
        ({"gate": Gate.raw(torch.zeros(HV), torch.zeros(H))}, "dt_bias: expected [HV]"),
        ({"gate": Gate.raw(torch.zeros(HV), torch.zeros(HV, K))}, "dt_bias: expected [HV]"),
        ({"gate": Gate.raw(torch.zeros(HV)), "g": None}, "g: expected a tensor with Gate.raw"),
        ({"implementation": "fast"}, "implementation: expected one of"),
        ({"snapshots": torch.int32}, "snapshots: expected a float dtype"),
        ({"snapshots": "float32"}, "snapshots: expected None, a dtype"),
        ({"snapshots": True}, "snapshots: expected None, a dtype"),
        ({"state": "zeros"}, "state: expected None, a tensor, a Pool or cache.at(slots), got str"),
        ({"state": new_cache()}, "state: expected None, a tensor, a Pool or cache.at(slots)"),
        ({"workspace": Workspace("meta")}, "workspace: expected device cpu"),
        ({"workspace": 1000}, "workspace: expected a Workspace"),
        ({"out": torch.zeros(T, HV, K)}, "out: expected the shape of o = [100, 4, 24]"),
        ({"out": torch.zeros(T, HV, V).half()}, "out: expected dtype float32"),
        ({"out": torch.zeros(T, V, HV).mT}, "out: expected a contiguous last dimension"),
        ({"out": torch.zeros(T, HV, V, device="meta")}, "out: expected device cpu"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else next(iter(value), "none"),
)
def test_wrong_arguments_are_named(arguments, says):
    refused(says, **tensors() | arguments)


BELOW = "lower_bound: expected None or a finite number below 0, got "


def test_gates_refuse_what_they_cannot_mean():
    for make, says in (
        (lambda: Gate.log(beta="sigmoid"), "beta: expected one of"),
        (lambda: Gate.raw(torch.zeros(4), beta="none"), "beta: expected one of"),
        (lambda: Gate("sigmoid"), "gate: expected one of ['log', 'linear', 'raw'], got 'sigmoid'"),
        (lambda: Gate(torch.zeros(3)), "gate: expected one of"),
        (lambda: Gate.log(beta=None), "beta: expected one of"),
        (lambda: Gate.log(beta=torch.zeros(9)), "beta: expected one of"),
        *(
            (lambda bound=bound: Gate.raw(torch.zeros(4), lower_bound=bound), BELOW)
            for bound in (0.0, 5.0, float("nan"), -float("inf"), "-5", True, torch.tensor(-5.0))
        ),
    ):
        with pytest.raises(ValueError) as error:
            make()
        assert str(error.value).startswith(says)


# States


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (pool(2), "state: expected [N, HV, K, V] = [1, 4, 16, 24], got [2, 4, 16, 24]"),
        (pool(1).mT, "state: expected [N, HV, K, V]"),
        (pool(1, dtype=torch.int32), "state: expected dtype"),
        (pool(1, device="meta"), "state: expected device cpu"),
        (Pool(pool().mT, [0]), "state: expected [S, HV, K, V]"),
        (Pool(pool(), [0], layout="vk"), "state: expected [S, HV, V, K]"),
        (Pool(pool(dtype=torch.int32), [0]), "state: expected dtype"),
        (Pool(pool(device="meta"), [0]), "state: expected device cpu"),
        (Pool([1.0], [0]), "state: expected a tensor"),
        (Pool(pool()), "write_slots: expected slots"),
        (Pool(pool(), [0, 1]), "read_slots: expected 1 slots, got 2"),
        (Pool(pool(), [4]), "read_slots: expected slots in [0, 4) or -1, got 4"),
        (Pool(pool(), [-2]), "read_slots: expected slots in [0, 4) or -1, got -2"),
        (Pool(pool(), [0.0]), "read_slots: expected integers"),
        (Pool(pool(), torch.zeros(1)), "read_slots: expected dtype int32 or int64"),
        (Pool(pool(), [0], [4]), "write_slots: expected slots in"),
        (Pool(pool(), [0], [1, 2]), "write_slots: expected 1 slots, got 2"),
        (Pool(pool(), [0], present=[True, False]), "present: expected one for each of 1 sequences"),
        (Pool(pool(), [0], present=[1.0]), "present: expected True or False, got 1.0"),
        (
            Pool(pool(), [0], present=True),
            "present: expected bools, one for each sequence, got True",
        ),
        (Pool(pool(), [0], present=torch.zeros(1)), "present: expected dtype bool, got float32"),
        (Pool(pool(), [True]), "read_slots: expected integers, got True"),
        (Pool(pool(), [0], ["1"]), "write_slots: expected integers, got '1'"),
        (new_cache().at([0.0]), "state: expected integers, got 0.0"),
        (new_cache().at([True]), "state: expected integers, got True"),
        (new_cache().at(torch.tensor([True])), "state: expected dtype int32 or int64, got bool"),
        (new_cache(H=1).at([0]), "state: expected a cache with [H, HV, K, V] = [2, 4, 16, 24]"),
        (new_cache(K=24).at([0]), "state: expected a cache with [H, HV, K, V]"),
        (new_cache(dtype=torch.bfloat16).at([0]), "state: expected a cache of dtype"),
        (new_cache(per_channel=True).at([0]), "g: expected a decay per channel"),
        (new_cache(device="meta").at([0]), "state: expected device cpu"),
        (new_cache().at([0, 1]), "state: expected 1 slots, got 2"),
        (new_cache().at([4]), "state: expected slots in [0, 4) or -1, got 4"),
        (new_cache().at([-2]), "state: expected slots in [0, 4) or -1, got -2"),
        (new_cache().at(0), "state: expected a list or tensor of integers"),
    ],
    ids=range(35),
)
def test_wrong_states_are_named(state, says):
    refused(says, **tensors(), schedule=scheduled(), state=state)


def test_a_pool_has_a_layout():
    with pytest.raises(ValueError, match=r"^layout: expected one of \['kv', 'vk'\], got 'hv'"):
        Pool(pool(), [0], layout="hv")


def test_a_cache_needs_a_schedule():
    """Without one nobody says where the sequences stand."""
    for arguments in ({}, {"schedule": [T]}):
        refused(
            "schedule: expected a Schedule", **tensors(), state=new_cache().at([0]), **arguments
        )


def test_states_in_place_do_not_come_back_too():
    for state in (Pool(pool(), [0]), new_cache().at([0])):
        refused(
            "return_state: expected False",
            **tensors(),
            schedule=scheduled(),
            state=state,
            return_state=True,
        )


def test_a_cache_is_reproducible_or_nothing():
    refused(
        "reproducible: expected True with a DeltaCache",
        **tensors(),
        schedule=scheduled(),
        state=new_cache().at([0]),
        reproducible=False,
    )


TWO = {"schedule": scheduled([60, 40])}


@pytest.mark.parametrize(
    ("state", "snapshots", "says"),
    [
        (Pool(pool(), [1, 1]), None, "state: expected every slot to be written once"),
        (Pool(pool(), [0, 1], [2, 2]), None, "state: expected every slot to be written once"),
        (Pool(pool(), [0, 1], [1, 2]), None, "state: slot 1 is written for sequence 0 and read"),
        (new_cache().at([3, 3]), None, "state: expected every slot to be written once"),
        (new_cache().at(torch.tensor([3, 3])), None, "state: expected every slot to be written"),
    ],
    ids=range(5),
)
def test_two_sequences_may_not_share_a_slot(state, snapshots, says):
    refused(says, **tensors(), **TWO, state=state)
    keep = [-1, -1]
    free = Pool(pool(), keep) if isinstance(state, Pool) else new_cache().at(keep)
    headstart.gated_delta_rule(**tensors(), **TWO, state=free)


def test_views_of_a_pool_are_that_pool(rule):
    """Whoever makes a view for each argument races as whoever passes one tensor twice."""
    memory, cache = pool(6), new_cache(6)
    alike = new_cache(6, tensors=cache.tensors)
    kept = scheduled(snapshot_every=64)
    for says, state, snapshots in (
        ("snapshots: expected slots that", Pool(memory, [1]), Pool(memory[:], write_slots=[1])),
        ("snapshots: expected slots that", Pool(memory, [1]), Pool(memory[:4], write_slots=[1])),
        ("snapshots: expected slots that", cache.at([1]), alike.at([1])),
        ("snapshots: expected memory of its", Pool(memory, [1]), Pool(memory[1:], write_slots=[4])),
        ("snapshots: expected memory of its", memory[:1], Pool(memory, write_slots=[4])),
    ):
        arguments = {"schedule": kept, "state": state, "snapshots": snapshots}
        refused(says, function=rule, **tensors(), **arguments)
    for state, snapshots in (
        (Pool(memory, [1]), Pool(memory[:], write_slots=[2])),
        (Pool(memory[:3], [1]), Pool(memory[3:], write_slots=[1])),
        (memory[:1], Pool(memory[1:], write_slots=[1])),
        (cache.at([1]), alike.at([2])),
    ):
        rule(**tensors(), schedule=kept, state=state, snapshots=snapshots)


def test_reading_one_slot_twice_is_fine():
    headstart.gated_delta_rule(**tensors(), **TWO, state=Pool(pool(), [1, 1], [2, 3]))


# Snapshots


def kept(**arguments) -> Schedule:
    return scheduled([T], **arguments)


@pytest.mark.parametrize(
    ("schedule", "snapshots", "says"),
    [
        (kept(snapshot_every=64), Pool(pool(), [0]), "snapshots: expected a Pool with write_slots"),
        (kept(snapshot_every=64), Pool(pool(), write_slots=[0, 1]), "snapshots: expected 1 slots"),
        (kept(snapshot_every=64), Pool(pool(), write_slots=[4]), "snapshots: expected slots in"),
        (kept(snapshot_every=64), Pool(pool().mT, write_slots=[0]), "snapshots: expected [S, HV,"),
        (kept(snapshot_every=64), new_cache().at([0, 1]), "snapshots: expected 1 slots, got 2"),
        (kept(snapshot_every=64), new_cache().at([9]), "snapshots: expected slots in"),
        (kept(snapshot_every=64), new_cache(V=16).at([0]), "snapshots: expected a cache with"),
        (
            kept(start_positions=60, snapshot_every=64),
            new_cache().at([1, 1]),
            "snapshots: expected every slot to be written once",
        ),
        (
            kept(start_positions=60, snapshot_every=64),
            Pool(pool(), write_slots=[1, 1]),
            "snapshots: expected every slot to be written once",
        ),
        (
            kept(start_positions=70, snapshot_positions=[[64]]),
            torch.float32,
            "snapshot_positions: position 64 lies before the plain state at 70",
        ),
    ],
    ids=range(10),
)
def test_wrong_snapshots_are_named(schedule, snapshots, says):
    refused(says, **tensors(), schedule=schedule, snapshots=snapshots)


def test_a_snapshot_may_not_lie_where_a_sequence_lives():
    cache = new_cache()
    refused(
        "snapshots: expected slots that no sequence uses in this call, got [2]",
        **tensors(),
        schedule=kept(snapshot_every=64),
        state=cache.at([2]),
        snapshots=cache.at([2]),
    )
    memory = pool()
    refused(
        "snapshots: expected slots that no sequence uses in this call, got [2]",
        **tensors(),
        schedule=kept(snapshot_every=64),
        state=Pool(memory, [2]),
        snapshots=Pool(memory, write_slots=[2]),
    )


# Starts


def filled(rule) -> DeltaCache:
    """Slot 1 holds 100 tokens: its state stands at 64."""
    cache = new_cache(draft_tokens=8)
    rule(**tensors(), schedule=scheduled(), state=cache.at([1]))
    return cache


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("start", [1, 63, 101, 128, 10**9])
def test_a_start_outside_the_tail_is_refused_before_anything_is_written(rule, start):
    cache = filled(rule)
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    out = torch.full((T, HV, V), 7.0)
    message = refused(
        "start_positions: ",
        **tensors(),
        schedule=scheduled([60, 40], start_positions=[0, start]),
        state=cache.at([0, 1]),
        out=out,
        function=rule,
    )
    assert str(start) in message
    assert (out == 7).all()
    assert all(torch.equal(cache.tensors[name], before[name]) for name in before)


@pytest.mark.usefixtures("checked")
def test_an_empty_slot_starts_at_0_only(rule):
    refused(
        "start_positions: ",
        **tensors(),
        schedule=scheduled(start_positions=64),
        state=filled(rule).at([3]),
        function=rule,
    )


@pytest.mark.parametrize("start", [0, 64, 99, 100])
def test_a_start_within_the_tail_is_legal(rule, start):
    rule(**tensors(), schedule=scheduled(start_positions=start), state=filled(rule).at([1]))


def test_a_draft_step_is_short(rule):
    cache = filled(rule)
    few = {name: tensor[:9] for name, tensor in tensors().items()}
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    message = refused(
        "schedule: expected at most draft_tokens = 8 tokens",
        **few,
        schedule=scheduled([9], start_positions=100, drafts=True),
        state=cache.at([1]),
        function=rule,
    )
    assert "got 9" in message
    assert all(torch.equal(cache.tensors[name], before[name]) for name in before)
    none = new_cache(draft_tokens=0)
    refused("schedule: expected at most draft_tokens = 0", **few,
            schedule=scheduled([9], drafts=True), state=none.at([0]))  # fmt: skip


# Gradients


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_gradients_are_an_error_only_where_they_would_be_recorded(name, rule):
    changed = tensors()
    changed[name] = changed[name].clone().requires_grad_()
    message = refused(f"{name}: requires grad", **changed, function=rule)
    assert "torch.inference_mode" in message
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o = rule(**changed).o
        assert not o.requires_grad


@pytest.mark.parametrize("which", ["state", "a_log", "dt_bias"])
def test_gradients_of_states_and_gate_parameters_are_an_error_too(which):
    parameter = pool(1) if which == "state" else torch.zeros(HV)
    parameter.requires_grad_()
    arguments = {
        "state": {"state": parameter},
        "a_log": {"gate": Gate.raw(parameter)},
        "dt_bias": {"gate": Gate.raw(torch.zeros(HV), parameter)},
    }[which]
    refused(f"{which}: requires grad", **tensors(), **arguments)
    with torch.no_grad():
        headstart.gated_delta_rule(**tensors(), **arguments)


def test_the_cache_may_be_filled_under_inference_mode_and_used_outside(rule):
    with torch.inference_mode():
        cache = filled(rule)
    rule(**tensors(), schedule=scheduled(start_positions=100), state=cache.at([1]))


# HEADSTART_CHECK=1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q": torch.full((T, H, K), torch.nan)}, "q: expected finite"),
        ({"k": torch.full((T, H, K), torch.inf)}, "k: expected finite"),
        ({"v": torch.full((T, HV, V), torch.nan)}, "v: expected finite"),
        ({"beta": torch.full((T, HV), torch.nan)}, "beta: expected finite"),
        ({"g": torch.full((T, HV), 0.1)}, "g: expected a log decay <= 0"),
        ({"g": torch.full((T, HV), torch.nan)}, "g: expected a log decay <= 0"),
        ({"gate": Gate.linear()}, "g: expected a decay in [0, 1]"),
        ({"gate": Gate.linear(), "g": torch.full((T, HV), 1.5)}, "g: expected a decay in [0, 1]"),
        (
            {"gate": Gate.raw(torch.zeros(HV)), "g": torch.full((T, HV), torch.inf)},
            "g: expected fin",
        ),
    ],
    ids=range(9),
)
def test_checks_look_at_values_when_asked(monkeypatch, changes, says):
    headstart.gated_delta_rule(**tensors(**changes))
    monkeypatch.setattr("headstart.runtime.checks.asked", True)
    refused(says, **tensors(**changes))
    headstart.gated_delta_rule(**tensors())
    x = tensors()
    x["g"][:, 0] = -torch.inf
    headstart.gated_delta_rule(**x)


def test_checks_look_only_at_rows_that_belong_to_a_sequence(monkeypatch):
    monkeypatch.setattr("headstart.runtime.checks.asked", True)
    x = tensors()
    for tensor in x.values():
        tensor[60:] = torch.nan
    headstart.gated_delta_rule(**x, schedule=[60])
