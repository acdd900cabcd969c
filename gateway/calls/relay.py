"""The relay: places a call, sends it to its engine, and retries on another engine until the client has a first byte.

The relay is an event-driven state machine. No method waits; the state is in the `Delivery`. The events of a call:

- it begins: `_place` asks admission, and `_send` follows at once, or when admission calls `_resume`;
- bytes of the answer have arrived, or the client has read some (`_news`): they are forwarded, and the call ends once
  the client has the whole answer;
- the engine fails the call, or lacks its model or context: `_place_again` chooses another engine, or the same one after
  a pause, or the call ends with the error;
- the client disconnects or the gateway stops (`_gone`), or the sink refuses the answer (`_untaken`): the call ends.

`_take` runs an event's step, then the step that each step returns. An exception is the next event: an `EngineError`
fails the attempt (`_failed`), a `LackError` moves the call (`_lacking`), any other ends the call (`_broken`).
Invariants: `Attempts.close` ends each booking exactly once. An ended call runs each cleanup step of `Holdings` exactly
once, in order, even if one raises (`_let_go`), and only then calls `on_end` (`tell`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import structlog

from plait.backends.errors import (
    ENDS_STREAMS,
    AnswerTooLargeError,
    EngineError,
    GatewayStoppingError,
    NoEngineError,
    PlaitError,
)
from plait.gateway.answers.refusals import LackError
from plait.gateway.asgi import OnEnd, Sink
from plait.gateway.calls.attempts import Attempts, most_useful, pause_s, tell_of_failure
from plait.gateway.calls.call import CLIENT_CLOSED, DEFECT, NO_SLOT, Answer, Asked, Attempt, Ending, Outcome
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import Companion, Delivery, DeliveryState
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.holdings import Holdings, tell
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.records import CallRecords
from plait.gateway.calls.request_faults import RequestFaults
from plait.gateway.calls.service_tier import Tier
from plait.gateway.calls.session_engines import SessionEngines
from plait.gateway.calls.silent_streams import SilentStreams
from plait.gateway.calls.upstream import Upstream
from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.membership.recovery import Recovery
from plait.gateway.timer import LEAST_LAG_S, LoopLag, loop_time_s
from plait.policy.types import Call, Placement

Step = Callable[[Delivery], "Step | None"]
"""Does one step of a call. Returns the step to run next, or None: the call waits for an event, or has ended."""

CUT: Final = frozenset(("closed", "unreachable", "connect_timeout"))
"""Causes of failures for which another host is preferred: the engines of a machine or pod go down within a second."""

log = structlog.get_logger(__name__)


ToldBy = Callable[[Sink, Delivery], Sink]
Accompany = Callable[[Delivery], Companion | None]


class Relay:
    """Delivers calls over `links` (by engine id), each at most `max_attempts` times.

    With `forward_client_key`, engines without a configured key get the client's bearer token. `objectives` changes
    calls that run. `open_answers` limits the buffered bytes of unstreamed answers. `told_receipt` makes the
    stage that tells a call's receipt, where there is such a guest, and each of `accompany` may give a call a companion.
    """

    def __init__(
        self,
        router: Router,
        links: Mapping[str, EngineLink],
        recovery: Recovery,
        gate: Gate,
        metrics: CallMetrics,
        *,
        records: CallRecords,
        objectives: ChangedObjectives,
        max_attempts: int,
        open_answers: OpenAnswers,
        forward_client_key: bool,
    ) -> None:
        faults, silent_streams = RequestFaults(router, recovery.on_change), SilentStreams(gate)
        self.open_answers = open_answers
        self.silent_streams = silent_streams
        self.holdings = Holdings(
            gate, records, silent_streams=silent_streams, objectives=objectives, faults=faults, retries=router.retries
        )
        self.is_stopping = False  # True: `cancel` reports calls as stopped by the gateway, not as client_gone
        self._attempts = Attempts(router, faults, metrics, recovery, max_attempts)
        self._upstream = Upstream(
            router, links, metrics, open_answers, faults,
            forward_client_key=forward_client_key, max_attempts=max_attempts,
        )  # fmt: skip
        self._router = router
        self._gate = gate
        self._metrics = metrics
        self._objectives = objectives
        self._sessions = SessionEngines()
        self.told_receipt: ToldBy | None = None
        self.accompany: list[Accompany] = []

    async def deliver(self, asked: Asked, sink: Sink, *, for_client: bool = True) -> Ending:
        """Deliver the call and flush the sink. Raises the error that ended the call.

        Once the answer has begun, only an error of the sink is raised: the client has got any other as an event.
        """
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        refused: PlaitError | None = None
        delivery = self.begin(asked, sink, partial(_set, ended), for_client=for_client)
        try:
            await sink.flush(ended)
        except PlaitError as error:  # the sink refuses the rest of the answer, as over a size limit
            if delivery.attempt is None or not delivery.attempt.is_open:
                raise
            refused = error if for_client else None
            self._take(delivery, partial(self._untaken, error))
            await sink.flush(ended)
        finally:
            if ended.cancelled() or not ended.done():  # the task that waits here was cancelled
                self.cancel(delivery)
        failure = ended.result() or refused
        if failure is not None:
            try:
                raise failure
            finally:  # its traceback refers to these names, and they to the error, in a cycle
                del delivery, ended, failure, refused
        assert delivery.ending is not None
        return delivery.ending

    async def run(self, asked: Asked, sink: Sink) -> Ending:
        """Deliver a call of a program, whose client gets its answer from elsewhere.

        Raises `PlaitError` if no engine can take the call.
        """
        return await self.deliver(asked, sink, for_client=False)

    def begin(self, asked: Asked, sink: Sink, on_end: OnEnd, *, for_client: bool = True) -> Delivery:
        """Begin the delivery. `on_end` is called once: with the error that ended the call, or None.

        With `for_client`, the error is the one to answer the client with: None once an answer has begun.
        """
        delivery = Delivery(asked, asked.call, sink, on_end, for_client)
        if asked.wants_tier and for_client:
            delivery.sink = sink = Tier(sink, asked.call.objective)
        if asked.wants_receipt and for_client and self.told_receipt is not None:
            delivery.sink = self.told_receipt(sink, delivery)
        for accompany in self.accompany:
            companion = accompany(delivery)
            if companion is not None:
                delivery.companions += (companion,)
                delivery.sink = companion.stage(delivery.sink)
        if for_client and asked.call.streamed:
            delivery.commented = self.silent_streams.begin(delivery)
        if asked.slot.handle is not None:
            self._objectives.begin(delivery)
        self._take(delivery, self._place)
        return delivery

    def cancel(self, delivery: Delivery) -> None:
        """End the call, because the client has gone or the gateway stops. `on_end` is not called.

        No effect on a call that has ended.
        """
        if delivery.state is not DeliveryState.ENDED:
            delivery.on_end = None
            self._take(delivery, self._gone)

    def _resume(self, delivery: Delivery, error: BaseException | None) -> None:
        self._take(delivery, partial(self._resumed, error))

    def refine(self, handle: str, call: Call) -> None:
        """Give the call with this handle the objectives of `call`. No effect unless it is being delivered."""
        self._objectives.change(handle, call)

    # Events.

    def _take(self, delivery: Delivery, step: Step) -> None:
        """Run the step of an event and all that follow. Raises a defect only if there is no `on_end` to take it."""
        following: Step | None = step
        while following is not None:
            try:
                following = following(delivery)
            except Exception as error:  # noqa: BLE001 - an engine's failure, a refusal, or a defect: the next event
                following = self._after(error)
        if delivery.state is DeliveryState.ENDED:
            tell(delivery)

    def _after(self, error: Exception) -> Step:
        """The step that follows an error."""
        if isinstance(error, LackError):
            return partial(self._lacking, error)
        if isinstance(error, EngineError):
            # A traceback holds the answer so far. The call keeps the error, so the two would be a reference cycle.
            return partial(self._failed, error.with_traceback(None))
        return partial(self._broken, error)

    def _resumed(self, error: BaseException | None, delivery: Delivery) -> Step | None:
        """Admission has let a waiting call through, or has failed it with `error`."""
        if error is not None:
            assert isinstance(error, Exception)
            return self._after(error)
        assert delivery.entry is not None
        assert delivery.entry.waiting.booking is not None
        return partial(self._send, delivery.entry.waiting.booking)

    def _news(self, delivery: Delivery) -> Step | None:
        """The engine's response or the client's sink has changed."""
        attempt = delivery.attempt
        if attempt is None or attempt.exchange is None:  # a late event of an attempt that is closed
            return None
        if not attempt.exchange.advance() or not attempt.is_open:
            return None
        answer, outcome = attempt.answer, self._attempts.close(delivery, attempt)
        return self._end(delivery, outcome, answer.status, problem=answer.problem)

    def _lacking(self, lack: LackError, delivery: Delivery) -> Step | None:
        """The engine lacks the model or the context. No failure, so the retry is not charged to the budget."""
        attempt = delivery.attempt
        assert attempt is not None
        self._attempts.close(delivery, attempt, "refused")
        delivery.unable = lack.unable
        delivery.tried += ((attempt.booking, lack.lack.value),)
        self._metrics.retried(delivery.call.model, attempt.engine_id, lack.lack)
        return self._place_again

    def _failed(self, error: EngineError, delivery: Delivery) -> Step | None:
        """An engine has failed the call, or no engine takes it: retry, or end the call."""
        attempt = delivery.attempt
        if delivery.state is DeliveryState.ENDED:
            return partial(self._broken, error)
        if attempt is None or not attempt.is_open:
            outcome: Outcome = "no_engine" if delivery.failures or isinstance(error, NoEngineError) else "refused"
            if delivery.failures:
                return self._give_up(delivery, outcome)
            return self._end(delivery, outcome, error.status, error=error)
        self._attempts.close(delivery, attempt, "failed", error)
        delivery.failed(attempt.booking, error)
        tell_of_failure(delivery, attempt, error)
        if delivery.is_told:
            status = attempt.answer.status if delivery.for_client else error.status
            return self._end(delivery, "failed", status, error=delivery.untold(error), problem=error)
        why = self._attempts.why_no_retry(delivery, attempt)
        if why is not None:
            self._metrics.not_retried(delivery.call.model, why)
            return self._give_up(delivery, "failed")
        self._metrics.retried(delivery.call.model, attempt.engine_id, error.cause)
        return self._place_again

    def _broken(self, error: Exception, delivery: Delivery) -> Step | None:
        """End the call by an error that is no engine's: a refusal, a sink that takes no more, or a defect."""
        if delivery.state is DeliveryState.ENDED:  # a cleanup step raised: the other steps still run
            delivery.defect = delivery.defect or error
            return self._let_go
        is_ours, attempt = not isinstance(error, PlaitError), delivery.attempt
        if is_ours and delivery.on_end is None:
            delivery.defect = error
        outcome: Outcome = "defect" if is_ours else "refused"
        if attempt is not None and attempt.is_open:
            is_untaken = not is_ours and not isinstance(error, (AnswerTooLargeError, *ENDS_STREAMS))
            outcome = self._attempts.close(delivery, attempt, "client_gone" if is_untaken else outcome)
        if isinstance(error, PlaitError):
            has_begun = attempt is not None and delivery.is_told and isinstance(error, ENDS_STREAMS)
            status = (
                attempt.answer.status if attempt is not None and has_begun and delivery.for_client else error.status
            )
            return self._end(delivery, outcome, status, error=error.with_traceback(None))  # as in `_take`
        return self._end(delivery, "defect", 500, error=error)

    def _untaken(self, error: PlaitError, delivery: Delivery) -> Step | None:
        """The sink takes no more of the answer."""
        if delivery.for_client and delivery.attempt is not None:  # `deliver` raises this error to the client
            delivery.attempt.answer.status = error.status
        return self._after(error)

    def _gone(self, delivery: Delivery) -> Step | None:
        """The client has gone, or the gateway stops."""
        attempt, error = delivery.attempt, GatewayStoppingError() if self.is_stopping else None
        unfinished: Outcome = "client_gone" if error is None else "refused"
        if attempt is not None and attempt.is_open:
            is_told, answer = delivery.is_told, attempt.answer
            outcome = self._attempts.close(delivery, attempt)
            if outcome != "client_gone":
                return self._end(delivery, outcome, CLIENT_CLOSED, problem=answer.problem)
            status = CLIENT_CLOSED if error is None else answer.status if is_told else error.status
            return self._end(delivery, unfinished, status, error=error, problem=answer.problem)
        if delivery.pause is not None:
            delivery.pause.cancel()
        if delivery.entry is not None:
            self._gate.gone(delivery.entry)
        return self._end(delivery, unfinished, CLIENT_CLOSED if error is None else error.status, error=error)

    # Steps.

    def _place(self, delivery: Delivery) -> Step | None:
        asked = delivery.asked
        prefer = self._sessions.preferred(asked) if asked.turn_of else asked.slot.continues_on or asked.prefer
        may_leave = delivery.for_client and not asked.call.streamed
        first: Sequence[Awaitable[None]] = ()
        if delivery.companions:
            first = [wait for companion in delivery.companions if (wait := companion.enter()) is not None]
        delivery.entry = entry = self._gate.enter(
            asked, prefer, partial(self._resume, delivery), may_leave=may_leave, first=first
        )
        if entry.waiting.is_sent:
            assert entry.waiting.booking is not None
            return partial(self._send, entry.waiting.booking)
        delivery.enter(DeliveryState.WAITING)
        return None

    def _place_again(self, delivery: Delivery) -> Step | None:
        """Choose an engine for a retry: another one, or after a pause one that failed the call before.

        A retry does not wait in admission for room.
        """
        delivery.attempt = None
        placement = self._selected(delivery)
        if placement.engine_id not in delivery.failed_engines:
            return self._booked(delivery, placement)
        for_s, later = pause_s(delivery), asyncio.get_running_loop().call_later
        delivery.enter(DeliveryState.PAUSED)
        delivery.pause = later(for_s, self._take, delivery, self._book_again)
        return None

    def _book_again(self, delivery: Delivery) -> Step | None:
        delivery.pause = None
        return self._booked(delivery, self._selected(delivery))

    def _selected(self, delivery: Delivery) -> Placement:
        asked, router = delivery.asked, self._router
        cut = [engine_id for engine_id, error in delivery.failures if error.cause in CUT]
        return router.select(
            delivery.call,
            loop_time_s(),
            prefer=self._sessions.preferred(asked),
            avoid=asked.avoids | delivery.failed_engines,
            shun={name for engine_id in cut for name in router.neighbours(engine_id)},
            unable=delivery.unable,
            route=asked.route,
        )

    def _booked(self, delivery: Delivery, placement: Placement) -> Step:
        booking = self._router.book(delivery.call, placement, loop_time_s(), tenant=delivery.asked.tenant)
        return partial(self._send, booking)

    def _send(self, booking: Booking, delivery: Delivery) -> Step | None:
        delivery.enter(DeliveryState.SENT)
        delivery.attempt = attempt = Attempt(booking, Answer())
        asked, call = delivery.asked, delivery.call
        if asked.turn_of and not call.prompt_tokens:
            self._sessions.placed(asked.tenant, asked.turn_of, call.model, attempt.engine_id)
        if self.holdings.watch is not None:
            self.holdings.watch.placed(delivery)
        attempt.exchange = self._upstream.send(delivery, attempt, partial(self._take, delivery, self._news))
        return None

    # The end.

    def _give_up(self, delivery: Delivery, outcome: Outcome) -> Step:
        """End a call that no engine answered."""
        engine_id, error = most_useful(delivery)
        told = error if delivery.for_client else None
        return self._end(delivery, outcome, error.status, error=told, problem=error, engine_id=engine_id)

    def _end(
        self,
        delivery: Delivery,
        outcome: Outcome,
        status: int,
        *,
        error: BaseException | None = None,
        problem: EngineError | str | None = None,
        engine_id: str | None = None,
    ) -> Step:
        """End the call. `engine_id` is by default that of the last attempt."""
        asked, call = delivery.asked, delivery.call
        shown = error or (None if outcome == "client_gone" else problem)
        code, message = (None, None) if shown is None else _shown(shown)
        where = delivery.latest_engine_id if engine_id is None else engine_id
        now_s, lag, gateway_s = loop_time_s(), self._router.health.lag, None
        sent_s = now_s if delivery.attempt is None else delivery.attempt.booking.sent_s
        if sent_s > call.arrived_s + LEAST_LAG_S or lag.went_on_s > sent_s or now_s > lag.due_s + LEAST_LAG_S:
            gateway_s = _gateway_s(delivery, lag, now_s)
        ending = Ending(
            outcome, status, where, delivery.is_told, error, problem, call.call_id, asked.path, asked.tenant,
            call.model, code, message, call.arrived_s, now_s, gateway_s,
        )  # fmt: skip
        delivery.enter(DeliveryState.ENDED)
        delivery.ending = ending
        slot, steps = asked.slot, self.holdings.of_clients
        if slot is not NO_SLOT:
            follows = slot.begins_anew is not None and slot.begins_anew(ending)
            steps = self.holdings.unrecorded if follows else self.holdings.of_guests
        if delivery.companions:
            steps = (*steps, partial(_leave_companions, is_over=steps is not self.holdings.unrecorded))
        delivery.holdings = iter(steps)
        return self._let_go

    def _let_go(self, delivery: Delivery) -> None:
        """Run the cleanup steps of an ended call."""
        assert delivery.holdings is not None
        for let_go in delivery.holdings:  # an iterator: after a step has raised, `_broken` comes back for the rest
            let_go(delivery)


