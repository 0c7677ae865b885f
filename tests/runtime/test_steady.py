"""A steady call launches what the long way launches: the same kernels with the same arguments."""

import sys
import threading

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.implementations import KERNELS  # noqa: E402
from tests.runtime import fake_driver  # noqa: E402
from tests.runtime.steady_calls import (  # noqa: E402
    alike,
    is_steady,
    launched,
    rule,
    the_long_way,
)
from triton import knobs  # noqa: E402

import headstart  # noqa: E402
from headstart import DeltaCache, Gate, Pool, Schedule, Workspace  # noqa: E402
from headstart.ops.gated_delta_rule import api  # noqa: E402
from headstart.runtime import dispatch, launcher  # noqa: E402
from headstart.runtime import layouts as module_of_layouts  # noqa: E402
from headstart.runtime.record import recording  # noqa: E402

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")
RULE = api._CHUNKED


def rows(T, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16, channels=False):
    g = torch.zeros(T, HV, K) if channels else torch.zeros(T, HV)
    q, k = (torch.zeros(T, H, K, dtype=dtype) for _ in range(2))
    return q, k, torch.zeros(T, HV, V, dtype=dtype), g, torch.zeros(T, HV)


def packed(T):
    """Slices of one projection, as models hand them over."""
    x = torch.zeros(T, 8 * 128 + 8, dtype=torch.bfloat16)
    q, k, v = x[:, :256], x[:, 256:512], x[:, 512:1024]
    gates = x[:, 1024:].unflatten(1, (2, 4))
    return *(y.unflatten(1, (-1, 128)) for y in (q, k, v)), gates[:, 0], gates[:, 1]


def cache(drafts=0, slots=6, **more):
    sizes = {"H": 2, "HV": 4, "K": 128, "V": 128} | more
    return DeltaCache(slots, **sizes, dtype=torch.bfloat16, device="cpu", draft_tokens=drafts)


def raw():
    return Gate.raw(torch.zeros(4), torch.zeros(4), beta="logit")


def on(lengths, **how):
    return Schedule(lengths, device="cpu", **how)


def pool(*slots, layout="kv", **how):
    return Pool(torch.zeros(7, 4, 128, 128), *slots, layout=layout, **how)


