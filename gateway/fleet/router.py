"""The router: sole owner of mutable scheduling state. Select an engine, book the call there, settle it, release it.

A synchronous core: events come in with their time (`now_s`, any monotonic clock), nothing here waits or does I/O, so
between reading the state and booking the decision nothing can happen. asyncio is its shell in the gateway; the
simulator drives the same object in virtual time. `select` changes nothing; what `book` did, exactly one of `settle`
and `release` ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

import msgspec

from plait.backends.errors import ModelNotFoundError, NoEngineError
from plait.backends.protocol.cache_state import CacheState, EngineKind
from plait.gateway.fleet.health import Health, HealthEvent, HealthState
from plait.policy.cost_model import CostModel
from plait.policy.placement.engine_view import EngineView
from plait.policy.placement.load import DEFAULT_PRIOR_OUTPUT_TOKENS, DEFAULT_WINDOW_S, LedgerEntry, LoadLedger
from plait.policy.placement.outstanding import Work
from plait.policy.placement.policies import POLICIES, Situation
from plait.policy.placement.reservation import Reservations
from plait.policy.prefix.block_hash import MIN_TREE_BLOCK_TOKENS
from plait.policy.prefix.node import Node
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency, Victim
from plait.policy.types import Call, Placement


class BookingState(StrEnum):
    """A call's life as the router sees it."""

    BOOKED = "booked"
    STREAMING = "streaming"
    SETTLED = "settled"
    RELEASED = "released"


BOOKING_TRANSITIONS: dict[BookingState, frozenset[BookingState]] = {
    BookingState.BOOKED: frozenset((BookingState.STREAMING, BookingState.SETTLED, BookingState.RELEASED)),
    BookingState.STREAMING: frozenset((BookingState.SETTLED, BookingState.RELEASED)),
    BookingState.SETTLED: frozenset(),
    BookingState.RELEASED: frozenset(),
}


class IllegalTransitionError(RuntimeError):
    """A call was settled, released or started twice; nothing was changed."""


@dataclass(slots=True, eq=False)
class Booking:
    """A call on its engine: what was decided, and what has to be undone or corrected when it ends.

    `taken_tokens` of the engine's free room were booked with it, after its report number `report_number`. `work` is
    what it is outstanding with.
    """

    call: Call
    placement: Placement
    leaf: Node
    entry: LedgerEntry
    work: Work
    booked_s: float
    taken_tokens: float
    report_number: int
    victims: list[Victim]
    state: BookingState = BookingState.BOOKED
    first_token_s: float | None = None

    def enter(self, state: BookingState) -> None:
        """Take a step of the life cycle."""
        if state not in BOOKING_TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"call {self.call.call_id} is {self.state} and cannot become {state}")
        self.state = state


