"""E2 with Preble's adjustments after the assignment: decode balance, shift and replicas, each of which may be left out.

E2 chooses first. Decode balance replaces the choice of a call that explores. Replicas and shift replace the engine that
a call would exploit. What they do is decided in `age`, off the path of a call. See docs/design/placement.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from benchmarks.placing.prefix_load import PrefixLoad, prefix_loads, prefix_tokens
from benchmarks.placing.routes import Route, RouteReason, Routes, RouteState
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation, cached_prefix, placed
from plait.policy.placement.e2 import e2, load_cost
from plait.policy.placement.policies import Groups, Policy
from plait.policy.prefix.prefix_tree import Node, PrefixTree
from plait.policy.types import Call, Placement, PlacementReason

IMBAL_RATIO = 0.7
"""Preble's ImbalR: an engine whose load has a larger share of decoding has compute to spare. The paper derives it from
the accelerator and the model without a number. 0.7 is ours.
"""

STANDS_OUT = 1.25
"""Ours: the share of decoding has to be so many times the median. Where all engines mostly decode, none has more to
spare than the others.
"""


def decode_ratio(engine: EngineView) -> float:
    """Decode's share of the load; 0 without calls in the window."""
    total_s = engine.ledger.window_cost_s()
    return engine.ledger.decode_s() / total_s if total_s else 0.0


DecodeBalance = Callable[[Sequence[EngineView]], EngineView | None]
"""Chooses the engine with compute to spare; None if there is none."""


def spare_compute(engines: Sequence[EngineView]) -> EngineView | None:
    """The engine with the highest share of decoding, if it exceeds `IMBAL_RATIO` and stands out (Preble, section 3.2).

    Decoding leaves compute unused, which a prefill can have almost for nothing.
    None if that engine is overloaded: it has more than `TH_BAL` times the load of the lightest.
    """
    ratios = [decode_ratio(engine) for engine in engines]
    highest = max(ratios)
    if highest <= IMBAL_RATIO or highest < STANDS_OUT * median(ratios):
        return None
    engine = engines[ratios.index(highest)]
    lightest_s = min(other.ledger.window_cost_s() for other in engines)
    return engine if engine.ledger.window_cost_s() <= TH_BAL * lightest_s else None


TH_BAL = 1.5
"""Preble's Th_bal: an engine whose load exceeds the lightest engine's so many times is overloaded. The paper leaves the
number to profiling. At 1.5, a fleet of two runs at 83 % of its balanced speed.
"""

FILLED = 0.5
"""Ours: prefixes are moved once the engine's calls reach back over this share of the window. Before that, a load says
which calls happened to come first. Moves in the first seconds made calls slower (docs/design/placement.md).
"""