CALLS = {
    "plain": lambda: (rows(100), {"schedule": on([100])}),
    "rows of nobody": lambda: (rows(100), {"schedule": on([40, 30])}),
    "no gates": lambda: ((*rows(70)[:3], None, None), {"schedule": on([70])}),
    "a packed projection": lambda: (packed(90), {"schedule": on([90]), "qk_l2norm": True}),
    "a scale, float16": lambda: (rows(70, dtype=torch.float16), {"schedule": on([70]), "scale": 2}),
    "a new state": lambda: (rows(90), {"schedule": on([50, 40]), "return_state": True}),
    "a state": lambda: (
        rows(90),
        {"schedule": on([90]), "state": torch.zeros(1, 4, 128, 128, dtype=torch.float16),
         "return_state": True},
    ),
    "a capacity": lambda: (
        rows(90),
        {"schedule": on([50, 10], capacity=(4, 90, 3)), "return_state": True,
         "snapshots": torch.bfloat16},
    ),
    "out": lambda: (
        rows(90),
        {"schedule": on([90]), "out": torch.zeros(90, 4, 128, dtype=torch.bfloat16)},
    ),
    "snapshots": lambda: (
        rows(200),
        {"schedule": on([200], snapshot_every=64), "snapshots": torch.float32},
    ),
    "several spans": lambda: (
        rows(4096, H=16, HV=64, dtype=torch.bfloat16),
        {"schedule": on([4096])},
    ),
    "a pool": lambda: (
        rows(90),
        {"schedule": on([60, 30]), "state": pool([1, 2], [3, -1], [True, False], layout="vk")},
    ),
    "a pool in place": lambda: (rows(90), {"schedule": on([60, 30]), "state": pool([1, 2])}),
    "two pools": lambda: (
        rows(90),
        {"schedule": on([60, 30], snapshot_positions=[[0], []]), "state": pool(None, [1, 2]),
         "snapshots": pool(None, [4])},
    ),
    "a cache": lambda: (
        rows(3),
        {"schedule": on([1, 2], start_positions=[100, 3]), "state": cache().at([4, 2]),
         "gate": raw(), "qk_l2norm": True},
    ),
    "drafts": lambda: (
        rows(9),
        {"schedule": on([4, 5], start_positions=[100, 0], drafts=True),
         "state": cache(16).at([4, -1])},
    ),
    "snapshots in the cache": lambda: (
        (lambda held: (
            rows(130),
            {"schedule": on([130], snapshot_every=64), "state": held.at([4]),
             "snapshots": held.at([0, 1])},
        ))(cache()),
    )[0],
    "slots on the device": lambda: (
        rows(3),
        {"schedule": on([1, 2], start_positions=64), "state": cache().at(torch.tensor([4, 2]))},
    ),
    "a pool's slots on the device": lambda: (
        rows(90),
        {"schedule": on([60, 30], snapshot_every=64),
         "state": pool(torch.tensor([1, 2]), [3, -1], torch.tensor([True, False])),
         "snapshots": pool(None, torch.zeros(0, dtype=torch.int32))},
    ),
    "a cache with a convolution": lambda: (
        rows(2),
        {"schedule": on([1, 1], start_positions=64), "state": cache(conv_channels=8).at([0, 1])},
    ),
    "channels": lambda: (rows(90, channels=True), {"schedule": on([90])}),
    "channels in a cache": lambda: (
        rows(90, channels=True),
        {"schedule": on([90]), "state": cache(per_channel=True).at([4])},
    ),
}  # fmt: skip
PORTABLE = {
    "float32": lambda: (rows(90, dtype=torch.float32), {"schedule": on([90])}),
    "other sizes": lambda: (rows(90, K=48, V=96), {"schedule": on([90]), "return_state": True}),
}
EVERY = [("hopper", name) for name in CALLS] + [("triton", name) for name in CALLS | PORTABLE]


@pytest.mark.parametrize(("by", "name"), EVERY)
def test_a_steady_call_launches_what_the_long_way_launches(driver, monkeypatch, by, name):
    make = (CALLS | PORTABLE)[name]
    first, call = make(), make()
    launched(driver, first, by)
    assert not is_steady(driver)
    for again in (call, first, call):
        result, found = launched(driver, again, by)
        assert is_steady(driver)
        expected, wanted = the_long_way(monkeypatch, driver, again, by)
        assert not is_steady(driver)
        assert found == wanted
        assert found
        alike(result, expected)
    T = call[1]["schedule"].T
    assert not result.o[T:].any()


@pytest.mark.parametrize("name", ["plain", "several spans", "a pool", "a cache", "out"])
def test_launches_on_amd_too(hip, monkeypatch, name):
    first, call = CALLS[name](), CALLS[name]()
    launched(hip, first, "triton")
    assert not is_steady(hip)
    _, found = launched(hip, call, "triton")
    assert is_steady(hip)
    assert found == the_long_way(monkeypatch, hip, call, "triton")[1]


@pytest.mark.parametrize("name", ["plain", "a pool", "a state"])
def test_the_recurrent_form_too(driver, monkeypatch, name):
    first, call = CALLS[name](), CALLS[name]()
    function = {"function": headstart.recurrent_gated_delta_rule}
    launched(driver, first, "triton", **function)
    _, found = launched(driver, call, "triton", **function)
    assert is_steady(driver)
    assert found == the_long_way(monkeypatch, driver, call, "triton", **function)[1]


def test_calls_that_are_alike_share_one_program(driver):
    schedule = on([1, 1], start_positions=[100, 200])
    for slots in ([0, 1], [3, 2], [1, 0]):
        for positions in ([100, 200], [70, 127]):
            later = schedule.update_([1, 1], start_positions=positions)
            call = rows(2), {"schedule": later, "state": cache().at(slots)}
            rule(call, "hopper")
    (group,) = RULE.prepared.values()
    assert len(group) == 1
    assert group.last is not None


