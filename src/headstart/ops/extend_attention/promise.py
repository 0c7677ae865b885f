"""Which calls can keep the promise of `reproducible`: those whose keys are runs of positions."""

from __future__ import annotations

from headstart.ops.extend_attention.spec import ExtendCall


def declines(call: ExtendCall) -> str | None:
    """Why no implementation can promise a row's bits for a call, or None."""
    plan, cache = call.plan, call.cache
    reads_both = plan.needs_cache and not plan.new_in_cache
    if reads_both and cache is not None and cache.k.dtype != call.q.dtype:
        return (
            "a cache of another dtype holds other values than the new keys have; reproducible "
            "needs the new keys in the cache too (new_in_cache=True)."
        )
    if plan.key_positions is not None and any(plan.prefix):
        return "reproducible reduces runs of consecutive positions; it takes no key_positions."
    for n in range(plan.N):
        if plan.prefix[n] and plan.key_start[n] + plan.prefix[n] > plan.query_start[n]:
            return "reproducible needs a prefix that ends before the first new token."
    return None
