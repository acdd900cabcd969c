"""Replicas: a prefix for which one engine is not enough gets another one, and they divide its subtree (Preble, 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.prefix_load import PrefixLoad, prefix_loads, prefix_tokens
from plait.policy.placement.routes import Route, Routes, RouteState
from plait.policy.placement.situation import Situation
from plait.policy.prefix.prefix_tree import Node
from plait.policy.types import Call, PlacementReason

DOUBLED = 2.0
"""Preble: replicate if the average queueing time doubles over H."""

LEAST_CALLS = 24
"""Ours: fewer calls in half a window say little. If waits are exponential and nothing has changed, the mean of 24 of
them is twice the mean of 24 others in 1 % of cases (F distribution; with eight calls 9 %).
"""


class Replicas:
    """Replicates a prefix when its calls' mean queueing time doubles within the window, second half against first.

    Ours: only if the calls also wait longer than the prefix's prefill takes, which is what a replica costs. Replicas
    end after a window at the earliest, when the prefix has fewer calls than when it was replicated, and these wait as
    little as before or less than half that prefill. So replicas stay while they are what keeps the queues short.
    """

    reason = PlacementReason.REPLICA
    least_calls = LEAST_CALLS
    least_prefills = 1.0

    def __init__(self, routes: Routes, block_tokens: int) -> None:
        self._routes = routes
        self._block_tokens = block_tokens
        self._turn = 0

    def redirect(self, call: Call, situation: Situation, exploited: EngineView) -> EngineView | None:
        """The engine for a call that would exploit the engine `exploited`; None: that one. Changes nothing.

        A call through a part of the subtree goes to the part's engine, any other call to the lightest engine.
        """
        found = self._routes.on(situation.path)
        if found is None or found[1].state is not RouteState.REPLICATED:
            return None
        node, route = found
        holders = {engine.engine_id: engine for engine in situation.engines if engine.engine_id in route.engine_ids}
        if not holders:
            return None
        part = call.block_hashes[node.end_blocks] if node.end_blocks < len(call.block_hashes) else None
        engine = holders.get(route.parts.get(part, "")) if part is not None else None
        engine = engine or min(holders.values(), key=lambda one: (one.ledger.window_cost_s(), one.outstanding))
        return None if engine is exploited else engine

    def rebalance(self, engines: Sequence[EngineView], now_s: float) -> None:
        """Look at the prefixes of one engine, each in turn. `engines` serve the same models."""
        self._turn += 1
        engine = engines[self._turn % len(engines)]
        loads = prefix_loads(engine, now_s)
        self._end_calm(engine, loads, now_s)
        doubled = [prefix for prefix in loads.values() if self._has_doubled(prefix, engine)]
        for prefix in sorted(doubled, key=lambda prefix: -prefix.load_s):
            if self._replicate(prefix, engine, engines, now_s):
                return  # one at a time: it changes the loads

    def _has_doubled(self, prefix: PrefixLoad, engine: EngineView) -> bool:
        before_s, after_s = prefix.mean_waits_s
        if min(prefix.waited) < self.least_calls or after_s < DOUBLED * before_s:
            return False
        return after_s > self.least_prefills * self._prefill_s(prefix, engine)

    def _replicate(self, prefix: PrefixLoad, engine: EngineView, engines: Sequence[EngineView], now_s: float) -> bool:
        """Give the prefix a further engine, the lightest, and divide its subtree anew. False: that is not possible."""
        route = self._routes.get(prefix.node)
        if route is None or route.state is not RouteState.REPLICATED:
            route = Route(RouteState.REPLICATED, engine.engine_id, (), now_s, prefix.load_s, calls=_calls(prefix.node))
        elif now_s - route.since_s < engine.ledger.window_s:
            return False
        free = [other for other in engines if other.engine_id not in route.engine_ids and other is not engine]
        if not free:
            return False
        lightest = min(free, key=lambda other: (other.ledger.window_cost_s(), other.outstanding))
        if lightest.ledger.window_cost_s() >= engine.ledger.window_cost_s():
            return False
        others = (*route.others, lightest.engine_id)
        holders = [other for other in engines if other.engine_id in (route.home, *others)]
        self._routes.enter(
            prefix.node,
            replace(
                route,
                others=others,
                since_s=now_s,
                parts=divide(prefix.node, engine, holders),
                calm_s=prefix.mean_waits_s[0],
            ),
        )
        return True

    def _end_calm(self, engine: EngineView, loads: Mapping[Node, PrefixLoad], now_s: float) -> None:
        for node, route in self._routes.of_state(RouteState.REPLICATED):
            if route.home != engine.engine_id or now_s - route.since_s < engine.ledger.window_s:
                continue
            if _calls(node) < route.calls and self._is_calm(loads.get(node), route, engine):
                self._routes.end(node)

    def _is_calm(self, prefix: PrefixLoad | None, route: Route, engine: EngineView) -> bool:
        if prefix is None:
            return True  # all of its calls go to the replicas
        enough_s = max(route.calm_s, self.least_prefills * self._prefill_s(prefix, engine) / 2)
        return prefix.mean_waits_s[1] <= enough_s

    def _prefill_s(self, prefix: PrefixLoad, engine: EngineView) -> float:
        return engine.cost_model.prefill_time_s(prefix_tokens(prefix.node, self._block_tokens))


def _calls(node: Node) -> int:
    """The calls of the window through the prefix, on all engines."""
    return sum(holding.sharers for holding in node.holdings.values())


def divide(node: Node, engine: EngineView, holders: Sequence[EngineView]) -> dict[int, str]:
    """The engine of each child of `node` that several calls on `engine` share, by the child's first block.

    Each child, the largest first, goes to the engine with the fewest calls of the subtree so far; ties: with the least
    load. Children that one call uses are not listed: that call's text will hardly come again.
    """
    shared: list[tuple[int, int]] = []
    for first, child in node.children.items():
        holding = child.held_by(engine.engine_id)
        if holding is not None and holding.sharers > 1:
            shared.append((holding.sharers, first))
    calls = dict.fromkeys(sorted(holders, key=lambda holder: holder.ledger.window_cost_s()), 0)
    parts: dict[int, str] = {}
    for sharers, first in sorted(shared, reverse=True):
        fewest = min(calls, key=calls.__getitem__)
        parts[first] = fewest.engine_id
        calls[fewest] += sharers
    return parts