def test_what_a_signature_holds_tells_calls_apart(driver, monkeypatch):
    """Every one of these differs from the one before in one fact: none may pass for another."""
    base = {"schedule": on([64])}
    strided = rows(64)
    strided[3].resize_(64, 8)
    calls = [
        (rows(64), base),
        (rows(64), {"schedule": on([63])}),
        (rows(64), {"schedule": on([32, 32])}),
        (rows(65), base),
        (rows(64, HV=8), base),
        (rows(64, dtype=torch.float16), base),
        (packed(64), base),
        (rows(64), base | {"scale": 0.5}),
        (rows(64), base | {"scale": 2}),
        (rows(64), base | {"qk_l2norm": True}),
        (rows(64), base | {"return_state": True}),
        (rows(64), base | {"gate": Gate.linear()}),
        (rows(64), base | {"gate": Gate.log(beta="logit")}),
        (rows(64), base | {"gate": raw()}),
        (rows(64), base | {"gate": Gate.raw(torch.zeros(4), torch.zeros(4), -1.0)}),
        (rows(64), base | {"gate": Gate.raw(torch.zeros(4, dtype=torch.bfloat16))}),
        (rows(64), base | {"state": torch.zeros(1, 4, 128, 128)}),
        (rows(64), base | {"state": torch.zeros(1, 4, 128, 128, dtype=torch.bfloat16)}),
        (rows(64), base | {"state": pool([0])}),
        (rows(64), base | {"state": pool([0], layout="vk")}),
        (rows(64), base | {"state": pool(None, [0])}),
        (rows(64), base | {"state": pool([0], [1])}),
        (rows(64), base | {"state": pool([0], [1], [True])}),
        (rows(64), base | {"state": cache().at([0])}),
        (rows(64), base | {"state": cache(4).at([0])}),
        (rows(64), {"schedule": on([64], start_positions=64), "state": cache(4).at([0])}),
        (rows(64), {"schedule": on([64], snapshot_every=64), "snapshots": torch.float32}),
        (rows(64), {"schedule": on([64], snapshot_every=64), "snapshots": torch.float16}),
        (rows(64), {"schedule": on([64], snapshot_every=64), "snapshots": pool(None, [2])}),
    ]
    for call in calls:
        launched(driver, call, "triton")
        assert not is_steady(driver)
    for call in calls:
        _, found = launched(driver, call, "triton")
        assert is_steady(driver)
        assert found == the_long_way(monkeypatch, driver, call, "triton")[1]


@pytest.mark.parametrize("guards", [True, False])
def test_calls_that_differ_in_layouts_alone_may_take_turns(driver, monkeypatch, guards):
    """Also with a PyTorch that has no guards."""
    if not guards:
        monkeypatch.setattr(module_of_layouts, "TensorGuards", None)
    calls = [
        (tensors, {"schedule": on([64])}) for tensors in (rows(64), packed(64), rows(64, HV=8))
    ]
    for call in calls:
        launched(driver, call, "triton")
    for _ in range(2):
        for call in calls:
            _, found = launched(driver, call, "triton")
            assert is_steady(driver)
            assert found == the_long_way(monkeypatch, driver, call, "triton")[1]
    assert [len(group) for group in RULE.prepared.values()] == [3]


def test_a_mode_of_gradients_or_inference_is_no_other_signature(driver):
    tensors = rows(64)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        for _ in range(2):
            del driver.launched[:]
            with mode():
                headstart.gated_delta_rule(*tensors, schedule=on([64]), implementation="triton")
                (group,) = RULE.prepared.values()
                assert group.last.guard(*tensors)
    assert is_steady(driver)
    assert len(group) == 1


def test_memory_that_is_shared_or_not_aligned_is_another_signature(driver, monkeypatch):
    q, k, v, g, beta = rows(64)
    odd = torch.zeros(64 * 4 + 1)[1:].view(64, 4)
    for tensors in ((q, q, v, g, beta), (q, k, v, g, beta), (q, k, v, g, g), (q, k, v, odd, beta)):
        call = tensors, {"schedule": on([64])}
        launched(driver, call, "triton")
        assert not is_steady(driver)
        _, found = launched(driver, call, "triton")
        assert is_steady(driver)
        assert found == the_long_way(monkeypatch, driver, call, "triton")[1]


