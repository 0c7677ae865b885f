"""Two runs over the same prompt: logits, top-1 and perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from headstart.evidence.prefill.runs import Run

BLOCK = 512
"""Rows whose logits are held at once."""


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart.

    margin: top-1 must agree wherever the first two logits are further apart than this.
    excluded: largest share of rows that are no further apart. perplexity: relative difference.
    """

    margin: float
    excluded: float
    perplexity: float


SINGLE = Tolerance(margin=1e-4, excluded=1e-3, perplexity=1e-4)
"""Of runs in float32."""
HALF = Tolerance(margin=0.5, excluded=0.5, perplexity=2e-3)
"""Of runs in 16 bits."""


@dataclass(frozen=True)
class Comparison:
    """What a run's logits have in common with those of another one.

    rows: logits compared (one a token).
    difference: largest |logit - logit|.
    differing_bits: bits that differ in all logits.
    agreeing, excluded: rows with the same top-1, and rows excluded as near-ties (by the tolerance's
        margin in the second run); `disagreeing` counts the rest.
    perplexity, other_perplexity: of the prompt's own next tokens.
    tolerance: that of the runs' dtype.
    """

    rows: int
    difference: float
    differing_bits: int
    agreeing: int
    excluded: int
    disagreeing: int
    perplexity: float
    other_perplexity: float
    tolerance: Tolerance = SINGLE

    @property
    def excluded_share(self) -> float:
        """Near-ties among all rows."""
        return self.excluded / self.rows

    @property
    def perplexity_difference(self) -> float:
        """Relative difference of the perplexities."""
        return abs(self.perplexity - self.other_perplexity) / self.other_perplexity

    def breaches(self) -> list[str]:
        """A sentence for each tolerance that is broken."""
        found, most = [], self.tolerance
        if self.disagreeing:
            found.append(
                f"top-1 differs in {self.disagreeing} of {self.rows} rows "
                f"whose margin exceeds {most.margin:g}"
            )
        if self.excluded_share > most.excluded:
            found.append(
                f"near-ties are {self.excluded_share:.3%} of the rows, "
                f"more than {most.excluded:.1%}"
            )
        if not self.perplexity_difference < most.perplexity:
            found.append(
                f"perplexity differs by {self.perplexity_difference:.2e} relatively, "
                f"not less than {most.perplexity:g}"
            )
        if not math.isfinite(self.difference):
            found.append(f"the largest logit difference is {self.difference}")
        return found


def compare(run: Run, other: Run, ids: list[int]) -> Comparison:
    """Compare the rows that both runs computed of a prompt with token ids `ids`."""
    tolerance = SINGLE if run.hidden.dtype == torch.float32 else HALF
    start = max(run.start, other.start)
    rows = len(ids) - start
    following = torch.tensor(ids[1:], device=run.hidden.device)
    difference, agreeing, excluded, disagreeing, bits = 0.0, 0, 0, 0, 0
    losses = [0.0, 0.0]
    for begin in range(start, len(ids), BLOCK):
        end = min(begin + BLOCK, len(ids))
        logits = [each.logits(begin, end) for each in (run, other)]
        bits += differing_bits(*logits)
        mine, theirs = (each.double() for each in logits)
        largest = (mine - theirs).abs().max().item()
        difference = max(difference, largest) if largest == largest else math.nan
        same = mine.argmax(-1) == theirs.argmax(-1)
        first, second = theirs.topk(2, dim=-1).values.unbind(-1)
        tie = first - second <= tolerance.margin
        agreeing += int(same.sum())
        excluded += int(tie.sum())
        disagreeing += int((~same & ~tie).sum())
        wanted = following[begin:end, None]
        for index, each in enumerate((mine, theirs)):
            chosen = each[: len(wanted)].log_softmax(-1).gather(-1, wanted)
            losses[index] -= chosen.sum().item()
    predicted = max(rows - 1, 1)
    return Comparison(
        rows=rows,
        difference=difference,
        differing_bits=bits,
        agreeing=agreeing,
        excluded=excluded,
        disagreeing=disagreeing,
        perplexity=math.exp(losses[0] / predicted),
        other_perplexity=math.exp(losses[1] / predicted),
        tolerance=tolerance,
    )


def differing_bits(left: torch.Tensor, right: torch.Tensor) -> int:
    """Bits in which two tensors of one shape and dtype differ; -0.0 is not 0.0.

    >>> differing_bits(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    1
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(
            f"right: expected {left.dtype} {list(left.shape)}, "
            f"got {right.dtype} {list(right.shape)}"
        )
    if not left.numel():
        return 0
    changed = left.contiguous().view(torch.uint8) ^ right.contiguous().view(torch.uint8)
    counts = torch.bincount(changed.flatten().int(), minlength=256).cpu()
    ones = torch.tensor([value.bit_count() for value in range(256)])
    return int((counts * ones).sum())
