"""Every public name of `headstart`, and the operations registered: what the package loads at first
use of any of them."""

from headstart.ops.convolution.api import causal_conv1d, rms_norm_gated
from headstart.ops.convolution.spec import Convolution
from headstart.ops.extend_attention.api import extend_attention, merge_attention, write_kv
from headstart.ops.extend_attention.kv_cache import KVCache
from headstart.ops.extend_attention.plan import ExtendPlan
from headstart.ops.gated_delta_rule.api import (
    ChunkMap,
    chunk_map,
    compose,
    gated_delta_rule,
    recurrent_gated_delta_rule,
)
from headstart.ops.gated_delta_rule.cache import DeltaCache
from headstart.ops.gated_delta_rule.gate import Gate
from headstart.ops.gated_delta_rule.pool import Pool
from headstart.ops.gated_delta_rule.schedule import Schedule
from headstart.ops.gated_delta_rule.spec import GatedDelta
from headstart.runtime.bundle_launch import CompileForbidden, programs
from headstart.runtime.bundle_warmup import warmup
from headstart.runtime.dispatch import Declined, explain, workspace_bytes
from headstart.runtime.workspace import Workspace

__all__ = [
    "ChunkMap",
    "CompileForbidden",
    "Convolution",
    "Declined",
    "DeltaCache",
    "ExtendPlan",
    "Gate",
    "GatedDelta",
    "KVCache",
    "Pool",
    "Schedule",
    "Workspace",
    "causal_conv1d",
    "chunk_map",
    "compose",
    "explain",
    "extend_attention",
    "gated_delta_rule",
    "merge_attention",
    "programs",
    "recurrent_gated_delta_rule",
    "rms_norm_gated",
    "warmup",
    "workspace_bytes",
    "write_kv",
]
