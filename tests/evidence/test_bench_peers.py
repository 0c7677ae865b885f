"""Adapters of peers hand over what the peers' sources ask for: each computes the case rightly."""

import functools
import os
import sys
import types
from functools import cache

import pytest
import torch
from tests.evidence import fake_peers

from headstart.evidence import arms, cases
from headstart.evidence.arms import layer
from headstart.evidence.checking import check, load_truths

MODULES = {
    "fla": {
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": fake_peers.fla_rule,
            "fused_recurrent_gated_delta_rule": fake_peers.fla_recurrent,
        },
        "fla.ops.kda": {"chunk_kda": fake_peers.fla_rule},
    },
    "flashqla": {"flash_qla": {"chunk_gated_delta_rule": fake_peers.flash_qla}},
    "flashinfer": {
        "flashinfer": {"BatchPrefillWithRaggedKVCacheWrapper": fake_peers.FlashInferRagged},
        "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": fake_peers.flashinfer_prefill},
        "flashinfer.gdn_decode": {
            "gated_delta_rule_decode_pretranspose": fake_peers.flashinfer_decode,
            "gated_delta_rule_mtp": fake_peers.flashinfer_mtp,
        },
    },
    "fa4": {"flash_attn.cute": {"flash_attn_varlen_func": fake_peers.flash_attn_4}},
    "sglang": {
        "extend_attention": {"extend_attention_fwd": fake_peers.sglang_extend},
        "sglang.kernels.ops.attention.extend_attention": {
            "extend_attention_fwd_unified": fake_peers.sglang_unified
        },
        "sglang.kernels.ops.mamba.causal_conv1d_triton": {
            "causal_conv1d_fn": fake_peers.sglang_convolution
        },
        "sglang.kernels.ops.attention.triton_gdn_fused_proj": {
            "fused_qkv_split_gdn_prefill": fake_peers.sglang_split
        },
        "sglang.kernels.ops.attention.fla.l2norm": {
            "gdn_prefill_qkv_prepare_fwd": fake_peers.sglang_prepare
        },
        "sglang.kernels.ops.attention.linear.fused_gdn_gating": {
            "fused_gdn_gating": fake_peers.sglang_gates
        },
        "sglang.kernels.ops.attention.fla.fused_norm_gate": {
            "rms_norm_gated": fake_peers.sglang_norm
        },
    },
}
CPU = torch.device("cpu")
RULE = ("gdn-1x128", "gdn-ragged-7seq", "gdn-pool", "gdn-35b-tp2-2500", "gdn-residual-512")
DECODES = ("gdn-decode-64", "gdn-verify-64x4")
PLAIN = ("llama-16k", "mla-expanded")
WINDOWS = ("gemma-win-16k", "oss-chunk-win-nosink", "paged-16-win-nosink")
SINKS = ("oss-512-on-8k-win", "oss-chunk-full", "oss-residual-mix")


@pytest.fixture
def peers(monkeypatch):
    """Stand-ins for every peer."""
    for modules in MODULES.values():
        for name, attributes in modules.items():
            module = types.ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)


@cache
def truths(id):
    """The float64 reference of a case, its first group of heads."""
    return load_truths(cases.get(id), 0, CPU, 1)


@pytest.mark.parametrize(
    ("name", "id"),
    [
        *[(name, id) for name in ("fla", "flashqla", "flashinfer") for id in RULE],
        *[(name, id) for name in ("fla", "flashinfer") for id in DECODES],
        ("fla", "kda-residual-512"),
        *[(name, id) for name in ("fa4", "flashinfer", "sglang") for id in (*PLAIN, *WINDOWS)],
        *[(name, id) for name in ("fa4", "sglang", "sglang-unified") for id in SINKS],
        *[("sglang-unified", id) for id in (*PLAIN, *WINDOWS)],
    ],
)
def test_a_peer_computes_the_case(peers, name, id):
    case = cases.get(f"{id}-small")
    arm = arms.build(name, case, CPU)
    for _ in range(2 if name == "flashinfer" else 1):  # it alone writes to its inputs
        arm.restore()
        found = check(arm, case, arm.outputs(arm.call()), truths(case.id))
        assert [failure for one in found for failure in one.failures] == []
    state = getattr(case, "state", "none")
    assert {one.output for one in found} == (
        {"o", "state"} if state in ("plain", "pool") else {"o"}
    )


