"""The relay: places a call, sends it to its engine, and tries another engine while the client has been told nothing.

Nothing here waits. A call goes from event to event, and each decides what comes next:

- `begin` places it (`_place`); it is sent at once (`_send`), or when admission lets it through (`_resume`);
- its exchange ends (`_answered`): the call ends, or it is placed again (`_place_again`), as the engine lacks something
  that another may have, or after a failure, perhaps with a pause (`_book_again`);
- its client goes, or the gateway stops (`cancel`).

However an attempt ends, `_close` settles, releases or fails its booking, exactly once. However a call ends, `_finish`
takes it out of the books, exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from random import random

import structlog

from plait.backends.errors import (
    EngineError,
    EngineLostError,
    EngineUnreachableError,
    NoEngineError,
    PlaitError,
)
from plait.gateway.answers.refusals import LackError
from plait.gateway.asgi import OnEnd, Sink
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import CallWatch, Delivery
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.request_faults import RequestFaults
from plait.gateway.calls.session_engines import SessionEngines
from plait.gateway.calls.silent_streams import SilentStreams
from plait.gateway.calls.upstream import Exchange, Upstream
from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.engine import note_answer
from plait.gateway.fleet.health import TAKES_CALLS
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.membership.recovery import Recovery
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call, Placement

REPEAT_S = 0.5
"""About the first pause before an engine without another is asked again. It doubles."""

log = structlog.get_logger(__name__)


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
        self._faults = faults = RequestFaults(router, recovery.on_change)
        self._upstream = Upstream(router, metrics.gaps, open_answers, faults, forward_client_key=forward_client_key)
        self._router = router
        self._links = links
        self._recovery = recovery
        self._gate = gate
        self._metrics = metrics
        self._objectives = objectives
        self._max_attempts = max_attempts
        self._sessions = SessionEngines()
        self.silent_streams = SilentStreams(gate)

    async def deliver(self, delivery: Delivery, sink: Sink, *, for_client: bool = True) -> None:
        """Place the call, send it, send on what comes in the sink. Raises the error that ended the call.

        Once the answer has begun, only an error of the sink itself is raised.
        """
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        refused: PlaitError | None = None
        self.begin(delivery, sink, partial(_set, ended), for_client=for_client)
        try:
            await sink.flush(ended)
        except PlaitError as error:  # whoever takes the answer takes no more of it
            if not isinstance(delivery.exchange, Exchange):
                raise
            if for_client:  # nobody else tells the client of it
                refused, delivery.engine_status = error, error.status
            delivery.exchange.end(error)
            await sink.flush(ended)
        finally:
            if ended.cancelled() or not ended.done():  # with the task that waits for it
                self.cancel(delivery)
        failure = ended.result() or refused
        if failure is not None:
            raise failure

    async def run(self, delivery: Delivery, sink: Sink) -> None:
        """Deliver a call whose client is told by others. How it ended is in its `problem`.

        In the end it leaves the books, is counted, and the log gets its line. Raises `PlaitError` if no engine can take
        it.
        """
        await self.deliver(delivery, sink, for_client=False)

    def begin(self, delivery: Delivery, sink: Sink, on_end: OnEnd, *, for_client: bool = True) -> None:
        """Place the call, send it, pass the answer on. `on_end` is called once, with the error that ended it.

        If it is `for_client`, that is the error to tell the client: there is none once an answer has begun.
        """
        delivery.sink, delivery.on_end = sink, on_end
        if for_client:
            delivery.may_leave = not delivery.call.streamed
            if delivery.call.streamed:
                self.silent_streams.begin(delivery)
        if delivery.handle is not None:
            self._objectives.begin(delivery)
        self._step(delivery, self._place)

    def cancel(self, delivery: Delivery) -> None:
        """The client has gone, or the gateway stops: the call ends where it is, and `on_end` is not called.

        No effect on a call that has ended.
        """
        exchange, booking = delivery.exchange, delivery.booking
        if delivery.on_end is None:
            return
        delivery.outcome = "client_gone"
        try:
            if exchange is None:
                self._gate.gone(delivery)
            else:
                exchange.close()
                assert booking is not None
                delivery.exchange, delivery.outcome = None, delivery.ended or "client_gone"
                self._close(delivery, booking, None)
        finally:
            self._finish(delivery)

    # What comes next.

    def _step(self, delivery: Delivery, step: Callable[[Delivery], None]) -> None:
        """Do what comes next of a call. An error ends its attempt, or the call."""
        try:
            step(delivery)
        except EngineError as error:
            self._failed(delivery, error)
        except Exception as error:  # noqa: BLE001 - a defect, too, ends the call, and is told to `on_end`
            self._end(delivery, error)

    def _place(self, delivery: Delivery) -> None:
        """Place the call, and send it if it does not have to wait."""
        prefer = self._sessions.preferred(delivery) if delivery.turn_of else delivery.continues_on
        try:
            waiting = self._gate.enter(delivery, prefer, partial(self._resume, delivery))
        except PlaitError as error:
            delivery.outcome = "no_engine" if isinstance(error, NoEngineError) else "refused"
            raise
        if waiting.is_sent:
            assert waiting.booking is not None
            self._send(waiting.booking, delivery)

    def _resume(self, delivery: Delivery, error: Exception | None) -> None:
        """A call that has waited is to be sent, or has failed."""
        waiting = delivery.waiting
        if error is None:
            assert waiting is not None
            assert waiting.booking is not None
            self._step(delivery, partial(self._send, waiting.booking))
        else:
            delivery.outcome = "no_engine" if isinstance(error, NoEngineError) else "refused"
            self._step(delivery, partial(_raise, error))

    def _place_again(self, delivery: Delivery) -> None:
        """Place a call that has failed on another engine, or after a pause on the same. It does not wait for room."""
        placement = self._selected(delivery)
        if placement.engine_id in delivery.failed_engines:
            later = asyncio.get_running_loop().call_later
            delivery.timer = later(_pause_s(delivery), self._step, delivery, self._book_again)
        else:
            self._book(delivery, placement)

    def _book_again(self, delivery: Delivery) -> None:
        delivery.timer = None
        self._book(delivery, self._selected(delivery))

    def _selected(self, delivery: Delivery) -> Placement:
        return self._router.select(
            delivery.call,
            loop_time_s(),
            prefer=self._sessions.preferred(delivery),
            avoid=delivery.avoids | delivery.failed_engines,
            unable=delivery.unable,
            route=delivery.route,
        )

    def _book(self, delivery: Delivery, placement: Placement) -> None:
        """Send a call that has failed to the engine of its new placement."""
        self._send(self._router.book(delivery.call, placement, loop_time_s(), tenant=delivery.tenant), delivery)

    def _send(self, booking: Booking, delivery: Delivery) -> None:
        """Send the call to the engine that it is booked on."""
        engine_id, call = booking.placement.engine_id, delivery.call
        delivery.booking, delivery.engine_id = booking, engine_id
        try:
            delivery.link = self._links[engine_id]
            if delivery.turn_of and not call.prompt_tokens:
                self._sessions.placed(delivery.tenant, delivery.turn_of, call.model, engine_id)
            if self.watch is not None:
                self.watch.placed(delivery)
            delivery.exchange = self._upstream.send(delivery, partial(self._answered, delivery))
        except Exception as error:  # noqa: BLE001 - whatever it is, the booking has to end
            self._answered(delivery, error)

    def _answered(self, delivery: Delivery, error: BaseException | None) -> None:
        """The engine's answer has ended, and perhaps the call."""
        booking, failure = delivery.booking, error if isinstance(error, EngineError) else None
        assert booking is not None
        delivery.exchange = None
        unfinished = "client_gone" if error is None or isinstance(error, PlaitError) else "defect"
        delivery.outcome = "failed" if failure is not None else delivery.ended or unfinished
        try:
            self._close(delivery, booking, failure)
        except Exception as defect:  # noqa: BLE001 - the call ends all the same, and whoever began it is told
            failure, error = None, defect
        if isinstance(error, LackError):  # nothing has failed: this is no attempt, and the retry costs nothing
            self._metrics.retried(delivery.call.model, delivery.engine_id, error.lack)
            delivery.retry()
            self._step(delivery, self._place_again)
        elif failure is None:
            self._end(delivery, error)
        else:
            self._failed(delivery, failure)

    def _failed(self, delivery: Delivery, error: EngineError) -> None:
        """An attempt has failed: another one follows, or the call ends."""
        try:
            again = self._may_retry(delivery, error)
        except Exception as final:  # noqa: BLE001 - an error, or a defect: the call ends
            self._end(delivery, final)
            return
        if again:
            self._step(delivery, self._place_again)
        else:
            self._end(delivery, None)

    def _end(self, delivery: Delivery, error: BaseException | None) -> None:
        """The call has ended, with the error that is raised for it."""
        if isinstance(error, PlaitError):
            delivery.status = error.status
        elif error is not None:
            delivery.status, delivery.outcome = 500, "defect"
        elif delivery.response_started:
            delivery.status = delivery.engine_status
        on_end = delivery.on_end
        try:
            self._finish(delivery)
            if error is not None or delivery.problem is not None:
                error = _untold(delivery, error)
        finally:
            if on_end is not None:
                on_end(error)

    def _finish(self, delivery: Delivery) -> None:
        """A call leaves the books, is counted, and the log gets its line."""
        delivery.on_end = None
        if delivery.held_stream is not None:
            self.silent_streams.end(delivery)
        if delivery.handle is not None:
            self._objectives.end(delivery)
        now_s, waiting, usage = loop_time_s(), delivery.waiting, delivery.usage
        if delivery.doubts:  # no other engine has answered
            self._faults.unresolved(delivery, now_s)
        if waiting is not None and waiting.is_sent:
            used_tokens = None if usage is None else usage.prompt_tokens + usage.output_tokens
            self._gate.admission.left(waiting, used_tokens, now_s)
        if delivery.charged:
            self._router.retries.give_back(delivery.call.model)
        _log(delivery, self._metrics.ended(delivery, now_s), now_s)
        if self.watch is not None:
            self.watch.ended(delivery, now_s)

    def refine(self, handle: str, call: Call) -> None:
        """The call with this handle has these objectives from now on. No effect if it is not on its way."""
        self._objectives.change(handle, call)

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
            change = self._faults.failed(delivery, booking, error, now_s)
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
            delivery.outcome = "no_engine"
            _give_up(delivery)
            return False
        delivery.failures += ((delivery.engine_id, error),)
        _tell_of_failure(delivery, error)
        if delivery.response_started:
            delivery.problem = error
            return False
        engine = self._router.engines[delivery.engine_id]
        went_out = engine.draining or engine.is_doubted or engine.health.state not in TAKES_CALLS
        is_free = delivery.charged or went_out or booking.sent_s < engine.health.ejected_s
        why = "attempts" if len(delivery.failures) >= self._max_attempts else None
        if why is None and not is_free:
            delivery.charged = self._router.retries.take(model)
            why = None if delivery.charged else "budget"
        if why is not None:
            self._metrics.not_retried(model, why)
            _give_up(delivery)
            return False
        self._metrics.retried(model, delivery.engine_id, error.cause)
        delivery.retry()
        return True


