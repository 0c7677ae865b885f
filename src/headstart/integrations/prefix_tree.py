"""Which prefixes a cache keeps: a radix tree over blocks of tokens, in a budget of bytes.

A prefix can be hit where two things are kept: the pages of all its blocks, and a restore point at
its end (the states of the layers that have states; it costs nothing where there are none). Pages
live as long as a restore point at or below their end does, so what is evicted, least recently used
first, are restore points. The tree holds no memory itself: pages and states are what its user says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from headstart.runtime.checks import expect_int, shown


class Node:
    """A run of blocks in which no other begins and no restore point lies, but perhaps at its end.

    keys, pages: of each block of the run. end: blocks from the root to the run's end.
    state: what the restore point at the end holds; None: there is none.
    users: requests that stand on the restore point; it is not evicted meanwhile.
    """

    __slots__ = ("children", "end", "keys", "pages", "parent", "state", "users")

    def __init__(self, parent: Node | None, keys: list[Hashable], pages: list[Any]) -> None:
        self.parent, self.keys, self.pages = parent or self, keys, pages
        self.end: int = len(keys) + (parent.end if parent else 0)
        self.children: dict[Hashable, Node] = {}
        self.state: Any = None
        self.users = 0


class PrefixTree:
    """Prefixes of requests, by blocks; block keys are compared with ==.

    Parameters
    ----------
    page_bytes, state_bytes: what a block's page and a restore point take.
    budget: most bytes kept; None: no bound.
    free: called with the pages of blocks that are no longer kept.

    Attributes
    ----------
    pages, states: how many of each are kept.
    evicted: restore points evicted so far.

    >>> tree = PrefixTree(page_bytes=1, state_bytes=10, budget=30)
    >>> tree.insert("abcd", [1, 2, 3, 4], {4: "state after abcd"})
    [1, 2, 3, 4]
    >>> node, shared = tree.find("abxy")  # two blocks are there, but nothing to start from
    >>> node.end, shared
    (0, 2)
    >>> tree.insert("abxy", [5, 6, 7, 8], {2: "state after ab"})
    []
    >>> tree.find("abz")[0].state, tree.bytes
    ('state after ab', 24)
    """

    def __init__(
        self,
        *,
        page_bytes: int,
        state_bytes: int,
        budget: int | None = None,
        free: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self.page_bytes = expect_int("page_bytes", page_bytes, 0)
        self.state_bytes = expect_int("state_bytes", state_bytes, 0)
        self.budget = math.inf if budget is None else expect_int("budget", budget, 0)
        self.pages = self.states = self.evicted = 0
        self._free = free
        self._root = Node(None, [], [])
        self._by_use: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._used: set[Node] = set()

    @property
    def bytes(self) -> int:
        """What is kept."""
        return self.pages * self.page_bytes + self.states * self.state_bytes

    def find(self, keys: Sequence[Hashable]) -> tuple[Node, int]:
        """The deepest restore point of a prefix of `keys` (else the root), and blocks shared.

        `shared` counts the leading blocks that are kept, up to the restore point and past it.
        """
        found, shared = self._root, 0
        for node, matched in self._descend(keys, len(keys)):
            shared += matched
            if matched == len(node.keys) and node.state is not None:
                found = node
        return found, shared

    def use(self, node: Node) -> None:
        """A request starts from a restore point: it is kept until as many calls of `leave`."""
        node.users += 1
        self._used.add(node)
        self._touch([node])

    def leave(self, node: Node) -> None:
        """The request is over."""
        if not node.users:
            raise ValueError("node: expected one in use, got one that nobody uses")
        node.users -= 1
        if not node.users:
            self._used.discard(node)

    def path_pages(self, node: Node) -> list[Any]:
        """The pages of all blocks from the root to the end of `node`."""
        runs = [step.pages for step in self._ancestors(node)]
        return [page for run in reversed(runs) for page in run]

    def insert(
        self, keys: Sequence[Hashable], pages: Sequence[Any], states: Mapping[int, Any]
    ) -> list[Any]:
        """Keep restore points of a prefix, by blocks from its start; returns the pages it took.

        pages: one for each key up to the last restore point; those of blocks that are there
            already are not taken. States where there is a restore point already are not taken
            either; it counts as used.
        What would not fit, even alone beside what is in use, is left out, longest prefix first.
        Then the least recently used restore points go, until the budget holds.
        """
        places = sorted(states)
        most = min(len(keys), len(pages))
        if places and not 0 < places[0] <= places[-1] <= most:
            raise ValueError(f"states: expected blocks in [1, {most}], got {shown(places)}")
        if any(state is None for state in states.values()):
            raise ValueError("states: expected something to keep at every place, got None")
        if self.budget != math.inf:
            fitting = range(1, len(places) + 1)
            del places[bisect_left(fitting, True, key=lambda n: not self._fits(keys, places[:n])) :]
        nodes: list[Node] = []
        taken: list[Any] = []
        for place in places:
            node = self._reach(nodes[-1] if nodes else self._root, keys, pages, place, taken)
            if node.state is None:
                node.state = states[place]
                self.states += 1
            node.users += 1
            nodes.append(node)
        if nodes:
            self._touch(nodes)
            self._evict()
        for node in nodes:
            node.users -= 1
        return taken

    def drop(self, node: Node) -> None:
        """Give a restore point up, with the pages that none other needs; ValueError if in use."""
        if node.state is None:
            raise ValueError("node: expected a restore point")
        if node.users:
            raise ValueError(f"node: expected one that nobody uses, got one with {node.users}")
        node.state = None
        self.states -= 1
        del self._by_use[node]
        self._prune(node)

    def path(self, keys: Sequence[Hashable]) -> list[Node]:
        """The restore points of prefixes of `keys`, shortest first."""
        return [
            node
            for node, matched in self._descend(keys, len(keys))
            if matched == len(node.keys) and node.state is not None
        ]

    def __iter__(self) -> Iterator[Node]:
        """All restore points, least recently used first."""
        return iter(list(self._by_use))

    def _descend(
        self, keys: Sequence[Hashable], stop: int, node: Node | None = None
    ) -> Iterator[tuple[Node, int]]:
        """Nodes on the way of `keys` below `node`, with how many blocks of each run match."""
        node = node or self._root
        while node.end < stop:
            child = node.children.get(keys[node.end])
            if child is None:
                return
            matched = _common(child.keys, keys, node.end, stop)
            whole = matched == len(child.keys)  # told before the caller may cut the run there
            yield child, matched
            if not whole:
                return
            node = child

    def _ancestors(self, node: Node) -> Iterator[Node]:
        while node is not self._root:
            yield node
            node = node.parent

    def _fits(self, keys: Sequence[Hashable], places: Sequence[int]) -> bool:
        """Whether these restore points fit beside what is in use."""
        blocks = {step: len(step.keys) for node in self._used for step in self._ancestors(node)}
        states, found = len(self._used - {self._root}) + len(places), 0
        for node, matched in self._descend(keys, places[-1]):
            found += matched
            blocks[node] = max(blocks.get(node, 0), matched)
            states -= node in self._used and matched == len(node.keys) and node.end in places
        pages = sum(blocks.values()) + places[-1] - found
        return pages * self.page_bytes + states * self.state_bytes <= self.budget

    def _reach(
        self, node: Node, keys: Sequence[Hashable], pages: Sequence[Any], end: int, taken: list[Any]
    ) -> Node:
        """The node below `node` that ends after `end` blocks; new pages go to `taken`."""
        for child, matched in self._descend(keys, end, node):
            node = child if matched == len(child.keys) else self._split(child, matched)
        if node.end < end:
            fresh = Node(node, list(keys[node.end : end]), list(pages[node.end : end]))
            node.children[keys[node.end]] = fresh
            taken += fresh.pages
            self.pages += len(fresh.pages)
            node = fresh
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a run in two; the node keeps the lower part, the new upper part is returned."""
        upper = Node(node.parent, node.keys[:at], node.pages[:at])
        node.parent.children[upper.keys[0]] = upper
        node.keys, node.pages, node.parent = node.keys[at:], node.pages[at:], upper
        upper.children[node.keys[0]] = node
        return upper

    def _prune(self, node: Node) -> None:
        """Remove runs that no restore point needs, from `node` up, and join what is left."""
        while node is not self._root and node.state is None and not node.children:
            del node.parent.children[node.keys[0]]
            self.pages -= len(node.pages)
            if self._free is not None:
                self._free(node.pages)
            node = node.parent
        if node is not self._root and node.state is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.keys, child.pages = node.keys + child.keys, node.pages + child.pages
            child.parent = node.parent
            node.parent.children[child.keys[0]] = child

    def _touch(self, nodes: Sequence[Node]) -> None:
        """These restore points of one prefix, shortest first, have been used just now."""
        # Those that cost nothing are used whenever their pages are. In any case a longer one goes
        # before a shorter one that it needs.
        steps = reversed(nodes) if self.state_bytes else self._ancestors(nodes[-1])
        for step in steps:
            if step.state is not None:
                self._by_use[step] = None
                self._by_use.move_to_end(step)

    def _evict(self) -> None:
        while self.bytes > self.budget:
            candidates = (
                node
                for node in self._by_use
                if not node.users and (self.state_bytes or not node.children)
            )
            victim = next(candidates, None)
            if victim is None:
                return
            self.drop(victim)
            self.evicted += 1


def _common(run: Sequence[Hashable], keys: Sequence[Hashable], begin: int, stop: int) -> int:
    """How many keys of a run equal those from `begin` on, up to `stop`."""
    others = keys[begin : min(begin + len(run), stop)]
    pairs = zip(run, others, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(others))