class Shift:
    """Moves prefixes from the heaviest engine to the lightest, and moves them back (Preble, section 3.2).

    Preble directs single calls away from the heaviest engine until the loads are balanced. Each such call may compute a
    prefix again. Ours are whole prefixes, each of which is computed again once.

    A prefix is moved only if the heavy engine then still has the load of the light one, and if the difference of the
    loads exceeds the prefill of the prefix. It goes back after a window at the earliest, once its engine would not be
    heavier with it than the other without it. So steady loads move nothing to and fro. While its window fills, an
    engine sheds nothing.
    """

    reason = RouteReason.SHIFT

    def __init__(self, routes: Routes, block_tokens: int) -> None:
        self._routes = routes
        self._block_tokens = block_tokens

    def redirect(self, call: Call, situation: Situation, exploited: EngineView) -> EngineView | None:
        """The engine for a call that would exploit the engine `exploited`; None: that one. Changes nothing."""
        del call
        found = self._routes.on(situation.path)
        if found is None:
            return None
        moved = _direction(found[1])
        if moved is None or moved[0] != exploited.engine_id:
            return None
        return next((engine for engine in situation.engines if engine.engine_id == moved[1]), None)

    def rebalance(self, engines: Sequence[EngineView], now_s: float) -> None:
        """Let prefixes go back, then move others. `engines` serve the same models."""
        loads = self.coming_loads(engines, now_s)
        self._give_back(engines, loads, now_s)
        heavy, light = max(engines, key=loads.__getitem__), min(engines, key=loads.__getitem__)
        if loads[heavy] <= TH_BAL * loads[light] or not _is_filled(heavy, now_s):
            return
        for prefix in sorted(prefix_loads(heavy, now_s).values(), key=lambda prefix: -prefix.load_s):
            light = min(engines, key=loads.__getitem__)
            if loads[heavy] <= TH_BAL * loads[light]:
                return
            gap_s = loads[heavy] - loads[light]
            if prefix.node not in self._routes and self._helps(prefix.node, prefix.load_s, light, gap_s):
                route = Route(RouteState.SHIFTED, heavy.engine_id, (light.engine_id,), now_s, prefix.load_s)
                self._routes.enter(prefix.node, route)
                loads[heavy] -= prefix.load_s
                loads[light] += prefix.load_s

    def coming_loads(self, engines: Sequence[EngineView], now_s: float) -> dict[EngineView, float]:
        """Each engine's load once the prefixes that were moved count where they are now, in seconds.

        Their earlier calls stay in the window of the engine from which they were moved, and leave it as it ages.
        """
        loads = {engine: engine.ledger.window_cost_s() for engine in engines}
        by_id = {engine.engine_id: engine for engine in engines}
        for _, route in self._routes:
            source, target = (by_id.get(engine_id) for engine_id in _direction(route) or ("", ""))
            if source is not None and target is not None:
                left = max(0.0, 1 - (now_s - route.since_s) / source.ledger.window_s)
                loads[source] -= left * route.load_s
                loads[target] += left * route.load_s
        return loads

    def _helps(self, node: Node, load_s: float, target: EngineView, gap_s: float) -> bool:
        """Whether a prefix is worth moving to `target`, which has `gap_s` less load than the engine that serves it."""
        prefill_s = target.cost_model.prefill_time_s(prefix_tokens(node, self._block_tokens))
        return prefill_s < gap_s and 2 * load_s <= gap_s

    def _give_back(self, engines: Sequence[EngineView], loads: dict[EngineView, float], now_s: float) -> None:
        by_id = {engine.engine_id: engine for engine in engines}
        for node, route in self._routes.of_state(RouteState.SHIFTED, RouteState.RETURNING):
            home, other = by_id.get(route.home), by_id.get(route.others[0])
            if home is None or other is None or now_s - route.since_s < home.ledger.window_s:
                continue
            if route.state is RouteState.RETURNING:
                self._routes.end(node)
                continue
            load_s = _load_s(node, other)
            if self._helps(node, load_s, home, loads[other] - loads[home]):
                self._routes.enter(node, replace(route, state=RouteState.RETURNING, since_s=now_s, load_s=load_s))
                loads[home] += load_s
                loads[other] -= load_s


def _direction(route: Route) -> tuple[str, str] | None:
    """The engine that the route moves calls from, and the one that it moves them to."""
    if route.state is RouteState.SHIFTED:
        return route.home, route.others[0]
    if route.state is RouteState.RETURNING:
        return route.others[0], route.home
    return None


def _is_filled(engine: EngineView, now_s: float) -> bool:
    """Whether the engine's calls reach back over `FILLED` of the window."""
    oldest = next(iter(engine.ledger), None)
    return oldest is not None and oldest.booked_s <= now_s - FILLED * engine.ledger.window_s


def _load_s(node: Node, engine: EngineView) -> float:
    """What the calls through the prefix cost the engine, if they cost what its calls cost on average."""
    holding = node.holding_of(engine.engine_id)
    if holding is None or not holding.sharers:
        return 0.0
    return engine.ledger.window_cost_s() * holding.sharers / len(engine.ledger)


DOUBLED = 2.0
"""Preble: replicate if the average queueing time doubles over H."""

LEAST_CALLS = 24
"""Ours: fewer calls in half a window say little. If waits are exponential and nothing has changed, the mean of 24 of
them is twice the mean of 24 others in 1 % of cases (F distribution; with eight calls 9 %).
"""


