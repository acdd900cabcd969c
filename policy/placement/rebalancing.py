"""E2 with Preble's adjustments after the assignment: decode balance, shift and replicas, each of which may be left out.

E2 chooses first. Decode balance replaces the choice of a call that explores. Replicas and shift replace the engine that
a call would exploit. What they do is decided in `rebalance`, off the path of a call. See docs/design/placement.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from plait.policy.placement.decode_balance import DecodeBalance, spare_compute
from plait.policy.placement.e2 import e2, load_cost
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.replicas import Replicas
from plait.policy.placement.routes import Routes
from plait.policy.placement.shift import Shift
from plait.policy.placement.situation import Situation, cached_blocks, placed
from plait.policy.types import Call, Placement, PlacementReason


class Rerouting(Protocol):
    """Sends calls to other engines than the one that E2 would exploit."""

    @property
    def reason(self) -> PlacementReason:
        """The reason of the calls that it sends elsewhere."""
        ...

    def redirect(self, call: Call, situation: Situation, exploited: EngineView) -> EngineView | None:
        """The engine for a call that would exploit `exploited`; None: that one. Changes nothing."""
        ...

    def rebalance(self, engines: Sequence[EngineView], now_s: float) -> None:
        """Decide what is sent elsewhere from now on. `engines`, at least one, serve the same models."""
        ...


class RebalancedE2:
    """A placement policy that the router also calls about once a second (`rebalance`).

    Of `reroutings`, the first that sends a call elsewhere decides. They share `routes`.
    """

    def __init__(
        self, routes: Routes, reroutings: Sequence[Rerouting] = (), decode_balance: DecodeBalance | None = None
    ) -> None:
        self.routes = routes
        self._reroutings = tuple(reroutings)
        self._decode_balance = decode_balance

    def __call__(self, call: Call, situation: Situation) -> Placement:
        """Place `call`. Changes nothing."""
        placement = e2(call, situation)
        if placement.reason is PlacementReason.EXPLORE:
            spare = self._decode_balance(situation.engines) if self._decode_balance is not None else None
            return placement if spare is None else _place(call, situation, spare, PlacementReason.DECODE_BALANCE)
        exploited = next(engine for engine in situation.engines if engine.engine_id == placement.engine_id)
        for rerouting in self._reroutings:
            engine = rerouting.redirect(call, situation, exploited)
            if engine is not None:
                return _place(call, situation, engine, rerouting.reason)
        return placement

    def rebalance(self, groups: Sequence[Sequence[EngineView]], now_s: float) -> None:
        """Adjust what is sent elsewhere. The engines of each group take calls and serve the same models."""
        self.routes.keep([engine.engine_id for engine in engines] for engines in groups)
        for engines in groups:
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


def _place(call: Call, situation: Situation, engine: EngineView, reason: PlacementReason) -> Placement:
    held_blocks = cached_blocks(call, situation, engine)
    cost = load_cost(call, situation, engine, held_blocks * call.block_tokens)
    return placed(call, engine, reason, held_blocks, cost)
