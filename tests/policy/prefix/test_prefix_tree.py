"""The prefix tree against the list of chains that were put into it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import USES_S, Holding, Node, PrefixTree, Segment
from tests.invariants import check
from tests.policy.prefix.block_index import block_index

CHAINS = st.lists(st.integers(0, 2), max_size=8)  # heavily shared: three different blocks


def hashes(blocks: Sequence[int]) -> array[int]:
    return chain(blocks, 1, 0)


def spelled(leaf: Node) -> list[int]:
    """The hashes from the root to the end of `leaf`."""
    return [block for node in reversed(list(leaf.path())) for block in node.hashes]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@settings(deadline=None)
@given(inserted=st.lists(CHAINS, max_size=8), query=CHAINS)
def test_match_is_the_longest_prefix_that_any_inserted_chain_shares(
    inserted: list[list[int]], query: list[int]
) -> None:
    tree = PrefixTree()
    for blocks in inserted:
        tree.insert(hashes(blocks))
        check(tree)
    path = tree.match(hashes(query))
    assert sum(segment.blocks for segment in path) == max((common(query, blocks) for blocks in inserted), default=0)
    assert [block for s in path for block in s.node.hashes[: s.blocks]] == list(hashes(query))[: _blocks(path)]
    assert all(segment.blocks == len(segment.node) for segment in path[:-1])
    assert all(left.node is right.node.parent for left, right in pairwise(path))
    assert len(tree) == len({block for blocks in inserted for block in hashes(blocks)})


@settings(deadline=None)
@given(inserted=st.lists(CHAINS, max_size=8))
def test_a_leaf_spells_its_chain_whatever_is_split_later(inserted: list[list[int]]) -> None:
    tree = PrefixTree()
    leaves = [(blocks, tree.insert(hashes(blocks))) for blocks in inserted]
    for blocks, leaf in leaves:
        assert spelled(leaf) == list(hashes(blocks))
        assert tree.insert(hashes(blocks)) is leaf
    check(tree)


@settings(deadline=None)
@given(chains=st.lists(CHAINS, min_size=2, max_size=5), data=st.data())
def test_what_was_matched_before_is_inserted_as_the_tree_is_now(chains: list[list[int]], data: st.DataObject) -> None:
    """Whatever has happened to the tree, or to the chain itself."""
    tree, known = PrefixTree(), [hashes(blocks) for blocks in chains]
    for step in range(6):
        chain_, other = (data.draw(st.sampled_from(known), label=f"{what} {step}") for what in ("matched", "other"))
        path = tree.match(chain_)
        change = data.draw(st.sampled_from(("nothing", "insert", "prune", "extend", "tidy", "grow")), label="change")
        if change == "insert":
            tree.insert(other)
        elif change == "prune" and path:
            tree.prune(path[-1].node)
        elif change == "extend" and path and path[-1].blocks == len(path[-1].node):
            tree.extend(path[-1].node, chain_[_blocks(path) :] or array("Q", [1_000 + step]))
        elif change == "tidy":
            tree.tidy()
        elif change == "grow":
            chain_.append(2_000 + step)
        assert spelled(tree.insert(chain_)) == list(chain_)
        check(tree)


@settings(deadline=None)
@given(inserted=st.lists(CHAINS, max_size=8), data=st.data())
def test_pruning_takes_what_nobody_holds_and_nothing_else(inserted: list[list[int]], data: st.DataObject) -> None:
    tree = PrefixTree()
    held = []
    for number, blocks in enumerate(inserted):
        leaf = tree.insert(hashes(blocks))
        if data.draw(st.booleans(), label=f"chain {number} is held"):
            held.append(blocks)
            for node in leaf.path():
                node.holding("a").sharers += 1
    for blocks in inserted:
        path = tree.match(hashes(blocks))
        if path:
            tree.prune(path[-1].node)
        check(tree)
    assert set(block_index(tree)) == {block for blocks in held for block in hashes(blocks)}


def test_what_was_stored_since_the_match_is_not_inserted_again() -> None:
    tree = PrefixTree()
    leaf, longer = tree.insert(hashes([1, 2])), hashes([1, 2, 3])
    assert tree.match(longer) == [Segment(leaf, 2)]
    tree.extend(leaf, longer[2:])
    assert tree.insert(longer) is leaf
    check(tree)


def test_a_partial_match_splits_a_node() -> None:
    tree = PrefixTree()
    first = tree.insert(hashes([1, 2, 3, 4]))
    second = tree.insert(hashes([1, 2, 7]))
    assert second.parent is first.parent
    assert second.parent is not None
    assert (second.parent.start_blocks, second.parent.end_blocks) == (0, 2)
    assert (first.start_blocks, first.end_blocks) == (2, 4)
    assert tree.match(hashes([1, 2, 3])) == [Segment(second.parent, 2), Segment(first, 1)]


def test_a_chain_that_ends_inside_a_node_splits_it_too() -> None:
    tree = PrefixTree()
    long = tree.insert(hashes([1, 2, 3]))
    short = tree.insert(hashes([1, 2]))
    assert long.parent is short
    assert list(short.hashes) == list(hashes([1, 2]))


def test_the_empty_chain_ends_at_the_root() -> None:
    tree = PrefixTree()
    assert tree.insert(hashes([])) is tree.root
    assert tree.match(hashes([])) == []
    assert tree.prune(tree.root) == 0
    assert list(tree.root.path()) == []


def test_chains_of_different_models_never_meet() -> None:
    tree = PrefixTree()
    tree.insert(chain([1, 2, 3], 1, 111))
    assert tree.match(chain([1, 2, 3], 1, 222)) == []


def test_uses_count_for_all_of_a_prefix_and_fade() -> None:
    tree = PrefixTree()
    whole = tree.insert(list(range(10, 16)))
    whole.use(0.0)
    other = tree.insert([10, 11, 20])
    other.use(0.0)
    shared = other.parent
    assert shared is not None
    assert whole.parent is shared
    assert [node.uses(0.0) for node in (shared, whole, other)] == [2.0, 1.0, 1.0], "before the split one call used it"
    assert shared.uses(USES_S) == pytest.approx(2.0 * exp(-1))
    whole.use(USES_S)
    assert shared.uses(USES_S) == pytest.approx(1.0 + 2.0 * exp(-1))


def test_a_split_leaves_holdings_on_both_parts() -> None:
    tree = PrefixTree()
    leaf = tree.insert(hashes([1, 2, 3, 4]))
    leaf.holding("booked").bookings = 1
    leaf.holding("resident").resident_blocks = 3
    leaf.holding("little").resident_blocks = 1
    upper = tree.split(leaf, 2)
    assert {name: one.cached_blocks for name, one in upper.holdings.items()} == {
        "booked": 2,
        "resident": 2,
        "little": 1,
    }
    assert {name: one.cached_blocks for name, one in leaf.holdings.items()} == {"booked": 2, "resident": 1}


def test_pruning_cuts_a_leaf_to_what_is_resident_and_climbs_to_what_is_needed() -> None:
    tree = PrefixTree()
    leaf = tree.insert(hashes([1, 2, 3, 4]))
    leaf.holding("a").resident_blocks = 1
    leaf.holding("b").resident_blocks = 2
    assert tree.prune(leaf) == 0
    assert list(block_index(tree)) == list(hashes([1, 2]))
    below = tree.insert(hashes([1, 2, 9]))
    for engine in "ab":
        leaf.holding(engine).resident_blocks = 0
        leaf.drop_unused(leaf.holding(engine))
    assert tree.prune(leaf) == 0, "something hangs below it"
    assert tree.prune(below) == 2
    assert not block_index(tree)
    assert not tree.root.children


def test_a_leaf_grows_only_while_no_call_spans_it() -> None:
    tree = PrefixTree()
    leaf = tree.insert(hashes([1, 2]))
    leaf.holding("a").resident_blocks = 2
    assert tree.extend(leaf, hashes([1, 2, 3])[2:]) is leaf
    assert list(leaf.hashes) == list(hashes([1, 2, 3]))
    leaf.holding("b").sharers = 1
    below = tree.extend(leaf, hashes([1, 2, 3, 4])[3:])
    assert below.parent is leaf
    assert tree.extend(leaf, hashes([1, 2, 3, 5])[3:]).parent is leaf
    assert len(tree) == 5


def test_match_reads_a_logarithm_of_the_hashes() -> None:
    class Counted(Sequence[int]):
        def __init__(self, values: Sequence[int]) -> None:
            self.values, self.reads = values, 0

        def __len__(self) -> int:
            return len(self.values)

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            self.reads += 1
            return self.values[index]

    tree = PrefixTree()
    tree.insert(hashes(range(600)))
    query = Counted(hashes([*range(500), *range(1000, 1500)]))
    assert _blocks(tree.match(query)) == 500
    assert query.reads <= 12


def _blocks(path: Sequence[Segment]) -> int:
    return sum(segment.blocks for segment in path)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=20))
def test_a_node_has_the_holdings_that_a_dict_would_have(steps: list[tuple[str, bool]]) -> None:
    node, expected = Node(None, 0, array("Q", [1])), dict[str, Holding]()
    for engine, is_held in steps:
        holding = expected.setdefault(engine, node.holding(engine))
        assert node.holding(engine) is holding
        holding.resident_blocks = int(is_held)
        node.drop_unused(holding)
        if not is_held:
            del expected[engine]
        assert list(node.holdings.items()) == list(expected.items())
        assert [node.holding_of(one) for one in "abc"] == [expected.get(one) for one in "abc"]


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=20))
def test_a_node_has_the_children_that_a_dict_would_have(steps: list[tuple[int, bool]]) -> None:
    node, expected = Node(Node(None, 0, array("Q")), 0, array("Q", [1])), dict[int, Node]()
    for block, is_there in steps:
        if is_there:
            expected[block] = Node(node, 1, array("Q", [block]))
            node.add_child(expected[block])
        elif block in expected:
            del expected[block]
            node.drop_child(block)
        assert list(node.children.items()) == list(expected.items())