class Replicas:
    """Replicates a prefix when its calls' mean queueing time doubles within the window, second half against first.

    A prefix for which one engine is not enough gets another one, and they divide its subtree (Preble, section 3.2).
    Ours: only if the calls also wait longer than the prefix's prefill takes, which is what a replica costs. Replicas
    end after a window at the earliest, when the prefix has fewer calls than when it was replicated, and these wait as
    little as before or less than half that prefill. So replicas stay while they are what keeps the queues short.
    """

    reason = RouteReason.REPLICA
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
        holding = child.holding_of(engine.engine_id)
        if holding is not None and holding.sharers > 1:
            shared.append((holding.sharers, first))
    calls = dict.fromkeys(sorted(holders, key=lambda holder: holder.ledger.window_cost_s()), 0)
    parts: dict[int, str] = {}
    for sharers, first in sorted(shared, reverse=True):
        fewest = min(calls, key=calls.__getitem__)
        parts[first] = fewest.engine_id
        calls[fewest] += sharers
    return parts


class Rerouting(Protocol):
    """Sends calls to other engines than the one that E2 would exploit."""

    @property
    def reason(self) -> RouteReason:
        """The reason of the calls that it sends elsewhere."""
        ...

    def redirect(self, call: Call, situation: Situation, exploited: EngineView) -> EngineView | None:
        """The engine for a call that would exploit `exploited`; None: that one. Changes nothing."""
        ...

    def rebalance(self, engines: Sequence[EngineView], now_s: float) -> None:
        """Decide what is sent elsewhere from now on. `engines`, at least one, serve the same models."""
        ...


class RebalancedE2:
    """E2, adjusted by what it decides about once a second: `policy` is the placement policy.

    Of `reroutings`, the first that sends a call elsewhere decides. They share `routes`.
    """

    def __init__(
        self, routes: Routes, reroutings: Sequence[Rerouting] = (), decode_balance: DecodeBalance | None = None
    ) -> None:
        self.routes = routes
        self._reroutings = tuple(reroutings)
        self._decode_balance = decode_balance
        self.policy = Policy("rebalanced_e2", "e2, rebalanced", self.place, age=self.age)

    def place(self, call: Call, situation: Situation) -> Placement:
        """Place `call`. Changes nothing."""
        placement = e2(call, situation)
        if placement.reason is PlacementReason.EXPLORE:
            spare = self._decode_balance(situation.engines) if self._decode_balance is not None else None
            return placement if spare is None else _place(call, situation, spare, RouteReason.DECODE_BALANCE)
        exploited = next(engine for engine in situation.engines if engine.engine_id == placement.engine_id)
        for rerouting in self._reroutings:
            engine = rerouting.redirect(call, situation, exploited)
            if engine is not None:
                return _place(call, situation, engine, rerouting.reason)
        return placement

    def age(self, tree: PrefixTree, groups: Groups, now_s: float) -> None:
        """Adjust what is sent elsewhere. The engines of each group take calls and serve the same models.

        The prefix tree is not tidied: routes refer to nodes, which a merge would take away.
        """
        del tree
        found = groups()
        self.routes.keep([engine.engine_id for engine in engines] for engines in found)
        for engines in found:
            for rerouting in reversed(self._reroutings):
                rerouting.rebalance(engines, now_s)


def rebalanced_e2(mechanisms: Collection[str], block_tokens: int) -> RebalancedE2:
    """E2 with some of `decode_balance`, `shift` and `replicate`. `block_tokens` is the length of a tree block."""
    routes = Routes()
    reroutings: list[Rerouting] = []
    if "replicate" in mechanisms:
        reroutings.append(Replicas(routes, block_tokens))
    if "shift" in mechanisms:
        reroutings.append(Shift(routes, block_tokens))
    return RebalancedE2(routes, reroutings, spare_compute if "decode_balance" in mechanisms else None)


def _place(call: Call, situation: Situation, engine: EngineView, reason: RouteReason) -> Placement:
    cached_blocks = cached_prefix(call, situation, engine)
    cost = load_cost(call, situation, engine, cached_blocks * call.block_tokens)
    return placed(call, engine, reason, cached_blocks, cost)
