"""Named mutants of softmax extend attention's Triton kernels, which run in the interpreter too."""

from __future__ import annotations

from functools import partial

from headstart.evidence.mutants.record import Mutant

_mutant = partial(Mutant, op="extend_attention", implementation="triton")
SOFTMAX = "extend_attention/triton/softmax.py"
SWEEP = "extend_attention/triton/sweep.py"
KEYS = "extend_attention/triton/keys.py"
ROWS = "extend_attention/triton/rows.py"
EXTEND = "extend_attention/triton/extend.py"
UNIFIED = "extend_attention/triton/unified.py"
CALL = "extend_attention/triton/call.py"
MERGE = "extend_attention/triton/merge.py"

MUTANTS = (
    _mutant(
        name="attention-kernel-max-guard-removed",
        fault="A tile in which a row sees nothing gives exp2(-inf - -inf).",
        pitfall=29,
        file=SOFTMAX,
        old="    return tl.where(m == NOTHING, 0.0, m)",
        new="    return m",
        checks=("attention window",),
    ),
    _mutant(
        name="attention-kernel-sink-doubled",
        fault="The sink enters twice.",
        pitfall=33,
        file=SOFTMAX,
        old="    total = tl.fma(l, share, tl.exp(sink - top_safe))",
        new="    total = tl.fma(l, share, 2.0 * tl.exp(sink - top_safe))",
        checks=("attention",),
    ),
    _mutant(
        name="attention-kernel-no-keys",
        fault="A row that sees nothing is 0 / 0.",
        pitfall=30,
        file=SOFTMAX,
        old="    safe = tl.where(seen, total, 1.0)\n    return tl.where(seen, share / safe, 0.0)",
        new="    safe = tl.where(seen, total, 1.0)\n    return share / total",
        checks=("attention",),
    ),
    _mutant(
        name="attention-kernel-lse-base-2",
        fault="The LSE is in base 2.",
        pitfall=35,
        file=SOFTMAX,
        old="LN2 = tl.constexpr(0.6931471805599453)",
        new="LN2 = tl.constexpr(1.0)",
        checks=("attention trimmed prefix",),
    ),
    _mutant(
        name="attention-kernel-window-high",
        fault="A window of W shows W + 1 keys.",
        pitfall=32,
        file=SWEEP,
        old="        m_seen = m_seen & (o_c > (o_own - base - window)[:, None])",
        new="        m_seen = m_seen & (o_c >= (o_own - base - window)[:, None])",
        checks=("attention after a gap",),
    ),
    _mutant(
        name="attention-kernel-window-floor-late",
        fault="The first key that a tile of rows visits is that of its last row.",
        pitfall=27,
        file=SWEEP,
        old="        lower = tl.maximum(first - window + 1 - start, 0)",
        new="        lower = tl.maximum(last - window + 1 - start, 0)",
        checks=("attention window",),
    ),
    _mutant(
        name="attention-kernel-looks-ahead",
        fault="A row sees the key behind its own.",
        file=SWEEP,
        old="        upper = tl.minimum(o_own - base, upper)[:, None]",
        new="        upper = tl.minimum(o_own - base + 1, upper)[:, None]",
        checks=("attention trimmed prefix",),
    ),
    _mutant(
        name="attention-kernel-softcap-dropped",
        fault="Softcap only divides.",
        pitfall=51,
        file=SWEEP,
        old="        b_s = tanh(b_s * column(inner))",
        new="        b_s = b_s * column(inner)",
        checks=("attention softcap",),
    ),
    _mutant(
        name="attention-kernel-causal-end-kept-under-mask",
        fault="The causal end stays although a custom mask looks ahead.",
        pitfall=28,
        file=EXTEND,
        old="    causal: tl.constexpr = CAUSAL and not MASKED",
        new="    causal: tl.constexpr = CAUSAL",
        checks=("attention masked",),
    ),
    _mutant(
        name="attention-kernel-fp8-scale-of-values",
        fault="Keys are scaled by the scale of values.",
        pitfall=52,
        file=EXTEND,
        old="            b_k_scale = read_scale(k_scale, k_number, key_head * k_scale_head)",
        new="            b_k_scale = read_scale(v_scale, v_number, key_head * v_scale_head)",
        checks=("attention fp8",),
    ),
    _mutant(
        name="attention-kernel-page-table-ignored",
        fault="Pages are read in the order of memory.",
        pitfall=38,
        file=KEYS,
        old="read_table(places + where + o_key.to(tl.uint32) // PAGE, m_key)",
        new="(o_key // PAGE) if m_key is None else tl.where(m_key, o_key // PAGE, 0)",
        checks=("attention pages",),
    ),
    _mutant(
        name="attention-kernel-slots-of-another",
        fault="Slots of a sequence are looked up at the start of the list.",
        pitfall=37,
        file=KEYS,
        old="read_table(places + where + o_key, m_key)",
        new="read_table(places + o_key, m_key)",
        checks=("attention slots",),
    ),
    _mutant(
        name="attention-kernel-list-as-run",
        fault="Slots of a list are copied as if they were consecutive.",
        pitfall=37,
        file=CALL,
        old="    if cache.k.dtype != call.q.dtype or isinstance(plan.slots, Listed):",
        new="    if cache.k.dtype != call.q.dtype:",
        checks=("attention slots of whole tiles",),
    ),
    _mutant(
        name="attention-kernel-straddling-tile-dropped",
        fault="A reproducible tile that has prefix and new keys is left out.",
        file=UNIFIED,
        old="tl.where(side == 1, old_end, new_end)",
        new="tl.where(side == 1, new_begin, new_end)",
        checks=("reproducible attention",),
    ),
    _mutant(
        name="attention-kernel-last-block-alone",
        fault="Blocks before a reproducible row's last one are dropped.",
        file=UNIFIED,
        old="acc, m, l = join_parked(place, acc, m, l)",
        new="pass",
        # Behind a gap, where no device cuts a tile into pieces that take a block each.
        checks=("reproducible across a block's end",),
    ),
    _mutant(
        name="attention-kernel-cached-new-tiles-dropped",
        fault="Whole reproducible tiles of new keys in the cache are left out under a mask.",
        file=UNIFIED,
        old='if NEW == "cached":',
        new='if NEW == "never":',
        checks=("reproducible pages, masked",),
    ),
    _mutant(
        name="attention-kernel-head-ratio",
        fault="All query heads read the first key head.",
        pitfall=41,
        file=ROWS,
        old="    return block // blocks, (block % blocks) * PACK",
        new="    return block * 0, (block % blocks) * PACK",
        checks=("attention trimmed prefix",),
    ),
    _mutant(
        name="attention-kernel-spare-tile-written",
        fault="A tile that a capacity leaves empty zeroes the last row.",
        file=ROWS,
        old="    elif n < 0:\n        length = first\n",
        new="",
        checks=("attention updated slots",),
    ),
    _mutant(
        name="attention-kernel-merge-drops-sink",
        fault="A merge counts no sink.",
        pitfall=33,
        file=MERGE,
        old="        total_share = tl.exp(b_sink - safe)",
        new="        total_share = 0.0 * b_sink",
        checks=("attention",),
    ),
    _mutant(
        name="attention-kernel-merge-averages",
        fault="A merge weighs all parts alike.",
        pitfall=34,
        file=MERGE,
        old="        acc = tl.fma(b_o, share[:, None], acc)",
        new="        acc = b_o + acc",
        checks=("attention no sinks",),
    ),
)
"""Each with the check that reveals it, the cheapest first."""