def _give_up(delivery: Delivery) -> None:
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
    log.bind().info(  # `log.info` would raise an AttributeError and catch it, in each call
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
        slo_at_risk=(placement and placement.meets_slo is False) or None,
        group=call.group and call.group.group_id.replace(delivery.tenant, tenant, 1),
        outcome=delivery.outcome,
        finish_reason=delivery.finish,
        failed_on=_failed_on(delivery) if delivery.failures else None,
        prompt_tokens=call.prompt_tokens,
        predicted_cached_tokens=placement and placement.cached_tokens,
        cached_tokens=usage and usage.cached_tokens,
        output_tokens=usage and usage.output_tokens,
        held_s=delivery.held_s and round(delivery.held_s, 4),
        placed_s=booking and round(booking.booked_s - arrived_s, 4),
        waited_s=booking and round(booking.sent_s - arrived_s, 4),
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


def _set(ended: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not ended.done():
        ended.set_result(error)


def _raise(error: Exception, _delivery: Delivery) -> None:
    raise error


def _untold(delivery: Delivery, error: BaseException | None) -> BaseException | None:
    """The error that is to be told of a call that has ended so. A client whose stream has waited is told here."""
    held = delivery.held_stream
    is_for_client = held is not None or delivery.may_leave
    if error is None and is_for_client and not delivery.response_started and isinstance(delivery.problem, EngineError):
        error = delivery.problem
    if held is None or not held.has_begun or not isinstance(error, PlaitError):
        return error
    held.fail(error)
    return None


def _pause_s(delivery: Delivery) -> float:
    """The pause before the same engine is tried again, as there is no other. Raises `NoEngineError` if it shall not be.

    A connection that was closed may have been an old one, for which nobody has to wait.
    """
    cause, failed = delivery.failures[-1][1].cause, len(delivery.failures)
    if cause not in {"closed", "garbled", "broken", "status_500", "status_502"}:
        raise NoEngineError(f"No other engine takes calls for '{delivery.call.model}'.")
    return 0.0 if cause == "closed" and failed == 1 else REPEAT_S * 2 ** (failed - 1) * (0.75 + random() / 2)  # noqa: S311