def test_rows_that_are_copied_first_go_the_long_way(driver):
    _, *rest = rows(64)
    odd = torch.zeros(64, 2, 131, dtype=torch.bfloat16)[..., 3:]
    for _ in range(3):
        launched(driver, ((odd, *rest), {"schedule": on([64])}), "hopper")
        assert not is_steady(driver)


def test_a_list_of_slots_is_taken_when_it_is_given(driver):
    held, slots = cache(), [3, 1]
    at = held.at(slots)
    call = rows(2), {"schedule": on([1, 1], start_positions=64), "state": at}
    for _ in range(2):
        rule(call, "hopper")
    slots[0] = 5
    copies = {at.slots.on_device(torch.device("cpu")).data_ptr()}
    assert at.slots.on_device(torch.device("cpu")).tolist() == [3, 1]
    _, found = launched(driver, call, "hopper")
    assert copies & {value for args in found for value in args if type(value) is int}
    call[1]["state"] = held.at(slots)
    fresh = call[1]["state"].slots.on_device(torch.device("cpu"))
    _, found = launched(driver, call, "hopper")
    assert is_steady(driver)
    assert fresh.tolist() == [5, 1]
    assert fresh.data_ptr() in {value for args in found for value in args if type(value) is int}


def test_tensors_of_a_cache_may_be_replaced(driver, monkeypatch):
    held = cache()
    call = rows(2), {"schedule": on([1, 1], start_positions=64), "state": held.at([0, 1])}
    for _ in range(2):
        launched(driver, call, "hopper")
    held.tensors["state"] = torch.zeros(6, 4, 128, 129)[..., :128]
    launched(driver, call, "hopper")
    assert not is_steady(driver)
    _, found = launched(driver, call, "hopper")
    assert found == the_long_way(monkeypatch, driver, call, "hopper")[1]


def sparse(*shape):
    return torch.zeros(shape).to_sparse()


