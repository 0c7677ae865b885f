"""Where the states of a prompt are kept, for a prefix cache of a model that has states.

A page of keys and values comes with its tokens, but a state is as large as the keys and values of
thousands of tokens, so that only a few of a prompt can be kept. All places are counted in blocks
from the start of the prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from headstart.integrations.prefix_tree import PrefixTree
from headstart.runtime.checks import expect_flag, expect_int, shown


@dataclass(frozen=True)
class SnapshotPolicy:
    """Which places of a prompt get a snapshot; each rule adds some.

    ends: the last one that the same prompt could hit again, and its very end.
    outputs: the last one of what was decoded after it.
    branches: where the prompt leaves what other prompts have brought.
    growth: places 1, 2, 4, ... (for 2), each at least so many times as far as the one before, so
        that whatever prefix another prompt shares, more than about 1 / growth of it is hit. 0:
        none.
    every: all multiples of so many blocks. 0: none.
    thin: whether places that a prompt has passed are given up, but for one in each doubling of
        their distance from its end and where prompts branch.

    >>> SnapshotPolicy().places(hit=0, shared=3, tokens=700, block=64)
    [1, 2, 3, 4, 8, 10]
    >>> SnapshotPolicy(growth=0).places(hit=2, shared=2, tokens=640, block=64)
    [9, 10]
    """

    ends: bool = True
    outputs: bool = True
    branches: bool = True
    growth: float = 2.0
    every: int = 0
    thin: bool = False

    def __post_init__(self) -> None:
        for name in ("ends", "outputs", "branches", "thin"):
            expect_flag(name, getattr(self, name))
        if not isinstance(self.growth, int | float) or not (self.growth == 0 or self.growth > 1):
            raise ValueError(f"growth: expected 0 or a number above 1, got {shown(self.growth)}")
        expect_int("every", self.every, 0)

    def places(self, hit: int, shared: int, tokens: int, block: int) -> list[int]:
        """Places past a hit of `hit` blocks in a prompt of so many tokens, its end included.

        shared: blocks that other prompts have brought. block: tokens of a block.
        """
        end, again = tokens // block, (tokens - 1) // block
        found: set[int] = set()
        if self.ends:
            found |= {again, end}
        if self.branches:
            found.add(min(shared, again))
        place = 1.0
        while self.growth and place <= end:
            found.add(int(place))
            place = max(place * self.growth, int(place) + 1.0)
        if self.every:
            found |= set(range(self.every, end + 1, self.every))
        return sorted(place for place in found if hit < place <= end)

    def thin_out(self, tree: PrefixTree, keys: Sequence[Hashable]) -> None:
        """Give up places of a prompt in a tree, if that is the policy."""
        if not self.thin:
            return
        path = tree.path(keys)
        kept = set()
        for node in path[:-1]:
            distance = (path[-1].end - node.end).bit_length()
            if distance in kept and not node.users and len(node.children) < 2:
                tree.drop(node)
            kept.add(distance)


POLICIES = {
    "ends": SnapshotPolicy(outputs=False, branches=False, growth=0),
    "outputs": SnapshotPolicy(branches=False, growth=0),
    "branches": SnapshotPolicy(growth=0),
    "geometric": SnapshotPolicy(),
    "thinned": SnapshotPolicy(thin=True),
    "all": SnapshotPolicy(every=1),
}
"""Policies by name, each keeping more places than the one before, but for "thinned"."""
