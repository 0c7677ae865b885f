"""FlashInfer: the gated delta rule's prefill and decode kernels, and ragged softmax prefill."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from headstart.evidence.arms import Arm, MissingPeer, Unfit, peer
from headstart.evidence.arms.attention import dense_attention
from headstart.evidence.arms.delta import PlainDelta, plain, refuse_snapshots
from headstart.evidence.cases import Case

WORKSPACE = 128 << 20


def build(case: Case, device: torch.device, seed: int) -> Arm:
    """`gdn_prefill`, `gdn_decode` or a ragged prefill wrapper, planned beforehand."""
    if case.op == "extend_attention":
        return _attention(case, device, seed)
    inputs = plain(case, device, seed)
    if inputs.case.per_channel:
        raise Unfit("this arm has no decay per channel")
    return _decode(inputs) if inputs.decoding else _prefill(inputs)


def _prefill(inputs: PlainDelta) -> Arm:
    (rule,) = peer("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    parameters = inspect.signature(rule).parameters
    initial = _value_major(inputs.initial)
    case = inputs.case
    # The decay itself, not its logarithm; states are [N, HV, V, K]; outputs are the caller's.
    options: dict[str, Any] = {
        "g": inputs.g.exp().contiguous(),
        "beta": inputs.beta.float().contiguous(),
        "initial_state": initial,
        "output_final_state": inputs.final,
        "cu_seqlens": inputs.cu_seqlens,
        "output": torch.empty_like(inputs.v),
    }
    if inputs.final:
        options["output_state"] = torch.empty(
            len(case.lengths), case.HV, case.V, case.K, device=inputs.q.device
        )
    if "max_seqlen" in parameters:
        options["max_seqlen"] = max(case.lengths, default=0)

    def outputs(found: Any) -> dict[str, torch.Tensor]:
        o, state = found if isinstance(found, tuple) else (found, None)
        return inputs.outputs(o, None if state is None else state.transpose(-1, -2))

    return Arm(
        "flashinfer",
        lambda: rule(inputs.q, inputs.k, inputs.v, **options),
        outputs,
        note=refuse_snapshots(case, inputs.note),
    )


def _decode(inputs: PlainDelta) -> Arm:
    """One token: `gated_delta_rule_decode_pretranspose`; several: `gated_delta_rule_mtp`."""
    if inputs.dense is None:
        raise Unfit("decodes sequences of one length only")
    count, length = inputs.dense
    q, k, v = (row.view(count, length, *row.shape[1:]) for row in (inputs.q, inputs.k, inputs.v))
    # These kernels take raw gates: a_log = dt_bias = 0, softplus(a) = -g and sigmoid(b) = beta.
    decay = (-inputs.g).double().clamp(1e-9, 80.0)
    a = torch.log(torch.expm1(decay)).to(q.dtype).view(count, length, -1)
    b = torch.logit(inputs.beta.double(), eps=1e-6).to(q.dtype).view(count, length, -1)
    zeros = torch.zeros(inputs.case.HV, device=q.device)
    before = _value_major(inputs.initial)
    state = before.clone()
    options: dict[str, Any] = {
        "A_log": zeros,
        "a": a,
        "dt_bias": zeros,
        "b": b,
        "output": torch.empty_like(v),
        "use_qk_l2norm": False,
    }
    if length == 1:
        (rule,) = peer("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
        options["state"] = state
    else:
        (rule,) = peer("flashinfer.gdn_decode", "gated_delta_rule_mtp")
        options |= {
            "initial_state": state,
            "initial_state_indices": torch.arange(count, dtype=torch.int32, device=q.device),
            "disable_state_update": True,
        }

    def restore() -> None:
        state.copy_(before)

    return Arm(
        "flashinfer",
        lambda: rule(q=q, k=k, v=v, **options),
        lambda found: inputs.outputs(found[0], None),
        restore,
        note=f"{inputs.note}; gates rounded to {inputs.case.dtype}",
    )


def _value_major(state: torch.Tensor | None) -> Any:
    return None if state is None else state.transpose(-1, -2).contiguous()


def _attention(case: Case, device: torch.device, seed: int) -> Arm:
    inputs = dense_attention(case, device, seed)
    inputs.refuse(sinks=True, mask=True)
    (wrapper_class,) = peer("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = wrapper_class(workspace, "NHD")
    window = inputs.case.window
    try:
        wrapper.plan(
            inputs.query_borders,
            inputs.key_borders,
            inputs.case.HQ,
            inputs.case.HK,
            inputs.case.D,
            head_dim_vo=inputs.case.value_size,
            causal=True,
            # Keys to the left of the query's own.
            window_left=-1 if window is None else window - 1,
            q_data_type=inputs.q.dtype,
        )
    except FileNotFoundError as error:  # its attention is compiled here, from sources in C++
        name = Path(error.filename or "").name
        raise MissingPeer(f"flashinfer: installed without sources to compile: {name}") from error
    return Arm(
        "flashinfer",
        lambda: wrapper.run(inputs.q, inputs.k, inputs.v),
        lambda o: {"o": o},
        note=inputs.note,
        kept=[workspace],
    )
