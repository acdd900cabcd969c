"""The relay: places a call, sends it to its engine, and tries another engine while the client has been told nothing.

However an attempt ends (answered, refused, failed, client gone, gateway stopping), `Relay._close` settles, releases or
fails its booking, exactly once.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping

import structlog
from starlette.types import Receive, Send

from plait.backends.errors import EngineError, EngineLostError, EngineStatusError, EngineUnreachableError, NoEngineError
from plait.gateway.asgi import unless_gone
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import Delivery, Outcome
from plait.gateway.calls.engine_link import EngineLink
from plait.gateway.calls.exchange import Exchange
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.held_stream import HeldStream
from plait.gateway.calls.journey import Journey
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.recovery import Recovery
from plait.gateway.calls.session_engines import SessionEngines
from plait.gateway.fleet.booking import Booking, Failure
from plait.gateway.fleet.health import TAKES_CALLS
from plait.gateway.fleet.router import Router
from plait.gateway.timer import loop_time_s

BUSY = frozenset((429, 503))
"""Statuses of an engine that has too many calls. The calls that it has taken may go on."""

log = structlog.get_logger(__name__)


class Relay:
    """Delivers calls over `links`, by engine id, each at most `max_attempts` times.

    With `forward_client_key`, engines without a key of their own get the client's bearer token. The objectives of calls
    on their way change through `objectives`. The answers that are held count in `open_answers`.
    """

    def __init__(
        self,
        router: Router,
        links: Mapping[str, EngineLink],
        recovery: Recovery,
        gate: Gate,
        metrics: CallMetrics,
        *,
        objectives: ChangedObjectives,
        max_attempts: int,
        open_answers: OpenAnswers,
        forward_client_key: bool,
    ) -> None:
        self.open_answers = open_answers
        self._router = router
        self._links = links
        self._recovery = recovery
        self._gate = gate
        self._metrics = metrics
        self._objectives = objectives
        self._max_attempts = max_attempts
        self._forward_client_key = forward_client_key
        self._sessions = SessionEngines()

    async def deliver(self, delivery: Delivery, receive: Receive, send: Send) -> None:
        """Place the call, send it, stream the answer back. Raises `PlaitError` only before the first byte."""
        if delivery.call.streamed:
            held = HeldStream(send, delivery.form, delivery.call.call_id)
            journey = Journey(delivery, on_wait=held.waits)
            await held.follow(_delivered(self._travel(journey, held.send), receive))
        else:
            await _delivered(self._travel(Journey(delivery, may_leave=True), send), receive)

    async def run(self, delivery: Delivery, send: Send) -> Outcome:
        """As `deliver`, but the call does not end when a client goes. Raises `PlaitError` if no engine can take it."""
        return await self._travel(Journey(delivery), send)

    async def _travel(self, journey: Journey, send: Send) -> Outcome:
        self._objectives.begin(journey)
        try:
            return await self._run(journey, send)
        finally:
            self._objectives.end(journey)

    def refine(self, delivery: Delivery) -> None:
        """The call with this delivery's handle has its objectives from now on. No effect if it is not on its way."""
        self._objectives.change(delivery)

    async def _run(self, journey: Journey, send: Send) -> Outcome:
        """Try engine after engine until the call has ended."""
        try:
            while True:
                try:
                    problem = await self._attempt(journey, send)
                except EngineError as error:
                    exchange = journey.exchange
                    if exchange is None:  # no engine takes calls
                        if journey.failures:
                            return self._given_up(journey)
                        raise
                    journey.failures.append((exchange.engine_id, error))
                    _tell_of_failure(journey, error)
                    if exchange.told:
                        return Outcome(exchange.engine_id, error)
                    if not self._may_retry(journey, error):
                        return self._given_up(journey)
                else:
                    assert journey.exchange is not None
                    return Outcome(journey.exchange.engine_id, problem)
        finally:
            self._gate.left(journey)
            if journey.charged:
                self._router.retries.give_back(journey.delivery.call.model)
            self._finish(journey)

    async def _attempt(self, journey: Journey, send: Send) -> str | None:
        """Place the call and run it there; returns what is wrong with the answer, as `Exchange.run` does."""
        booking = await self._booked(journey)
        delivery, engine_id = journey.delivery, booking.placement.engine_id
        link, known = self._links[engine_id], self._router.engines[engine_id].cache
        if delivery.turn_of and not delivery.call.prompt_tokens:
            self._sessions.placed(delivery.tenant, delivery.turn_of, delivery.call.model, engine_id)
        self._metrics.placed(booking)
        gaps = self._metrics.gaps.of(delivery.call.model, engine_id)
        exchange = journey.exchange = Exchange(
            booking, delivery, link, known, self._router, gaps, self.open_answers,
            sends_client_key=self._forward_client_key,
        )  # fmt: skip
        error: EngineError | None = None
        try:
            return await exchange.run(send)
        except EngineError as failure:
            error = failure
            raise
        finally:
            journey.outcome = "failed" if error is not None else exchange.ended or "client_gone"
            self._close(exchange, journey.outcome, error)

    async def _booked(self, journey: Journey) -> Booking:
        """The booking of the next attempt, once the call is to be sent. A retry does not wait."""
        delivery, journey.exchange = journey.delivery, None
        prefer = self._continues_on(delivery)
        if journey.waiting is None:
            return await self._gate.enter(journey, prefer)
        now_s = loop_time_s()
        placement = self._router.select(delivery.call, now_s, prefer=prefer, avoid=journey.avoids, route=delivery.route)
        if placement.engine_id in journey.avoids and not _may_repeat(journey.failures[-1][1]):
            raise NoEngineError(f"No other engine takes calls for '{delivery.call.model}'.")
        return self._router.book(delivery.call, placement, now_s)

    def _continues_on(self, delivery: Delivery) -> str | None:
        """The engine that has most of the prompt, if something else than the prompt tells."""
        if delivery.continues_on is None and delivery.turn_of and not delivery.call.prompt_tokens:
            return self._sessions.engine_of(delivery.tenant, delivery.turn_of, delivery.call.model)
        return delivery.continues_on

    def _close(self, exchange: Exchange, outcome: str, error: EngineError | None) -> None:
        """Settle, release or fail the booking, and tell those who look after the engines."""
        booking, now_s, change = exchange.booking, loop_time_s(), None
        if outcome == "ok":
            usage = None if exchange.usage_corrected else exchange.usage  # the prediction is better than a wrong count
            change = self._router.settle(booking, usage, now_s)
        elif error is None:
            refused = outcome == "refused"
            self._router.release(booking, now_s, delivered=exchange.told and not refused, refused=refused)
        elif isinstance(error, EngineLostError):
            self._router.fail(booking, None, now_s)
        else:
            change = self._router.fail(booking, _failure(error), now_s)
            if isinstance(error, EngineUnreachableError) and error.cause == "unreachable":
                change = self._router.health.unreachable(exchange.engine_id) or change
        self._metrics.ended(exchange, outcome, None if error is None else error.cause, now_s)
        self._recovery.on_change(change)

    def _may_retry(self, journey: Journey, error: EngineError) -> bool:
        """Whether the call is tried again. A retry because the engine went out is not charged to the budget."""
        exchange, model = journey.exchange, journey.delivery.call.model
        assert exchange is not None
        if len(journey.failures) >= self._max_attempts:
            self._metrics.not_retried(model, "attempts")
            return False
        engine = self._router.engines[exchange.engine_id]
        went_out = engine.draining or engine.health.state not in TAKES_CALLS
        is_free = went_out or not engine.health.counts(exchange.booking.sent_s)
        if not is_free and not journey.charged:
            journey.charged = self._router.retries.take(model)
            if not journey.charged:
                self._metrics.not_retried(model, "budget")
                return False
        self._metrics.retried(model, exchange.engine_id, error.cause)
        return True

    def _given_up(self, journey: Journey) -> Outcome:
        """The outcome of a call that no engine answered: the most useful of its errors."""
        engine_id, error = min(journey.failures, key=lambda failure: _USEFULNESS.get(failure[1].cause, 2))
        if isinstance(error, EngineUnreachableError):
            error = NoEngineError(f"No engine that serves '{journey.delivery.call.model}' can be reached.")
        if error.retry_after_s is None:
            error.retry_after_s = 1.0
        return Outcome(engine_id, error, is_told=False)

    def _finish(self, journey: Journey) -> None:
        """The call has ended: what it was promised is counted, and it gets its line in the log."""
        delivery, exchange, now_s = journey.delivery, journey.exchange, loop_time_s()
        if exchange is not None and journey.outcome in {"ok", "failed"}:
            self._metrics.objectives.ended(exchange, now_s, answered=journey.outcome == "ok")
        booking = exchange and exchange.booking
        usage = exchange and exchange.usage
        tenant = self._metrics.tenant_label(delivery.tenant)
        log.info(
            "call",
            request_id=delivery.call.call_id,
            tenant=tenant,
            model=delivery.call.model,
            session=delivery.session,
            output=delivery.output,
            engine=exchange and exchange.engine_id,
            placement=booking and booking.placement.reason,
            objective=delivery.call.objective,
            slo_at_risk=bool(booking and booking.placement.is_at_risk) or None,
            group=delivery.call.group and delivery.call.group.group_id.replace(delivery.tenant, tenant, 1),
            outcome=journey.outcome if exchange or not journey.failures else "no_engine",
            failed_on=[f"{engine_id}: {error.cause}" for engine_id, error in journey.failures] or None,
            prompt_tokens=delivery.call.prompt_tokens,
            predicted_cached_tokens=booking and booking.placement.cached_tokens,
            cached_tokens=usage and usage.cached_tokens,
            output_tokens=usage and usage.output_tokens,
            held_s=delivery.held_s and round(delivery.held_s, 4),
            placed_s=booking and round(booking.booked_s - delivery.arrived_s, 4),
            waited_s=booking and round(booking.sent_s - booking.booked_s, 4),
            ttft_s=booking and booking.first_token_s and round(booking.first_token_s - delivery.arrived_s, 4),
            e2e_s=round(now_s - delivery.arrived_s, 4),
        )


