"""Softmax attention of vLLM's decoder layers by `headstart.extend_attention`."""

# pyright: reportMissingImports=false
# (vLLM has an environment of its own)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from headstart.integrations.vllm import paged


class HeadstartBackend(AttentionBackend):
    """The backend that `--attention-backend CUSTOM` names on a GPU."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's registry of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HeadstartAttention]:
        """What runs in each layer."""
        return HeadstartAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """What looks at each step."""
        return StepBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks join the denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows count keys, the query's own included."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """With VLLM_BATCH_INVARIANT=1 the bits of a row do not depend on its batch."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Steps are planned from the host's lengths."""
        return False


class HeadstartCpuBackend(HeadstartBackend):
    """The same in the place of vLLM's backend for CPUs, which takes no other name."""

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's registry of backends."""
        return "CPU_ATTN"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The layout of vLLM's own backend for CPUs."""
        return (KVCacheLayout.LBHNC,)


@dataclass
class StepMetadata(AttentionMetadata):
    """A step of the engine, for all layers of one KV cache group."""

    step: paged.PagedStep
    num_actual_tokens: int


class StepBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Makes the plan of a step, once for a KV cache group. No CUDA graphs: plans are host facts."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = kv_cache_spec.block_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StepMetadata:
        """The plan of one step. With drafts only the device knows lengths: they are read back."""
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(
                "headstart serves causal attention only; leave it out with HEADSTART_VLLM=delta"
            )
        requests, known = common.num_reqs, common.seq_lens_cpu_upper_bound
        if known is None or self.vllm_config.speculative_config is not None:
            known = common.seq_lens
        step = paged.PagedStep.of(
            common.query_start_loc_cpu[: requests + 1],
            known[:requests],
            common.block_table_tensor,
            self.page_size,
        )
        return StepMetadata(step, common.num_actual_tokens)


class HeadstartAttention(AttentionImpl[StepMetadata]):
    """The attention of one layer.

    Raises NotImplementedError at construction for what headstart does not serve.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        served = HeadstartBackend.supported_kv_cache_dtypes
        for name, ok, wanted, got in (
            ("alibi_slopes", alibi_slopes is None, "None", alibi_slopes),
            ("attn_type", attn_type == AttentionType.DECODER, "decoder attention", attn_type),
            ("kv_cache_dtype", kv_cache_dtype in served, f"one of {served}", kv_cache_dtype),
        ):
            if not ok:
                raise NotImplementedError(
                    f"{name}: headstart serves {wanted}, got {got}; leave its attention out with "
                    "HEADSTART_VLLM=delta"
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = logits_soft_cap or None
        self.sinks = sinks  # not loaded yet
        self.kind = "full_attention" if sliding_window is None else "sliding_attention"

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the new keys and values into the pages, before `forward`."""
        paged.write(self.kind, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill output [T, HQ, D] with the attention of query; no metadata: the engine warms up."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("headstart does not quantise its output")
        if attn_metadata is None:
            return output
        tokens = attn_metadata.num_actual_tokens
        attn_metadata.step.attend(
            self.kind,
            query[:tokens],
            kv_cache,
            output[:tokens],
            scale=self.scale,
            window=self.sliding_window,
            sinks=self.sinks,
            softcap=self.softcap,
            reproducible=envs.VLLM_BATCH_INVARIANT,
        )
        return output
