"""The router: sole owner of mutable scheduling state. Select an engine, book the call there, settle it, release it.

A synchronous core: events come in with their time (`now_s`, any monotonic clock), nothing here waits or does I/O, so
between reading the state and booking the decision nothing can happen. asyncio is its shell in the gateway; the
simulator drives the same object in virtual time. `select` changes nothing; what `book` did, exactly one of `settle`
and `release` ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from plait.backends.protocol.cache_state import CacheState
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import Health, HealthEvent
from plait.gateway.fleet.served_models import ServedModels
from plait.policy.cost_model import CostModel
from plait.policy.placement.continuation import continue_on
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.load import DEFAULT_PRIOR_OUTPUT_TOKENS, DEFAULT_WINDOW_S, LoadLedger
from plait.policy.placement.policies import POLICIES, Situation
from plait.policy.placement.reservation import Reservations
from plait.policy.prefix.block_hash import MIN_TREE_BLOCK_TOKENS
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call, Placement


class Router:
    """Places the calls of one fleet. `policy` is a name of `plait.policy.placement.policies.POLICIES`.

    `models` says which models it serves, the `expected_models` among them.
    """

    def __init__(
        self,
        policy: str = "e2",
        *,
        block_tokens: int = MIN_TREE_BLOCK_TOKENS,
        window_s: float = DEFAULT_WINDOW_S,
        prior_output_tokens: float = DEFAULT_PRIOR_OUTPUT_TOKENS,
        expected_models: Collection[str] = (),
    ) -> None:
        self.policy = policy
        self.block_tokens = block_tokens
        self.tree = PrefixTree()
        self.engines: dict[str, FleetEngine] = {}
        self.models = ServedModels(self.engines, expected_models)
        self.reservations = Reservations(window_s)
        self._select = POLICIES[policy]
        self._window_s = window_s
        self._prior_output_tokens = prior_output_tokens
        self._placed: Counter[str] = Counter()

    # A call's way through the fleet.

    def select(self, call: Call, *, prefer: str | None = None, avoid: Collection[str] = ()) -> Placement:
        """Choose an engine; raises `ModelNotFoundError` or `NoEngineError`. Changes nothing.

        A call that continues another prefers the engine where that ran, and goes there while it takes calls. A call
        that has to `avoid` engines is placed by itself, and on one of them only if there is no other.
        """
        assert call.block_tokens == self.block_tokens
        engines, reservation = self.models.eligible(call.model), self.reservations.of(call)
        path, turn = self.tree.match(call.block_hashes), self._placed[call.model]
        if prefer is not None and prefer not in avoid:
            view = next((view for view in engines if view.engine_id == prefer), None)
            if view is not None:
                return continue_on(view, call, Situation(path, engines, turn, reservation))
        if avoid:
            engines = [engine for engine in engines if engine.engine_id not in avoid] or engines
            reservation = None
        return self._select(call, Situation(path, engines, turn, reservation))

    def book(self, call: Call, placement: Placement, now_s: float) -> Booking:
        """Enter the decision: the prompt's blocks are expected on the engine, its work is in the window, and what was
        decided for the rest of its task group is reserved.
        """
        leaf = self.tree.insert(call.block_hashes)
        booking = self.engines[placement.engine_id].book(call, placement, leaf, now_s)
        self._placed[call.model] += 1
        self.reservations.book(call, placement, now_s)
        return booking

    def first_token(self, booking: Booking, now_s: float) -> None:
        """The engine answered: the prompt has been computed."""
        self.engines[booking.placement.engine_id].first_token(booking, now_s)

    def settle(self, booking: Booking, usage: CallUsage, now_s: float) -> None:
        """The call ended and the engine said what it took: real lengths replace the predicted ones."""
        self.engines[booking.placement.engine_id].settle(booking, usage, now_s)
        self.reservations.leave(booking.call)

    def release(self, booking: Booking, now_s: float, *, delivered: bool) -> None:
        """The call ended without a word on what it took: aborted, failed, or (not `delivered`) never begun.

        A call that was not delivered is taken back as if it had never been booked.
        """
        self.engines[booking.placement.engine_id].release(booking, now_s, delivered=delivered)
        self.reservations.leave(booking.call)

    # The fleet.

    def add_engine(
        self, engine_id: str, cost_model: CostModel, *, kv_tokens: int | None = None, health: Health | None = None
    ) -> None:
        """A new engine, untried; `kv_tokens` bounds what is believed resident on one that does not report."""
        ledger = LoadLedger(cost_model, self._window_s, self._prior_output_tokens)
        view = EngineView(engine_id, cost_model, ledger, Residency(engine_id, self.tree), kv_tokens=kv_tokens)
        self.engines[engine_id] = FleetEngine(view, health or Health(), self.block_tokens, kv_tokens)

    def engine_answered(self, engine_id: str, models: Mapping[str, int | None]) -> bool:
        """A probe succeeded: the models served, with their context in tokens if known; True if the engine came up."""
        engine = self.engines[engine_id]
        changed = engine.health.on(HealthEvent.ANSWERED)
        if changed or engine.models != models:  # every report is an answer: most of them tell nothing new
            engine.models = dict(models)
            self._fleet_changed()
        return changed

    def engine_unreachable(self, engine_id: str) -> bool:
        """A connection or a probe failed: no more calls until a probe succeeds; True if it was up until now."""
        changed = self.engines[engine_id].health.on(HealthEvent.UNREACHABLE)
        if changed:
            self._fleet_changed()
        return changed

    def report(self, engine_id: str, state: CacheState, requested_s: float) -> None:
        """Apply a cache-state report that was asked for at `requested_s`.

        Raises ValueError, and takes the engine as one that does not report, if its blocks are not the tree's.
        """
        self.engines[engine_id].report(state, requested_s)

    def no_reports(self, engine_id: str) -> None:
        """The engine has no cache-state endpoint: what it holds is estimated from what was placed there."""
        self.engines[engine_id].no_reports()

    def age(self, now_s: float) -> None:
        """Let calls older than the window go, and reservations. Called every second or so, off the path of any call."""
        for engine in self.engines.values():
            engine.age(now_s)
        self.reservations.age(now_s)

    def check(self) -> None:
        """Assert that the state is consistent; for tests."""
        self.tree.check()
        for engine in self.engines.values():
            engine.check()
        self.reservations.check()
        assert self.reservations.running <= sum(engine.view.outstanding for engine in self.engines.values())

    def _fleet_changed(self) -> None:
        self.models.refresh()
        self.reservations.restrict(self.models.eligible_ids())
