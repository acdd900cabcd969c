"""The relay: places a call, sends it to its engine, and tries another engine while the client has been told nothing.

`Relay` awaits. What comes next after an attempt is decided by synchronous methods: `_close`, `_may_retry`, `_give_up`.
However an attempt ends (answered, refused, failed, client gone, gateway stopping), `_close` settles, releases or fails
its booking, exactly once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from random import random

import structlog

from plait.backends.errors import (
    EngineError,
    EngineLostError,
    EngineStatusError,
    EngineUnreachableError,
    NoEngineError,
    PlaitError,
)
from plait.gateway.asgi import Sink
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import CallWatch, Delivery
from plait.gateway.calls.gate import Gate, HeldStream
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_bodies import OpenAnswers
from plait.gateway.calls.upstream import Upstream
from plait.gateway.fleet.booking import Booking, Failure
from plait.gateway.fleet.engine import note_answer
from plait.gateway.fleet.health import TAKES_CALLS
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.membership.recovery import Recovery
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call

BUSY = frozenset((429, 503))
"""Statuses of an engine that has too many calls. The calls that it has taken may go on."""

REPEAT_S = 0.5
"""About the first pause before an engine without another is asked again. It doubles."""

MOST_SESSIONS = 10_000
"""So many sessions are remembered."""

log = structlog.get_logger(__name__)


class SessionEngines:
    """The engine of each named session's latest turn. The least recently used ones are forgotten beyond `most`."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._engines: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    def engine_of(self, tenant: str, session: str, model: str) -> str | None:
        """Where the session's latest turn ran; None for one that is not known."""
        return self._engines.get((tenant, session, model))

    def placed(self, tenant: str, session: str, model: str, engine_id: str) -> None:
        """A turn of the session runs on this engine."""
        key = tenant, session, model
        self._engines[key] = engine_id
        self._engines.move_to_end(key)
        if len(self._engines) > self._most:
            self._engines.popitem(last=False)


