"""Where headstart enters vLLM: a backend in its registry, and a layer in place of its own."""

# pyright: reportMissingImports=false
# (vLLM has an environment of its own)
from __future__ import annotations

import logging
import os

SUPPORTED = "0.32"
"""The minor version of vLLM whose interfaces these hooks were written and tested for."""
VARIABLE = "HEADSTART_VLLM"
PARTS = ("attention", "delta")
_ENGINE = "headstart.integrations.vllm.engine"
_LAYER = "QwenGatedDeltaNetAttention"

log = logging.getLogger("vllm.headstart")  # below vLLM's own, which has handlers


def take() -> None:
    """Hook in what HEADSTART_VLLM names; raises RuntimeError where that cannot be done."""
    import vllm
    from vllm.platforms import current_platform

    given = os.environ.get(VARIABLE)
    wanted = parts(given, on_cpu=current_platform.is_cpu())
    if not wanted:
        if given is None:
            log.warning(
                "headstart has served no engine on %s yet and takes nothing there unasked; "
                "%s=attention,delta asks for it",
                current_platform.device_name,
                VARIABLE,
            )
        return
    expect_version(vllm.__version__)
    if "attention" in wanted:
        _take_attention(current_platform.is_cpu())
    if "delta" in wanted:
        _take_delta()
    log.info("headstart serves %s in process %d", " and ".join(wanted), os.getpid())


def parts(given: str | None, *, on_cpu: bool) -> tuple[str, ...]:
    """What a value of HEADSTART_VLLM names.

    >>> parts(None, on_cpu=True), parts("delta", on_cpu=False), parts("off", on_cpu=True)
    (('attention', 'delta'), ('delta',), ())
    """
    if given is None:
        return PARTS if on_cpu else ()
    if given == "off":
        return ()
    names = [name.strip() for name in given.split(",")]
    if not set(names) <= set(PARTS):
        raise RuntimeError(f"{VARIABLE}: expected off, or {' and '.join(PARTS)}, got {given!r}")
    return tuple(part for part in PARTS if part in names)


def expect_version(version: str) -> None:
    """Raise RuntimeError for a version of vLLM whose interfaces may differ.

    >>> expect_version("0.32.1+cpu")
    """
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise RuntimeError(
            f"headstart serves vLLM {SUPPORTED}.x, got {version}; run without it by "
            f"{VARIABLE}=off, or leave headstart out of VLLM_PLUGINS"
        )


def _take_attention(on_cpu: bool) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # On a CPU vLLM takes one backend, whatever --attention-backend says.
    member = AttentionBackendEnum.CPU_ATTN if on_cpu else AttentionBackendEnum.CUSTOM
    name = "HeadstartCpuBackend" if on_cpu else "HeadstartBackend"
    place = f"{_ENGINE}.attention.{name}"
    if member.is_overridden() and member.get_path() != place:
        raise RuntimeError(
            f"vLLM's attention backend {member.name}: {member.get_path()} has taken it; run "
            f"without headstart's by {VARIABLE}=delta"
        )
    register_backend(member, place)
    member.get_class()  # a class that cannot be imported must be told here
    if not on_cpu:
        log.warning("headstart serves softmax layers only with --attention-backend CUSTOM")


def _take_delta() -> None:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    from headstart.integrations.vllm.engine.delta import HeadstartGatedDeltaNet

    there = op_registry_oot.get(_LAYER)
    if there not in (None, HeadstartGatedDeltaNet):
        raise RuntimeError(
            f"vLLM's layer {_LAYER}: {there.__module__} has taken it; run without headstart's by "
            f"{VARIABLE}=attention"
        )
    if there is None:
        PluggableLayer.register_oot(HeadstartGatedDeltaNet, name=_LAYER)
    member = MambaAttentionBackendEnum.GDN_ATTN
    register_backend(member, f"{_ENGINE}.delta.DeltaBackend", is_mamba=True)
    member.get_class()
