"""The prefixes that are shared most, from the top of the tree."""

from __future__ import annotations

from plait.policy.prefix import hot_prefixes as module
from plait.policy.prefix.hot_prefixes import cached_shares, hot_prefixes, prefix_id
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency


def call(tree: PrefixTree, *hashes: int, now_s: float = 0.0, times: int = 1) -> None:
    for _ in range(times):
        tree.insert(hashes).use(now_s)


def test_a_prefix_ends_where_its_calls_part() -> None:
    tree = PrefixTree()
    for question in range(10):
        call(tree, 1, 2, 3, 100 + question)
    (node,) = hot_prefixes(tree, 0.0, (), 5)
    assert (node.end_blocks, prefix_id(node)) == (3, "000000")
    assert round(node.uses(0.0)) == 10


def test_what_saves_most_comes_first_and_what_one_call_used_not_at_all() -> None:
    tree = PrefixTree()
    for question in range(4):
        call(tree, 1, 200 + question)
        call(tree, *range(10, 20), 300 + question)
    call(tree, 50, 51)
    assert [node.end_blocks for node in hot_prefixes(tree, 0.0, (), 5)] == [10, 1]
    assert [node.end_blocks for node in hot_prefixes(tree, 0.0, (), 1)] == [10]
    assert hot_prefixes(tree, 1_000.0, (), 5) == []


def test_a_conversation_that_grows_is_one_prefix() -> None:
    tree = PrefixTree()
    for turn in range(1, 9):
        call(tree, *range(2 * turn))
    (node,) = hot_prefixes(tree, 0.0, (), 5)
    assert 10 <= node.end_blocks <= 14


def test_a_wide_tree_is_not_walked_but_late_prompts_are_found() -> None:
    tree = PrefixTree()
    for first in range(module.MOST_CHILDREN + 10):
        call(tree, first)
    last = module.MOST_CHILDREN + 5
    call(tree, last, times=3)
    assert hot_prefixes(tree, 0.0, (), 5) == []
    (node,) = hot_prefixes(tree, 0.0, [last, last, 10**9], 5)
    assert node.hashes[0] == last


def test_the_walk_is_bounded() -> None:
    tree = PrefixTree()
    for first in range(100):
        for second in range(100):
            call(tree, first, 1_000 + 100 * first + second, times=2)
    assert len(hot_prefixes(tree, 0.0, (), 10**6)) <= module.MOST_NODES


def test_an_engine_holds_a_part() -> None:
    tree = PrefixTree()
    engines = {name: Residency(name, tree) for name in ("a", "b")}
    engines["a"].resident.store(None, [1, 2, 3, 4])
    engines["b"].resident.store(None, [1, 2])
    call(tree, 1, 2, 3, 4, times=4)
    (node,) = hot_prefixes(tree, 0.0, (), 5)
    assert cached_shares(node) == {"a": 1.0, "b": 0.5}
