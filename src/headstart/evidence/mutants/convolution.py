"""Named mutants of the short convolution, of the gated norm and of the histories they keep."""

from __future__ import annotations

from functools import partial

from headstart.evidence.mutants.record import Mutant

_mutant = partial(Mutant, op="convolution", implementation="torch")
TORCH = "convolution/decomposed.py"
HISTORIES = "convolution/histories.py"
_kernel = partial(_mutant, implementation="triton", file="convolution/triton/convolve.py")

MUTANTS = (
    _mutant(
        name="convolution-last-tap-dropped",
        fault="The newest input does not enter.",
        file=TORCH,
        old="        for w in range(1, len(self.taps)):",
        new="        for w in range(1, len(self.taps) - 1):",
        checks=("convolution",),
    ),
    _mutant(
        name="convolution-taps-reversed",
        fault="Taps are taken newest first.",
        file=TORCH,
        old="        self.taps = call.weight.t().to(torch.float32).contiguous()",
        new="        self.taps = call.weight.t().flip(0).to(torch.float32).contiguous()",
        checks=("convolution",),
    ),
    _mutant(
        name="convolution-neighbour-seen",
        fault="The first rows of a sequence see the last ones of the sequence before.",
        pitfall=59,
        file=TORCH,
        old="    _heads(call, histories.before, rows, y)\n",
        new="    _heads(call, histories.before, rows, y) if call.schedule.N == 1 else None\n",
        checks=("convolution", "layer"),
    ),
    _mutant(
        name="convolution-history-not-restored",
        fault="A restored prefix starts without its history.",
        pitfall=61,
        file=HISTORIES,
        old="        empty = (wanted < 0) | (slot < 0)[:, None]",
        new="        empty = (wanted < self._starts.max()) | (slot < 0)[:, None]",
        checks=("layer",),
    ),
    _mutant(
        name="convolution-stale-history",
        fault="A new sequence in a used slot sees the inputs of the one before.",
        pitfall=64,
        file=HISTORIES,
        old="        empty = (wanted < 0) | (slot < 0)[:, None]",
        new="        empty = (slot < 0)[:, None]",
        checks=("convolution reused slots",),
    ),
    _mutant(
        name="convolution-ring-off-by-one",
        fault="The ring is written one row late.",
        pitfall=64,
        file=HISTORIES,
        old='        cache.tensors["history"][slot[n], position % room] = self.call.x[rows]',
        new='        cache.tensors["history"][slot[n], (position + 1) % room] = self.call.x[rows]',
        checks=("layer",),
    ),
    _mutant(
        name="convolution-history-of-first-inputs",
        fault="A snapshot keeps the inputs one token late.",
        file=HISTORIES,
        old="        since = (positions - self._starts[n])[:, None] + self._span",
        new="        since = (positions - self._starts[n])[:, None] + self._span - 1",
        checks=("convolution",),
    ),
    _mutant(
        name="convolution-draft-overwrites",
        fault="The ring has no room for the inputs before a draft.",
        pitfall=62,
        file="gated_delta_rule/cache.py",
        old="        return self.conv_width - 1 + self.draft_tokens",
        new="        return self.conv_width - 1",
        checks=("transcripts",),
    ),
    _mutant(
        name="convolution-norm-eps-outside",
        fault="The norm adds eps after the root.",
        file=TORCH,
        old="total.div_(D).add_(call.eps).rsqrt_()",
        new="total.div_(D).sqrt_().add_(call.eps).reciprocal_()",
        checks=("norm",),
    ),
    _mutant(
        name="convolution-norm-gate-before",
        fault="The norm's gate is not activated.",
        file=TORCH,
        old="            normed *= activate(other.copy_(gate[place]), third[:size].view(shape))",
        new="            normed *= other.copy_(gate[place])",
        checks=("norm",),
    ),
    _mutant(
        name="convolution-history-summed-wide",
        fault="Rows that see a history are summed in float64: their bits depend on the steps.",
        file="convolution/decomposed.py",
        old="            total += product\n",
        new="            wide = inputs.narrow(-2, w, count).double() * self.taps[w]\n"
        "            total.copy_(total + wide if inputs.dim() > 2 else total + product)\n",
        pitfall=19,
        checks=("bits of convolution splits",),
    ),
    _kernel(
        name="convolution-kernel-history-not-read",
        fault="The kernel's first rows see zeros in place of the history.",
        pitfall=61,
        old="        b_x = tl.where(since >= 0, b_x, tl.load(p_old, mask=m_c & seen, other=0.0))",
        new="        b_x = tl.where(since >= 0, b_x, 0.0)",
        checks=("convolution",),
    ),
    _kernel(
        name="convolution-kernel-stale-history",
        fault="A new sequence in a used slot sees the inputs of the one before.",
        pitfall=64,
        old="            seen = seen & (start + since >= 0)\n"
        "            at = (start + since) % old_rows",
        new="            at = (start + since + old_rows) % old_rows",
        checks=("convolution reused slots",),
    ),
    _kernel(
        name="convolution-kernel-ring-off-by-one",
        fault="The ring is read one row late.",
        pitfall=64,
        old="            at = (start + since) % old_rows",
        new="            at = (start + since + 1) % old_rows",
        checks=("convolution reused slots", "layer"),
    ),
    _kernel(
        name="convolution-kernel-present-ignored",
        fault="A slot that holds another sequence's history is read.",
        pitfall=64,
        old="        readable = readable & (tl.load(present + n, mask=live, other=0) != 0)\n",
        new="        readable = readable & live\n",
        checks=("convolution pool",),
    ),
    _kernel(
        name="convolution-kernel-snapshot-late",
        fault="A snapshot keeps the inputs one token late.",
        old="        there = position - (WIDTH - 1 - w)",
        new="        there = position - (WIDTH - 2 - w)",
        checks=("convolution",),
    ),
    _kernel(
        name="convolution-kernel-rows-of-nobody",
        fault="Rows past the last sequence stay as they are.",
        pitfall=8,
        old="        for t in range(tl.minimum(rows, tokens - begin)):",
        new="        for t in range(0):",
        checks=("convolution under a capacity",),
    ),
    _kernel(
        name="convolution-kernel-last-tap-dropped",
        fault="The newest input does not enter.",
        old="                    for w in tl.static_range(1, WIDTH):",
        new="                    for w in tl.static_range(1, WIDTH - 1):",
        checks=("convolution",),
    ),
    _mutant(
        name="convolution-kernel-norm-mean-of-block",
        fault="The norm divides by the block's size.",
        implementation="triton",
        file="convolution/triton/norm.py",
        old="    mean = tl.sum(b_x * b_x, axis=1) / size",
        new="    mean = tl.sum(b_x * b_x, axis=1) / BD",
        checks=("norm",),
    ),
    _kernel(
        name="convolution-kernel-norm-gate-before",
        fault="The norm's gate is not activated.",
        file="convolution/triton/norm.py",
        old="        b_active = silu(b_gate)",
        new="        b_active = b_gate",
        checks=("norm",),
    ),
)
"""Each with the check that reveals it, the cheapest first."""
