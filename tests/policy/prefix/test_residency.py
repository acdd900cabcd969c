"""Residency and its order of use, case by case; a block is a letter, a prompt a text."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import Node, PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.prefix.resident_blocks import BlockFinder
from plait.policy.prefix.use_order import UseOrder
from tests.invariants import check


def hashes(text: bytes) -> array[int]:
    return chain(list(text), 1, 0)


def fleet(*stored: str) -> tuple[PrefixTree, Residency]:
    tree = PrefixTree()
    residency = Residency("a", tree)
    for text in stored:
        residency.resident.store(None, list(hashes(text.encode())))
    return tree, residency


def held(tree: PrefixTree, residency: Residency, text: str) -> int:
    return residency.cached_blocks(tree.match(hashes(text.encode())))


def test_a_run_behind_an_unknown_or_missing_parent_is_left_out() -> None:
    tree, residency = fleet("ab")
    run = hashes(b"xyz")
    residency.resident.store(run[0], list(run[1:]))
    residency.resident.store(12345, [678])
    assert len(tree) == 2
    Residency("b", tree).resident.store(hashes(b"ab")[1], list(hashes(b"abc")[2:]))
    assert len(tree) == 2, "known to the tree, but not resident on that engine"


def test_an_eviction_in_the_middle_takes_all_that_lies_behind() -> None:
    tree, residency = fleet("abcd", "abce")
    residency.resident.remove(hashes(b"ab")[1])
    assert (held(tree, residency, "abcd"), residency.resident.blocks, len(tree)) == (1, 1, 1)
    residency.resident.store(hashes(b"a")[0], list(hashes(b"ab")[1:]))
    assert held(tree, residency, "abcd") == 2, "what is there again is what was reported again"


@given(st.permutations(["c", "d", "e", "f"]))
def test_evicted_ends_are_found_in_any_order_without_an_index(order: list[str]) -> None:
    tree, residency = fleet("abcd", "abcef")
    named = {"c": "abc", "d": "abcd", "e": "abce", "f": "abcef"}
    evicted, left = [hashes(named[block].encode())[-1] for block in order], set[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockFinder, "_index", None)
        residency.resident.apply(evicted, [], left)
    assert (left, held(tree, residency, "abcd"), residency.resident.blocks) == (set(evicted), 2, 2)


def test_an_eviction_elsewhere_or_of_something_unknown_changes_nothing() -> None:
    tree, residency = fleet("abc")
    other = Residency("b", tree)
    other.resident.store(None, list(hashes(b"a")))
    other.resident.remove(hashes(b"abc")[2])
    other.resident.store(hashes(b"abc")[2], [77])
    residency.resident.remove(99)
    assert (held(tree, residency, "abc"), held(tree, other, "abc")) == (3, 1)
    assert (residency.resident.blocks, other.resident.blocks, len(tree)) == (3, 1, 3)


def test_booked_blocks_are_expected_until_unbooked() -> None:
    tree, residency = fleet("ab")
    leaf = tree.insert(hashes(b"abcd"))
    residency.book(leaf)
    assert held(tree, residency, "abcdz") == 4
    residency.resident.clear()
    assert held(tree, residency, "abcdz") == 4, "a restart is no reason to give up on calls on their way"
    residency.resident.store(None, list(hashes(b"abc")))
    residency.unbook(leaf)
    assert held(tree, residency, "abcdz") == 3
    assert len(tree) == 4, "the call still shares it within the window"
    residency.unshare(leaf)
    assert len(tree) == 3


def test_a_waiting_call_counts_only_on_what_is_there_and_on_calls_that_were_sent() -> None:
    tree, residency = fleet("ab")
    first, second = tree.insert(hashes(b"abcd")), tree.insert(hashes(b"abcxyz"))
    for leaf in (first, second):
        residency.book(leaf, waits=True)
    assert held(tree, residency, "abcxyz") == 6, "those who come count on both"
    assert [residency.ready_blocks(leaf) for leaf in (first, second)] == [2, 2]
    residency.send(first)
    assert [residency.ready_blocks(leaf) for leaf in (first, second)] == [4, 3]
    residency.unbook(first)
    assert residency.ready_blocks(second) == 2, "it failed: nobody computes what it brought"
    residency.unbook(second, waits=True)
    assert held(tree, residency, "abcxyz") == 2
    check(residency)
    check(tree)


def test_what_is_about_to_be_evicted_is_not_ready() -> None:
    tree, residency = fleet("abcd", "xy")
    residency.expect_eviction(3)
    leaf = tree.insert(hashes(b"abcdef"))
    residency.book(leaf, waits=True)
    assert (held(tree, residency, "abcdef"), residency.ready_blocks(leaf)) == (6, 1)
    check(residency)
    check(tree)


def test_an_output_reported_block_by_block_stays_one_node() -> None:
    tree, residency = fleet("prompt")
    text = b"prompt" + bytes(range(20))
    for end in range(7, len(text) + 1):
        residency.resident.store(hashes(text[: end - 1])[-1], [hashes(text[:end])[-1]])
    assert [segment.blocks for segment in tree.match(hashes(text))] == [26]


def test_eviction_takes_the_least_lately_used_leaf_first() -> None:
    tree, residency = fleet("sx", "sy", "sz")
    residency.touch(tree.match(hashes(b"sx"))[-1].node)
    assert [(bytes_of(tree, node), taken) for node, taken in residency.victims(9)] == [
        (b"sy", 1),
        (b"sz", 1),
        (b"sx", 1),
        (b"s", 1),
    ]
    residency.evict(2)
    assert [held(tree, residency, text) for text in ("sx", "sy", "sz")] == [2, 1, 1]


def test_the_order_of_use_survives_splits() -> None:
    tree, residency = fleet("abcd", "xy")
    tree.insert(hashes(b"ab"))
    assert [bytes_of(tree, node) for node, _ in residency.victims(9)] == [b"abcd", b"ab", b"xy"]


def test_a_split_takes_a_part_that_is_only_shared_out_of_the_order_of_use() -> None:
    tree, residency = fleet("ab")
    leaf = tree.insert(hashes(b"abcd"))
    residency.book(leaf)
    residency.unbook(leaf)
    tree.insert(hashes(b"abc"))
    check(residency)
    check(tree)
    assert [taken for _, taken in residency.victims(9)] == [2]


def test_touching_moves_to_the_newest_end_once() -> None:
    root = Node(None, 0, array("Q"))
    nodes = [Node(root, 0, array("Q", [number])) for number in range(3)]
    holdings = [node.holding("a") for node in nodes]
    order = UseOrder("a", root)
    assert list(order) == []
    for node, holding in zip(nodes, holdings, strict=True):
        holding.resident_blocks = 1
        order.touch_path(node)
    order.touch_path(nodes[0])
    assert list(order) == [holdings[1], holdings[2], holdings[0]]
    for holding in order:
        holding.unlink()
        holding.unlink()
    assert list(order) == []


def bytes_of(tree: PrefixTree, node: Node) -> bytes:
    """The text that ends at a node, found by trying: hashes do not tell."""
    known = {hashes(text)[-1]: text for text in (b"s", b"sx", b"sy", b"sz", b"ab", b"abcd", b"xy")}
    return known[node.hashes[-1]]


def test_what_is_expected_to_be_evicted_does_not_count_as_held() -> None:
    tree, residency = fleet("abcd", "xy")
    victims = residency.expect_eviction(3)
    assert (held(tree, residency, "abcd"), held(tree, residency, "xy")) == (1, 2), "the oldest prefix, from its end"
    assert residency.resident.blocks == 6, "it is there until the engine says otherwise"
    assert [taken for _, taken in residency.victims(2)] == [1, 1], "the next to go come behind"
    residency.end_expectation(victims)
    assert held(tree, residency, "abcd") == 4
    check(residency)
    check(tree)


def test_an_expected_eviction_that_was_reported_stays_gone() -> None:
    tree, residency = fleet("abcd", "xy")
    victims = residency.expect_eviction(3)
    for block in reversed(hashes(b"abcd")[2:]):
        residency.resident.remove(block)
    assert held(tree, residency, "abcd") == 1, "two of three have gone, the third is still expected to"
    residency.end_expectation(victims)
    assert held(tree, residency, "abcd") == 2
    check(residency)


def test_a_booked_prefix_is_not_expected_to_go() -> None:
    tree, residency = fleet("abcd", "xy")
    residency.book(tree.insert(hashes(b"abcd")))
    victims = residency.expect_eviction(9)
    assert (held(tree, residency, "abcd"), held(tree, residency, "xy")) == (4, 0)
    residency.end_expectation(victims)
    assert held(tree, residency, "xy") == 2


def test_an_expectation_survives_a_split_of_its_node() -> None:
    tree, residency = fleet("abcd", "xy")
    victims = residency.expect_eviction(3)
    residency.book(tree.insert(hashes(b"abz")))
    assert held(tree, residency, "abcd") == 2, "what the new call brings is expected again"
    check(residency)
    check(tree)
    residency.end_expectation(victims)
    assert held(tree, residency, "abcd") == 4
    assert all(node.holdings["a"].leaving_blocks == 0 for node in tree.nodes())


def test_an_expectation_whose_node_has_gone_ends_quietly() -> None:
    tree, residency = fleet("ab", "xy")
    victims = residency.expect_eviction(2)
    residency.resident.clear()
    residency.end_expectation(victims)
    assert (len(tree), residency.resident.blocks) == (0, 0)
