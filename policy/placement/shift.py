"""Shift: an overloaded engine sheds whole prefixes to the lightest engine (Preble, section 3.2).

Preble directs single calls away from the heaviest engine until the loads are balanced. Each such call may compute a
prefix again. Ours are whole prefixes, each of which is computed again once. See docs/design/placement.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.prefix_load import prefix_loads, prefix_tokens
from plait.policy.placement.routes import Route, Routes, RouteState
from plait.policy.placement.situation import Situation
from plait.policy.prefix.prefix_tree import Node
from plait.policy.types import Call, PlacementReason

TH_BAL = 1.5
"""Preble's Th_bal: an engine whose load exceeds the lightest engine's so many times is overloaded. The paper leaves the
number to profiling. At 1.5, a fleet of two runs at 83 % of its balanced speed.
"""

FILLED = 0.5
"""Ours: prefixes are moved once the engine's calls reach back over this share of the window. Before that, a load says
which calls happened to come first. Moves in the first seconds made calls slower (docs/design/placement.md).
"""


class Shift:
    """Moves prefixes from the heaviest engine to the lightest, and moves them back.

    A prefix is moved only if the heavy engine then still has the load of the light one, and if the difference of the
    loads exceeds the prefill of the prefix. It goes back after a window at the earliest, once its engine would not be
    heavier with it than the other without it. So steady loads move nothing to and fro. While its window fills, an
    engine sheds nothing.
    """

    reason = PlacementReason.SHIFT

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
    holding = node.held_by(engine.engine_id)
    if holding is None or not holding.sharers:
        return 0.0
    return engine.ledger.window_cost_s() * holding.sharers / len(engine.ledger)
