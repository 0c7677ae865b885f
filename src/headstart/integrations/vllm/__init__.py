"""headstart in vLLM 0.32: softmax attention and gated-delta-rule layers of a real engine.

vLLM finds `register` by itself (entry point `vllm.general_plugins`). Then softmax layers run
`extend_attention` on vLLM's pages, and the linear layers of Qwen3-Next and Qwen3.5 run
`causal_conv1d`, `gated_delta_rule` and `recurrent_gated_delta_rule` on its pools of states.

HEADSTART_VLLM names what headstart takes: `attention`, `delta`, `attention,delta` or `off`. Unset
means both on a CPU and nothing elsewhere, where no engine has been served yet.

>>> from headstart.integrations.vllm import statistics
>>> statistics().served["full_attention"]
0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.integrations.vllm.counting import Statistics

__all__ = ["register", "statistics"]


def register() -> None:
    """Hook headstart into vLLM, in the process that calls; a second call changes nothing.

    Raises RuntimeError, which stops the engine, where HEADSTART_VLLM or the version of vLLM is not
    one that headstart knows, or a hook does not take.
    """
    # Here and not above: vLLM swallows errors of importing a plugin, and would run without it.
    from headstart.integrations.vllm.hooks import take

    take()


def statistics() -> Statistics:
    """What has been served in this process, since it began or `.reset()`."""
    from headstart.integrations.vllm.counting import STATISTICS

    return STATISTICS