def _leave_companions(delivery: Delivery, *, is_over: bool) -> None:
    """Let the companions go: the call is over, or it is delivered again."""
    for companion in delivery.companions:
        if is_over:
            companion.ended(delivery)
        else:
            companion.undone()


def _gateway_s(delivery: Delivery, lag: LoopLag, now_s: float) -> float | None:
    """The seconds of a call that neither a wait nor an engine explains: before the first wait, and in the loop's lags.

    None if they are less than a usual lag.
    """
    attempt, entry, arrived_s = delivery.attempt, delivery.entry, delivery.arrived_s
    booking = delivery.tried[0][0] if delivery.tried else None if attempt is None else attempt.booking
    sent_s = now_s if booking is None else min(now_s, booking.sent_s)
    waits = None if entry is None else entry.waiting.waits
    begun_s = min(sent_s, waits[0].since_s) if waits else sent_s
    found = [seconds for seconds in (begun_s - arrived_s, lag.since(sent_s, now_s)) if seconds >= LEAST_LAG_S]
    return sum(found) if found else None


def _shown(error: BaseException | str) -> tuple[str | None, str | None]:
    """The code and the message of the error that ended a call; None where the client got an engine's answer."""
    if isinstance(error, PlaitError):
        return error.shown_code, error.logged_message
    return (DEFECT, None) if isinstance(error, BaseException) else (None, None)


def _set(ended: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not ended.done():
        ended.set_result(error)
