"""Preble's adjustments after the assignment under the published conditions alone, to compare ours with."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.placing.rebalancing import IMBAL_RATIO, TH_BAL, Replicas, decode_ratio
from benchmarks.placing.routes import RouteReason
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.situation import Situation
from plait.policy.types import Call


class PublishedShift:
    """While an engine has more than `TH_BAL` times the lightest one's load, calls that would exploit it go there."""

    reason = RouteReason.SHIFT

    def __init__(self) -> None:
        self._lightest: dict[str, str] = {}

    def redirect(self, call: Call, situation: Situation, exploited: EngineView) -> EngineView | None:
        """The lightest engine for every call that would exploit the heaviest."""
        del call
        target = self._lightest.get(exploited.engine_id)
        return next((engine for engine in situation.engines if engine.engine_id == target), None)

    def rebalance(self, engines: Sequence[EngineView], now_s: float) -> None:
        """Compare the heaviest engine with the lightest."""
        del now_s
        for engine in engines:
            self._lightest.pop(engine.engine_id, None)
        loads = {engine: engine.ledger.window_cost_s() for engine in engines}
        heavy, light = max(engines, key=loads.__getitem__), min(engines, key=loads.__getitem__)
        if loads[heavy] > TH_BAL * loads[light]:
            self._lightest[heavy.engine_id] = light.engine_id


class PublishedReplicas(Replicas):
    """A queueing time that doubles is enough, however short it is and however few the calls."""

    least_calls = 1
    least_prefills = 0.0


def most_decoding(engines: Sequence[EngineView]) -> EngineView | None:
    """The engine with the highest share of decoding, if it exceeds `IMBAL_RATIO`."""
    engine = max(engines, key=decode_ratio)
    return engine if decode_ratio(engine) > IMBAL_RATIO else None
