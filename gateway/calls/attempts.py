"""The end of an attempt: its booking, its engine's health, and whether a retry follows."""

from __future__ import annotations

from collections.abc import Iterable
from random import random
from typing import Final

import structlog

from plait.backends.errors import EngineError, EngineLostError, EngineUnreachableError, NoEngineError
from plait.gateway.calls.call import Attempt, Outcome
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.request_faults import RequestFaults
from plait.gateway.fleet.comparisons import note_answer
from plait.gateway.fleet.health import TAKES_CALLS, HealthChange, HealthState
from plait.gateway.fleet.router import Router
from plait.gateway.membership.recovery import Recovery
from plait.gateway.timer import loop_time_s

REPEAT_S = 0.5
"""The first pause before an engine gets a call again that it has failed, if no other engine takes the call. The pause
doubles with each failure, and varies by a quarter."""

FAILING: Final = frozenset((HealthState.SUSPECT, HealthState.EJECTED, HealthState.DOWN))

log = structlog.get_logger(__name__)


class Attempts:
    """Ends attempts, and decides about retries. No retry follows the `max_attempts`-th failed attempt of a call."""

    def __init__(
        self, router: Router, faults: RequestFaults, metrics: CallMetrics, recovery: Recovery, max_attempts: int
    ) -> None:
        self._router = router
        self._faults = faults
        self._metrics = metrics
        self._recovery = recovery
        self._max_attempts = max_attempts

    def close(
        self,
        delivery: Delivery,
        attempt: Attempt,
        unfinished: Outcome = "client_gone",
        error: EngineError | None = None,
    ) -> Outcome:
        """End the exchange, and settle, release or fail the booking.

        Returns the attempt's outcome: that of the engine's answer, or `unfinished` without a whole answer.
        """
        attempt.is_open = False
        try:
            if attempt.exchange is not None:
                attempt.exchange.close()
                attempt.exchange = None
        finally:
            outcome = unfinished if error is not None else attempt.answer.outcome or unfinished
            changes = self._leave_books(delivery, attempt, outcome, error)
        cause = None if error is None else error.cause
        self._metrics.left_engine(attempt, outcome, cause, delivery.call.arrived_s, loop_time_s())
        for change in changes:
            if change is not None:
                self._recovery.on_change(change)
        return outcome

    def _leave_books(
        self, delivery: Delivery, attempt: Attempt, outcome: Outcome, error: EngineError | None
    ) -> Iterable[HealthChange | None]:
        """End the booking. Returns the changes of engines' health, if any."""
        booking, answer, now_s = attempt.booking, attempt.answer, loop_time_s()
        if outcome == "ok":
            if self._faults.undecided:
                self._faults.answered(delivery, now_s)
            if delivery.refused:  # from now on the engine gets no call with what it has refused
                self._router.engines[attempt.engine_id].refused_fields |= delivery.refused.get(attempt.engine_id, {})
            usage = None if answer.is_corrected else answer.usage  # the prediction is better than a wrong count
            if usage is not None:
                note_answer(self._router.engines[booking.placement.engine_id], booking, usage, now_s)
            return (self._router.settle(booking, usage, now_s),)
        if error is None:
            refused = answer.outcome == "refused" or (outcome == "refused" and not delivery.is_told)
            self._router.release(booking, now_s, delivered=delivery.is_told and not refused, refused=refused)
            return ()
        if isinstance(error, EngineLostError):  # the gateway gave up: trials judge the engine, not this call
            self._router.fail(booking, None, now_s)
            return ()
        change = self._faults.failed(delivery, booking, error, now_s)
        if isinstance(error, EngineUnreachableError) and error.cause == "unreachable":
            address = self._router.engines[attempt.engine_id].address
            detail = str(error.__cause__ or "")
            return self._router.health.unreachable(address, said=error.message, detail=detail) or (change,)
        return (change,)

    def why_no_retry(self, delivery: Delivery, attempt: Attempt) -> str | None:
        """Why a failed call is not retried: `attempts`, `request` (it is at fault itself) or `budget`. None: it is.

        A call is charged to the model's retry budget once, unless the engine drains, is doubted or has gone out,
        another rank of its server fails, too, or the gateway has taken the call off it: an outage uses up no budget,
        and another engine decides whose fault a failure is.
        """
        engine = self._router.engines[attempt.engine_id]
        ranks = self._router.addresses.get(engine.address, ())
        went_out = engine.draining or engine.doubts or engine.health.state not in TAKES_CALLS
        went_out = went_out or any(one.health.state in FAILING for one in ranks if one is not engine)
        if len(delivery.failures) >= self._max_attempts or delivery.asked.is_line:  # a line's batch sends it again
            return "attempts"
        if delivery.failures[-1][1].is_requests:
            return "request"
        is_moved = isinstance(delivery.failures[-1][1], EngineLostError)
        if not (delivery.charged or went_out or is_moved or attempt.booking.sent_s < engine.health.ejected_s):
            delivery.charged = self._router.retries.take(delivery.call.model)
            return None if delivery.charged else "budget"
        return None


def most_useful(delivery: Delivery) -> tuple[str, EngineError]:
    """The engine and the error to show for a call that no engine answered."""
    engine_id, error = min(delivery.failures, key=lambda failure: _USEFULNESS.get(failure[1].cause, 2))
    if isinstance(error, EngineUnreachableError):
        error = NoEngineError(f"No engine that serves '{delivery.call.model}' can be reached.")
    if error.retry_after_s is None:
        error.retry_after_s = 1.0
    return engine_id, error


_USEFULNESS: Final = {
    "status_429": 0,
    "status_503": 0,
    "status_500": 1,
    "unreachable": 4,
    "connect_timeout": 4,
    "lost": 3,
}
"""A rank by cause; 2 for other causes. The client gets the error with the lowest rank: an engine's answer rather than a
broken connection."""


def pause_s(delivery: Delivery) -> float:
    """The pause before an engine gets a call again that it has failed, in seconds.

    Raises `NoEngineError` if the cause of the failure does not allow a retry there. There is no pause after a first
    failure by a closed connection: the engine may have closed an idle connection.
    """
    cause, failed = delivery.failures[-1][1].cause, len(delivery.failures)
    if cause not in {"closed", "garbled", "broken", "status_500", "status_502"}:
        raise NoEngineError(f"No other engine takes calls for '{delivery.call.model}'.")
    return 0.0 if cause == "closed" and failed == 1 else REPEAT_S * 2 ** (failed - 1) * (0.75 + random() / 2)  # noqa: S311


def tell_of_failure(delivery: Delivery, attempt: Attempt, error: EngineError) -> None:
    log.warning(
        "engine failed a call",
        request_id=delivery.call.call_id,
        engine=attempt.engine_id,
        cause=error.cause,
        error=error.logged_message,
        detail=None if error.quotes or error.__cause__ is None else str(error.__cause__),
        in_mid_stream=delivery.is_told,
    )