class Relay:
    """Delivers calls over `links`, by engine id, each at most `max_attempts` times. A `watch` takes notice of each.

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
        self.watch: CallWatch | None = None
        self._upstream = Upstream(router, metrics.gaps, open_answers, forward_client_key=forward_client_key)
        self._router = router
        self._links = links
        self._recovery = recovery
        self._gate = gate
        self._metrics = metrics
        self._objectives = objectives
        self._max_attempts = max_attempts
        self._sessions = SessionEngines()

    async def deliver(self, delivery: Delivery, sink: Sink) -> None:
        """Place the call, send it, stream the answer back. Raises `PlaitError` only before the first byte."""
        held = None
        if delivery.call.streamed:
            held = delivery.held_stream = HeldStream(sink, delivery.form, delivery.call.call_id)
        else:
            delivery.may_leave = True
        try:
            await self.run(delivery, sink)
            if isinstance(delivery.problem, EngineError) and not delivery.response_started:
                raise delivery.problem
        except PlaitError as error:
            if held is None or not held.has_begun:
                raise
            held.fail(error)
            await held.flush()

    async def run(self, delivery: Delivery, sink: Sink) -> None:
        """Deliver a call whose client is told by others. How it ended is in its `problem`.

        In the end it leaves the books, is counted, and the log gets its line. Raises `PlaitError` if no engine can take
        it.
        """
        if delivery.handle is not None:
            self._objectives.begin(delivery)
        try:
            while True:
                try:
                    await self._attempt(delivery, sink)
                except EngineError as error:
                    if self._may_retry(delivery, error):
                        continue
                if delivery.response_started:
                    delivery.status = delivery.engine_status
                return
        except PlaitError as error:
            delivery.status = error.status
            raise
        finally:
            if delivery.handle is not None:
                self._objectives.end(delivery)
            now_s = loop_time_s()
            self._gate.left(delivery, now_s)
            if delivery.charged:
                self._router.retries.give_back(delivery.call.model)
            _log(delivery, self._metrics.ended(delivery, now_s), now_s)
            if self.watch is not None:
                self.watch.ended(delivery, now_s)

    def refine(self, handle: str, call: Call) -> None:
        """The call with this handle has these objectives from now on. No effect if it is not on its way."""
        self._objectives.change(handle, call)

    async def _attempt(self, delivery: Delivery, sink: Sink) -> None:
        """Place the call and run it there."""
        call, prefer, held = delivery.call, delivery.continues_on, delivery.held_stream
        follows_session = bool(delivery.turn_of) and not call.prompt_tokens  # the prompt does not tell
        if follows_session and prefer is None:
            prefer = self._sessions.engine_of(delivery.tenant, delivery.turn_of, call.model)
        if delivery.waiting is None:
            booking = await self._gate.enter(delivery, prefer)
        else:  # a retry does not wait
            booking = await _booked_again(self._router, delivery, prefer)
        engine_id = booking.placement.engine_id
        delivery.booking, delivery.link, delivery.engine_id = booking, self._links[engine_id], engine_id
        if follows_session:
            self._sessions.placed(delivery.tenant, delivery.turn_of, call.model, engine_id)
        self._metrics.placed(booking)
        if self.watch is not None:
            self.watch.placed(delivery)
        error: EngineError | None = None
        try:
            await self._upstream.send(delivery, held if held is not None and held.has_begun else sink)
        except EngineError as failure:
            error = failure
            raise
        finally:
            delivery.outcome = "failed" if error is not None else delivery.ended or "client_gone"
            self._close(delivery, booking, error)

    def _close(self, delivery: Delivery, booking: Booking, error: EngineError | None) -> None:
        """Settle, release or fail the booking, and tell those who look after the engines."""
        outcome, now_s, change = delivery.outcome, loop_time_s(), None
        if outcome == "ok":
            usage = None if delivery.usage_corrected else delivery.usage  # the prediction is better than a wrong count
            if usage is not None:
                note_answer(self._router.engines[delivery.engine_id], booking, usage, now_s)
            change = self._router.settle(booking, usage, now_s)
        elif error is None:
            refused = outcome == "refused"
            delivered = delivery.response_started and not refused
            self._router.release(booking, now_s, delivered=delivered, refused=refused)
        elif isinstance(error, EngineLostError):
            self._router.fail(booking, None, now_s)
        else:
            change = self._router.fail(booking, _failure(error), now_s)
            if isinstance(error, EngineUnreachableError) and error.cause == "unreachable":
                change = self._router.health.unreachable(delivery.engine_id, said=error.message) or change
        self._metrics.left_engine(delivery, booking, None if error is None else error.cause, now_s)
        if change is not None:
            self._recovery.on_change(change)

    def _may_retry(self, delivery: Delivery, error: EngineError) -> bool:
        """Whether a failed call is tried again; else its `problem` is set. Raises the error if no engine takes calls.

        A retry because the engine went out is not charged to the budget.
        """
        booking, model = delivery.booking, delivery.call.model
        if booking is None:  # no engine takes it
            if not delivery.failures:
                raise error
            self._give_up(delivery)
            return False
        delivery.failures += ((delivery.engine_id, error),)
        _tell_of_failure(delivery, error)
        if delivery.response_started:
            delivery.problem = error
            return False
        engine = self._router.engines[delivery.engine_id]
        went_out = engine.draining or engine.health.state not in TAKES_CALLS
        is_free = delivery.charged or went_out or booking.sent_s < engine.health.ejected_s
        why = None
        if len(delivery.failures) >= self._max_attempts:
            why = "attempts"
        elif not is_free:
            delivery.charged = self._router.retries.take(model)
            why = None if delivery.charged else "budget"
        if why is not None:
            self._metrics.not_retried(model, why)
            self._give_up(delivery)
            return False
        self._metrics.retried(model, delivery.engine_id, error.cause)
        delivery.retry()
        return True

    def _give_up(self, delivery: Delivery) -> None:
        """The problem of a call that no engine answered: the most useful of its errors."""
        engine_id, error = min(delivery.failures, key=lambda failure: _USEFULNESS.get(failure[1].cause, 2))
        if isinstance(error, EngineUnreachableError):
            error = NoEngineError(f"No engine that serves '{delivery.call.model}' can be reached.")
        if error.retry_after_s is None:
            error.retry_after_s = 1.0
        delivery.status, delivery.engine_id, delivery.problem = error.status, engine_id, error


_USEFULNESS = {"status_429": 0, "status_503": 0, "status_500": 1, "unreachable": 4, "connect_timeout": 4, "lost": 3}
"""Of several errors, a client gets the one with the lowest number: engines' answers come before broken connections."""


