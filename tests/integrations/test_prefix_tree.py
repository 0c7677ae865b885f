"""The tree of kept prefixes against a literal model: a list of prefixes in order of use."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.integrations.prefix_tree import PrefixTree
from headstart.integrations.snapshot_policy import POLICIES, SnapshotPolicy


class Literal:
    """Restore points are prefixes, spelt out; what is kept of blocks are all their prefixes."""

    def __init__(self, page_bytes, state_bytes, budget):
        self.page_bytes, self.state_bytes, self.budget = page_bytes, state_bytes, budget
        self.points = []  # least recently used first
        self.used = []  # one entry a user

    def blocks(self, points):
        return {point[:end] for point in points for end in range(1, len(point) + 1)}

    def size(self, points):
        return len(self.blocks(points)) * self.page_bytes + len(set(points)) * self.state_bytes

    def find(self, keys):
        prefixes = [keys[:end] for end in range(1, len(keys) + 1)]
        hit = max((len(p) for p in prefixes if p in self.points), default=0)
        blocks = self.blocks(self.points)
        return hit, sum(p in blocks for p in prefixes)

    def touch(self, points):
        for point in sorted(points, key=len, reverse=True):
            self.points.remove(point)
            self.points.append(point)

    def use(self, point):
        self.used.append(point)
        self._touch_path(point)

    def _touch_path(self, point):
        costs = self.state_bytes > 0
        self.touch([p for p in self.points if p == point or (not costs and point[: len(p)] == p)])

    def insert(self, keys, places):
        wanted = [keys[:place] for place in sorted(places)]
        used = [p for p in self.used if p]
        while wanted and self.size(used + wanted) > self.budget:
            wanted.pop()
        self.points += [point for point in wanted if point not in self.points]
        if wanted and self.state_bytes:
            self.touch(wanted)
        elif wanted:
            self._touch_path(wanted[-1])
        fixed = {*used, *wanted}
        while self.size(self.points) > self.budget:
            others = [p for p in self.points if p not in fixed]
            if not self.state_bytes:  # one that others need gives nothing
                others = [
                    p for p in others
                    if not any(q != p and q[: len(p)] == p for q in self.points)
                ]  # fmt: skip
            self.points.remove(others[0])


def spelt(tree, node):
    keys = []
    while node.keys:
        keys = node.keys + keys
        node = node.parent
    return tuple(keys)


KEYS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
PLACES = st.sets(st.integers(1, 6), min_size=1, max_size=3)
ACTS = ["insert", "insert", "insert", "use", "use", "leave", "drop"]
STEPS = st.lists(st.tuples(KEYS, PLACES, st.sampled_from(ACTS)), min_size=5, max_size=40)


@settings(deadline=None, max_examples=400)
@given(
    steps=STEPS,
    state_bytes=st.sampled_from([0, 1, 7]),
    page_bytes=st.sampled_from([0, 1, 3]),
    budget=st.integers(0, 30),
)
def test_against_the_literal_model(steps, page_bytes, state_bytes, budget):
    held = []  # pages that the tree holds
    tree = PrefixTree(
        page_bytes=page_bytes, state_bytes=state_bytes, budget=budget,
        free=lambda pages: [held.remove(page) for page in pages],
    )  # fmt: skip
    literal = Literal(page_bytes, state_bytes, budget)
    users = []
    for index, (keys, places, act) in enumerate(steps):
        node, shared = tree.find(keys)
        assert (node.end, shared) == literal.find(keys)
        assert spelt(tree, node) == keys[: node.end]
        if act == "insert":
            places = {place for place in places if place <= len(keys)}
            pages = [(index, keys[: at + 1]) for at in range(len(keys))]
            held += tree.insert(keys, pages, {place: keys[:place] for place in places})
            literal.insert(keys, places)
        elif act == "use":
            tree.use(node)
            users.append(node)
            literal.use(spelt(tree, node))
        elif act == "leave" and users:
            node = users.pop(0)
            literal.used.remove(spelt(tree, node))
            tree.leave(node)
        elif act == "drop" and node.end and not node.users:
            literal.points.remove(spelt(tree, node))
            tree.drop(node)
        assert [node.state for node in tree] == literal.points
        assert [spelt(tree, node) for node in tree] == literal.points
        assert tree.bytes == literal.size(literal.points)
        assert tree.bytes <= budget
        assert tree.states == len(literal.points)
        # Of every kept block one page, that of its own prefix; a user finds those it stands on.
        assert sorted(page for _, page in held) == sorted(literal.blocks(literal.points))
        for node in [*tree, *users]:
            pages = tree.path_pages(node)
            assert [len(prefix) for _, prefix in pages] == list(range(1, node.end + 1))
            assert all(page in held for page in pages)
            assert all(longer[: len(prefix)] == prefix for (_, prefix), (_, longer)
                       in pairwise(pages))  # fmt: skip


def test_no_bound():
    tree = PrefixTree(page_bytes=2**40, state_bytes=2**40)
    tree.insert(range(9), list("abcdefghi"), {9: 1})
    assert tree.bytes == 10 * 2**40
    assert tree.evicted == 0


def test_what_is_in_use_stays_and_counts_once():
    tree = PrefixTree(page_bytes=1, state_bytes=10, budget=26)
    tree.insert("ab", [1, 2], {2: "ab"})
    node, _ = tree.find("ab")
    tree.use(node)
    tree.use(node)
    tree.insert("cd", [3, 4], {2: "cd"})
    tree.leave(node)
    tree.insert("ef", [5, 6], {2: "ef"})  # "cd" goes, though it was used later
    assert [node.state for node in tree] == ["ab", "ef"]
    assert len(tree.insert("abxyz", [1, 2, 7, 8, 9], {2: "ab", 5: "abxyz"})) == 3
    assert (tree.bytes, [node.state for node in tree]) == (25, ["abxyz", "ab"])
    assert tree.insert("gh", [5, 6], {2: "gh"}) != []
    assert [node.state for node in tree] == ["ab", "gh"]
    tree.leave(node)
    tree.insert("ijkl", [1, 2, 3, 4], {4: "ijkl"})
    assert [node.state for node in tree] == ["gh", "ijkl"]


def test_without_states_only_ends_are_evicted():
    """A place inside a prefix that is needed costs nothing, so giving it up gains nothing."""
    tree = PrefixTree(page_bytes=1, state_bytes=0, budget=5)
    tree.insert("abc", [1, 2, 3], {1: "a", 2: "ab", 3: "abc"})
    tree.use(tree.find("abc")[0])
    for other in ("de", "fg"):
        tree.insert(other, [4, 5], {1: other[0], 2: other})
        assert [node.state for node in tree] == ["abc", "ab", "a", other, other[0]]


def test_evictions_are_counted():
    tree = PrefixTree(page_bytes=1, state_bytes=10, budget=25)  # two of these
    for n, prompt in enumerate(("ab", "cd", "ef", "gh")):
        tree.insert(prompt, [1, 2], {2: prompt})
        assert tree.evicted == max(n - 1, 0)


def test_a_prompt_that_is_too_long_evicts_nothing():
    tree = PrefixTree(page_bytes=1, state_bytes=10, budget=30)
    tree.insert("ab", [1, 2], {2: "ab"})
    assert tree.insert("c" * 21, list(range(21)), {21: "c"}) == []
    assert tree.find("ab")[0].state == "ab"
    # The shorter of its restore points fits.
    assert len(tree.insert("c" * 21, list(range(21)), {5: "c", 21: "c"})) == 5
    assert (tree.bytes, tree.evicted) == (27, 0)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ({0: "s"}, r"states: expected blocks in \[1, 2\]"),
        ({3: "s"}, r"states: expected blocks in \[1, 2\]"),
        ({1: None}, "states: expected something to keep"),
    ],
)
def test_wrong_states(states, words):
    tree = PrefixTree(page_bytes=1, state_bytes=1)
    with pytest.raises(ValueError, match=words):
        tree.insert("abc", [1, 2], states)
    assert tree.bytes == 0


def test_wrong_use():
    tree = PrefixTree(page_bytes=1, state_bytes=1)
    tree.insert("ab", [1, 2], {2: "s"})
    node, _ = tree.find("ab")
    with pytest.raises(ValueError, match="nobody uses"):
        tree.leave(node)
    tree.use(node)
    with pytest.raises(ValueError, match="nobody uses, got one with 1"):
        tree.drop(node)
    with pytest.raises(ValueError, match="expected a restore point"):
        tree.drop(tree.find("x")[0])
    for name in ("page_bytes", "state_bytes", "budget"):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            PrefixTree(**{"page_bytes": 1, "state_bytes": 1, name: -1})


@given(
    hit=st.integers(0, 40), shared=st.integers(0, 60), tokens=st.integers(1, 4000),
    block=st.sampled_from([64, 512, 1024]), growth=st.sampled_from([0, 1.1, 2, 3.5]),
)  # fmt: skip
def test_places(hit, shared, tokens, block, growth):
    policy = SnapshotPolicy(growth=growth)
    found = policy.places(hit, shared, tokens, block)
    assert found == sorted(set(found))
    assert all(hit < place <= tokens // block for place in found)
    for wanted in (tokens // block, (tokens - 1) // block, min(shared, (tokens - 1) // block)):
        assert wanted in found or not hit < wanted
    if growth and not hit:  # whatever is shared, about 1 / growth of it is hit
        for shares in range(1, tokens // block + 1):
            best = max(place for place in found if place <= shares)
            assert best * growth + 1 > shares


def test_every_policy_has_places():
    sizes = [len(POLICIES[name].places(0, 5, 7000, 64)) for name in POLICIES]
    assert sizes == [1, 1, 2, 9, 9, 109]


def test_thinning():
    """One place is left for each doubling of the distance, and those where prompts branch."""
    tree = PrefixTree(page_bytes=1, state_bytes=1)
    tree.insert(range(20), range(20), dict.fromkeys(range(1, 21), "s"))
    tree.insert([0, 1, 2, 3, 4, 5, 99], range(7), {7: "s"})
    SnapshotPolicy().thin_out(tree, range(20))
    assert len(tree.path(range(20))) == 20
    SnapshotPolicy(thin=True).thin_out(tree, range(20))
    assert [node.end for node in tree.path(range(20))] == [1, 5, 6, 13, 17, 19, 20]
    SnapshotPolicy(thin=True).thin_out(tree, [77])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"growth": 1}, "growth: expected 0 or a number above 1, got 1"),
        ({"growth": "2"}, "growth: expected"),
        ({"growth": float("nan")}, "growth: expected"),
        ({"every": -1}, "every: expected"),
        ({"ends": 1}, "ends: expected"),
    ],
)
def test_wrong_policies(wrong, words):
    with pytest.raises(ValueError, match=words):
        SnapshotPolicy(**wrong)