@dataclass(frozen=True, slots=True)
class CallUsage:
    """What the engine reported for a call that ended; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


@dataclass(slots=True, eq=False)
class FleetEngine:
    """One engine's scheduling state: its view for the policies, its health, and what is not confirmed yet.

    `reports` is None while it is not known whether the engine reports its cache; `last_report` is the latest.
    """

    view: EngineView
    health: Health
    kv_tokens: int | None
    models: Mapping[str, int | None] = field(default_factory=dict)
    epoch: str | None = None
    cursor: int | None = None
    reports: bool | None = None
    kind: EngineKind | None = None
    last_report: CacheState | None = None
    report_number: int = 0
    unconfirmed: deque[tuple[float, Node]] = field(default_factory=deque)


class Router:
    """Places the calls of one fleet. `policy` is a name of `plait.policy.placement.policies.POLICIES`.

    `expected_models` are to be served although no engine has told so yet: while none does, that is a fault of the
    fleet, not of the caller.
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
        self._select = POLICIES[policy]
        self._window_s = window_s
        self._prior_output_tokens = prior_output_tokens
        self._expected_models = frozenset(expected_models)
        self._eligible: dict[str, list[EngineView]] = {}
        self._placed: Counter[str] = Counter()
        self.reservations = Reservations(window_s)

    # A call's way through the fleet.

    def select(self, call: Call, avoid: Collection[str] = ()) -> Placement:
        """Choose an engine; raises `ModelNotFoundError` or `NoEngineError`. Changes nothing.

        A call that has to `avoid` engines is placed by itself, and on one of them only if there is no other.
        """
        assert call.block_tokens == self.block_tokens
        self.check_model(call.model)
        engines, reservation = self._eligible[call.model], self.reservations.of(call)
        if avoid:
            engines = [engine for engine in engines if engine.engine_id not in avoid] or engines
            reservation = None
        path = self.tree.match(call.block_hashes)
        return self._select(call, Situation(path, engines, self._placed[call.model], reservation))

    def book(self, call: Call, placement: Placement, now_s: float) -> Booking:
        """Enter the decision: the prompt's blocks are expected on the engine, its work is in the window, and what was
        decided for the rest of its task group is reserved.
        """
        engine = self.engines[placement.engine_id]
        view = engine.view
        leaf = self.tree.insert(call.block_hashes)
        view.residency.book(leaf)
        entry = view.ledger.book(leaf, placement.missed_tokens, call.prompt_tokens, now_s)
        work = view.expected_work(call, placement.missed_tokens, entry.prefill_s)
        view.outstanding += 1
        view.work.add(work)
        taken_tokens, victims = 0.0, []
        if view.free_tokens is not None:
            taken_tokens = min(view.free_tokens, placement.missed_tokens)
            view.free_tokens -= taken_tokens
            victims = view.residency.expect_eviction(ceil((placement.missed_tokens - taken_tokens) / self.block_tokens))
        self._placed[call.model] += 1
        self.reservations.book(call, placement, now_s)
        return Booking(call, placement, leaf, entry, work, now_s, taken_tokens, engine.report_number, victims)

    def first_token(self, booking: Booking, now_s: float) -> None:
        """The engine answered: the prompt has been computed."""
        booking.enter(BookingState.STREAMING)
        booking.first_token_s = now_s
        booking.work = self.engines[booking.placement.engine_id].view.work.prefilled(booking.work)
        self._end_expectation(booking)

    def settle(self, booking: Booking, usage: CallUsage, now_s: float) -> None:
        """The call ended and the engine said what it took: real lengths replace the predicted ones."""
        booking.enter(BookingState.SETTLED)
        engine = self.engines[booking.placement.engine_id]
        cached = booking.placement.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
        missed = max(0, usage.prompt_tokens - cached)
        engine.view.ledger.settle(booking.entry, missed, usage.output_tokens)
        self._leave(engine, booking, now_s)

    def release(self, booking: Booking, now_s: float, *, delivered: bool) -> None:
        """The call ended without a word on what it took: aborted, failed, or (not `delivered`) never begun.

        A call that was not delivered is taken back as if it had never been booked.
        """
        booking.enter(BookingState.RELEASED)
        engine = self.engines[booking.placement.engine_id]
        if not delivered:
            if engine.view.ledger.cancel(booking.entry):
                engine.view.residency.unshare(booking.leaf)
            if engine.view.free_tokens is not None and engine.report_number == booking.report_number:
                engine.view.free_tokens += booking.taken_tokens
        self._leave(engine, booking, now_s, stored=delivered)

    # The fleet.

    def add_engine(
        self, engine_id: str, cost_model: CostModel, *, kv_tokens: int | None = None, health: Health | None = None
    ) -> None:
        """A new engine, untried; `kv_tokens` bounds what is believed resident on one that does not report."""
        ledger = LoadLedger(cost_model, self._window_s, self._prior_output_tokens)
        view = EngineView(engine_id, cost_model, ledger, Residency(engine_id, self.tree), kv_tokens=kv_tokens)
        self.engines[engine_id] = FleetEngine(view, health or Health(), kv_tokens)

    def engine_answered(self, engine_id: str, models: Mapping[str, int | None]) -> bool:
        """A probe succeeded: the models served, with their context in tokens if known; True if the engine came up."""
        engine = self.engines[engine_id]
        changed = engine.health.on(HealthEvent.ANSWERED)
        if changed or engine.models != models:  # every report is an answer: most of them tell nothing new
            engine.models = dict(models)
            self._list_eligible()
        return changed

    def engine_unreachable(self, engine_id: str) -> bool:
        """A connection or a probe failed: no more calls until a probe succeeds; True if it was up until now."""
        changed = self.engines[engine_id].health.on(HealthEvent.UNREACHABLE)
        if changed:
            self._list_eligible()
        return changed

    def report(self, engine_id: str, state: CacheState, requested_s: float) -> None:
        """Apply a cache-state report that was asked for at `requested_s`.

        Raises ValueError, and takes the engine as one that does not report, if its blocks are not the tree's.
        """
        engine = self.engines[engine_id]
        if state.granularity_tokens != self.block_tokens:
            self.no_reports(engine_id)
            raise ValueError(
                f"engine {engine_id} reports its cache in blocks of {state.granularity_tokens} tokens, "
                f"the prefix tree has {self.block_tokens}: its cached prefixes are estimated instead"
            )
        residency = engine.view.residency
        if state.snapshot or state.epoch != engine.epoch:
            residency.clear()
        for block in state.removed:
            residency.remove(block)
        for run in state.stored:
            residency.store(run.parent, run.hashes)
        engine.reports, engine.epoch, engine.cursor, engine.kind = True, state.epoch, state.cursor, state.kind
        engine.view.free_tokens = float(state.kv_free_tokens)
        engine.view.kv_tokens = state.kv.total_blocks * state.block_tokens
        engine.last_report = msgspec.structs.replace(state, stored=[], removed=[])
        engine.report_number += 1
        while engine.unconfirmed and engine.unconfirmed[0][0] <= requested_s:
            residency.unbook(engine.unconfirmed.popleft()[1])

    def no_reports(self, engine_id: str) -> None:
        """The engine has no cache-state endpoint: what it holds is estimated from what was placed there."""
        engine = self.engines[engine_id]
        engine.reports, engine.cursor, engine.epoch, engine.kind = False, None, None, None
        engine.view.free_tokens = engine.last_report = None
        engine.view.kv_tokens = engine.kv_tokens
        engine.report_number += 1
        while engine.unconfirmed:
            self._assume_stored(engine, engine.unconfirmed.popleft()[1])

    def age(self, now_s: float) -> None:
        """Let calls older than the window go, and reservations. Called every second or so, off the path of any call."""
        for engine in self.engines.values():
            for entry in engine.view.ledger.age(now_s):
                engine.view.residency.unshare(entry.leaf)
        self.reservations.age(now_s)

    def serving(self, model: str) -> int:
        """How many engines that are up serve `model`."""
        return len(self._eligible.get(model, ()))

    def context_tokens(self, model: str) -> int | None:
        """The longest context that an engine offers for `model`; None if one does not say."""
        offers = [engine.models[model] for engine in self.engines.values() if model in engine.models]
        known = [offer for offer in offers if offer is not None]
        return max(known) if known and len(known) == len(offers) else None

    def check_model(self, model: str) -> None:
        """Raise `ModelNotFoundError` or `NoEngineError` unless some engine that is up serves `model`."""
        if not self._eligible.get(model):
            raise self._nobody_serves(model)

    @property
    def models(self) -> set[str]:
        """Every model that some engine of the fleet is known to serve, up or not."""
        return {model for engine in self.engines.values() for model in engine.models}

    def check(self) -> None:
        """Assert that the state is consistent; for tests."""
        self.tree.check()
        for engine in self.engines.values():
            engine.view.residency.check()
            engine.view.ledger.check()
            engine.view.work.check()
            assert engine.view.outstanding == engine.view.work.calls >= 0
        self.reservations.check()
        assert self.reservations.running <= sum(engine.view.outstanding for engine in self.engines.values())

    def _leave(self, engine: FleetEngine, booking: Booking, now_s: float, *, stored: bool = True) -> None:
        """The call no longer runs. Its blocks stay expected until a report that was asked for later confirms them."""
        engine.view.outstanding -= 1
        engine.view.work.remove(booking.work)
        self.reservations.leave(booking.call)
        self._end_expectation(booking)
        if not stored:
            engine.view.residency.unbook(booking.leaf)
        elif engine.reports:
            engine.view.residency.touch(booking.leaf)
            engine.unconfirmed.append((now_s, booking.leaf))
        else:
            self._assume_stored(engine, booking.leaf)

    def _end_expectation(self, booking: Booking) -> None:
        """The call found its room, which reports tell of, or needs none any more."""
        self.engines[booking.placement.engine_id].view.residency.end_expectation(booking.victims)
        booking.victims = []

    def _assume_stored(self, engine: FleetEngine, leaf: Node) -> None:
        residency = engine.view.residency
        residency.touch(leaf)
        residency.store_path(leaf)
        residency.unbook(leaf)
        if engine.kv_tokens is not None:
            residency.evict(residency.resident_blocks - engine.kv_tokens // self.block_tokens)

    def _list_eligible(self) -> None:
        self._eligible = {
            model: [
                engine.view
                for engine in self.engines.values()
                if engine.health.state is HealthState.UP and model in engine.models
            ]
            for model in self.models
        }
        self.reservations.restrict(
            {model: [view.engine_id for view in views] for model, views in self._eligible.items()}
        )

    def _nobody_serves(self, model: str) -> ModelNotFoundError | NoEngineError:
        if model in self.models | self._expected_models:
            return NoEngineError(f"No engine that serves model '{model}' is up; try again shortly.", retry_after_s=1.0)
        known = ", ".join(sorted(self.models)) or "none so far"
        return ModelNotFoundError(f"The model '{model}' does not exist. Models served here: {known}.", param="model")
