"""What the installed vLLM asks of a plugin, on a CPU and on the GPU platforms not served here."""

import dataclasses
import inspect
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make vllm-test")

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

from headstart.integrations.vllm import hooks, register
from headstart.integrations.vllm.engine import attention, delta

LAYER = "QwenGatedDeltaNetAttention"


@pytest.fixture(autouse=True)
def untouched():
    """Nothing is hooked in before a test, nor after it."""

    def clear():
        AttentionBackendEnum.CPU_ATTN.clear_override()
        AttentionBackendEnum.CUSTOM.clear_override()
        MambaAttentionBackendEnum.GDN_ATTN.clear_override()
        op_registry_oot.pop(LAYER, None)

    clear()
    yield
    clear()


def test_the_installed_package_names_the_plugin():
    (found,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "headstart")
    assert found.load() is register


def test_registering_twice_is_registering_once():
    for _ in range(2):
        register()
        assert AttentionBackendEnum.CPU_ATTN.get_class() is attention.HeadstartCpuBackend
        assert MambaAttentionBackendEnum.GDN_ATTN.get_class() is delta.DeltaBackend
        assert op_registry_oot[LAYER] is delta.HeadstartGatedDeltaNet


@pytest.mark.parametrize(
    ("given", "softmax", "linear"),
    [("off", False, False), ("attention", True, False), ("delta", False, True)],
)
def test_only_what_is_named_is_taken(monkeypatch, given, softmax, linear):
    monkeypatch.setenv("HEADSTART_VLLM", given)
    register()
    assert AttentionBackendEnum.CPU_ATTN.is_overridden() is softmax
    assert (LAYER in op_registry_oot) is linear


def test_elsewhere_nothing_is_taken_unasked(monkeypatch):
    from vllm.platforms import current_platform

    said = []
    monkeypatch.setattr(hooks.log, "warning", lambda words, *_: said.append(words))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    register()
    assert not op_registry_oot
    assert not AttentionBackendEnum.CUSTOM.is_overridden()
    assert "takes nothing there unasked" in said.pop()
    monkeypatch.setenv("HEADSTART_VLLM", "attention,delta")
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is attention.HeadstartBackend
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert op_registry_oot[LAYER] is delta.HeadstartGatedDeltaNet
    assert "only with --attention-backend CUSTOM" in said.pop()


def test_a_place_that_another_plugin_has_taken_is_refused():
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "another.plugin.Backend")
    with pytest.raises(RuntimeError, match=r"CPU_ATTN: another.plugin.Backend has taken it"):
        register()
    AttentionBackendEnum.CPU_ATTN.clear_override()
    op_registry_oot[LAYER] = type("Other", (gdn.QwenGatedDeltaNetAttention,), {})
    with pytest.raises(RuntimeError, match=rf"layer {LAYER}: .* has taken it"):
        register()


def test_another_version_of_vllm_does_not_start():
    code = (
        "import vllm; vllm.__version__ = '0.33.0'\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VLLM_PLUGINS": "headstart"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "headstart serves vLLM 0.32.x, got 0.33.0" in ended.stderr


def test_the_version_installed_is_the_one_supported():
    import vllm

    hooks.expect_version(vllm.__version__)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (AttentionImpl.__init__, attention.HeadstartAttention.__init__),
        (AttentionImpl.forward, attention.HeadstartAttention.forward),
        (AttentionMetadataBuilder.__init__, attention.StepBuilder.__init__),
        (AttentionMetadataBuilder.build, attention.StepBuilder.build),
        (GDNAttentionMetadataBuilder.build, delta.DeltaBuilder.build),
        (gdn.QwenGatedDeltaNetAttention._forward_core, delta.HeadstartGatedDeltaNet._forward_core),
    ],
)
def test_methods_take_what_those_of_the_base_classes_take(theirs, ours):
    wanted = list(inspect.signature(theirs).parameters.values())
    given = list(inspect.signature(ours).parameters.values())
    for one, other in zip(wanted, given, strict=False):
        assert (one.name, one.kind, one.default) == (other.name, other.kind, other.default)
    assert len(given) >= len(wanted)
    assert all(more.default is not more.empty for more in given[len(wanted) :])


def test_methods_of_other_backends_take_the_same():
    # What a layer calls is no part of the base class.
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    for name in ("do_kv_cache_update", "forward", "__init__"):
        theirs = inspect.signature(getattr(TritonAttentionImpl, name)).parameters
        ours = inspect.signature(getattr(attention.HeadstartAttention, name)).parameters
        shared = [each for each in theirs if each in ours]
        assert list(ours)[: len(shared)] == shared


def test_no_abstract_method_is_left():
    for kind in (
        attention.HeadstartBackend,
        attention.HeadstartCpuBackend,
        attention.HeadstartAttention,
        attention.StepBuilder,
        delta.DeltaBuilder,
    ):
        assert not inspect.isabstract(kind)
    theirs = GDNAttentionBackend.__abstractmethods__  # never constructed
    assert delta.DeltaBackend.__abstractmethods__ == theirs


def test_vllms_core_calls_the_layers_own_method():
    # On every platform but ROCm's fused path, which `forward_cuda` does not take.
    assert "self._forward_core(" in inspect.getsource(gdn.qwen_gdn_attention_core)
    source = inspect.getsource(gdn.QwenGatedDeltaNetAttention.forward_cuda)
    assert "torch.ops.vllm.qwen_gdn_attention_core(" in source
    assert "self.enable_fused_gdn_spec_decode" in source


def test_metadata_is_vllms_own_and_more():
    base = GDNAttentionMetadata(*range(7))
    ours = delta.DeltaMetadata(**vars(base))
    names = [field.name for field in dataclasses.fields(base)]
    assert [getattr(ours, name) for name in names] == [getattr(base, name) for name in names]
    assert ours.steps == []


def valid(**changes):
    """Why vLLM would not take the backend for a layer of gpt-oss on an H100."""
    how = {
        "head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER, "has_sliding_window": True,
    }  # fmt: skip
    return attention.HeadstartBackend.validate_configuration(**how | changes)


def test_vllm_takes_the_backend_for_what_it_serves():
    assert valid() == []
    assert valid(use_batch_invariant=True, head_size=128, block_size=640) == []
    assert delta.DeltaBackend.supports_batch_invariance()


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": "fp8"},
        {"use_mla": True},
        {"attn_type": AttentionType.ENCODER},
        {"use_non_causal": True},
        {"use_dcp": True},
        {"use_pcp": True},
        {"use_adaptive_verification": True},
    ],
)
def test_vllm_does_not_take_it_for_the_rest(change):
    assert len(valid(**change)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"alibi_slopes": [0.5]},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"kv_cache_dtype": "fp8"},
    ],
)
def test_layers_that_nobody_validates_are_refused(change):
    (name,) = change
    with pytest.raises(NotImplementedError, match=rf"{name}: headstart serves"):
        attention.HeadstartAttention(8, 64, 0.125, 2, **change)