MISTAKES = {
    "slots out of range": lambda: {"state": cache().at([0, 6])},
    "a slot twice": lambda: {"state": cache().at([1, 1])},
    "too few slots": lambda: {"state": cache().at([1])},
    "flags as slots": lambda: {"state": cache().at([True, False])},
    "a cache of another dtype": lambda: {
        "state": DeltaCache(
            6, H=2, HV=4, K=128, V=128, dtype=torch.float16, device="cpu", draft_tokens=0
        ).at([0, 1])
    },
    "a sparse pool": lambda: {"state": Pool(sparse(7, 4, 128, 128), [0, 1], [2, 3])},
    "a sparse place for snapshots": lambda: {
        "state": pool([0, 1], [2, 3]),
        "snapshots": Pool(sparse(7, 4, 128, 128), write_slots=[]),
    },
    "sparse slots": lambda: {"state": pool(sparse(2).int())},
    "a race": lambda: {"state": pool([0, 1], [1, 2])},
    "a flag": lambda: {"return_state": 1},
    "another flag": lambda: {"qk_l2norm": 1},
    "a third flag": lambda: {"reproducible": 1},
    "a scale": lambda: {"scale": float("nan")},
    "a scale that is a flag": lambda: {"scale": True},
    "a gate": lambda: {"gate": "log"},
    "a workspace": lambda: {"workspace": 3},
    "a plain state with drafts": lambda: {"schedule": on([1, 1], drafts=True)},
    "more tokens than rows": lambda: {"schedule": on([1, 2])},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_after_a_call_that_was_right(driver, name):
    right = {"schedule": on([1, 1], start_positions=64)}
    for more in (
        {}, {"state": cache().at([0, 1])}, {"state": pool([0, 1], [2, 3])},
        {"return_state": True}, {"qk_l2norm": True}, {"reproducible": True}, {"scale": 1},
    ):  # fmt: skip
        rule((rows(2), right | more), "triton")
        rule((rows(2), right | more), "triton")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^[a-z0-9_]+: "):
            rule((rows(2), right | MISTAKES[name]()), "triton")


@pytest.mark.parametrize("thinned", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_rows_are_told_after_a_call_that_was_right(driver, thinned):
    q, k, v, g, beta = rows(2)
    call = {"schedule": on([1, 1])}
    for _ in range(2):
        rule(((q, k, v, g, beta), call), "triton")
        with pytest.raises(ValueError, match="g: expected a dense tensor"):
            rule(((q, k, v, thinned(g), beta), call), "triton")


def test_out_over_an_input_is_told_after_one_that_was_not(driver):
    q, k, _, g, beta = rows(90)
    memory = torch.zeros(200, 4, 128, dtype=torch.bfloat16)
    call = {"schedule": on([90])}
    for begin in (90, 100, 110):
        right = (q, k, memory[:90], g, beta), call | {"out": memory[begin:][:90]}
        launched(driver, right, "triton")
    assert is_steady(driver)
    with pytest.raises(ValueError, match="out: expected memory of its own, got that of v"):
        rule(((q, k, memory[:90], g, beta), call | {"out": memory[50:][:90]}), "triton")


def test_out_may_be_columns_of_the_rows_of_an_input(driver, monkeypatch):
    q, k, _, g, beta = rows(90)

    def columns(first):
        memory = torch.zeros(90, 12, 128, dtype=torch.bfloat16)
        return (q, k, memory[:, :4], g, beta), {
            "schedule": on([90]),
            "out": memory[:, first : first + 4],
        }

    launched(driver, columns(4), "triton")
    for first, steady in ((4, True), (8, False)):
        call = columns(first)
        _, found = launched(driver, call, "triton")
        assert is_steady(driver) == steady
        assert found == the_long_way(monkeypatch, driver, call, "triton")[1]


def test_gradients_are_refused_after_a_call_without(driver):
    q, k, v, g, beta = rows(64)
    for _ in range(2):
        del driver.launched[:]
        headstart.gated_delta_rule(q, k, v, g, beta, schedule=on([64]), implementation="triton")
    assert is_steady(driver)
    with pytest.raises(ValueError, match="g: requires grad"):
        headstart.gated_delta_rule(
            q, k, v, g.requires_grad_(), beta, schedule=on([64]), implementation="triton"
        )


def test_values_are_looked_at_where_that_is_asked_for(driver, monkeypatch):
    q, k, v, g, beta = rows(64)
    for _ in range(2):
        rule(((q, k, v, g, beta), {"schedule": on([64])}), "triton")
    g[3] = 1.0
    rule(((q, k, v, g, beta), {"schedule": on([64])}), "triton")
    monkeypatch.setattr("headstart.runtime.checks.asked", True)
    with pytest.raises(ValueError, match="g: expected a log decay <= 0"):
        rule(((q, k, v, g, beta), {"schedule": on([64])}), "triton")


def test_a_listener_hears_every_launch(driver):
    call = CALLS["plain"]()
    for _ in range(2):
        rule(call, "hopper")
    heard = []
    knobs.runtime.launch_enter_hook.add(heard.append)
    try:
        launched(driver, call, "hopper")
        assert not is_steady(driver)
    finally:
        knobs.runtime.launch_enter_hook.remove(heard.append)
    launched(driver, call, "hopper")
    assert is_steady(driver)


def test_scratch_that_moved_is_found_again(driver, monkeypatch):
    call, longer = CALLS["plain"](), (rows(700), {"schedule": on([700])})
    workspace = Workspace("cpu")
    for _ in range(2):
        rule(call, "hopper", workspace=workspace)
    encoded = driver.encoded
    rule(call, "hopper", workspace=workspace)
    assert driver.encoded <= encoded + 1  # at most that of a fresh output
    for disturb in (
        workspace.release,
        lambda: rule(longer, "hopper", workspace=workspace),
        lambda: rule(longer, "triton", workspace=workspace),
        lambda: workspace.buffer("T", (10**6,), torch.float32),
    ):
        disturb()
        _, found = launched(driver, call, "hopper", workspace=workspace)
        assert is_steady(driver)
        wanted = the_long_way(monkeypatch, driver, call, "hopper", workspace=workspace)[1]
        assert found == wanted


def test_each_stream_has_its_scratch_and_is_told_to_the_launcher(driver, monkeypatch):
    call = CALLS["plain"]()
    for _ in range(2):
        rule(call, "hopper")
    scratch = []
    for driver.stream in (5, 6, 5):
        _, found = launched(driver, call, "hopper")
        assert is_steady(driver)
        assert all(driver.stream in args[:6] for args in found)
        scratch.append({value for value in found[0] if type(value) is int and value > 2**32})
    assert scratch[0] == scratch[2] != scratch[1]


def test_calls_are_counted_either_way(driver):
    call = CALLS["plain"]()
    before = dispatch.served["gated_delta_rule", "hopper"]
    with dispatch.watching() as ran:
        for _ in range(3):
            rule(call, "hopper")
    assert ran == [("gated_delta_rule", "hopper")] * 3
    assert dispatch.served["gated_delta_rule", "hopper"] == before + 3


def test_threads_share_programs(driver):
    call, failed = CALLS["a cache"](), []
    rule(call, "hopper")
    before = dispatch.served["gated_delta_rule", "hopper"]

    def work():
        try:
            for _ in range(50):
                rule(call, "hopper")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert dispatch.served["gated_delta_rule", "hopper"] == before + 8 * 50
    assert [len(group) for group in RULE.prepared.values()] == [1]


def test_a_captured_call_is_not_remembered(driver, monkeypatch):
    call = CALLS["a cache"]()
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "capturing", lambda device: True)
        patch.setattr(dispatch, "capturing", lambda device: True)
        rule(call, "hopper")
    assert not RULE.prepared
    for steady in (False, True):
        launched(driver, call, "hopper")
        assert is_steady(driver) == steady


def test_only_the_last_signatures_are_kept(driver, monkeypatch):
    monkeypatch.setattr(dispatch, "SIGNATURES", 3)
    for scale in range(6):
        rule((rows(64), {"schedule": on([64]), "scale": scale}), "triton")
    assert len(RULE.prepared) == 3


def test_layouts_count_as_signatures_too(driver, monkeypatch):
    monkeypatch.setattr(dispatch, "SIGNATURES", 2)
    for tensors in (rows(64), packed(64), rows(64, HV=8)):
        rule((tensors, {"schedule": on([64])}), "triton")
    assert [len(group) for group in RULE.prepared.values()] == [2]


@pytest.mark.parametrize("missing", ["make_launcher", "wrap_handle_tensordesc"])
def test_a_launcher_of_another_kind_is_left_to_triton(driver, monkeypatch, missing):
    call = CALLS["no gates"]()
    launched(driver, call, "triton")  # which compiles
    RULE.prepared.clear()
    monkeypatch.delattr(fake_driver, missing)
    for _ in range(3):
        launched(driver, call, "triton")
        assert not is_steady(driver)


def test_so_is_one_that_takes_arguments_in_a_tuple(driver, monkeypatch):
    call = CALLS["no gates"]()

    def together(self, *args):
        self.launch(*args[:9], args[9:])

    launched(driver, call, "triton")
    RULE.prepared.clear()
    monkeypatch.setattr(fake_driver.FakeLauncher, "__call__", together)
    rule(call, "triton")
    assert [(len(group), group.last) for group in RULE.prepared.values()] == [(1, None)]


@pytest.mark.parametrize("name", ["plain", "a cache"])
def test_a_steady_call_is_a_small_part_of_the_long_way(driver, monkeypatch, name):
    call = CALLS[name]()

    def calls():
        count = 0

        def step(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(step)
        try:
            rule(call, "hopper")
        finally:
            sys.setprofile(None)
        return count

    first, _, steady = calls(), calls(), calls()
    assert steady < 100 < 500 < first


def test_nothing_is_recorded_outside_of_a_record():
    with recording() as record:
        Workspace("cpu").buffer("x", (2, 3), torch.float32)
    assert list(record.scratch) == ["x"]
    Workspace("cpu").buffer("y", (2,), torch.float32)
    assert list(record.scratch) == ["x"]
