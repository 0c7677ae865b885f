"""headstart in transformers models: Qwen3-Next, Qwen3.5 and gpt-oss.

`enable(model)` gives the layers of one model instance to headstart and `disable(model)` gives them
back; nothing is patched at import and no other instance changes. `HybridCache` is a cache whose
prefix hits equal a cold prefill bit for bit at the level of operations; `PrefixCache` keeps what
requests have in common and gives each such a cache.

>>> import torch
>>> from transformers import GptOssConfig, GptOssForCausalLM
>>> from headstart.integrations.transformers import disable, enable, statistics
>>> config = GptOssConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=64, head_dim=64,
...     num_attention_heads=4, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
...     vocab_size=256, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
>>> model = enable(GptOssForCausalLM(config).eval())
>>> with torch.inference_mode():
...     logits = model(torch.arange(9)[None]).logits
>>> statistics(model).calls["sliding_attention", "extend_attention", "torch"]
1
>>> _ = disable(model)
"""

from headstart.integrations.transformers.adapters import (
    Statistics,
    disable,
    enable,
    observe,
    statistics,
)
from headstart.integrations.transformers.caches import HybridCache
from headstart.integrations.transformers.prefix_cache import PrefixCache, PrefixRequest

__all__ = [
    "HybridCache",
    "PrefixCache",
    "PrefixRequest",
    "Statistics",
    "disable",
    "enable",
    "observe",
    "statistics",
]
