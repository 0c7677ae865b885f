"""Named mutants of the gated delta rule's Hopper kernels, which run on a device alone."""

from __future__ import annotations

from functools import partial

from headstart.evidence.mutants.record import Mutant

_mutant = partial(
    Mutant,
    op="gated_delta_rule",
    implementation="hopper",
    device_only="its kernels run on NVIDIA Hopper alone",
)
SCAN = "gated_delta_rule/hopper/scan.py"
PREPARE = "gated_delta_rule/hopper/prepare.py"
TILES = "gated_delta_rule/hopper/tiles.py"
RESULTS = "gated_delta_rule/hopper/results.py"

MUTANTS = (
    _mutant(
        name="hopper-carry-scaled",
        fault="The state is scaled by 0.99 from span to span.",
        file=SCAN,
        old="        store_state(S, kept, ck, cv, V, 1)",
        new="        store_state(S * 0.99, kept, ck, cv, V, 1)",
        checks=("rule many spans of 128",),
    ),
    _mutant(
        name="hopper-last-decay-dropped",
        fault="The decay of a chunk's last token does not reach the state.",
        file=SCAN,
        old="gl.where(rows == 63, inside, 0.0)",
        new="gl.where(rows == 62, inside, 0.0)",
        checks=("rule of 128",),
    ),
    _mutant(
        name="hopper-beta-dropped",
        fault="The update is not weighed by beta.",
        file=SCAN,
        old="x * inside[None, :]) * strength[None, :]",
        new="x * inside[None, :])",
        checks=("rule of 128",),
    ),
    _mutant(
        name="hopper-start-decay-dropped",
        fault="What a row reads of the state before its chunk is not decayed.",
        file=SCAN,
        old="- x * inside[None, :]) * strength",
        new="- x) * strength",
        checks=("rule of 128",),
    ),
    _mutant(
        name="hopper-scale-dropped",
        fault="What queries read of the state before their chunk is not scaled.",
        file=SCAN,
        old="        y = y * (inside * scale)[None, :]",
        new="        y = y * inside[None, :]",
        checks=("rule of 128",),
    ),
    _mutant(
        name="hopper-neighbour-rows-taken",
        fault="Rows of the next sequence take part in a chunk.",
        pitfall=8,
        file=SCAN,
        old="            r = gl.where((taking_part != 0.0)[None, :], r, 0.0)\n",
        new="            r = gl.where((taking_part > -1.0)[None, :], r, 0.0)\n",
        checks=("rule of 128",),
    ),
    _mutant(
        name="hopper-neighbour-rows-written",
        fault="A chunk's rows past its sequence are written over the next one's.",
        pitfall=8,
        file=RESULTS,
        old="            mask=((rows >= lower) & (rows < upper))[:, None],",
        new="            mask=(rows >= lower)[:, None],",
        checks=("rule of 128",),
    ),
    _mutant(
        name="hopper-stale-slot",
        fault="A new sequence starts from whatever its slot held.",
        pitfall=64,
        file=SCAN,
        old="            there = there & (start > 0) & (stands > 0)\n",
        new="            there = there & (stands >= 0)\n",
        checks=("rule cache of 128",),
    ),
    _mutant(
        name="hopper-fold-one-early",
        fault="A slot is given the state one chunk before its tail begins.",
        file=SCAN,
        old="            if low + 64 == fold:",
        new="            if low + 128 == fold:",
        checks=("rule cache of 128",),
    ),
    _mutant(
        name="hopper-tiles-read-early",
        fault="The scan does not wait for tiles that are prepared beside it.",
        file=TILES,
        old="        missing = there & (found < READY)\n        if LEAD",
        new="        missing = there & (found < 0)\n        if LEAD",
        checks=("rule beside of 128",),
    ),
    _mutant(
        name="hopper-inverse-level-missing",
        fault="The inverse leaves out the blocks between halves of 16 rows.",
        file=PREPARE,
        old="    for level in gl.static_range(1, 4):",
        new="    for level in gl.static_range(1, 3):",
        checks=("rule equal keys of 128",),
    ),
    _mutant(
        name="hopper-inverse-block-missing",
        fault="The inverse leaves out what rows 16 to 31 hand on to the first 16 columns.",
        file=PREPARE,
        old="    r0 = mma_v2(left, a_blocks.index(0).slice(16, 16).load(RIGHT), r0)\n",
        new="",
        checks=("rule equal keys of 128",),
    ),
    _mutant(
        name="hopper-own-row-unseen",
        fault="An output does not see its own token.",
        file=PREPARE,
        old="gl.where((later >= 0) & kept_j",
        new="gl.where((later > 0) & kept_j",
        checks=("rule of 128",),
    ),
    _mutant(
        name="hopper-head-ratio",
        fault="Value head j reads key head j mod H where a chunk is copied whole.",
        file=PREPARE,
        old="    key_head = head // (HV // H)\n    n = gl.load(items",
        new="    key_head = head % H\n    n = gl.load(items",
        checks=("rule of 128",),
    ),
    _mutant(
        name="hopper-neighbour-rows-read",
        fault="Rows of the next sequence are read as this one's.",
        pitfall=8,
        file=PREPARE,
        old="    new = ((at >= start) & (at < end))[:, None]\n    first_row",
        new="    new = (at >= start)[:, None]\n    first_row",
        checks=("rule of 128", "rule cache of 128"),
    ),
    _mutant(
        name="hopper-tail-row-missing",
        fault="The first row of a tail is not read.",
        file=PREPARE,
        old="        old = (held & (at >= stands) & (at < start))[:, None]\n        kept = tail_k",
        new="        old = (held & (at > stands) & (at < start))[:, None]\n        kept = tail_k",
        checks=("rule cache of 128",),
    ),
)  # fmt: skip
"""Each with the check that reveals it, the cheapest first."""
