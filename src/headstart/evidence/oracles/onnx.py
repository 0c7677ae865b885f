"""ONNX Runtime's CPU operators: kernels in float32 that nobody here wrote."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from headstart.evidence.cases import Case
from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.gated_delta_rule import DeltaCase
from headstart.runtime.dispatch import Declined


def onnx_run(
    operator: str, inputs: dict[str, torch.Tensor | None], outputs: int, **attributes: Any
) -> list[Any]:
    """Run one com.microsoft operator on the CPU; inputs by position, None for one left out.

    Raises `Declined` where onnx or onnxruntime is missing.
    """
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise Declined(f"onnxruntime: {' and '.join(missing)} missing.")
    import onnx
    import onnxruntime as runtime

    kinds = {torch.float32: onnx.TensorProto.FLOAT, torch.int32: onnx.TensorProto.INT32}
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    names = [name if tensor is not None else "" for name, tensor in inputs.items()]
    results = [f"result_{n}" for n in range(outputs)]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(operator, names, results, domain="com.microsoft", **attributes)],
        "oracle",
        [value(name, kinds[tensor.dtype], list(tensor.shape)) for name, tensor in given.items()],
        [value(name, onnx.TensorProto.FLOAT, None) for name in results],
    )
    model = onnx.helper.make_model(
        graph,
        opset_imports=[
            onnx.helper.make_opsetid("", 21),
            onnx.helper.make_opsetid("com.microsoft", 1),
        ],
        ir_version=10,
    )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, {name: tensor.numpy() for name, tensor in given.items()}))


def gated_delta_net(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    lengths: list[int],
    before: torch.Tensor,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    **attributes: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states [N, HV, K, V] of com.microsoft GatedDeltaNet, whose states are [V, K]."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    o, state = onnx_run(
        "GatedDeltaNet",
        {
            "query": q,
            "key": k,
            "value": v,
            "cu_seqlens": offsets,
            "decay": g,
            "beta": beta,
            "initial_state": before.mT.contiguous(),
            "a_log": a_log,
            "dt_bias": dt_bias,
        },
        outputs=2,
        **attributes,
    )
    return torch.as_tensor(o), torch.as_tensor(state).mT


def outputs(case: Case, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs [rows, heads, vector] from the case's inputs, rounded to `dtype` and then widened.

    Raises `Declined` for a case that the operators cannot express.
    """
    if isinstance(case, DeltaCase) and not isinstance(case, DeltaBlockCase):
        return _delta(case, seed, dtype)
    if isinstance(case, AttentionCase):
        return _attention(case, seed, dtype)
    raise Declined(f"onnxruntime: it has no operator for all of {case.id}.")


def _delta(case: DeltaCase, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if case.state == "cache":
        raise Declined("onnxruntime: its operator knows no cache.")
    (call,) = case.steps(seed, "cpu", dtype)
    before = case.initial_states(seed)
    if before is None:
        before = torch.zeros(len(case.lengths), case.HV, case.K, case.V)
    rows = [call[name].float().contiguous() for name in ("q", "k", "v", "g", "beta")]
    q, k, v, g, beta = rows
    o, state = gated_delta_net(q, k, v, g, beta, list(case.lengths), before)
    found = {"o": o.view(case.tokens, case.HV, case.V)}
    if case.state != "none":
        found["state"] = state.flatten(2)
    return found


def _attention(case: AttentionCase, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    steps = list(zip(case.lengths, case.cached, strict=True))
    if case.mask or case.cache_dtype or case.layout != "rows" or case.value_size != case.D:
        raise Declined(
            "onnxruntime: its operator has no masks, no fp8, no pages, and one head size."
        )
    if any(new > 1 and cached for new, cached in steps):
        raise Declined("onnxruntime: its operator takes one new token on a past, or none.")
    call = case.inputs(seed, "cpu", dtype)
    lengths, offsets = list(case.lengths), list(case.cached)
    new = [call[name].float().split(lengths) for name in "qkv"]
    size = (0, case.HK, case.D)
    if (cache := call.get("cache")) is None:
        past = [[torch.zeros(size)] * len(steps)] * 2
    else:
        count = sum(offsets)
        past = [memory[:count].float().split(offsets) for memory in (cache.k, cache.v)]
    found = []
    for n, (length, cached) in enumerate(steps):
        if not length:
            continue
        q, k, v = (rows[n].reshape(1, length, -1) for rows in new)
        total = torch.tensor([cached + length], dtype=torch.int32)
        o, *_ = onnx_run(
            "GroupQueryAttention",
            {
                "query": q,
                "key": k,
                "value": v,
                **{
                    name: rows[n].transpose(0, 1)[None].contiguous()
                    for name, rows in zip(("past_key", "past_value"), past, strict=True)
                },
                "seqlens_k": total - 1,
                "total_sequence_length": total,
                "cos_cache": None,
                "sin_cache": None,
                "position_ids": None,
                "attention_bias": None,
                "head_sink": call.get("sinks"),
            },
            outputs=3,
            num_heads=case.HQ,
            kv_num_heads=case.HK,
            local_window_size=-1 if case.window is None else case.window,
            softcap=0.0,
        )
        found.append(torch.as_tensor(o).view(length, case.HQ, case.D))
    if not found:
        raise Declined("onnxruntime: there is nothing to compute.")
    return {"o": torch.cat(found)}
