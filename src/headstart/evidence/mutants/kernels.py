"""Named mutants of the gated delta rule's Triton kernels.

In the interpreter they run in float32; those that only hardware shows wait for a device.
"""

from __future__ import annotations

from functools import partial

from headstart.evidence.mutants.record import Mutant

_mutant = partial(Mutant, op="gated_delta_rule", implementation="triton")
SCAN = "gated_delta_rule/triton/scan.py"
PREPARE = "gated_delta_rule/passes/prepare.py"
DECAYS = "gated_delta_rule/passes/decays.py"
INVERSE = "gated_delta_rule/passes/inverse.py"
CHANNEL = "gated_delta_rule/passes/channel.py"
GATES = "gated_delta_rule/passes/gates.py"
TABLE = "gated_delta_rule/chunk_table.py"
CUTTING = "gated_delta_rule/cutting.py"
JOIN = "gated_delta_rule/passes/join.py"

MUTANTS = (
    _mutant(
        name="kernel-carry-scaled",
        fault="The state is scaled by 0.99 from span to span.",
        file=SCAN,
        old="        store_state(S, kept, ck, cv, K, V, V, 1)",
        new="        store_state(S * 0.99, kept, ck, cv, K, V, V, 1)",
        checks=("rule many spans",),
    ),
    _mutant(
        name="kernel-carry-of-another",
        fault="A piece reads the state of another sequence under way.",
        file=SCAN,
        old="            carry + (before * HV + head)",
        new="            carry + ((1 - before) * HV + head)",
        checks=("rule many spans",),
    ),
    _mutant(
        name="kernel-piece-begins-anew",
        fault="A piece starts from the sequence's own state, not where the piece before it ended.",
        file=CUTTING,
        old="            source = rows.pop(n, OPENS)\n",
        new="            source = min(rows.pop(n, OPENS), OPENS)\n",
        checks=("rule many spans",),
    ),
    _mutant(
        name="kernel-piece-of-nothing-left-out",
        fault="A sequence without chunks has no piece: nobody hands its state on.",
        file=CUTTING,
        old="    spans[:1] = [(spans[0] if spans else []) + empty]",
        new="    spans[:1] = [spans[0] if spans else []]",
        checks=("rule",),
    ),
    _mutant(
        name="kernel-segment-map-dropped",
        fault="A segment begins with what the one before adds alone, not with what it passes on.",
        file=JOIN,
        old="            after = tl.dot(L, before, after, input_precision=PRECISION)\n",
        new="",
        checks=("rule segments",),
    ),
    _mutant(
        name="kernel-segment-addend-dropped",
        fault="A segment begins with what the one before passes on alone, not with what it adds.",
        file=JOIN,
        old="        after = tl.load(own + square, mask=there, other=0.0)\n",
        new="        after = tl.zeros(S.shape, tl.float32)\n",
        checks=("rule segments",),
    ),
    _mutant(
        name="kernel-segment-begins-anew",
        fault="What a segment adds is counted from the sequence's state at the opening.",
        file=CUTTING,
        old="source if i == 0 else ZEROS, state + i))",
        new="source, state + i))",
        checks=("rule segments",),
    ),
    _mutant(
        name="kernel-maps-take-values",
        fault="What a segment does to the identity holds what its values add.",
        file=SCAN,
        old="            if before == IDENTITY:\n                values = tl.zeros",
        new="            if before == OPENS:\n                values = tl.zeros",
        checks=("rule segments",),
    ),
    _mutant(
        name="kernel-last-decay-dropped",
        fault="The decay of a chunk's last token does not reach the state.",
        file=SCAN,
        old="        whole = tl.load(from_start + tile * 64 + 63)",
        new="        whole = tl.load(from_start + tile * 64 + 62)",
        checks=("rule mild decays",),
    ),
    _mutant(
        name="kernel-state-rounded",
        fault="The state is kept in bfloat16.",
        pitfall=24,
        file=SCAN,
        old="        S = tl.dot(update.to(dtype), kk, S * whole, input_precision=PRECISION)\n",
        new="        S = tl.dot(update.to(dtype), kk, S * whole, input_precision=PRECISION)\n"
        "        S = S.to(tl.float16).to(tl.float32)\n",
        checks=("rule",),
    ),
    _mutant(
        name="kernel-stale-slot",
        fault="A new sequence starts from whatever its slot held.",
        pitfall=64,
        file=SCAN,
        old="            there = there & (start > 0) & (stands > 0)\n",
        new="",
        checks=("rule cache",),
    ),
    _mutant(
        name="kernel-head-ratio",
        fault="Value head j reads key head j mod H.",
        file=PREPARE,
        old="    key_head = first_head // (HV // H)",
        new="    key_head = first_head % H",
        checks=("rule",),
    ),
    _mutant(
        name="kernel-neighbour-rows-read",
        fault="Rows of the next sequence are read as this one's.",
        pitfall=8,
        file=PREPARE,
        old="    new = (at >= start) & (at < end)\n",
        new="    new = at >= start\n",
        checks=("rule spoiled neighbours",),
    ),
    _mutant(
        name="kernel-foreign-keys-kept",
        fault="The first row of k of the next sequence is not masked: its NaN meets zeros.",
        pitfall=8,
        file=SCAN,
        old="                k + source[:, None] * k_token + key_head * k_head + ck[None, :],\n"
        "                mask=new[:, None] & in_k,",
        new="                k + source[:, None] * k_token + key_head * k_head + ck[None, :],\n"
        "                mask=((at >= start) & (at <= end))[:, None] & in_k,",
        checks=("rule spoiled neighbours",),
    ),
    _mutant(
        name="kernel-neighbour-rows-written",
        fault="Rows of the sequence before are written by this one's first chunk.",
        pitfall=8,
        file=SCAN,
        old="        at = low + rows\n        new = (at >= start) & (at < end)\n        source",
        new="        at = low + rows\n        new = at < end\n        source",
        checks=("rule cache",),
    ),
    _mutant(
        name="kernel-forgetting-lost",
        fault="A decay of -inf is a step of -4 in powers of two.",
        pitfall=2,
        file=DECAYS,
        old="FAR = tl.constexpr(256.0)",
        new="FAR = tl.constexpr(4.0)",
        checks=("rule late forgetting", "rule hard decays"),
    ),
    _mutant(
        name="kernel-one-word-sums",
        fault="Running sums of decays are kept in one float32 word.",
        pitfall=1,
        file=DECAYS,
        old="    rest = (total - high.to(tl.float64)).to(tl.float32)",
        new="    rest = (total - total).to(tl.float32)",
        checks=("rule hard decays",),
    ),
    _mutant(
        name="kernel-tail-mask-dropped",
        fault="Rows that hold no token decay the state as a projection of 0 does.",
        pitfall=6,
        file=DECAYS,
        old="        decay = tl.where(new, log_decay(decay, rate, bias, lower_bound, GATE), 0.0)",
        new="        decay = log_decay(decay, rate, bias, lower_bound, GATE)",
        checks=("rule raw gates",),
    ),
    _mutant(
        name="kernel-beta-dropped",
        fault="The update is not weighed by beta.",
        file=SCAN,
        old="x * inside[None, :]) * b[None, :]",
        new="x * inside[None, :])",
        checks=("rule",),
    ),
    _mutant(
        name="kernel-start-decay-dropped",
        fault="What a row reads of the state before its chunk is not decayed.",
        file=SCAN,
        old="- x * inside[None, :]) * b",
        new="- x) * b",
        checks=("rule",),
    ),
    _mutant(
        name="kernel-own-row-unseen",
        fault="An output does not see its own token.",
        file=PREPARE,
        old="tl.where((i >= j) & kept[None, :]",
        new="tl.where((i > j) & kept[None, :]",
        checks=("rule",),
    ),
    _mutant(
        name="kernel-channel-tail-decay-dropped",
        fault="With decays per channel, those of a tail are not read.",
        file=CHANNEL,
        old="            decay = tl.where(held_rows, kept_decay, decay)\n",
        new="",
        checks=("channels cache",),
    ),
    _mutant(
        name="kernel-channel-level-missing",
        fault="With decays per channel, halves of a chunk do not see each other.",
        file=CHANNEL,
        old="        for level in tl.range(0, 6, num_stages=1):",
        new="        for level in tl.range(0, 5, num_stages=1):",
        checks=("channels",),
    ),
    _mutant(
        name="kernel-channel-last-decay-dropped",
        fault="With decays per channel, that of a chunk's last token does not reach the state.",
        file=CHANNEL,
        old="        total = tl.sum(tl.where(i == 63, reach, 0.0), 0)",
        new="        total = tl.sum(tl.where(i == 62, reach, 0.0), 0)",
        checks=("channels mild decays",),
    ),
    _mutant(
        name="kernel-tail-row-missing",
        fault="The first row of a tail is not read.",
        file=PREPARE,
        old="        old = held & (at >= stands) & (at < start)",
        new="        old = held & (at > stands) & (at < start)",
        checks=("rule cache",),
    ),
    _mutant(
        name="kernel-drafts-folded-early",
        fault="A step with drafts folds the chunk that they complete.",
        pitfall=62,
        file=TABLE,
        old="        fold = opening if draft else end // CHUNK",
        new="        fold = end // CHUNK",
        checks=("rule drafts",),
    ),
    _mutant(
        name="kernel-snapshot-one-late",
        fault="A snapshot holds the state one chunk late.",
        file=TABLE,
        old="after[n].get((c + 1) * CHUNK, -1)",
        new="after[n].get(c * CHUNK, -1)",
        checks=("rule snapshots",),
    ),
    _mutant(
        name="kernel-inverse-level-missing",
        fault="The inverse leaves out the blocks between halves of a chunk.",
        file=INVERSE,
        old="    for level in tl.static_range(4, 6):",
        new="    for level in tl.static_range(4, 5):",
        checks=("rule equal keys",),
    ),
    _mutant(
        name="kernel-softplus-overflows",
        fault="softplus is log(1 + exp(x)) as written: infinite above 88.",
        pitfall=3,
        file=GATES,
        old="    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))",
        new="    return tl.log(1.0 + tl.exp(x))",
        checks=("rule overflowing gates",),
    ),
    _mutant(
        name="kernel-offsets-of-32-bits",
        fault="Slots multiply their stride in 32 bits.",
        pitfall=10,
        file=SCAN,
        old="            slot = tl.load(read_slots + n).to(tl.int64)",
        new="            slot = tl.load(read_slots + n).to(tl.int32)",
        checks=("rule far slot",),
        device_only="the interpreter's addresses are Python's integers, which do not overflow",
    ),
    _mutant(
        name="kernel-fused-arithmetic",
        fault="The compiler may contract a product and a sum: bits depend on the path.",
        pitfall=19,
        file="gated_delta_rule/passes/launch.py",
        old="enable_fp_fusion=False",
        new="enable_fp_fusion=True",
        # On an H200 all paths contract alike, so no bit says whether the compiler may.
        checks=("rule contraction", "rule cache contraction"),
    ),
    _mutant(
        name="kernel-keys-not-rounded",
        fault="Normalised keys keep float32's sums in a tail of another row: bits differ.",
        pitfall=19,
        file=PREPARE,
        old="        x = (x.to(tl.float32) * norms[:, None]).to(x.dtype)",
        new="        x = (x.to(tl.float32) * norms[:, None] * (1 + 0.01 * CACHED)).to(x.dtype)",
        checks=("bits of plain normalised", "layer"),
    ),
)  # fmt: skip
"""Each with the check that reveals it, the cheapest first."""
