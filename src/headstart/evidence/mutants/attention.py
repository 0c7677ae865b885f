"""Named mutants of softmax extend attention's `torch` implementation, route by route."""

from __future__ import annotations

from functools import partial

from headstart.evidence.mutants.record import Mutant

_mutant = partial(Mutant, op="extend_attention", implementation="torch")
TILED = "extend_attention/tiled.py"
FIXED = "extend_attention/fixed_tiles.py"
FLASH = "extend_attention/flash.py"
BAND = "extend_attention/band.py"
MERGING = "extend_attention/merging.py"
TILES = "extend_attention/tiles.py"
KEYS = "extend_attention/keys.py"

MUTANTS = (
    _mutant(
        name="attention-window-low",
        fault="A window of W hides its oldest key.",
        pitfall=32,
        file=TILED,
        old="position > own - call.window)",
        new="position > own - call.window + 1)",
        checks=("attention softcap window",),
    ),
    _mutant(
        name="attention-window-high",
        fault="A window of W shows W + 1 keys (a radius for a count).",
        pitfall=32,
        file=FIXED,
        old="                target |= position <= own - call.window",
        new="                target |= position < own - call.window",
        checks=("reproducible window",),
    ),
    _mutant(
        name="attention-band-window-low",
        fault="The band's mask hides the oldest key of the window.",
        pitfall=32,
        file=BAND,
        old="(column < row) | (column >= row + window)",
        new="(column <= row) | (column >= row + window)",
        checks=("attention window",),
    ),
    _mutant(
        name="attention-band-looks-ahead",
        fault="The band's mask shows the key after the query.",
        file=BAND,
        old="(column < row) | (column >= row + window)",
        new="(column < row) | (column > row + window)",
        checks=("attention window",),
    ),
    _mutant(
        name="attention-start-tile-late",
        fault="The loop over key tiles starts one tile late.",
        pitfall=27,
        file=TILES,
        old="    return range((keys.start - anchor) // tile, (keys.stop - 1 - anchor) // tile + 1)",
        new="    return range((keys.start - anchor) // tile + 1, "
        "(keys.stop - 1 - anchor) // tile + 1)",
        checks=("reproducible window",),
    ),
    _mutant(
        name="attention-window-floor-late",
        fault="The first key that a block visits is that of its last row.",
        pitfall=27,
        file=TILES,
        old="    lower = start if window is None else max(start, first_query - window + 1)",
        new="    lower = start if window is None else max(start, last_query - window + 1)",
        checks=("attention softcap window",),
    ),
    _mutant(
        name="attention-causal-end-kept-under-mask",
        fault="The causal end stays although the causal rule is off.",
        pitfall=28,
        file=TILES,
        old="    upper = start + length if not causal else min(start + length, last_query + 1)\n"
        "    return range(lower, upper)",
        new="    upper = min(start + length, last_query + 1)\n    return range(lower, upper)",
        checks=("attention without the causal rule, window", "attention tree"),
    ),
    _mutant(
        name="attention-unmasked-too-early",
        fault="A tile counts as seen by all rows although the window cuts it.",
        file=TILES,
        old="    lower = start if window is None else max(start, last_query - window + 1)\n"
        "    upper",
        new="    lower = start if window is None else max(start, first_query - window + 1)\n"
        "    upper",
        checks=("reproducible window", "attention softcap window"),
    ),
    _mutant(
        name="attention-max-guard-removed",
        fault="A tile in which a row sees nothing gives exp(-inf - -inf).",
        pitfall=29,
        file=TILED,
        old="            safe = m_new.masked_fill(m_new == -torch.inf, 0.0)",
        new="            safe = m_new",
        checks=("attention softcap window",),
    ),
    _mutant(
        name="attention-empty-block-merged",
        fault="A block in which a row sees no key is merged as if it saw some.",
        pitfall=29,
        file=FIXED,
        old="            lse_block.masked_fill_(hidden.all(-1)[..., None], -torch.inf)",
        new="            lse_block.masked_fill_(hidden.all(-1)[..., None], 0.0)",
        checks=("reproducible window", "reproducible attention"),
    ),
    _mutant(
        name="attention-capped-max-guard-removed",
        fault="By hand too, a block without a key gives exp(-inf - -inf).",
        pitfall=29,
        file=FIXED,
        old="            m.masked_fill_(m == -torch.inf, 0.0)\n",
        new="",
        checks=("reproducible softcap window",),
    ),
    _mutant(
        name="attention-tail-mask-dropped",
        fault="Rows of a key tile that hold no key are seen.",
        pitfall=30,
        file=FIXED,
        old="        hidden = self.q.new_ones(tiles.stop - tiles.start, R, N, dtype=torch.bool)",
        new="        hidden = self.q.new_zeros(tiles.stop - tiles.start, R, N, dtype=torch.bool)",
        checks=("reproducible window", "attention without the causal rule"),
    ),
    _mutant(
        name="attention-keys-not-cleared",
        fault="A tile's rows without a key hold what the tile before left there, NaN at first.",
        pitfall=40,
        file=FIXED,
        old="        k[filled:], v[filled:] = 0, 0\n",
        new="",
        checks=("reproducible attention",),
    ),
    _mutant(
        name="attention-sink-dropped",
        fault="The fused route forgets the sink.",
        pitfall=33,
        file=FLASH,
        old="    if call.sinks is None:\n        out.copy_(o)",
        new="    if True:\n        out.copy_(o)",
        checks=("attention",),
    ),
    _mutant(
        name="attention-sink-doubled",
        fault="The tiled route adds the sink twice.",
        pitfall=33,
        file=TILED,
        old="            acc.mul_(share.unsqueeze(-1))\n",
        new="            acc.mul_(share.unsqueeze(-1))\n"
        "            lse, share = add_sinks(lse, call.sinks.view(HK, G, 1))\n"
        "            acc.mul_(share.unsqueeze(-1))\n",
        checks=("attention softcap",),
    ),
    _mutant(
        name="attention-sink-scaled",
        fault="The sink is scaled as scores are.",
        pitfall=33,
        file=FLASH,
        old="        lse, share = add_sinks(lse, call.sinks)",
        new="        lse, share = add_sinks(lse, call.sinks * call.scale)",
        checks=("attention",),
    ),
    _mutant(
        name="attention-sink-kills-rows",
        fault="The factor of a sink is formed without the guard of its maximum.",
        pitfall=31,
        file=MERGING,
        old="    joined, share, _ = log_add(lse, sinks.to(lse.dtype).expand_as(lse))\n"
        "    return joined, share",
        new="    sinks = sinks.to(lse.dtype).expand_as(lse)\n"
        "    joined = torch.log(torch.exp(lse) + torch.exp(sinks))\n"
        "    return joined, torch.exp(lse) / (torch.exp(lse) + torch.exp(sinks))",
        checks=("attention blind rows",),
    ),
    _mutant(
        name="attention-merge-ignores-one",
        fault="A merge keeps the LSE of its first part.",
        pitfall=34,
        file=MERGING,
        old="    lse.copy_(joined)\n",
        new="    lse.copy_(torch.maximum(lse, lse_part))\n",
        checks=("attention",),
    ),
    _mutant(
        name="attention-merge-of-nothing",
        fault="Merging two empty partials is NaN.",
        pitfall=34,
        file=MERGING,
        old="    safe = top.masked_fill(top == -torch.inf, 0.0)",
        new="    safe = top",
        checks=("attention", "reproducible window"),
    ),
    _mutant(
        name="attention-merge-averages",
        fault="A merge weighs both parts alike.",
        file=MERGING,
        old="    o.mul_(share.unsqueeze(-1)).add_(o_part * share_part.unsqueeze(-1))",
        new="    o.mul_(0.5).add_(o_part * 0.5)",
        checks=("attention",),
    ),
    _mutant(
        name="attention-lse-base-2",
        fault="The LSE is in base 2.",
        pitfall=35,
        file=TILED,
        old="            m.copy_(m_new)\n        empty = l == 0\n"
        "        m.add_(torch.log(l.masked_fill(empty, 1.0)))",
        new="            m.copy_(m_new)\n        empty = l == 0\n"
        "        m.add_(torch.log2(l.masked_fill(empty, 1.0)))",
        checks=("attention softcap",),
    ),
    _mutant(
        name="attention-queries-aligned-left",
        fault="New tokens count from 0 instead of from the end of their prefix.",
        pitfall=36,
        file="extend_attention/fixed_tiles.py",
        old="        own = own[:, None]  # positions of rows",
        new="        own = own[:, None] - self.call.plan.prefix[self.n]",
        checks=("reproducible attention",),
    ),
    _mutant(
        name="attention-page-table-ignored",
        fault="Pages are read in the order of memory.",
        pitfall=38,
        file="extend_attention/locate.py",
        old="        return self.table[n, begin // self.page_size : -(-end // self.page_size)]",
        new="        return torch.arange(begin // self.page_size, -(-end // self.page_size))",
        checks=("attention pages",),
    ),
    _mutant(
        name="attention-first-page-table-row",
        fault="Every sequence reads the pages of the first.",
        pitfall=38,
        file="extend_attention/locate.py",
        old="        return self.table[n, ",
        new="        return self.table[0, ",
        checks=("attention pages",),
    ),
    _mutant(
        name="attention-slots-of-another",
        fault="Slots of a sequence are looked up at the start of the list.",
        pitfall=37,
        file="extend_attention/locate.py",
        old="        return self.indices[self.indptr[n] + begin : self.indptr[n] + end]",
        new="        return self.indices[begin:end]",
        checks=("attention slots",),
    ),
    _mutant(
        name="attention-softcap-after-mask",
        fault="Softcap bends the -inf of the mask to -softcap.",
        pitfall=51,
        file=FIXED,
        old="            s.div_(cap).tanh_().mul_(cap)\n            if hidden is not None:\n"
        "                s.masked_fill_(hidden[pair // call.HQ], -torch.inf)\n",
        new="            if hidden is not None:\n"
        "                s.masked_fill_(hidden[pair // call.HQ], -torch.inf)\n"
        "            s.div_(cap).tanh_().mul_(cap)\n",
        checks=("reproducible softcap",),
    ),
    _mutant(
        name="attention-softcap-dropped",
        fault="Softcap only divides.",
        pitfall=51,
        file=TILED,
        old="                s.div_(call.softcap).tanh_().mul_(call.softcap)",
        new="                s.div_(call.softcap).mul_(call.softcap)",
        checks=("attention softcap",),
    ),
    _mutant(
        name="attention-scale-or-default",
        fault="A scale of 0 is taken for none.",
        pitfall=50,
        file="extend_attention/spec.py",
        old="    if scale is None:\n        return D**-0.5",
        new="    if not scale:\n        return D**-0.5",
        checks=("attention scale of 0",),
    ),
    _mutant(
        name="attention-head-ratio",
        fault="By hand, query head j reads key head j mod HK.",
        pitfall=41,
        file=FIXED,
        old="            head = pair % call.HQ // (call.HQ // call.HK)",
        new="            head = pair % call.HQ % call.HK",
        checks=("reproducible softcap",),
    ),
    _mutant(
        name="attention-fp8-scale-ignored",
        fault="Scales of a float8 cache read as ones.",
        pitfall=52,
        file=KEYS,
        old="    if scale is not None:",
        new="    if False:",
        checks=("attention fp8",),
    ),
    _mutant(
        name="attention-fp8-scale-of-keys",
        fault="Values are scaled by the scale of keys.",
        pitfall=52,
        file=KEYS,
        old="        _dequantise(v, v_out[rows], call.cache.v_scale if",
        new="        _dequantise(v, v_out[rows], call.cache.k_scale if",
        checks=("attention fp8",),
    ),
    _mutant(
        name="attention-slot-before-zero-written",
        fault="A row for slot -1 lands in the last slot.",
        file="extend_attention/decomposed.py",
        old="        slots, k, v = slots[kept], k[kept], v[kept]\n",
        new="",
        checks=("cache writes",),
    ),
    _mutant(
        name="attention-tail-keys-missing",
        fault="The last key of the prefix is not visited.",
        file=FLASH,
        old="    spans = [(lower, min(lower + SPAN, prefix), False)",
        new="    spans = [(lower, max(lower, min(lower + SPAN, prefix) - 1), False)",
        checks=("attention",),
    ),
    _mutant(
        name="attention-tiles-follow-the-step",
        fault="Key tiles are narrower in short steps: bits change with the chunking.",
        pitfall=48,
        file=FIXED,
        old="Tiling(R=8, N=512) if call.window is None",
        new="Tiling(R=8, N=512 if call.plan.T > 64 else 64) if call.window is None",
        checks=("bits of attention pages",),
    ),
    _mutant(
        name="attention-tiles-follow-the-heads",
        fault="Key tiles are narrower with few heads: bits change with the ranks.",
        pitfall=65,
        file=FIXED,
        old="Tiling(R=8, N=512) if call.window is None",
        new="Tiling(R=8, N=512 if call.HQ > 4 else 64) if call.window is None",
        checks=("bits of attention heads",),
    ),
    _mutant(
        name="attention-mask-transposed",
        fault="A custom mask is read column by column.",
        file="extend_attention/spec.py",
        old="        return rows.view(plan.lengths[n], plan.mask_columns(n)) != 0",
        new="        return rows.view(plan.mask_columns(n), plan.lengths[n]).T != 0",
        checks=("attention tree",),
    ),
)
"""Each with the check that reveals it, the cheapest first."""