_USEFULNESS = {"status_429": 0, "status_503": 0, "status_500": 1, "unreachable": 4, "connect_timeout": 4, "lost": 3}
"""The order of errors for a client that gets one of several: first what the engine said, last what it did not."""


def _tell_of_failure(journey: Journey, error: EngineError) -> None:
    exchange = journey.exchange
    assert exchange is not None
    log.warning(
        "engine failed a call",
        request_id=journey.delivery.call.call_id,
        engine=exchange.engine_id,
        cause=error.cause,
        error=error.message,
        detail=error.__cause__ and str(error.__cause__),
        in_mid_stream=exchange.told,
    )


async def _delivered(run: Coroutine[None, None, Outcome], receive: Receive) -> None:
    """Raises the call's error if its client has not been told of it."""
    outcome = await unless_gone(receive, run)
    if isinstance(outcome.problem, EngineError) and not outcome.is_told:
        raise outcome.problem


def _may_repeat(error: EngineError) -> bool:
    """Whether the same engine may be tried again at once, as there is no other."""
    return error.cause in {"closed", "garbled", "broken", "status_500", "status_502"}


def _failure(error: EngineError) -> Failure:
    is_busy = isinstance(error, EngineStatusError) and error.status in BUSY
    return Failure(error.cause, moves_waiting=not is_busy, retry_after_s=error.retry_after_s)
