"""The load of each shared prefix on an engine, from the calls of its window."""

from __future__ import annotations

from dataclasses import dataclass

from plait.policy.costs.engine_view import EngineView
from plait.policy.prefix.prefix_tree import Node


@dataclass(slots=True)
class PrefixLoad:
    """The calls of one window through the prefix that ends with `node`.

    `load_s` is their part of the engine's load. `waits_s` are the sums of their queueing times in the first and the
    second half of the window, and `waited` the numbers of calls in these sums.
    """

    node: Node
    calls: int
    load_s: float
    waits_s: list[float]
    waited: list[int]

    @property
    def mean_waits_s(self) -> tuple[float, float]:
        """The mean queueing time in the first and the second half of the window; 0 without calls."""
        early_s, late_s = (total / max(1, calls) for total, calls in zip(self.waits_s, self.waited, strict=True))
        return early_s, late_s


def prefix_loads(engine: EngineView, now_s: float) -> dict[Node, PrefixLoad]:
    """The load of each shared prefix. O(calls in the window, and the nodes of their paths).

    A call's prefix is the longest node on its path that other calls of the window share on the engine. So each call
    counts for one prefix at most, and the loads of an engine's prefixes do not overlap.
    """
    ledger, engine_id = engine.ledger, engine.engine_id
    middle_s, decode_s = now_s - ledger.window_s / 2, ledger.decode_s() / max(1, len(ledger))
    loads: dict[Node, PrefixLoad] = {}
    found: dict[Node, Node | None] = {}
    for entry in ledger:
        node = _shared_prefix(entry.leaf, engine_id, found)
        if node is None:
            continue
        load = loads.get(node)
        if load is None:
            load = loads[node] = PrefixLoad(node, 0, 0.0, [0.0, 0.0], [0, 0])
        load.calls += 1
        load.load_s += entry.prefill_s + decode_s
        if entry.queue_s is not None:
            half = int(entry.booked_s >= middle_s)
            load.waits_s[half] += entry.queue_s
            load.waited[half] += 1
    return loads


def prefix_tokens(node: Node, block_tokens: int) -> int:
    """The tokens of the prefix that ends with `node`."""
    return node.end_blocks * block_tokens


def _shared_prefix(leaf: Node, engine_id: str, found: dict[Node, Node | None]) -> Node | None:
    """The longest node on the path that at least two calls of the window share; ties: the deepest.

    `found` has the answers for nodes that were asked for before, and takes this one.
    """
    path = []
    node = leaf
    while node.parent is not None and node not in found:
        path.append(node)
        node = node.parent
    longest = found.get(node)
    for node in reversed(path):
        holding = node.holding_of(engine_id)
        if holding is not None and holding.sharers > 1 and (longest is None or len(node) >= len(longest)):
            longest = node
        found[node] = longest
    return longest
