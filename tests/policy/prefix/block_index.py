"""The nodes of a prefix tree by the blocks in them."""

from __future__ import annotations

from plait.policy.prefix.prefix_tree import Node, PrefixTree


def block_index(tree: PrefixTree) -> dict[int, Node]:
    """The node of every block. No block may be in two nodes."""
    found: dict[int, Node] = {}
    for node in tree.nodes():
        for block in node.hashes:
            assert block not in found
            found[block] = node
    return found
