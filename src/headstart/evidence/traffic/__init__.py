"""Traffic: a trace of requests replayed against a prefix cache.

As bookkeeping (what could be hit), on a model (are hits cold prefills, and how much sooner), and as
workloads of the operations (what the hits are worth on a device).
"""
