"""Who runs a call, with how much scratch, and what the host looks at meanwhile."""

import inspect

import pytest
import torch
from tests.implementations import DEVICE, by_name
from tests.ops.gated_delta_rule.test_validation import (
    HV,
    H,
    K,
    T,
    kept,
    new_cache,
    pool,
    tensors,
)

import headstart
from headstart import Declined, Workspace


def test_float64_is_for_the_reference_alone():
    x = {name: tensor.double() for name, tensor in tensors().items()}
    assert headstart.gated_delta_rule(**x, implementation="reference").o.dtype == torch.float64
    for implementation in (None, "torch"):
        with pytest.raises(Declined, match=r"gated_delta_rule.*float64"):
            headstart.gated_delta_rule(**x, implementation=implementation)
    rows = {name: (accepted, says) for name, accepted, says in
            headstart.explain("gated_delta_rule", **x)}  # fmt: skip
    assert rows["torch"][0] is False
    assert "float64" in rows["torch"][1]
    assert rows["reference"][0] is True


def test_an_implementation_that_does_not_exist_here_declines_by_name():
    with pytest.raises(Declined):
        headstart.gated_delta_rule(**tensors(), implementation="hopper")


def test_declined_is_a_not_implemented_error():
    assert issubclass(Declined, NotImplementedError)


def test_explain_tells_who_would_run():
    rows = headstart.explain("gated_delta_rule", **tensors())
    assert rows[0][:2] == ("torch", True)
    assert rows[-1][:2] == ("reference", True)
    assert all(isinstance(sentence, str) and sentence for _, _, sentence in rows)
    with pytest.raises(ValueError, match=r"^name: expected one of"):
        headstart.explain("gated_rule")
    with pytest.raises(ValueError, match=r"^name: expected one of .* got \['gated_delta_rule'\]"):
        headstart.explain(["gated_delta_rule"])
    with pytest.raises(ValueError, match=r"^implementation: expected one of .* got \['torch'\]"):
        headstart.gated_delta_rule(**tensors(), implementation=["torch"])
    with pytest.raises(ValueError, match=r"^k: expected"):
        headstart.explain("gated_delta_rule", **tensors(k=torch.zeros(3, H, K)))


def calls():
    """Calls of every kind, with the arguments of each."""
    x = tensors()
    yield "plain", x
    yield "states", x | {"state": pool(1), "return_state": True}
    yield "reproducible", x | {"reproducible": True, "return_state": True}
    yield "normalised", x | {"qk_l2norm": True}
    yield "ragged", x | {"schedule": [1, 0, 64, 30]}
    yield "per channel", x | {"g": torch.zeros(T, HV, K)}
    yield "cache", x | {"schedule": kept(snapshot_every=64), "state": new_cache().at([0]),
                        "snapshots": torch.float32}  # fmt: skip
    yield "empty", {name: tensor[:0] for name, tensor in x.items()}
    yield "half", {name: tensor.bfloat16() for name, tensor in x.items()}


@pytest.mark.parametrize("name", [name for name, _ in calls()])
def test_workspace_bytes_is_what_a_call_takes(implementation, rule, name):
    arguments = dict(calls())[name]
    workspace = Workspace(DEVICE)
    rule(**arguments, workspace=workspace)
    asked = by_name(headstart.workspace_bytes, implementation)
    expected = asked("gated_delta_rule", **arguments)
    assert workspace.bytes == expected
    if implementation == "torch" and name != "empty":
        assert expected > 0


def test_workspace_bytes_and_explain_take_meta_tensors():
    meta = {name: tensor.to("meta") for name, tensor in tensors().items()}
    on_cpu = headstart.workspace_bytes("gated_delta_rule", **tensors(), implementation="torch")
    on_meta = headstart.workspace_bytes("gated_delta_rule", **meta, implementation="torch")
    assert on_meta == on_cpu
    assert headstart.workspace_bytes("gated_delta_rule", **meta) > 0
    assert any(accepted for _, accepted, _ in headstart.explain("gated_delta_rule", **meta))


def test_a_call_on_meta_tensors_is_declined():
    meta = {name: tensor.to("meta") for name, tensor in tensors().items()}
    with pytest.raises(Declined, match="meta tensors have no memory"):
        headstart.gated_delta_rule(**meta)


def test_scratch_is_bounded_whatever_the_length():
    """72 KiB of scratch a token is what others take; ours stops growing."""
    sizes = []
    for length in (4096, 65536, 1048576):
        x = {
            name: torch.zeros(length, *tensor.shape[1:], device="meta")
            for name, tensor in tensors().items()
        }
        sizes.append(
            headstart.workspace_bytes(
                "gated_delta_rule", **x, implementation="torch", schedule=[length]
            )
        )
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_second_call_takes_no_more():
    workspace = Workspace("cpu")
    headstart.gated_delta_rule(**tensors(), workspace=workspace)
    held = workspace.bytes
    headstart.gated_delta_rule(**tensors(), workspace=workspace)
    assert workspace.bytes == held
    workspace.release()
    assert workspace.bytes == 0


def test_the_signature_is_that_of_the_design():
    parameters = inspect.signature(headstart.gated_delta_rule).parameters
    assert list(parameters) == [
        "q", "k", "v", "g", "beta", "schedule", "state", "gate", "snapshots", "return_state",
        "scale", "qk_l2norm", "reproducible", "implementation", "workspace", "out",
    ]  # fmt: skip
    keyword = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keyword == list(parameters)[5:]


def test_the_host_never_reads_a_device_value_of_a_plain_call(rule):
    """No .item(), .tolist() or copy between launches: every Tensor.item call is counted."""
    x = tensors()
    count = 0
    original = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__")}

    def counted(name):
        def run(self, *args):
            nonlocal count
            count += 1
            return original[name](self, *args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in original:
            patch.setattr(torch.Tensor, name, counted(name))
        rule(**x, schedule=[60, 40], return_state=True, qk_l2norm=True)
    assert count == 0
