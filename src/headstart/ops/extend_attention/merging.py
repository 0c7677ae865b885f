"""Joining attention results over disjoint sets of keys, and adding the sink.

With a_i = exp(lse_i - max lse):   o = sum a_i o_i / sum a_i,   lse = max + log(sum a_i).
(0, -inf) is the identity. A sink is a set of one key whose value is 0 and whose score is the sink.
Only exp and log are used: on the CPU their vector and scalar forms agree bit for bit, so an element
does not depend on its place in the array; those of sigmoid and logaddexp do not.
"""

from __future__ import annotations

import torch


def log_add(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log(exp a + exp b), and the shares of a and b in it (0 and 0 where both are -inf)."""
    top = torch.maximum(a, b)
    safe = top.masked_fill(top == -torch.inf, 0.0)
    share_a, share_b = torch.exp(a - safe), torch.exp(b - safe)
    total = share_a + share_b
    lse = top + torch.log(total.masked_fill(top == -torch.inf, 1.0))
    total.masked_fill_(total == 0, 1.0)
    return lse, share_a / total, share_b / total


def merge_into(
    o: torch.Tensor, lse: torch.Tensor, o_part: torch.Tensor, lse_part: torch.Tensor
) -> None:
    """Join the part (o_part, lse_part) into (o, lse), in place; o [..., DV], lse [...]."""
    joined, share, share_part = log_add(lse, lse_part)
    o.mul_(share.unsqueeze(-1)).add_(o_part * share_part.unsqueeze(-1))
    lse.copy_(joined)


def add_sinks(lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The LSE with the sink in it, and the factor that o takes (0 where a row saw no key)."""
    joined, share, _ = log_add(lse, sinks.to(lse.dtype).expand_as(lse))
    return joined, share
