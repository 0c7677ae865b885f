"""Prompts as a chat service saw them: new tokens on a cached prefix.

Source: one hour of conversations, 12,031 requests, of the Mooncake FAST'25 trace release
(kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0), replayed in order against an unbounded
cache of 512-token blocks. A request of n tokens hits its run of leading blocks seen before, at most
64 floor((n - 1) / 64) tokens; its new tokens are the rest. Requests that hit more than the first
block (the system prompt that all share) were kept: 4,658. From these, 24 were drawn with
replacement by Python's `random.Random(2024)`, each as `requests[int(rng.random() * 4658)]`.
"""

RESIDUAL_MIX = (
    # (new, prefix)
    (471, 1024),
    (541, 16384),
    (574, 14848),
    (156, 7168),
    (542, 5632),
    (7495, 8192),
    (671, 10240),
    (760, 8704),
    (14934, 1024),
    (461, 3584),
    (450, 1024),
    (22, 8896),
    (262, 13824),
    (716, 5120),
    (1551, 7680),
    (1375, 1024),
    (574, 7680),
    (596, 10752),
    (974, 1536),
    (747, 1536),
    (5885, 4608),
    (2152, 44032),
    (776, 1536),
    (504, 18432),
)

NEW = tuple(new for new, _ in RESIDUAL_MIX)
PREFIX = tuple(prefix for _, prefix in RESIDUAL_MIX)
