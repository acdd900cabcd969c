"""The relay: places a call, sends it to its engine, and tries another engine while the client has been told nothing.

Nothing here waits. `Relay` carries out what the events of a `Delivery` ask for (`_take`), step by step:

- it is begun: it is placed (`_place`), and sent at once (`_send`), or when admission lets it through (`_resume`);
- something has come of its answer, or its client has room (`Exchange.advance`): once the client has all, it ends;
- its engine has failed it, or lacks something: it is placed again (`_place_again`), perhaps after a pause, or ends;
- its client goes, or takes no more, or the gateway stops: it ends where it is (`_gone`, `_untaken`).

A step returns the next one. What a step raises is the next event: an engine's error fails the attempt (`_failed`), any
other ends the call (`_broken`). However an attempt ends, `_close` settles, releases or fails its booking, exactly once.
However a call ends, it lets go of all that it holds (`_let_go`), each exactly once and in the order of `_holdings`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from plait.backends.errors import (
    AnswerTooLargeError,
    EngineError,
    GatewayStoppingError,
    NoEngineError,
    PlaitError,
)
from plait.gateway.answers.refusals import LackError
from plait.gateway.asgi import OnEnd, Sink
from plait.gateway.calls.attempts import Attempts, most_useful, pause_s, tell_of_failure
from plait.gateway.calls.call import CLIENT_CLOSED, DEFECT, Answer, Asked, Attempt, Ending, Outcome
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import Delivery, DeliveryState
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.holdings import Holdings, tell
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.records import CallRecords
from plait.gateway.calls.request_faults import RequestFaults
from plait.gateway.calls.session_engines import SessionEngines
from plait.gateway.calls.silent_streams import SilentStreams
from plait.gateway.calls.upstream import Upstream
from plait.gateway.fleet.booking import Booking
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.membership.recovery import Recovery
from plait.gateway.timer import loop_time_s
from plait.policy.types import Call, Placement

Step = Callable[[Delivery], "Step | None"]
"""Does what comes next of a call, and returns what comes after that at once."""

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
        self.receipt_sink: Callable[[Sink, Delivery], Sink] | None = None
        self.is_stopping = False  # calls end because the gateway stops, and not because their clients go
        self._attempts = Attempts(router, faults, metrics, recovery, max_attempts)
        self._upstream = Upstream(router, links, metrics, open_answers, faults, forward_client_key=forward_client_key)
        self._router = router
        self._gate = gate
        self._metrics = metrics
        self._objectives = objectives
        self._sessions = SessionEngines()

    async def deliver(self, asked: Asked, sink: Sink, *, for_client: bool = True) -> Ending:
        """Place the call, send it, send on what comes in the sink. Raises the error that ended the call.

        Once the answer has begun, only an error of the sink itself is raised.
        """
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        refused: PlaitError | None = None
        delivery = self.begin(asked, sink, partial(_set, ended), for_client=for_client)
        try:
            await sink.flush(ended)
        except PlaitError as error:  # whoever takes the answer takes no more of it
            if delivery.attempt is None or not delivery.attempt.is_open:
                raise
            refused = error if for_client else None
            self._take(delivery, partial(self._untaken, error))
            await sink.flush(ended)
        finally:
            if ended.cancelled() or not ended.done():  # with the task that waits for it
                self.cancel(delivery)
        failure = ended.result() or refused
        if failure is not None:
            raise failure
        assert delivery.ending is not None
        return delivery.ending

    async def run(self, asked: Asked, sink: Sink) -> Ending:
        """Deliver a call whose client is told by others. Raises `PlaitError` if no engine can take it."""
        return await self.deliver(asked, sink, for_client=False)

    def begin(self, asked: Asked, sink: Sink, on_end: OnEnd, *, for_client: bool = True) -> Delivery:
        """Place the call, send it, pass the answer on. `on_end` is called once, with the error that ended it.

        If it is `for_client`, that is the error to tell the client: there is none once an answer has begun.
        """
        delivery = Delivery(asked, asked.call, sink, on_end, for_client)
        if asked.wants_receipt and for_client and self.receipt_sink is not None:
            delivery.sink = self.receipt_sink(sink, delivery)
        if for_client and asked.call.streamed:
            delivery.commented = self.silent_streams.begin(delivery)
        if asked.handle is not None:
            self._objectives.begin(delivery)
        self._take(delivery, self._place)
        return delivery

    def cancel(self, delivery: Delivery) -> None:
        """The client has gone, or the gateway stops: the call ends where it is, and `on_end` is not called.

        No effect on a call that has ended.
        """
        if delivery.state is not DeliveryState.ENDED:
            delivery.on_end = None
            self._take(delivery, self._gone)

    def _resume(self, delivery: Delivery, error: BaseException | None) -> None:
        self._take(delivery, partial(self._resumed, error))

    def refine(self, handle: str, call: Call) -> None:
        """The call with this handle has these objectives from now on. No effect if it is not on its way."""
        self._objectives.change(handle, call)

    # Events.

    def _take(self, delivery: Delivery, step: Step) -> None:
        """Carry out what an event asks for, whatever comes of it. Raises a defect that nobody else is told of."""
        following: Step | None = step
        while following is not None:
            try:
                following = following(delivery)
            except LackError as lack:
                following = partial(self._lacking, lack)
            except EngineError as error:
                following = partial(self._failed, error)
            except Exception as error:  # noqa: BLE001 - the sink's refusal, or a defect: the call ends
                following = partial(self._broken, error)
        if delivery.state is DeliveryState.ENDED:
            tell(delivery)

    def _resumed(self, error: BaseException | None, delivery: Delivery) -> Step | None:
        """A call that has waited is to be sent, or has failed."""
        if error is not None:
            raise error
        assert delivery.entry is not None
        assert delivery.entry.waiting.booking is not None
        return partial(self._send, delivery.entry.waiting.booking)

    def _news(self, delivery: Delivery) -> Step | None:
        """Something has come of the answer, or it has ended, or its client has room for more."""
        attempt = delivery.attempt
        if attempt is None or attempt.exchange is None:  # it has ended
            return None
        if not attempt.exchange.advance() or not attempt.is_open:
            return None
        answer, outcome = attempt.answer, self._attempts.close(delivery, attempt, "client_gone")
        return self._end(delivery, outcome, answer.status, problem=answer.problem)

    def _lacking(self, lack: LackError, delivery: Delivery) -> Step | None:
        """The engine has refused the call for what another one may have: this is no failure, and the retry is free."""
        attempt = delivery.attempt
        assert attempt is not None
        self._attempts.close(delivery, attempt, "refused")
        delivery.unable = lack.unable
        delivery.tried += ((attempt.booking, lack.lack.value),)
        self._metrics.retried(delivery.call.model, attempt.engine_id, lack.lack)
        return self._place_again

    def _failed(self, error: EngineError, delivery: Delivery) -> Step | None:
        """An engine has failed the call, or none takes it: another attempt follows, or the call ends."""
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
        """The call ends by an error that is no engine's: it is refused, its answer is not taken, or a defect."""
        if delivery.state is DeliveryState.ENDED:  # by what it lets go of: the rest of that follows
            delivery.defect = delivery.defect or error
            return self._let_go
        is_ours, attempt = not isinstance(error, PlaitError), delivery.attempt
        if is_ours and delivery.on_end is None:
            delivery.defect = error
        outcome: Outcome = "defect" if is_ours else "refused"
        if attempt is not None and attempt.is_open:
            is_untaken = not is_ours and not isinstance(error, AnswerTooLargeError)
            outcome = self._attempts.close(delivery, attempt, "client_gone" if is_untaken else outcome)
        if isinstance(error, PlaitError):
            return self._end(delivery, outcome, error.status, error=error)
        return self._end(delivery, "defect", 500, error=error)

    def _untaken(self, error: PlaitError, delivery: Delivery) -> Step | None:
        """Whoever takes the answer takes no more of it."""
        if delivery.for_client and delivery.attempt is not None:  # nobody else tells the client
            delivery.attempt.answer.status = error.status
        raise error

    def _gone(self, delivery: Delivery) -> Step | None:
        attempt, error = delivery.attempt, GatewayStoppingError() if self.is_stopping else None
        unfinished: Outcome = "client_gone" if error is None else "refused"
        if attempt is not None and attempt.is_open:
            is_told, answer = delivery.is_told, attempt.answer
            outcome = self._attempts.close(delivery, attempt, "client_gone")
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
        prefer = self._sessions.preferred(asked) if asked.turn_of else asked.continues_on
        may_leave = delivery.for_client and not asked.call.streamed
        delivery.entry = entry = self._gate.enter(asked, prefer, partial(self._resume, delivery), may_leave=may_leave)
        if entry.waiting.is_sent:
            assert entry.waiting.booking is not None
            return partial(self._send, entry.waiting.booking)
        delivery.enter(DeliveryState.WAITING)
        return None

    def _place_again(self, delivery: Delivery) -> Step | None:
        """Place a call that has failed on another engine, or after a pause on the same. It does not wait for room."""
        delivery.attempt = None
        placement = self._selected(delivery)
        if placement.engine_id not in delivery.failed_engines:
            return self._booked(delivery, placement)
        for_s, later = pause_s(delivery), asyncio.get_running_loop().call_later
        delivery.enter(DeliveryState.PAUSED)
        delivery.pause = later(for_s, self._take, delivery, self._book_again)
        return None

    def _book_again(self, delivery: Delivery) -> Step | None:
        """Place the call once its pause is over."""
        delivery.pause = None
        return self._booked(delivery, self._selected(delivery))

    def _selected(self, delivery: Delivery) -> Placement:
        asked = delivery.asked
        return self._router.select(
            delivery.call,
            loop_time_s(),
            prefer=self._sessions.preferred(asked),
            avoid=asked.avoids | delivery.failed_engines,
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
        """End the call, where its latest attempt was unless an `engine_id` is given."""
        asked, call = delivery.asked, delivery.call
        code, message = _shown(error or (None if outcome == "client_gone" else problem))
        where = delivery.latest_engine_id if engine_id is None else engine_id
        ending = Ending(
            outcome, status, where, delivery.is_told, error, problem, call.call_id, asked.path, asked.tenant,
            call.model, code, message, call.arrived_s, loop_time_s(),
        )  # fmt: skip
        delivery.enter(DeliveryState.ENDED)
        delivery.ending = ending
        follows = asked.begins_anew is not None and asked.begins_anew(ending)
        delivery.holdings = iter(self.holdings.unrecorded if follows else self.holdings.order)
        return self._let_go

    def _let_go(self, delivery: Delivery) -> None:
        """Let go of all that the call holds. What follows after one has raised is what is left."""
        assert delivery.holdings is not None
        for let_go in delivery.holdings:
            let_go(delivery)


def _shown(error: BaseException | str | None) -> tuple[str | None, str | None]:
    """The code and the message of what ended a call; None for an engine's answer."""
    if isinstance(error, PlaitError):
        return error.shown_code, error.logged_message
    return (DEFECT, None) if isinstance(error, BaseException) else (None, None)


def _set(ended: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not ended.done():
        ended.set_result(error)
