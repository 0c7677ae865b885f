"""Named mutants of the `reference` implementation, which would judge itself.

Neighbours judge it: onnxruntime, transformers, torch's own attention, and the chunk form.
"""

from __future__ import annotations

from functools import partial

from headstart.evidence.mutants.record import Mutant

_mutant = partial(Mutant, implementation="reference")
_rule = partial(
    _mutant, op="gated_delta_rule", file="gated_delta_rule/reference.py",
    checks=("rule beside onnxruntime", "rule beside the chunk form", "rule beside transformers"),
)  # fmt: skip
_attention = partial(
    _mutant, op="extend_attention", file="extend_attention/reference.py",
    checks=("attention beside onnxruntime", "attention window beside onnxruntime",
            "attention beside sdpa"),
)  # fmt: skip

MUTANTS = (
    _rule(
        name="reference-decay-after-update",
        fault="The decay comes after the update.",
        old="        u = beta[:, None] * (v - (state * k[:, :, None]).sum(1))\n"
        "        state = state + k[:, :, None] * u[:, None, :]\n",
        new="        u = beta[:, None] * (v - (state * k[:, :, None]).sum(1))\n"
        "        state = state + k[:, :, None] * u[:, None, :] * decay.exp().reshape(HV, -1, 1)\n",
    ),
    _rule(
        name="reference-beta-dropped",
        fault="The update is not weighed by beta.",
        old="        u = beta[:, None] * (v",
        new="        u = 1.0 * (v",
    ),
    _rule(
        name="reference-head-ratio",
        fault="Value head j reads key head j mod H.",
        old="    q, k = (x.repeat_interleave(HV // H, 0) for x in (q, k))",
        new="    q, k = (x.repeat(HV // H, 1) for x in (q, k))",
    ),
    _rule(
        name="reference-old-state-dropped",
        fault="The initial state is not read.",
        old="        state.copy_(old)",
        new="        state.copy_(0 * old)",
    ),
    _attention(
        name="reference-window-high",
        fault="A window of W shows W + 1 keys.",
        pitfall=32,
        old="        visible &= position > own - call.window",
        new="        visible &= position >= own - call.window",
    ),
    _attention(
        name="reference-sink-capped",
        fault="The sink gives a value too.",
        pitfall=33,
        old="    total = weights.sum()",
        new="    total = weights[: v.shape[0]].sum()",
    ),
    _attention(
        name="reference-causal-late",
        fault="A row does not see its own key.",
        old="        visible &= position <= own",
        new="        visible &= (position < own) | (position == 0)",
    ),
    _attention(
        name="reference-value-head",
        fault="Values are those of the first key head.",
        pitfall=41,
        old="v_seen[:, at], call.scale",
        new="v_seen[:, 0], call.scale",
    ),
)
"""Each judged by neighbours alone."""
