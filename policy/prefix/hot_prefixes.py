"""The prefixes that calls share most, found from the top of the prefix tree: for the live screen."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Final

from plait.policy.prefix.prefix_tree import Node, PrefixTree

MOST_CHILDREN: Final = 1_000
"""A search visits only the oldest children of a node: a prefix that is used all the time stays cached, and is old."""

MOST_NODES: Final = 3_000
"""A search visits at most this many nodes, in about a millisecond."""

LEAST_USES: Final = 1.5
"""With fewer recent uses, a prefix is not shared."""


def hot_prefixes(tree: PrefixTree, now_s: float, recent: Iterable[int], limit: int) -> list[Node]:
    """The last nodes of at most `limit` prefixes, those that save most first. `recent`: first blocks of recent prompts.

    A prefix saves its uses of about the last minute times its length. A prefix ends where its calls diverge: no longer
    prefix is used half as often.
    """
    root, left = tree.root, MOST_NODES
    newest = (node for first in recent if (node := root.children.get(first)) is not None)
    level = list(dict.fromkeys(chain(newest, islice(root.children.values(), MOST_CHILDREN))))
    found = list[tuple[float, Node]]()
    while level and left > 0:
        node = level.pop()
        left -= 1
        if node.use_count < LEAST_USES:
            continue  # uses only decay from this count, so there is no need to compute them
        uses = node.uses(now_s)
        if uses < LEAST_USES:
            continue
        below = [child for child in islice(node.children.values(), MOST_CHILDREN) if child.use_count >= LEAST_USES]
        if all(child.uses(now_s) < max(LEAST_USES, uses / 2) for child in below):
            found.append((uses * node.end_blocks, node))
        level += below
        left -= len(node.children) // 8
    found.sort(key=lambda pair: pair[0], reverse=True)
    return [node for _, node in found[:limit]]


def prefix_id(node: Node) -> str:
    """A short name of the prefix that ends with a node, from its last block's hash."""
    return f"{node.hashes[-1]:016x}"[:6]


def cached_shares(node: Node) -> dict[str, float]:
    """By engine, the part of the prefix that ends with a node that is resident or expected there."""
    blocks = dict[str, int]()
    for part in node.path():
        for engine_id, holding in part.holdings.items():
            blocks[engine_id] = blocks.get(engine_id, 0) + holding.cached_blocks
    return {engine_id: cached / node.end_blocks for engine_id, cached in blocks.items() if cached}