def _log(delivery: Delivery, tenant: str, now_s: float) -> None:
    """Write the line of a call that has ended. `tenant` is the tenant as operators read it. Times are in seconds."""
    call, booking, usage, arrived_s = delivery.call, delivery.booking, delivery.usage, delivery.arrived_s
    placement = booking and booking.placement
    first_s = None if booking is None else booking.first_token_s
    tpot_s = None  # the mean time of a token after the first, where they were timed
    if usage is not None and first_s is not None and usage.output_tokens > 1:
        tpot_s = round((now_s - first_s) / (usage.output_tokens - 1), 5)
    log.info(
        "call",
        request_id=call.call_id,
        path=delivery.path,
        status=delivery.status,
        stream=call.streamed,
        tenant=tenant,
        model=call.model,
        session=delivery.session,
        output=delivery.output,
        engine=placement and placement.engine_id,
        placement=placement and placement.reason,
        objective=call.objective,
        slo_at_risk=(placement and placement.meets_ttft is False) or None,
        group=call.group and call.group.group_id.replace(delivery.tenant, tenant, 1),
        outcome=delivery.outcome if booking or not delivery.failures else "no_engine",
        finish_reason=delivery.finish,
        failed_on=_failed_on(delivery) if delivery.failures else None,
        prompt_tokens=call.prompt_tokens,
        predicted_cached_tokens=placement and placement.cached_tokens,
        cached_tokens=usage and usage.cached_tokens,
        output_tokens=usage and usage.output_tokens,
        held_s=delivery.held_s and round(delivery.held_s, 4),
        placed_s=booking and round(booking.booked_s - arrived_s, 4),
        waited_s=booking and round(booking.sent_s - booking.booked_s, 4),
        ttft_s=first_s and round(first_s - arrived_s, 4),
        tpot_s=tpot_s,
        e2e_s=round(now_s - arrived_s, 4),
    )


def _failed_on(delivery: Delivery) -> list[str]:
    return [f"{engine_id}: {error.cause}" for engine_id, error in delivery.failures]


def _tell_of_failure(delivery: Delivery, error: EngineError) -> None:
    log.warning(
        "engine failed a call",
        request_id=delivery.call.call_id,
        engine=delivery.engine_id,
        cause=error.cause,
        error=error.message,
        detail=error.__cause__ and str(error.__cause__),
        in_mid_stream=delivery.response_started,
    )


async def _booked_again(router: Router, delivery: Delivery, prefer: str | None) -> Booking:
    """The booking of a call that has failed: on another engine, or after a pause on the same."""
    avoid = delivery.avoids.union(engine_id for engine_id, _ in delivery.failures)
    select = partial(router.select, delivery.call, prefer=prefer, avoid=avoid, route=delivery.route)
    placement = select(loop_time_s())
    if placement.engine_id in avoid:
        await asyncio.sleep(_pause_s(delivery))
        placement = select(loop_time_s())
    return router.book(delivery.call, placement, loop_time_s())


def _pause_s(delivery: Delivery) -> float:
    """The pause before the same engine is tried again, as there is no other. Raises `NoEngineError` if it shall not be.

    A connection that was closed may have been an old one, for which nobody has to wait.
    """
    cause, failed = delivery.failures[-1][1].cause, len(delivery.failures)
    if cause not in {"closed", "garbled", "broken", "status_500", "status_502"}:
        raise NoEngineError(f"No other engine takes calls for '{delivery.call.model}'.")
    return 0.0 if cause == "closed" and failed == 1 else REPEAT_S * 2 ** (failed - 1) * (0.75 + random() / 2)  # noqa: S311


def _failure(error: EngineError) -> Failure:
    is_busy = isinstance(error, EngineStatusError) and error.status in BUSY
    return Failure(error.cause, not is_busy, error.retry_after_s, error.message)