@pytest.mark.parametrize("id", ["block-next-8k", "block-residual-512"])
def test_an_engines_chain_computes_the_layer(peers, id, monkeypatch):
    case = cases.get(f"{id}-small")
    for most in (layer.MOST_FUSED, 0):
        monkeypatch.setattr(layer, "MOST_FUSED", most)
        arm = arms.build("sglang", case, CPU)
        for _ in range(2):  # its pools change with every call
            arm.restore()
            (found,) = check(arm, case, arm.outputs(arm.call()), load_truths(case, 0, CPU, 2))
            assert found.output == "norm"
            assert found.failures == ()


def test_an_engines_convolution_is_right(peers):
    case = cases.get("conv-next-18778-small")
    arm = arms.build("sglang", case, CPU)
    (found,) = check(arm, case, arm.outputs(arm.call()), load_truths(case, 0, CPU, 1))
    assert (found.output, found.failures) == ("convolution", ())


def test_attention_that_cannot_be_compiled_is_missing(peers, monkeypatch):
    def plan(self, *args, **options):
        raise FileNotFoundError(2, "No such file or directory", "/nowhere/csrc/prefill.jinja")

    monkeypatch.setattr(fake_peers.FlashInferRagged, "plan", plan)
    with pytest.raises(arms.MissingPeer, match=r"without sources to compile: prefill\.jinja"):
        arms.build("flashinfer", cases.get("llama-16k-small"), CPU)


@pytest.mark.parametrize(
    ("name", "id", "words"),
    [
        ("flashqla", "kda-residual-512", "no decay per channel"),
        ("flashqla", "gdn-dk64-dv64", "head sizes of 128 only"),
        ("flashinfer", "kda-residual-512", "no decay per channel"),
        ("flashinfer", "oss-chunk-full", "knows no sinks"),
        ("sglang", "edge-1-nosink", "a window of one key for no window"),
        ("fa4", "tree-verify", "no custom mask"),
        ("fa4", "fp8-cache", "in the dtype of the queries only"),
        ("sdpa", "oss-chunk-win", "knows no sinks"),
        ("sdpa", "gemma-win-16k", "knows no window"),
        ("transformers", "gdn-ragged-7seq", "sequences of one length only"),
        ("transformers", "llama-16k", "arms of their own"),
        ("fla", "block-next-8k", "the rule alone"),
        ("fla", "llama-16k", "the gated delta rule, not extend_attention"),
        ("fa4", "gdn-1x128", "softmax attention, not gated_delta_rule"),
    ],
)
def test_what_a_peer_lacks_is_said(peers, name, id, words):
    with pytest.raises(arms.Unfit, match=words):
        arms.build(name, cases.get(f"{id}-small"), CPU)


def test_fla_runs_its_own_kernels(peers, monkeypatch):
    for variable in ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG"):
        monkeypatch.setenv(variable, "1")
    arms.build("fla", cases.get("gdn-1x1-small"), CPU)
    assert {os.environ[f"FLA_{name}"] for name in ("FLASH_QLA", "FLASH_KDA", "TILELANG")} == {"0"}


def test_transformers_runs_its_own_operations(monkeypatch):
    from transformers.models.qwen3_next import modeling_qwen3_next

    calls = []

    @functools.wraps(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    def kernel_of_another_library(*args, **kwargs):
        calls.append(args)

    monkeypatch.setattr(
        modeling_qwen3_next, "torch_chunk_gated_delta_rule", kernel_of_another_library
    )
    case = cases.get("gdn-1x128-small")
    arm = arms.build("transformers", case, CPU)
    found = check(arm, case, arm.outputs(arm.call()), truths(case.id))
    assert [failure for one in found for failure in one.failures] == []
    assert not calls


def test_sglang_gets_no_slot_before_the_window(peers):
    case = cases.get("oss-512-on-8k-win-small")
    seen = {}

    def extend(*inputs, **options):
        seen.update(slots=inputs[8], borders=inputs[7], **options)

    sys.modules["extend_attention"].extend_attention_fwd = extend
    arm = arms.build("sglang", case, CPU)
    arm.call()
    assert seen["sliding_window_size"] == 127
    assert seen["borders"].tolist() == [0, 127]
    assert torch.equal(seen["slots"], case.cache_rows(0)[0][-127:])
