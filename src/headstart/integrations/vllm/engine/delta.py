"""The gated-delta-rule layers of Qwen3-Next and Qwen3.5 in vLLM."""

# pyright: reportMissingImports=false
# (vLLM has an environment of its own)
from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import envs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from headstart.integrations.vllm.states import DeltaCore, DraftStep, PlainStep


@dataclass
class DeltaMetadata(GDNAttentionMetadata):
    """vLLM's own, and the same step as headstart computes it."""

    steps: list[PlainStep | DraftStep] = field(default_factory=list)


class DeltaBackend(GDNAttentionBackend):
    """vLLM's own, with another builder."""

    @staticmethod
    def get_builder_cls() -> type[DeltaBuilder]:
        """What looks at each step."""
        return DeltaBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """With VLLM_BATCH_INVARIANT=1 the bits of a row do not depend on its batch."""
        return True


class DeltaBuilder(GDNAttentionMetadataBuilder):
    """Adds schedules to vLLM's metadata, once a step. No CUDA graphs: schedules are host facts."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if envs.VLLM_BATCH_INVARIANT and self.use_spec_decode:
            raise NotImplementedError(
                "VLLM_BATCH_INVARIANT: headstart's linear layers keep no bits with drafts"
            )

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> DeltaMetadata:
        """The step as vLLM describes it, and as headstart does."""
        theirs = super().build(
            common_prefix_len,
            common_attn_metadata,
            num_accepted_tokens,
            num_decode_draft_tokens_cpu,
            fast_build,
        )
        if theirs.checkpoint is not None:
            raise NotImplementedError(
                "headstart keeps no checkpoints inside a prefill; leave its linear layers out with "
                "HEADSTART_VLLM=attention"
            )
        metadata = DeltaMetadata(**vars(theirs))
        common = common_attn_metadata
        lengths = torch.diff(common.query_start_loc_cpu[: common.num_reqs + 1]).tolist()
        masks = theirs.spec_sequence_masks_cpu
        drafted = [False] * len(lengths) if masks is None else masks.tolist()
        count = theirs.num_decodes + theirs.num_prefills
        if count:
            assert theirs.non_spec_state_indices_tensor is not None
            assert common.seq_lens_cpu_upper_bound is not None
            others = [not draft for draft in drafted]
            ends = common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()
            own = list(itertools.compress(lengths, others))[:count]
            ends = list(itertools.compress(ends, others))[:count]
            step = PlainStep.of(
                own,
                [end - length for end, length in zip(ends, own, strict=True)],
                theirs.num_decodes,
                theirs.non_spec_state_indices_tensor[:count],
                None if masks is None else theirs.non_spec_token_indx,
            )
            metadata.steps.append(step)
        if theirs.num_spec_decodes:
            assert theirs.spec_state_indices_tensor is not None
            assert theirs.num_accepted_tokens is not None
            step = DraftStep.of(
                list(itertools.compress(lengths, drafted)),
                theirs.spec_state_indices_tensor[: theirs.num_spec_decodes],
                theirs.num_accepted_tokens[: theirs.num_spec_decodes],
                theirs.spec_token_indx if count else None,
            )
            metadata.steps.append(step)
        return metadata


class HeadstartGatedDeltaNet(QwenGatedDeltaNetAttention):
    """vLLM's layer, whose convolution and rule are headstart's; projections and norm stay its own.

    Prefill, decode and drafts all run here, on the engine's own pools.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The path whose core is a method of the layer, on every platform, and no kernel around it.
        self._forward_method = self.forward_cuda
        self.enable_fused_gdn_spec_decode = False
        if is_conv_state_dim_first():
            raise NotImplementedError(
                "VLLM_SSM_CONV_STATE_LAYOUT: headstart serves SD, got DS; leave its linear layers "
                "out with HEADSTART_VLLM=attention"
            )

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """mixed_qkv [T, channels], b and a [T, HV]; fills core_attn_out [T, HV, V]."""
        by_layer = get_forward_context().attn_metadata
        if not isinstance(by_layer, dict):
            return  # the engine warms up
        metadata = by_layer[self.prefix]
        # vLLM packs the weight for its own kernels on some CPUs, and keeps it as it was.
        packed = self.conv1d.weight
        weight = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        core = DeltaCore(
            packed.squeeze(1) if weight is None else weight,
            self.conv1d.bias,
            self.A_log,
            self.dt_bias,
            self.activation,
            self.num_k_heads // self.tp_size,
            self.head_k_dim,
            self.head_v_dim,
            *self.kv_cache,
            reproducible=envs.VLLM_BATCH_INVARIANT,
        )
        core.run(metadata.steps, mixed_qkv, b, a, core_attn_out)
