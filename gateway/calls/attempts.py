"""How attempts end: their bookings, their engines' health, and whether another one follows."""

from __future__ import annotations

from random import random
from typing import Final

import structlog

from plait.backends.errors import EngineError, EngineLostError, EngineUnreachableError, NoEngineError
from plait.gateway.calls.call import Attempt, Outcome
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.request_faults import RequestFaults
from plait.gateway.fleet.health import TAKES_CALLS, HealthChange
from plait.gateway.fleet.router import Router
from plait.gateway.membership.recovery import Recovery
from plait.gateway.timer import loop_time_s

REPEAT_S = 0.5
"""About the first pause before an engine without another is asked again. It doubles."""

log = structlog.get_logger(__name__)


class Attempts:
    """Ends attempts, of which a call has at most `max_attempts`."""

    def __init__(
        self, router: Router, faults: RequestFaults, metrics: CallMetrics, recovery: Recovery, max_attempts: int
    ) -> None:
        self._router = router
        self._faults = faults
        self._metrics = metrics
        self._recovery = recovery
        self._max_attempts = max_attempts

    def close(
        self, delivery: Delivery, attempt: Attempt, unfinished: Outcome, error: EngineError | None = None
    ) -> Outcome:
        """End the exchange, and settle, release or fail the booking. Returns how the attempt ended.

        That is `unfinished` unless the engine has answered.
        """
        attempt.is_open = False
        try:
            if attempt.exchange is not None:
                attempt.exchange.close()
                attempt.exchange = None
        finally:
            outcome = unfinished if error is not None else attempt.answer.outcome or unfinished
            change = self._leave_books(delivery, attempt, outcome, error)
        cause = None if error is None else error.cause
        self._metrics.left_engine(attempt, outcome, cause, delivery.arrived_s, loop_time_s())
        if change is not None:
            self._recovery.on_change(change)
        return outcome

    def _leave_books(
        self, delivery: Delivery, attempt: Attempt, outcome: Outcome, error: EngineError | None
    ) -> HealthChange | None:
        """Take an attempt out of the engine's books. Returns the change of the engine's health, if any."""
        booking, answer, now_s = attempt.booking, attempt.answer, loop_time_s()
        if outcome == "ok":
            usage = None if answer.is_corrected else answer.usage  # the prediction is better than a wrong count
            if usage is not None:
                self._router.comparisons.answer(booking, usage, now_s)
            return self._router.settle(booking, usage, now_s)
        if error is None:
            refused = answer.outcome == "refused" or (outcome == "refused" and not delivery.is_told)
            self._router.release(booking, now_s, delivered=delivery.is_told and not refused, refused=refused)
            return None
        if isinstance(error, EngineLostError):
            self._router.fail(booking, None, now_s)
            return None
        change = self._faults.failed(delivery, booking, error, now_s)
        if isinstance(error, EngineUnreachableError) and error.cause == "unreachable":
            return self._router.health.unreachable(attempt.engine_id, said=error.message) or change
        return change

    def why_no_retry(self, delivery: Delivery, attempt: Attempt) -> str | None:
        """Why a failed call is not tried again; None if it is.

        A retry because the engine went out is not charged to the budget.
        """
        engine = self._router.engines[attempt.engine_id]
        went_out = engine.draining or engine.is_doubted or engine.health.state not in TAKES_CALLS
        if len(delivery.failures) >= self._max_attempts:
            return "attempts"
        if not (delivery.charged or went_out or attempt.booking.sent_s < engine.health.ejected_s):
            delivery.charged = self._router.retries.take(delivery.call.model)
            return None if delivery.charged else "budget"
        return None


def most_useful(delivery: Delivery) -> tuple[str, EngineError]:
    """The error to tell of a call that no engine answered, and its engine."""
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
"""A client gets the error with the lowest number: engines' answers come before broken connections."""


def pause_s(delivery: Delivery) -> float:
    """The pause before the same engine is tried again, as there is no other. Raises `NoEngineError` if it shall not be.

    A connection that was closed may have been an old one, for which nobody has to wait.
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
