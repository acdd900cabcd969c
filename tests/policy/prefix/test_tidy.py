"""What `tidy` does to the prefix tree: nodes merge when what split them is gone, and the root gives memory back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import getsizeof

import pytest

from plait.policy.prefix.block_hash import chain
from plait.policy.prefix.prefix_tree import Node, PrefixTree, Segment
from plait.policy.prefix.residency import Residency
from tests.invariants import check


def hashes(blocks: Sequence[int]) -> array[int]:
    return chain(blocks, 1, 0)


def booked(tree: PrefixTree, residency: Residency, blocks: Sequence[int]) -> Node:
    leaf = tree.insert(hashes(blocks))
    residency.book(leaf)
    return leaf


def end(residency: Residency, leaf: Node) -> None:
    residency.unbook(leaf)
    residency.unshare(leaf)


def test_nodes_merge_when_what_split_them_is_gone() -> None:
    tree = PrefixTree()
    engine = Residency("a", tree)
    long, branch = booked(tree, engine, [1, 2, 3, 4]), booked(tree, engine, [1, 2, 7])
    engine.touch(long)
    tree.tidy()
    assert (long.start_blocks, branch.start_blocks) == (2, 2)
    end(engine, branch)
    tree.tidy()
    assert tree.match(hashes([1, 2, 3, 4])) == [Segment(long, 4)]
    assert engine.cached_blocks(tree.match(hashes([1, 2, 3]))) == 3
    check(tree)
    check(engine)


@pytest.mark.parametrize("exits", [("unbook", "unshare"), ("unshare", "unbook")])
def test_a_call_that_ends_between_two_nodes_keeps_them_apart_while_it_counts(exits: tuple[str, str]) -> None:
    tree = PrefixTree()
    engine = Residency("a", tree)
    long, short = booked(tree, engine, [1, 2, 3]), booked(tree, engine, [1, 2])
    engine.touch(long)
    getattr(engine, exits[0])(short)
    tree.tidy()
    assert long.parent is short
    getattr(engine, exits[1])(short)
    tree.tidy()
    assert long.parent is tree.root


def test_nodes_that_were_last_used_at_different_times_stay_apart() -> None:
    tree = PrefixTree()
    engine = Residency("a", tree)
    for prompt in ([1, 2, 3, 4], [8, 9], [1, 2, 7]):
        engine.resident.store(None, hashes(prompt))
    engine.resident.remove(hashes([1, 2, 7])[-1])
    tree.tidy()
    evicted = [block for node, _ in engine.victims(4) for block in node.hashes]
    assert evicted == [*hashes([1, 2, 3, 4])[2:], *hashes([8, 9])], "the prefix was used after the other prompt"


def test_blocks_that_are_expected_to_be_evicted_stay_so() -> None:
    tree = PrefixTree()
    engine = Residency("a", tree)
    for prompt in ([1, 2, 3, 4], [1, 2, 7]):
        engine.resident.store(None, hashes(prompt))
    engine.resident.remove(hashes([1, 2, 7])[-1])
    expected = engine.expect_eviction(4)
    tree.tidy()
    assert engine.cached_blocks(tree.match(hashes([1, 2, 3, 4]))) == 0
    engine.end_expectation(expected)
    assert engine.cached_blocks(tree.match(hashes([1, 2, 3, 4]))) == 4


def test_engines_that_hold_only_the_upper_part_keep_it() -> None:
    tree = PrefixTree()
    both, upper = Residency("both", tree), Residency("upper", tree)
    both.resident.store(None, hashes([1, 2, 3, 4]))
    upper.resident.store(None, hashes([1, 2, 7]))
    both.resident.store(None, hashes([1, 2, 3, 4]))
    upper.resident.remove(hashes([1, 2, 7])[-1])
    tree.tidy()
    path = tree.match(hashes([1, 2, 3, 4]))
    assert len(path) == 1
    assert (both.cached_blocks(path), upper.cached_blocks(path)) == (4, 2)
    check(upper)


def test_the_root_gives_memory_back() -> None:
    tree = PrefixTree()
    engine = Residency("a", tree)
    for number in range(2000):
        engine.resident.store(None, hashes([number]))
    tree.tidy()
    full = getsizeof(tree.root.branches)
    engine.evict(1500)
    tree.tidy()
    assert getsizeof(tree.root.branches) < full / 2
    assert len(tree) == 500
    check(tree)
